# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from pathlib import Path

import pytest

from vfork.edits import load_edits, owner_test_errors
from vfork.errors import VforkError
from vfork.spec import (
    AddImport,
    Edit,
    EditFile,
    Function,
    InsertAfter,
    Module,
    PrependBody,
    Statement,
)

EDIT = """\
Edit(
    id={id!r},
    why={why!r},
    drop_when={drop_when!r},
    forwarded={forwarded!r},
    at={at},
    op={op},
    test={test!r},{more}
),
"""
FIELDS = {
    "id": "paint-hook",
    "why": "There is no hook.",
    "drop_when": "upstream has a hook",
    "forwarded": "https://example.org/pull/1",
    "at": "Function('paint')",
    "op": "PrependBody('call()')",
    "test": "tests/test_paint.py::test_hook",
    "more": "",
}
IMPORT = "from vfork.spec import *\n"


def declared(**fields: str) -> str:
    return EDIT.format(**{**FIELDS, **fields})


def file_text(*edits: str) -> str:
    return f"{IMPORT}FILE = EditFile(topic='t', edits=({''.join(edits)}))\n"


def write(root: Path, text: str, target: str = "vllm/paint.py") -> None:
    path = root / "edits" / target
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def refused(root: Path, code: str) -> VforkError:
    with pytest.raises(VforkError) as caught:
        load_edits(root)
    assert caught.value.code == code, caught.value
    return caught.value


def test_edit_file_becomes_the_declaration_it_spells(tmp_path: Path) -> None:
    write(
        tmp_path,
        '"""Doc."""\n\n'
        "from vfork.spec import AddImport, Edit, EditFile, Function, InsertAfter\n"
        "from vfork.spec import Module, PrependBody, Statement\n\n"
        "FILE = EditFile(topic='paint', edits=("
        + declared(why="one\ntwo", more="releases='<0.33', bases=('cpu',),")
        + declared(id="b", at="Module()", op="AddImport(stmt='import ü')")
        + declared(
            id="c",
            at="Statement(Function('f'), 'x' ' = 1')",
            op="InsertAfter('y()')",
            forwarded="not-needed: ours",
        )
        + "))",
    )
    (loaded,) = load_edits(tmp_path)
    assert loaded.target == "vllm/paint.py"
    assert loaded.path == tmp_path / "edits/vllm/paint.py"
    shared = ("upstream has a hook", "https://example.org/pull/1")
    test = "tests/test_paint.py::test_hook"
    assert loaded.file == EditFile(
        "paint",
        (
            Edit(
                "paint-hook",
                "one\ntwo",
                *shared,
                Function("paint"),
                PrependBody("call()"),
                test,
                releases="<0.33",
                bases=("cpu",),
            ),
            Edit(
                "b", "There is no hook.", *shared, Module(), AddImport("import ü"), test
            ),
            Edit(
                "c",
                "There is no hook.",
                "upstream has a hook",
                "not-needed: ours",
                Statement(Function("f"), "x = 1"),
                InsertAfter("y()"),
                test,
            ),
        ),
    )
    assert loaded.ref(loaded.file.edits[0]).file == "edits/vllm/paint.py"


def test_files_are_sorted_and_a_missing_folder_means_no_edits(tmp_path: Path) -> None:
    assert load_edits(tmp_path) == ()
    for number, name in enumerate(("b.py", "a/z.py", "a.py")):
        write(tmp_path, file_text(declared(id=f"e{number}")), f"vllm/{name}")
    targets = [loaded.target for loaded in load_edits(tmp_path)]
    assert targets == sorted(targets)
    assert len(targets) == 3


def test_file_that_does_not_parse_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "FILE = (")
    assert "edits/vllm/paint.py" in refused(tmp_path, "VF101").message


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param(IMPORT, id="no FILE"),
        pytest.param("import os\nFILE = EditFile('t', ())\n", id="other import"),
        pytest.param(
            "from vfork.spec import EditFile as E\nFILE = E('t', ())\n", id="alias"
        ),
        pytest.param("from os import path\nFILE = EditFile('t', ())\n", id="from os"),
        pytest.param("X = 1\nFILE = EditFile('t', ())\n", id="other statement"),
        pytest.param("FILE = EditFile('t', ())\nprint()\n", id="code behind"),
        pytest.param("if 1:\n    FILE = EditFile('t', ())\n", id="control flow"),
        pytest.param("FILE = EditFile(TOPIC, ())\n", id="name"),
        pytest.param("FILE = EditFile('a' + 'b', ())\n", id="operator"),
        pytest.param("FILE = EditFile(f'{1}', ())\n", id="f-string"),
        pytest.param("FILE = EditFile('t', tuple(x for x in ()))\n", id="generator"),
        pytest.param("FILE = EditFile('t', (*(),))\n", id="star"),
        pytest.param("FILE = EditFile('t', [])\n", id="list"),
        pytest.param("FILE = EditFile('t', open('x'))\n", id="other call"),
        pytest.param("FILE = EditFile('t', a.b())\n", id="attribute call"),
        pytest.param("FILE = Module()\n", id="not an EditFile"),
        pytest.param("FILE: EditFile = EditFile('t', ())\n", id="annotated"),
        pytest.param("FILE = EditFile(1, ())\n", id="number"),
    ],
)
def test_file_that_is_more_than_data_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    error = refused(tmp_path, "VF102")
    assert "edits/vllm/paint.py, line 1" in error.message or "line 2" in error.message


