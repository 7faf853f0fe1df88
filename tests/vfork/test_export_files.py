# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The form of exported files and patches."""

from pathlib import Path
from textwrap import dedent

import pytest

from tests.vfork.conftest import git
from vfork.errors import VforkError
from vfork.export.conventions import LICENSE, OURS, THEIRS, Conventions, conform
from vfork.export.imports import rename_modules, sort_imports
from vfork.export.patch import Author, Change, Message, diff, format_patch, paragraph
from vfork.export.tidy import tidy

AUTHOR = Author("T", "t@example.org")


def conformed(body: str, *, cpu_only: bool = False, **rules: object) -> str:
    """The body of a test file after its way upstream, less the header."""
    data = (LICENSE + OURS + dedent(body)).encode()
    made = conform(
        "tests/a/test_b.py",
        "tests/c/d/test_e.py",
        data,
        Conventions(**rules),  # type: ignore[arg-type]
        cpu_only=cpu_only,
    ).decode()
    assert made.startswith(LICENSE + THEIRS)
    return made.removeprefix(LICENSE + THEIRS)


def test_a_shebang_stays_above_the_header() -> None:
    data = ("#!/usr/bin/env python3\n" + LICENSE + OURS).encode()
    made = conform("a.py", "b.py", data, Conventions())
    assert made.decode() == "#!/usr/bin/env python3\n" + LICENSE + THEIRS


def test_empty_and_foreign_files_stay_as_they_are() -> None:
    assert conform("a/__init__.py", "a/__init__.py", b"", Conventions()) == b""
    assert conform("a.json", "b.json", b"{ }", Conventions()) == b"{ }"


def test_modules_that_upstream_forbids_are_replaced_and_sorted() -> None:
    text = "import os\nimport re\n\nimport numpy\nfrom vllm import a\n"
    assert conformed(text) == (
        "import os\n\nimport numpy\nimport regex as re\n\nfrom vllm import a\n"
    )


def test_sections_of_docstrings_end_with_a_blank_line() -> None:
    text = '''
    def one(a):
        """Do.

        Args:
            a: what.
        """


    def two():
        """Do. Returns: nothing."""


    def three():
        """Do.

        Raises:
            ValueError: always."""


    def four():
        """Do.

        Returns:
            All.

        """
    '''
    want = '''
    def one(a):
        """Do.

        Args:
            a: what.

        """


    def two():
        """Do. Returns: nothing."""


    def three():
        """Do.

        Raises:
            ValueError: always.

        """


    def four():
        """Do.

        Returns:
            All.

        """
    '''
    assert conformed(text) == dedent(want)


def test_paths_from_the_file_upward_keep_their_target() -> None:
    text = (
        "ROOT = Path(__file__).parents[2]\nTOP = Path(__file__).resolve().parents[1]\n"
    )
    assert conformed(text) == (
        "ROOT = Path(__file__).parents[3]\nTOP = Path(__file__).resolve().parents[2]\n"
    )


def test_cpu_tests_are_skipped_elsewhere() -> None:
    text = "import torch\n\nfrom vllm.b import c\n\nX = 1\n"
    assert conformed(text, cpu_only=True) == (
        "import pytest\nimport torch\n\n"
        "from vllm.b import c\nfrom vllm.platforms import current_platform\n\n"
        "if not current_platform.is_cpu():\n"
        '    pytest.skip("needs the CPU platform", allow_module_level=True)\n\n'
        "X = 1\n"
    )


def test_marks_and_names_of_ours_go() -> None:
    text = "import pytest\n\npytestmark = pytest.mark.gpu\n\n\n@in_tree\ndef f(): ...\n"
    assert conformed(text, names={"in_tree": "apart"}) == (
        "import pytest\n\n\n@apart\ndef f(): ...\n"
    )


def test_paths_are_renamed_as_whole_words() -> None:
    text = '"""See tests/a/x.py, not mytests/a/x.py or tests/a/x.pyc."""\n'
    made = conformed(text, paths={"tests/a/x.py": "tests/y.py"})
    assert made == '"""See tests/y.py, not mytests/a/x.py or tests/a/x.pyc."""\n'


MODULES = {
    "p.a": "q.b",
    "p.deep": "q.far",
    "p.deep.a": "q.far.c",
    "lone": "q.lone",
    "tool": "r.gear",
}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import p.a\np.a.f()\n", "import q.b\nq.b.f()\n"),
        ("from p.a import f\n", "from q.b import f\n"),
        ("from p import a\na.f()\n", "from q import b as a\na.f()\n"),
        ("from p import a as b\n", "from q import b\n"),
        ("from p.deep import a, b\n", None),
        (
            "def f():\n    from p.deep import a\n",
            "def f():\n    from q.far import c as a\n",
        ),
        ("import lone\nlone.f()\n", "from q import lone\nlone.f()\n"),
        ("import tool as t\n", "from r import gear as t\n"),
        ("from tool import f\ntool = 1\n", "from r.gear import f\ntool = 1\n"),
        (
            'X = "p.deep.a.F"\nY = "p.apple p.deeper x.p.a"\n',
            'X = "q.far.c.F"\nY = "p.apple p.deeper x.p.a"\n',
        ),
        ("from p.deep import b\n", "from q.far import b\n"),
    ],
    ids=str,
)
def test_modules_are_renamed(before: str, after: str | None) -> None:
    if after is None:
        with pytest.raises(VforkError) as caught:
            rename_modules("x.py", before, MODULES)
        assert caught.value.code == "VF705"
    else:
        assert rename_modules("x.py", before, MODULES) == after


