# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.vfork_edits import TARGET, apply, edit, load, refused
from vfork.apply import NOTICE, plan, render
from vfork.errors import VforkError
from vfork.spec import (
    AddImport,
    AddMember,
    AppendBody,
    Assigned,
    Class,
    Decorate,
    Edit,
    ExtendLiteral,
    Function,
    InsertAfter,
    InsertBefore,
    Module,
    PrependBody,
    ReplaceFunction,
    Statement,
    SwapName,
)

SOURCE = '''\
# SPDX-License-Identifier: Apache-2.0
"""Colors — größe, 色."""

import os
from x import (
    y,
)

COLORS = [
    "rot",  # ü, ]
    "grün"
]


class Paint(Base):
    NAME = "é"

    @property
    def size(self):
        """Size\f in ℓ."""
        # how
        return measure(self, "µ")


def mix(a, b="色"):
    text = "long \\
line"; other = 1
    if a:
        use(a); use("ß")
    return text
'''
EDITS = (
    edit(Module(), AddImport("from new import hook"), id="import"),
    edit(Assigned("COLORS"), ExtendLiteral('"bläulich"'), id="literal"),
    edit(Class("Paint"), Decorate("hook"), id="decorate-class"),
    edit(Class("Paint"), AddMember("def g(self):\n    hook(self)"), id="member"),
    edit(Function("Paint.size"), Decorate("hook"), id="decorate"),
    edit(Function("Paint.size"), PrependBody("hook('ä')"), id="prepend"),
    edit(Function("Paint.size"), SwapName("measure", "m.gauge"), id="swap"),
    edit(
        Statement(Function("mix"), "return ..."), InsertBefore("hook(b)"), id="before"
    ),
    edit(Statement(Function("mix"), "if a: ..."), InsertAfter("hook(a)"), id="after"),
    edit(Module(), AppendBody("mix = hook(mix)"), id="append"),
)
EXPECTED = '''\
# SPDX-License-Identifier: Apache-2.0
"""Colors — größe, 色."""

import os
from x import (
    y,
)
from new import hook

COLORS = [
    "rot",  # ü, ]
    "grün",
    "bläulich",
]


@hook
class Paint(Base):
    NAME = "é"

    @property
    @hook
    def size(self):
        """Size\f in ℓ."""
        hook('ä')
        # how
        return m.gauge(self, "µ")

    def g(self):
        hook(self)


def mix(a, b="色"):
    text = "long \\
line"; other = 1
    if a:
        use(a); use("ß")
    hook(a)
    hook(b)
    return text


mix = hook(mix)
'''


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("end", [True, False], ids=["line end", "no line end"])
def test_all_operations_in_one_file(newline: str, bom: bytes, end: bool) -> None:
    source, expected = SOURCE, EXPECTED
    if not end:
        source, expected = source.removesuffix("\n"), expected.removesuffix("\n")
    data = bom + source.replace("\n", newline).encode()
    wanted = bom + expected.replace("\n", newline).encode()
    assert render(data, load(*EDITS), "cpu", "1", notice=False).data == wanted


def test_same_input_gives_the_same_bytes() -> None:
    one = render(SOURCE.encode(), load(*EDITS), "cpu", "1")
    two = render(SOURCE.encode(), load(*EDITS), "cpu", "1")
    assert one == two


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_edited_file_ends_with_one_notice_line(newline: bytes) -> None:
    source = b"def f():" + newline + b"    x()"
    made = edit(Function("f"), PrependBody("call()"))
    data = render(source, load(made), "cpu", "1").data
    assert data.endswith(newline + b"    x()" + newline + NOTICE + newline)
    assert data.count(NOTICE) == 1


def test_file_without_edits_for_the_base_stays_as_it_is() -> None:
    source = b"def f():\n    x()"
    later = edit(Function("gone"), PrependBody("call()"), releases=">=2")
    assert render(source, load(later), "cpu", "1.9").data == source
    with pytest.raises(VforkError):
        render(source, load(later), "cpu", "2.0")


def test_edit_for_one_base_only_is_left_out_of_the_other() -> None:
    values = {**vars(edit(Function("f"), PrependBody("call()"))), "bases": ("cuda",)}
    source = b"def f():\n    x()\n"
    assert render(source, load(Edit(**values)), "cpu", "1").spans == ()
    assert b"call()" in render(source, load(Edit(**values)), "cuda", "1").data


