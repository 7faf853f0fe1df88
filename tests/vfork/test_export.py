# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vfork export` on synthetic releases: its patches go through git."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vfork.conftest import ENGINE, git, release_files, write
from vfork.cli import main
from vfork.export.topics import load_topics
from vfork.pin import Base

OURS = """\
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""
THEIRS = OURS.replace("vllm-glm-dsa", "vLLM")
TOPICS = """\
[fork_only]
"vllm/v1/sparse.py" = "of no use elsewhere"

[[topics]]
name = "hook"
title = "[Core] Call a hook at the start"
why = "Some want to know."
issues = ["vllm-project/vllm#7"]
edit_topics = ["engine"]
files = ["vllm/extra/"]
[topics.moved]
"tests/overlay/test_hook.py" = "tests/core/test_the_hook.py"
"tests/helpers/sizes.py" = "tests/core/sizes.py"
"""
SECOND = """
[[topics]]
name = "stop"
title = "[Core] Stop"
why = "What starts has to stop."
edits = ["engine-import"]
files = ["vllm/stop.py"]
"""
SECOND_EDIT = """\
        Edit(
            id="engine-import",
            why="Stopping needs a module.",
            drop_when="never",
            forwarded="no: a test",
            at=Module(),
            op=AddImport("from vllm import stop"),
            test="tests/edits/test_engine.py::test_hook",
        ),
    ),
)
"""


@pytest.fixture
def offered(seeded: Path) -> Path:
    """The project with one topic, whose files have headers as ours do."""
    for path in seeded.glob("vllm/**/*.py"):
        path.write_text(OURS + path.read_text("utf-8"), "utf-8")
    write(
        seeded,
        {
            "upstream_topics.toml": TOPICS,
            "tests/helpers/sizes.py": OURS + "SIZE = 3\n",
            "tests/overlay/test_hook.py": OURS
            + "from tests.helpers.sizes import SIZE\n\n\n"
            "def test_hook():\n    assert SIZE == 3\n",
        },
    )
    return seeded


@pytest.fixture
def two(offered: Path) -> Path:
    """A second topic that edits the same file."""
    edits = offered / "edits/vllm/engine.py"
    text = edits.read_text("utf-8").replace("    ),\n)\n", SECOND_EDIT)
    text = text.replace(
        "import Edit, EditFile, Function,",
        "import AddImport, Edit, EditFile, Function, Module,",
    )
    edits.write_text(text, "utf-8")
    write(
        offered,
        {"upstream_topics.toml": TOPICS + SECOND, "vllm/stop.py": OURS + "NOW = 1\n"},
    )
    return offered


@pytest.fixture
def upstream(tmp_path: Path, two: Path) -> Path:
    """A git tree of the fake CUDA release."""
    root = tmp_path / "upstream"
    for name, file in release_files("vllm", "1.3.0").items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(file.data)
    git(root.parent, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-qm", "release")
    return root


def run(root: Path, out: Path, *arguments: str) -> int:
    return main(["-C", str(root), "export", "--out", str(out), *arguments])


def report(
    capsys: pytest.CaptureFixture[str], root: Path, out: Path, *arguments: str
) -> dict[str, Any]:
    capsys.readouterr()
    run(root, out, "--json", *arguments)
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def findings(
    capsys: pytest.CaptureFixture[str], root: Path, *arguments: str
) -> list[tuple[str, str]]:
    content = report(capsys, root, root / "dist/upstream", *arguments)
    assert content["ok"] is not bool(content["findings"])
    return [(f["code"], f["message"]) for f in content["findings"]]


def apply(upstream: Path, out: Path) -> None:
    patches = sorted(map(str, (out / "vllm").glob("*.patch")))
    git(upstream, "am", "--quiet", "--keep-non-patch", *patches)


def everything(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
    }


def test_the_series_applies_in_order(two: Path, upstream: Path, tmp_path: Path) -> None:
    assert run(two, tmp_path / "out") == 0
    apply(upstream, tmp_path / "out")
    assert (upstream / "vllm/engine.py").read_bytes() == ENGINE.replace(
        b"import os\n", b"import os\n\nfrom vllm import stop\n"
    ).replace(b"start():\n", b"start():\n    from vllm.extra import hook\n    hook()\n")
    subjects = git(upstream, "log", "--format=%s", "--reverse").splitlines()
    assert subjects == ["release", "[Core] Call a hook at the start", "[Core] Stop"]


@pytest.mark.parametrize("topic", ["hook", "stop"])
def test_each_topic_applies_alone(
    two: Path, upstream: Path, tmp_path: Path, topic: str
) -> None:
    assert run(two, tmp_path / "out", "--topic", topic) == 0
    assert [*everything(tmp_path / "out")].count(f"vllm/0001-{topic}.patch") == 1
    apply(upstream, tmp_path / "out")
    engine = (upstream / "vllm/engine.py").read_text("utf-8")
    assert ("hook()" in engine) is (topic == "hook")
    assert ("import stop" in engine) is (topic == "stop")


def test_a_topic_brings_those_that_it_needs(
    two: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    topics = TOPICS + SECOND + 'needs = ["hook"]\n'
    (two / "upstream_topics.toml").write_text(topics, "utf-8")
    content = report(capsys, two, tmp_path / "out", "--topic", "stop")
    assert [p["topic"] for p in content["patches"]] == ["hook", "stop"]
    content = report(capsys, two, tmp_path / "out", "--topic", "hook")
    assert [p["topic"] for p in content["patches"]] == ["hook"]


def test_a_file_of_two_topics_comes_with_the_first(
    two: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    topics = (TOPICS + SECOND).replace('stop.py"]', 'stop.py", "vllm/extra/hook.py"]')
    (two / "upstream_topics.toml").write_text(topics, "utf-8")
    first, second = report(capsys, two, tmp_path / "out")["patches"]
    assert "vllm/extra/hook.py" in first["files"]
    assert "vllm/extra/hook.py" not in second["files"]
    (alone,) = report(capsys, two, tmp_path / "o2", "--topic", "stop")["patches"]
    assert "vllm/extra/hook.py" in alone["files"]


def test_an_edit_of_two_topics_comes_with_the_first(
    two: Path, upstream: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topics = TOPICS.replace("edit_topics", 'edits = ["engine-import"]\nedit_topics')
    topics = topics.replace('"vllm/extra/"]', '"vllm/extra/", "vllm/stop.py"]')
    (two / "upstream_topics.toml").write_text(topics + SECOND, "utf-8")
    patches = report(capsys, two, tmp_path / "out")["patches"]
    # Nothing is left for the second, so that it has no patch.
    assert [p["edits"] for p in patches] == [["engine-start", "engine-import"]]
    apply(upstream, tmp_path / "out")
    assert b"import stop" in (upstream / "vllm/engine.py").read_bytes()


def test_new_files_get_upstreams_header_and_places(
    two: Path, upstream: Path, tmp_path: Path
) -> None:
    run(two, tmp_path / "out")
    apply(upstream, tmp_path / "out")
    moved = (upstream / "tests/core/test_the_hook.py").read_text("utf-8")
    assert moved.startswith(THEIRS)
    assert "from tests.core.sizes import SIZE\n" in moved
    assert not (upstream / "tests/overlay").exists()
    assert not (upstream / "vllm/v1/sparse.py").exists()
    (name,) = {p.name for p in (upstream / "vllm/extra").iterdir()} - {"__init__.py"}
    assert name == "hook.py"


def test_a_patch_has_neither_notice_nor_clock_nor_sign_off(
    two: Path, tmp_path: Path
) -> None:
    run(two, tmp_path / "out")
    patch = (tmp_path / "out/vllm/0001-hook.patch").read_text("utf-8")
    assert "Modified by" not in patch and "Signed-off-by" not in patch
    assert patch.startswith(f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n")
    assert "\nDate: Tue, 01 Jan 1980 00:00:00 +0000\n" in patch
    assert "\nRelated: vllm-project/vllm#7\n---\n" in patch
    message = patch.partition("\n---\n")[0]
    assert "- vllm/engine.py, `start`: The release has no hook where the" in message
    assert max(map(len, message.splitlines()[8:])) <= 72


def test_two_exports_have_the_same_bytes(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(two, tmp_path / "one")
    copy = shutil.copytree(two, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    run(copy, tmp_path / "two")
    assert everything(tmp_path / "one") == everything(tmp_path / "two")


def test_a_changed_edit_changes_its_patch_alone(two: Path, tmp_path: Path) -> None:
    run(two, tmp_path / "one")
    edits = two / "edits/vllm/engine.py"
    edits.write_text(
        edits.read_text("utf-8").replace(
            "from vllm import stop", "from vllm.stop import NOW"
        )
    )
    run(two, tmp_path / "two")
    before, after = everything(tmp_path / "one"), everything(tmp_path / "two")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"vllm/0002-stop.patch", "export.json"}


def test_author_and_date_can_be_given(
    two: Path, upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")
    run(two, tmp_path / "out", "--author", "A. Person <a@example.org>")
    apply(upstream, tmp_path / "out")
    shown = git(upstream, "log", "-1", "--format=%an <%ae> %at")
    assert shown == "A. Person <a@example.org> 1767225600\n"


@pytest.mark.parametrize(
    "author", ["A. Person", "A <a>", "<a@b>", "Ä <a@b>", "A\n<a@b>"]
)
def test_a_malformed_author_is_wrong_usage(two: Path, author: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(two, two / "dist", "--author", author)
    assert caught.value.code == 2


def test_blob_ids_are_those_of_git(two: Path, upstream: Path, tmp_path: Path) -> None:
    run(two, tmp_path / "out")
    patch = (tmp_path / "out/vllm/0001-hook.patch").read_text("utf-8")
    old = git(upstream, "rev-parse", "HEAD:vllm/engine.py").strip()
    git(upstream, "am", "-q", str(tmp_path / "out/vllm/0001-hook.patch"))
    new = git(upstream, "rev-parse", "HEAD:vllm/engine.py").strip()
    assert f"index {old}..{new} 100644\n" in patch


def test_the_listing_names_patches_and_hashes(two: Path, tmp_path: Path) -> None:
    run(two, tmp_path / "out")
    listing = json.loads((tmp_path / "out/export.json").read_text("utf-8"))
    assert (listing["base"], listing["version"]) == ("cuda", "1.3.0")
    for patch in listing["patches"]:
        data = (tmp_path / "out" / patch["path"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == patch["sha256"]
    assert listing["patches"][0]["edits"] == ["engine-start"]


def test_an_export_replaces_an_older_one_and_nothing_else(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(two, out)
    run(two, out, "--topic", "stop")
    assert {*everything(out)} == {"export.json", "vllm/0001-stop.patch"}
    (out / "export.json").unlink()
    content = report(capsys, two, out)
    assert [f["code"] for f in content["findings"]] == ["VF501"]
    assert {*everything(out)} == {"vllm/0001-stop.patch"}


def test_a_dry_run_writes_nothing(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = report(capsys, two, tmp_path / "out", "--dry-run")
    assert [p["path"] for p in content["patches"]] == [
        "vllm/0001-hook.patch",
        "vllm/0002-stop.patch",
    ]
    assert not (tmp_path / "out").exists()


def test_words_about_the_fork_are_pointed_out(
    offered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = offered / "vllm/extra/hook.py"
    hook.write_text(hook.read_text("utf-8") + "# only the fork needs this\n", "utf-8")
    (patch,) = report(capsys, offered, tmp_path / "out")["patches"]
    assert patch["remarks"] == ["vllm/extra/hook.py:5: # only the fork needs this"]


def test_edits_for_another_base_stay_out(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edits = two / "edits/vllm/engine.py"
    text = edits.read_text("utf-8")
    edits.write_text(
        text.replace('drop_when="never",', 'drop_when="never", bases=("cpu",),')
    )
    patches = report(capsys, two, tmp_path / "out")["patches"]
    assert [p["edits"] for p in patches] == [["engine-start"], []]
    patches = report(capsys, two, tmp_path / "out", "--base", "cpu")["patches"]
    assert [p["edits"] for p in patches] == [["engine-start"], ["engine-import"]]


def test_what_no_topic_takes_is_a_finding(
    offered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert findings(capsys, offered) == []
    write(offered, {"vllm/late.py": OURS, "tests/overlay/test_late.py": OURS})
    topics = TOPICS.replace('edit_topics = ["engine"]\n', "")
    (offered / "upstream_topics.toml").write_text(topics, "utf-8")
    assert findings(capsys, offered) == [
        ("VF704", "no topic takes vllm/late.py"),
        ("VF704", "no topic takes tests/overlay/test_late.py"),
        ("VF704", "no topic takes engine-start"),
    ]
    # It is no reason to refuse a topic that is asked for.
    assert findings(capsys, offered, "--topic", "hook") == []


def test_names_of_nothing_are_findings(
    offered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topics = TOPICS.replace('"engine"', '"motor"').replace(
        "files = [", 'edits = ["gone"]\nfiles = ["vllm/gone/", '
    )
    topics = topics.replace("[fork_only]\n", '[fork_only]\n"vllm/old.py" = "old"\n')
    topics = '[stand_ins]\n"tests/a.py" = "tests/b.py"\n\n' + topics
    (offered / "upstream_topics.toml").write_text(topics, "utf-8")
    found = findings(capsys, offered, "--topic", "hook")
    assert found == [
        ("VF703", "hook: no file vllm/gone/"),
        ("VF703", "hook: no edit gone"),
        ("VF703", "hook: no edit file of topic motor"),
        ("VF703", "stand_ins: no file tests/a.py"),
        ("VF703", "stand_ins: no file tests/b.py"),
        ("VF703", "fork_only: no file or edit vllm/old.py"),
    ]
    assert not (offered / "dist").exists()


def test_an_unknown_topic_is_a_finding(
    offered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert findings(capsys, offered, "--topic", "hock") == [
        ("VF702", "no topic 'hock' in upstream_topics.toml; it has: hook")
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[fork_only]", "[fork_only", "cannot be read"),
        ("[fork_only]", "[fork]", "unknown keys ['fork']"),
        ('name = "hook"', 'name = "Hook"', "'Hook' is not words and hyphens"),
        ('name = "hook"', 'name = "hook"\nsize = 1', "unknown keys ['size']"),
        ('why = "Some want to know."', "", "why must be a text"),
        ('title = "[Core]', 'title = "[Córe]', "title is not a line"),
        ("vllm#7", "vllm/7", "is not owner/repo#number"),
        ('files = ["vllm/extra/"]', 'files = ["../x"]', "not relative paths"),
        ('= "tests/core/sizes.py"', '= "tests/core/"', "differ in kind"),
        ('why = "S', 'needs = ["stop"]\nwhy = "S', "not earlier topics"),
        ('why = "S', 'repository = "p"\nwhy = "S', "only vllm has files to be edited"),
        ('edit_topics = ["engine"]', "edit_topics = 3", "must be a list of strings"),
        ('"of no use elsewhere"', "3", "fork_only must map strings to strings"),
    ],
)
def test_a_malformed_file_of_topics_is_a_finding(
    offered: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    assert old in TOPICS
    (offered / "upstream_topics.toml").write_text(TOPICS.replace(old, new), "utf-8")
    ((code, message),) = findings(capsys, offered)
    assert code == "VF701"
    assert said in message


def test_a_missing_file_of_topics_is_a_finding(
    seeded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ((code, message),) = findings(capsys, seeded)
    assert code == "VF701"
    assert "upstream_topics.toml cannot be read" in message


LACKS = {
    "from vllm.v1.sparse import NAME\n": "vllm/v1/sparse.py",
    "def late():\n    from vllm.v1 import sparse\n": "vllm/v1/sparse.py",
    'BACKEND = "vllm.v1.sparse.NAME"\n': "vllm/v1/sparse.py",
    "import tests.edits.test_engine\n": "tests/edits/test_engine.py",
    "from ..v1.sparse import NAME\n": "vllm/v1/sparse.py",
    "import shown\n": "examples/shown.py",
}


@pytest.mark.parametrize("line", LACKS)
def test_what_a_topic_lacks_is_a_finding(
    offered: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    hook = offered / "vllm/extra/hook.py"
    hook.write_text(hook.read_text("utf-8") + line, "utf-8")
    write(offered, {"examples/shown.py": OURS})
    assert findings(capsys, offered) == [
        (
            "VF705",
            f"vllm/extra/hook.py uses {LACKS[line]}, which topic hook neither brings "
            "nor needs",
        )
    ]


def test_modules_that_an_edit_calls_belong_to_its_topic(
    offered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topics = TOPICS.replace("vllm/extra/", "vllm/v1/sparse.py").replace(
        '"vllm/v1/sparse.py" =', '"vllm/extra/" ='
    )
    (offered / "upstream_topics.toml").write_text(topics, "utf-8")
    assert [message.partition(",")[0] for _, message in findings(capsys, offered)] == [
        "edit engine-start uses vllm/extra/__init__.py",
        "edit engine-start uses vllm/extra/hook.py",
    ]


def test_a_stand_in_is_exported_in_place_of_a_helper(
    offered: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    topics = '[stand_ins]\n"tests/helpers/sizes.py" = "up/sizes.py"\n\n' + TOPICS
    write(
        offered,
        {"upstream_topics.toml": topics, "up/sizes.py": OURS + "SIZE = 1 + 2\n"},
    )
    assert run(offered, tmp_path / "out") == 0
    assert (
        "+SIZE = 1 + 2" in everything(tmp_path / "out")["vllm/0001-hook.patch"].decode()
    )
    (offered / "up/sizes.py").write_text(OURS + "LENGTH = 3\n", "utf-8")
    assert findings(capsys, offered) == [
        (
            "VF705",
            "tests/overlay/test_hook.py uses SIZE, which up/sizes.py does not define",
        )
    ]


def test_files_move_to_another_repository_with_their_names(
    offered: Path, tmp_path: Path
) -> None:
    plugin = """