def test_nothing_in_an_edit_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    write(tmp_path, f"FILE = EditFile('t', (open({str(mark)!r}, 'w'),))\n")
    refused(tmp_path, "VF102")
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        file_text(declared(more="extra='x',")),
        file_text(declared(at="'paint'")),
        file_text(declared(at="PrependBody('x')")),
        file_text(declared(op="Function('x')")),
        file_text(declared(at="Function(())")),
        file_text(declared(at="Function()")),
        file_text(declared(at="Module('x')")),
        file_text(declared(at="Function('a', name='b')")),
        file_text(declared(at="Function(**'a')")),
        file_text(declared(more="bases='cpu',")),
        file_text(declared(id="Paint Hook")),
        "FILE = EditFile(topic='t')\n",
        "FILE = EditFile(topic='t', edits=('x',))\n",
        "FILE = EditFile(topic='t', edits=Module())\n",
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    refused(tmp_path, "VF103")


@pytest.mark.parametrize(
    "field",
    [
        {"why": ""},
        {"drop_when": "  "},
        {"test": ""},
        {"forwarded": ""},
        {"forwarded": "no"},
        {"forwarded": "later"},
        {"forwarded": "not-needed:"},
        {"forwarded": "http://example.org"},
    ],
    ids=str,
)
def test_undocumented_edit_is_refused(tmp_path: Path, field: dict[str, str]) -> None:
    write(tmp_path, file_text(declared(**field)))
    error = refused(tmp_path, "VF104")
    assert [*field][0] in error.message
    assert error.edit is not None and error.edit.id == "paint-hook"


@pytest.mark.parametrize(
    ("test", "missing"),
    [
        ("tests/test_paint.py", False),
        ("tests/test_paint.py::test_hook", False),
        ("tests/test_paint.py::test_hook[one]", False),
        ("tests/test_paint.py::TestPaint::test_hook", False),
        ("tests/test_paint.py::test_hoo", True),
        ("tests/test_none.py", True),
        ("tests", True),
    ],
)
def test_owner_test_must_exist(tmp_path: Path, test: str, missing: bool) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_paint.py").write_text("def test_hook():\n    pass\n")
    write(tmp_path, file_text(declared(test=test)))
    errors = owner_test_errors(tmp_path, load_edits(tmp_path))
    assert [error.code for error in errors] == ["VF105"] * missing


def test_id_is_unique_over_all_files(tmp_path: Path) -> None:
    write(tmp_path, file_text(declared(), declared()))
    assert "paint-hook" in refused(tmp_path, "VF106").message
    write(tmp_path, file_text(declared()))
    write(tmp_path, file_text(declared()), "vllm/other.py")
    error = refused(tmp_path, "VF106")
    assert error.edit is not None
    assert {"edits/vllm/other.py", "edits/vllm/paint.py"} == {
        error.edit.file,
        error.message.split()[-2].rstrip(","),
    }


@pytest.mark.parametrize(
    "target",
    [
        "vllm/third_party/a.py",
        "vllm/vllm_flash_attn/layers/a.py",
        "vllm/_version.py",
    ],
)
def test_vendored_and_generated_files_are_not_edited(
    tmp_path: Path, target: str
) -> None:
    write(tmp_path, file_text(declared()), target)
    assert target in refused(tmp_path, "VF107").message


@pytest.mark.parametrize(
    ("field", "code"),
    [
        ({"op": "AddImport('import a')"}, "VF108"),
        ({"op": "PrependBody('a b')"}, "VF109"),
        ({"op": "PrependBody('a(); b(); c(); d()')"}, "VF110"),
        ({"more": "releases='0.33',"}, "VF111"),
        ({"more": "bases=('rocm',),"}, "VF111"),
        ({"more": "bases=(),"}, "VF111"),
        (
            {"at": "Statement(Function('f'), 'if')", "op": "InsertAfter('a()')"},
            "VF112",
        ),
    ],
    ids=str,
)
def test_unsound_edit_is_refused_when_it_is_read(
    tmp_path: Path, field: dict[str, str], code: str
) -> None:
    write(tmp_path, file_text(declared(**field)))
    error = refused(tmp_path, code)
    assert error.edit is not None and error.edit.file == "edits/vllm/paint.py"