def test_edited_file_is_not_edited_again() -> None:
    made = load(edit(Function("f"), PrependBody("call()")))
    once = render(b"def f():\n    x()\n", made, "cpu", "1").data
    with pytest.raises(VforkError) as caught:
        render(once, made, "cpu", "1")
    assert caught.value.code == "VF203"


def test_edits_of_an_export_without_notice_are_not_made_again() -> None:
    once = apply(SOURCE, *EDITS)
    for made in EDITS:
        if not isinstance(made.op, SwapName):
            refused("VF206", once, made)
    refused("VF204", once, edit(Function("Paint.size"), SwapName("measure", "x")))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"def f(:\n", id="syntax"),
        pytest.param(b"x = 1\n\xff\n", id="not UTF-8"),
        pytest.param(b"# coding: latin-1\nx = '\xe4'\n", id="latin-1"),
        pytest.param(b"x = 1\0\n", id="null byte"),
    ],
)
def test_unreadable_upstream_source_is_refused(data: bytes) -> None:
    error = refused("VF202", data, edit(Module(), AddImport("import a")))
    assert TARGET in error.message


def test_source_that_only_a_function_may_hold_is_found_after_applying() -> None:
    refused("VF209", "x = 1\n", edit(Module(), AppendBody("return 1")))


def test_all_errors_of_a_file_are_collected() -> None:
    made = load(
        edit(Function("a"), PrependBody("call()"), id="one"),
        edit(Function("f"), PrependBody("call()"), id="fine"),
        edit(Class("b"), AddMember("c = 1"), id="two"),
    )
    file = plan(b"def f():\n    x()\n", made, "cpu", "1")
    assert [e.edit.id for e in file.errors if e.edit] == ["one", "two"]
    assert [p.edit.id for p in file.edits] == ["fine"]


def test_equal_insertions_keep_the_order_of_the_edit_file() -> None:
    edits = [edit(Function("f"), PrependBody(f"{n}()"), id=n) for n in "cab"]
    assert apply("def f():\n    x()\n", *edits) == (
        "def f():\n    c()\n    a()\n    b()\n    x()\n"
    )


@pytest.mark.parametrize("flip", [False, True])
def test_deeper_block_comes_first_at_one_place(flip: bool) -> None:
    source = "def f():\n    if a:\n        x()\n    y()\n"
    f = Function("f")
    edits = [
        edit(Statement(f, "y()"), InsertBefore("last()"), id="before"),
        edit(Statement(f, "if a: ..."), InsertAfter("if b:\n    outer()"), id="outer"),
        edit(Statement(f, "x()"), InsertAfter("inner()"), id="inner"),
    ]
    assert apply(source, *(reversed(edits) if flip else edits)) == (
        "def f():\n    if a:\n        x()\n        inner()\n"
        "    if b:\n        outer()\n    last()\n    y()\n"
    )


@pytest.mark.parametrize("flip", [False, True])
def test_insertions_at_one_place_stay_with_their_neighbors(flip: bool) -> None:
    source = "X = []\ndef f(): ...\n"
    edits = [
        edit(Function("f"), Decorate("d"), id="decorate"),
        edit(Assigned("X"), InsertAfter("def g(): ..."), id="after"),
        edit(Module(), AddImport("import a"), id="import"),
        edit(Assigned("X"), InsertBefore("b()"), id="before"),
    ]
    assert apply(source, *(reversed(edits) if flip else edits)) == (
        "import a\nb()\nX = []\ndef g(): ...\n@d\ndef f(): ...\n"
    )


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (SwapName("old", "new"), SwapName("old", "newer")),
        (SwapName("old", "new"), ReplaceFunction("def f():\n    call()")),
        (PrependBody("call()"), ReplaceFunction("def f():\n    call()")),
        (Decorate("d"), ReplaceFunction("def f():\n    call()")),
    ],
)
def test_overlapping_edits_are_refused(
    one: SwapName | PrependBody | Decorate, two: SwapName | ReplaceFunction
) -> None:
    source = "def f():\n    return old\n"
    for first, second in ((one, two), (two, one)):
        error = refused(
            "VF208",
            source,
            edit(Function("f"), first, id="first"),
            edit(Function("f"), second, id="second"),
        )
        assert "first and second" in error.message