[[topics]]
name = "plugin"
repository = "a-plugin"
title = "Add the hook"
why = "It belongs there."
[topics.moved]
"vllm/extra/" = "a_plugin/hooks/"
"""
    (offered / "upstream_topics.toml").write_text(TOPICS + plugin, "utf-8")
    assert run(offered, tmp_path / "out") == 0
    git(tmp_path, "init", "-q", "plugin")
    git(tmp_path / "plugin", "commit", "-q", "--allow-empty", "-m", "empty")
    git(
        tmp_path / "plugin",
        "am",
        "-q",
        str(tmp_path / "out/a-plugin/0001-plugin.patch"),
    )
    init = (tmp_path / "plugin/a_plugin/hooks/__init__.py").read_text("utf-8")
    assert init == THEIRS + "from a_plugin.hooks.hook import hook\n"


def test_overlay_paths_that_upstream_has_are_refused(
    offered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(offered, {"vllm/sums.py": OURS})
    topics = TOPICS.replace('"vllm/extra/"]', '"vllm/extra/", "vllm/sums.py"]')
    (offered / "upstream_topics.toml").write_text(topics, "utf-8")
    ((code, _),) = findings(capsys, offered)
    assert code == "VF304"


@pytest.mark.parametrize(
    "content", [b"# no header\n", OURS.encode() + b"x = 1\r\n", OURS.encode() + b"\xff"]
)
def test_files_that_no_mail_carries_are_refused(
    offered: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (offered / "tests/helpers/sizes.py").write_bytes(content)
    ((code, message),) = findings(capsys, offered)
    assert code == "VF706"
    assert "sizes.py" in message


def test_topics_of_the_repository_are_sound(base: Callable[[str], Base]) -> None:
    topics = load_topics(Path(__file__).parents[2])
    assert {t.repository for t in topics.topics} == {"vllm", "vllm-gguf-plugin"}
