# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
import pytest

from tests.helpers.vfork_edits import change, edit, refused
from vfork.anchors import matches, parse_pattern, resolve
from vfork.errors import VforkError
from vfork.source import Source, dump, parse_quietly
from vfork.spec import (
    Anchor,
    Assigned,
    Class,
    Decorate,
    ExtendLiteral,
    Function,
    InsertBefore,
    PrependBody,
    Statement,
)

CALL = PrependBody("call()")


def line_of(source: str, anchor: Anchor) -> int:
    place = resolve(Source.parse("colors.py", source.encode()), anchor)
    assert place is not None
    return place.stmt.lineno


SCOPES = """\
def paint():
    def paint(): ...
    class Brush:
        def paint(self): ...

class Brush:
    SIZE = 1
    class Tip:
        async def paint(self): ...
    if SIZE:
        def clean(self): ...
    else:
        def dry(self): ...
"""


@pytest.mark.parametrize(
    ("anchor", "line"),
    [
        (Function("paint"), 1),
        (Function("paint.paint"), 2),
        (Function("paint.Brush.paint"), 4),
        (Class("Brush"), 6),
        (Assigned("Brush.SIZE"), 7),
        (Class("Brush.Tip"), 8),
        (Function("Brush.Tip.paint"), 9),
        (Function("Brush.clean"), 11),
        (Function("Brush.dry"), 13),
    ],
    ids=str,
)
def test_qualified_name_finds_its_scope(anchor: Anchor, line: int) -> None:
    assert line_of(SCOPES, anchor) == line


def test_function_is_found_where_it_was_moved_to_in_the_file() -> None:
    source = "def a():\n    x()\n\n\ndef b():\n    y()\n"
    moved = "# new\n\n\ndef b():\n    y()\n\n\ndef a():\n    x()\n"
    assert "call()\n    x()" in change(source, Function("a"), CALL)
    assert "call()\n    x()" in change(moved, Function("a"), CALL)


@pytest.mark.parametrize(
    "anchor",
    [Function("pain"), Function("Brush.paint"), Class("paint"), Assigned("SIZE")],
    ids=str,
)
def test_missing_name_is_an_error_that_shows_the_nearest_names(
    anchor: Function | Class | Assigned,
) -> None:
    op = ExtendLiteral("1") if isinstance(anchor, Assigned) else Decorate("d")
    error = refused("VF204", SCOPES, edit(anchor, op))
    assert anchor.name in error.message
    assert "did it become" in error.hint
    assert error.excerpt


def test_function_moved_to_another_file_leaves_no_candidate() -> None:
    error = refused("VF204", "x = 1\n", edit(Function("paint"), CALL))
    assert "moved to another file" in error.hint


def test_conditional_definitions_are_ambiguous_and_both_are_shown() -> None:
    source = "if fast:\n    def f():\n        a()\nelse:\n    def f():\n        b()\n"
    error = refused("VF205", source, edit(Function("f"), CALL))
    assert "2 times" in error.message
    assert ">     2     def f():" in error.excerpt
    assert ">     5     def f():" in error.excerpt


def test_try_and_except_definitions_are_ambiguous() -> None:
    source = "try:\n    X = [1]\nexcept OSError:\n    X = []\n"
    refused("VF205", source, edit(Assigned("X"), ExtendLiteral("2")))


def test_property_with_setter_is_ambiguous() -> None:
    source = (
        "class A:\n"
        "    @property\n    def x(self):\n        return 1\n"
        "    @x.setter\n    def x(self, v):\n        pass\n"
    )
    refused("VF205", source, edit(Function("A.x"), CALL))


@pytest.mark.parametrize("name", ["overload", "typing.overload", "t.overload"])
def test_overloaded_function_means_its_implementation(name: str) -> None:
    source = (
        f"@{name}\ndef f(a: int): ...\n@{name}\ndef f(a: str): ...\n"
        "def f(a):\n    return a\n"
    )
    assert line_of(source, Function("f")) == 5