HOME = "from vllm.a_module_with_a_long_name.and_another_one import "


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from b import c\nimport a\n", "import a\nfrom b import c\n"),
        (
            "from vllm import b\nimport os\nimport z\n",
            "import os\n\nimport z\n\nfrom vllm import b\n",
        ),
        (
            "from m10 import a\nfrom m9 import b\n",
            "from m9 import b\nfrom m10 import a\n",
        ),
        ("import z  # why\nimport a\n", None),
        ("import z; import a\n", None),
        (
            "def f():\n    from b import (\n        c,\n    )\n    import a\n",
            "def f():\n    import a\n    from b import (\n        c,\n    )\n",
        ),
        (
            HOME + "one_function, another_fun as x\n",
            HOME + "(\n    one_function,\n    another_fun as x,\n)\n",
        ),
        ("import b\n\nX = 1\nimport a\n", None),
    ],
    ids=str,
)
def test_imports_are_sorted(before: str, after: str | None) -> None:
    want = before if after is None else after
    assert sort_imports(before, ("vllm",)) == want
    assert sort_imports(want, ("vllm",)) == want


RELEASE = '''\
"""Doc."""

import os

import torch

from vllm.b import (
    x,
    y,
)
from vllm.d import z


def f(a):
    return   a
'''


@pytest.mark.parametrize(
    ("at", "new", "want"),
    [
        ("    return   a\n", "    g(\n        a, b\n    )\n", "    g(a, b)\n"),
        ("    return   a\n", "    g(\n        a,\n        b,\n    )\n", None),
        ("    return   a\n", '    x = (\n        "text"\n    )\n', '    x = "text"\n'),
        ("    return   a\n", f"    g(\n        {'a' * 44}, {'b' * 44}\n    )\n", None),
        ("    return   a\n", "    g(  # why\n        a\n    )\n", None),
        (
            "    return   a\n",
            "\n\nfrom vllm import late\n",
            "\n\nfrom vllm import late  # noqa: E402\n",
        ),
    ],
    ids=str,
)
def test_inserted_lines_are_laid_out(at: str, new: str, want: str | None) -> None:
    after = RELEASE.replace(at, at + new)
    assert tidy(RELEASE, after) == RELEASE.replace(at, at + (want or new))


@pytest.mark.parametrize(
    ("new", "place"),
    [
        ("from vllm.c import k\n", "from vllm.d import z\n"),
        ("from vllm import k\n", "from vllm.b import (\n"),
        ("import torchvision\n", "\nfrom vllm.b import (\n"),
        ("from vllm.e import k\n", "\n\ndef f(a):\n"),
    ],
    ids=str,
)
def test_new_imports_go_to_their_places(new: str, place: str) -> None:
    last = "from vllm.d import z\n"
    made = tidy(RELEASE, RELEASE.replace(last, last + new))
    assert made == RELEASE.replace(place, new + place)


def test_the_first_import_of_its_section_gets_a_section() -> None:
    before = "import os\n\nX = 1\n"
    made = tidy(before, "import os\nfrom vllm import a\n\nX = 1\n")
    assert made == "import os\n\nfrom vllm import a\n\nX = 1\n"


def test_lines_of_the_release_stay_as_they_are() -> None:
    source = "import z\nimport a\n\nx = (\n    1\n)\n"
    assert tidy(source, source + "y = 2\n") == source + "y = 2\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "one\ntwo\n"),
        (None, "no line end"),
        (None, ""),
        ("one\n", "one"),
        ("one", "one\n"),
        ("one\ntwo", "one\n2"),
        (
            "".join(f"{n}\n" for n in range(40)),
            "".join(f"{n}\n" for n in range(39, 0, -1)),
        ),
        ("a\n\x0cb\u2028c\n", "a\n\x0cb\u2028d\n"),
        ("x\n", "x\nFrom me\n-- \n---\ndiff --git\n"),
    ],
    ids=repr,
)
def test_git_gets_back_what_a_patch_says(
    tmp_path: Path, before: str | None, after: str
) -> None:
    git(tmp_path, "init", "-q")
    if before is not None:
        (tmp_path / "f").write_bytes(before.encode())
        git(tmp_path, "add", "f")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "base")
    old = None if before is None else before.encode()
    mode = 0o755 if before is None else 0o644
    change = Change("f", old, after.encode(), mode)
    message = Message("Größe", [paragraph("diff -x --- y From z"), "Ä\nb"], [" remark"])
    patch = format_patch(message, [change], AUTHOR, date=86400, number=1, count=1)
    (tmp_path / "p.patch").write_bytes(patch)
    git(tmp_path, "am", "-q", "p.patch")
    assert (tmp_path / "f").read_bytes() == after.encode()
    assert bool((tmp_path / "f").stat().st_mode & 0o100) is (before is None)
    assert git(tmp_path, "log", "-1", "--format=%B").endswith("Ä\nb\n\n")


def test_a_filled_line_never_starts_like_a_diff() -> None:
    text = paragraph("x " * 35 + "word --- Index: diff -u From " * 9)
    starts = [line.split(" ")[0] for line in text.splitlines()]
    assert not {"---", "Index:", "diff", "From"} & {*starts}
    assert "" in starts


def test_the_change_of_a_release_file_names_both_blobs() -> None:
    text = diff(Change("a", b"x\n", b"y\n"))
    assert text.splitlines()[:2] == [
        "diff --git a/a b/a",
        "index 587be6b4c3f93f93c489c0111bba5596147a26cb"
        "..975fbec8256d3e8a3797e7a3611380f27c49f4ac 100644",
    ]


@pytest.mark.parametrize("data", [b"a\r\n", b"a\0", b"\xff"])
def test_contents_that_a_mail_would_change_are_refused(data: bytes) -> None:
    with pytest.raises(VforkError) as caught:
        diff(Change("a", data, b""))
    assert caught.value.code == "VF706"