def test_spans_tell_lines_before_and_after() -> None:
    rendered = render(SOURCE.encode(), load(*EDITS), "cpu", "1")
    lines = rendered.data.decode().split("\n")
    spans = {span.id: span for span in rendered.spans}
    assert [*spans] == [made.id for made in EDITS]
    assert lines[spans["import"].line - 1] == "from new import hook"
    assert spans["import"].upstream_line == 8
    assert lines[spans["prepend"].line - 1] == "        hook('ä')"
    assert "m.gauge" in lines[spans["swap"].line - 1]
    assert spans["swap"].upstream_line == 22
    assert spans["member"].inserted == 2
    assert spans["literal"].inserted == 2


def test_first_line_behind_a_bom_is_edited() -> None:
    source = b"\xef\xbb\xbfX = f('\xc3\xbc', [1])\n"
    changed = apply(source, edit(Assigned("X"), InsertBefore("call()")))
    assert changed == "\ufeffcall()\nX = f('ü', [1])\n"
    swap = edit(Function("g"), SwapName("old", "new"))
    assert apply(b"\xef\xbb\xbfdef g(): old()\n", swap) == "\ufeffdef g(): new()\n"


def test_mixed_line_ends_take_the_commonest() -> None:
    source = b"def f():\r\n    x()\r\ny = 1\n"
    changed = apply(source, edit(Function("f"), PrependBody("call()")))
    assert changed == "def f():\r\n    call()\r\n    x()\r\ny = 1\n"


NAMES = st.sampled_from(["a", "größe", "色", "x1"])
SIMPLE = st.builds(
    "{} = {}{}".format,
    NAMES,
    st.sampled_from(["1", "'ß'", '"""\n# text\n"""', "[\n  1,\n]", "f(  2)"]),
    st.sampled_from(["", "  # ünd; }", " ", " ; a = 2"]),
)


@st.composite
def function_source(draw: st.DrawFn) -> bytes:
    """A module of functions `f0`, `f1`, ... with odd layout."""
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    indent = draw(st.sampled_from(["    ", "\t", "  "]))
    lines = draw(st.lists(st.sampled_from(["# c", "", "import os"]), max_size=3))
    for number in range(draw(st.integers(1, 3))):
        lines += ["@d"] * draw(st.integers(0, 1))
        lines += [f"def f{number}(a, b='色'):{draw(st.sampled_from(['', '  # h']))}"]
        lines += [f'{indent}"""Doc."""'] * draw(st.integers(0, 1))
        lines += [f"{indent}# c"] * draw(st.integers(0, 1))
        lines += [indent + s for s in draw(st.lists(SIMPLE, min_size=1, max_size=3))]
        if draw(st.booleans()):
            lines += [f"{indent}if a:", f"{indent * 2}return", f"{indent}else:"]
            lines += [indent * 2 + draw(SIMPLE)]
    text = newline.join(lines)
    return (text + draw(st.sampled_from(["", newline]))).encode()


INSERTIONS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([PrependBody("hook_()"), Decorate("hook_"), AppendBody("h()")]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(source=function_source(), wanted=INSERTIONS)
def test_bytes_outside_insertions_never_change_and_the_tree_is_as_asked(
    source: bytes, wanted: list[tuple[int, PrependBody | Decorate | AppendBody]]
) -> None:
    edits = [
        edit(Function(f"f{number}"), op, id=f"e{index}")
        for index, (number, op) in enumerate(wanted)
    ]
    file = plan(source, load(*edits), "cpu", "1")
    assert {error.code for error in file.errors} <= {"VF204", "VF207"}
    good = [p.edit for p in file.edits]
    data = render(source, load(*good), "cpu", "1", notice=False).data
    inserted = sorted(s.start for p in file.edits for s in p.splices)
    at = 0
    for start, stop in zip([0, *inserted], [*inserted, len(source)], strict=True):
        at = data.index(source[start:stop], at) + stop - start
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(data))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert calls.count("hook_") == sum(isinstance(e.op, PrependBody) for e in good)
    for made in good:
        assert isinstance(made.at, Function)
        check_edited(ast.parse(data), made, made.at.name)


def check_edited(tree: ast.Module, made: Edit, name: str) -> None:
    (node,) = (n for n in tree.body if getattr(n, "name", "") == name)
    assert isinstance(node, ast.FunctionDef)
    if isinstance(made.op, Decorate):
        assert ast.unparse(node.decorator_list[-1]) == "hook_"
    elif isinstance(made.op, AppendBody):
        assert ast.unparse(node.body[-1]) == "h()"
    else:
        first = 1 if ast.get_docstring(node) is not None else 0
        assert ast.unparse(node.body[first]) == "hook_()"