def test_overloads_without_or_with_two_implementations_are_refused() -> None:
    stub = "@overload\ndef f(a: int): ...\n"
    refused("VF204", stub, edit(Function("f"), CALL))
    twice = stub + "def f(a):\n    a()\ndef f(a):\n    b()\n"
    refused("VF205", twice, edit(Function("f"), CALL))


def test_assignment_is_found_with_annotation_and_with_several_targets() -> None:
    assert line_of("X: list[int]\nX: list[int] = []\n", Assigned("X")) == 2
    assert line_of("a = X = []\n", Assigned("X")) == 1
    source = "X = []\nX += [1]\ny, X2 = 1, 2\n"
    assert line_of(source, Assigned("X")) == 1
    refused("VF204", source, edit(Assigned("X2"), ExtendLiteral("1")))


FLOW = """\
def f(a):
    x = make(a, 1, key=2)
    if a:
        for b in a:
            use(b)
    elif x:
        use(x)
    else:
        raise ValueError(f"bad {x}")
    with lock:
        try:
            x = 1
        finally:
            done(x)

    def g():
        hidden()

    return x


hidden()
"""


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("x = make(...)", 2),
        ("x = make(a, ...)", 2),
        ("x = make(..., 1, key=2)", 2),
        ("x = make(..., key=...)", 2),
        ("x = ...(a, 1, key=2)", 2),
        ("if a: ...", 3),
        ("if a:\n    ...\nelse:\n    ...", 3),
        ("for b in a:\n    use(b)", 4),
        ("if x: ...", 6),
        ("use(b)", 5),
        ("raise ValueError(...)", 9),
        ("raise ...", 9),
        ("with lock: ...", 10),
        ("try: ...\nfinally: ...", 11),
        ("x = 1", 12),
        ("done(...)", 14),
        ("def g(): ...", 16),
        ("  return x  ", 19),
    ],
)
def test_pattern_finds_its_statement(pattern: str, line: int) -> None:
    assert line_of(FLOW, Statement(Function("f"), pattern)) == line


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        ("x = ...", "VF205"),
        ("use(...)", "VF205"),
        ("x = True", "VF204"),
        ("x = make(a, 1)", "VF204"),
        ("x = make(a, ..., 2)", "VF204"),
        ("x = make(..., other=2)", "VF204"),
        ("for b in a:\n    ...\nelse:\n    ...", "VF204"),
        ("if a:\n    use(b)", "VF204"),
        ("hidden()", "VF204"),
        ("return", "VF204"),
    ],
)
def test_pattern_that_does_not_match_once_is_an_error(pattern: str, code: str) -> None:
    at = Statement(Function("f"), pattern)
    error = refused(code, FLOW, edit(at, InsertBefore("call()")))
    assert "def f(a):" in error.excerpt or code == "VF205"


def test_statement_in_a_missing_function_names_the_function() -> None:
    at = Statement(Function("nowhere"), "x = 1")
    error = refused("VF204", FLOW, edit(at, InsertBefore("call()")))
    assert "function nowhere" in error.message


@pytest.mark.parametrize("pattern", ["", "...", "x = 1; y = 2", "if x:", "... = 1"])
def test_pattern_must_be_one_statement(pattern: str) -> None:
    with pytest.raises(VforkError) as caught:
        parse_pattern(pattern)
    assert caught.value.code == "VF112"


def test_pattern_tells_equal_constants_of_different_types_apart() -> None:
    (node,) = parse_quietly("x = 1").body
    assert matches(parse_pattern("x = 1"), node)
    assert not matches(parse_pattern("x = True"), node)
    assert not matches(parse_pattern("x = 1.0"), node)


def test_dump_ignores_layout_comments_and_position() -> None:
    one = parse_quietly("def f(a, b=1):\n    # why\n    return (a +\n      b)\n")
    two = parse_quietly("\n\ndef f(a,b = 1): return a+b\n")
    assert dump(one) == dump(two)
    assert dump(one) != dump(parse_quietly("def f(a, b=1): return a-b\n"))


def test_dump_leaves_out_empty_fields_which_differ_between_python_versions() -> None:
    assert "[]" not in dump(parse_quietly("class A:\n    def f(self): return g()\n"))
