# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
import pytest

from tests.helpers.vfork_edits import apply, change, edit, refused
from vfork.errors import VforkError
from vfork.ops import check_edit
from vfork.spec import (
    AddImport,
    AddMember,
    Anchor,
    AppendBody,
    Class,
    Decorate,
    ExtendLiteral,
    Function,
    InsertAfter,
    InsertBefore,
    Module,
    Op,
    PrependBody,
    ReplaceFunction,
    Statement,
    SwapName,
)

F = Function("f")


def at_statement(pattern: str) -> Statement:
    return Statement(F, pattern)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(
            '# SPDX\n"""Doc."""\n\nimport a\nfrom b import (\n    c,\n)  # why\n'
            "\nx = 1\n",
            '# SPDX\n"""Doc."""\n\nimport a\nfrom b import (\n    c,\n)  # why\n'
            "import new\n\nx = 1\n",
            id="behind the last leading import",
        ),
        pytest.param(
            "from __future__ import annotations\nx = 1\nimport late\n",
            "from __future__ import annotations\nimport new\nx = 1\nimport late\n",
            id="behind __future__, before late imports",
        ),
        pytest.param('"""Doc."""\n', '"""Doc."""\nimport new\n', id="docstring only"),
        pytest.param("# c\nx = 1\n", "# c\nimport new\nx = 1\n", id="no import"),
        pytest.param("# c\n", "# c\nimport new\n", id="comments only"),
        pytest.param("# c", "# c\nimport new", id="comment without line end"),
        pytest.param("", "import new\n", id="empty file"),
        pytest.param("import a", "import a\nimport new", id="no line end"),
    ],
)
def test_import_goes_into_the_leading_block(source: str, expected: str) -> None:
    assert change(source, Module(), AddImport("import new")) == expected


@pytest.mark.parametrize(
    "source",
    [
        "import new\n",
        "from b import new\n",
        "from b import c as new\n",
        "if x:\n    import new\n",
        "def new(): ...\n",
        "new = 1\n",
    ],
)
def test_import_of_a_bound_name_is_refused(source: str) -> None:
    refused("VF206", source, edit(Module(), AddImport("import new")))


def test_dotted_imports_of_one_package_do_not_collide() -> None:
    source = "import a.b\n"
    assert change(source, Module(), AddImport("import a.c")) == source + "import a.c\n"
    refused("VF206", source, edit(Module(), AddImport("import a.b")))


@pytest.mark.parametrize(
    ("source", "at", "expected"),
    [
        ("def f(): ...\n", F, "@d(1)\ndef f(): ...\n"),
        ("@a\n# c\ndef f(): ...\n", F, "@a\n# c\n@d(1)\ndef f(): ...\n"),
        ("async def f():\n    pass\n", F, "@d(1)\nasync def f():\n    pass\n"),
        ("class A(B):\n    pass\n", Class("A"), "@d(1)\nclass A(B):\n    pass\n"),
        (
            "class A:\n\t@property\n\tdef f(self): ...\n",
            Function("A.f"),
            "class A:\n\t@property\n\t@d(1)\n\tdef f(self): ...\n",
        ),
    ],
)
def test_decorator_goes_directly_above_the_definition(
    source: str, at: Anchor, expected: str
) -> None:
    assert change(source, at, Decorate("d(1)")) == expected


def test_decorator_that_is_there_is_refused() -> None:
    refused("VF206", "@a\n@d( 1 )\ndef f(): ...\n", edit(F, Decorate("d(1)")))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    x()\n", "    call()\n    x()\n"),
        ('    """Doc."""\n', '    """Doc."""\n    call()\n'),
        (
            '    """Doc.\n    # not a comment\n    """\n\n    x()\n',
            '    """Doc.\n    # not a comment\n    """\n    call()\n\n    x()\n',
        ),
        ("    # why x\n    x()\n", "    call()\n    # why x\n    x()\n"),
        ("    @d\n    def g(): ...\n", "    call()\n    @d\n    def g(): ...\n"),
        ("\tx()\n", "\tcall()\n\tx()\n"),
    ],
    ids=["plain", "docstring", "long docstring", "comment", "decorated", "tab"],
)
def test_prepended_source_is_first_but_for_the_docstring(
    body: str, expected: str
) -> None:
    head = "def f(\n    a,\n):  # head\n"
    assert change(head + body, F, PrependBody("call()")) == head + expected


def test_source_is_dedented_and_indented_to_its_place() -> None:
    source = "class A:\n  def f(self):\n    x()\n"
    op = PrependBody("\n        if self.on:\n\n            call(self)\n        ")
    assert change(source, Function("A.f"), op) == (
        "class A:\n  def f(self):\n    if self.on:\n\n        call(self)\n    x()\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    x()  # c\n\n\ny = 1\n", "def f():\n    x()  # c\n    call()\n"),
        ("def f():\n    if a:\n        x()\n", "        x()\n    call()\n"),
        ("def f():\n    x()", "    x()\n    call()"),
    ],
    ids=["comment", "after a nested block", "no line end"],
)
def test_appended_source_is_last(source: str, expected: str) -> None:
    assert expected in change(source, F, AppendBody("call()"))


def test_module_append_is_at_the_end() -> None:
    op = AppendBody("x = wrap(x)")
    assert change("x = 1\n# end\n", Module(), op) == "x = 1\nx = wrap(x)\n# end\n"
    assert change("", Module(), op) == "x = wrap(x)\n"
    assert change("def x(): ...\n", Module(), op) == ("def x(): ...\n\n\nx = wrap(x)\n")


@pytest.mark.parametrize("last", ["return 1", "raise E", "return"])
def test_source_that_could_never_run_is_refused(last: str) -> None:
    source = f"def f():\n    {last}\n"
    refused("VF210", source, edit(F, AppendBody("call()")))
    refused("VF210", source, edit(at_statement(last), InsertAfter("call()")))


@pytest.mark.parametrize(
    ("body", "src", "expected"),
    [
        ("    A = 1\n", "B = 2", "    A = 1\n    B = 2\n"),
        ('    """Doc."""\n', "B: int = 2", '    """Doc."""\n    B: int = 2\n'),
        ("    A = 1\n", "def g(self):\n    call()", "    A = 1\n\n    def g(self):\n"),
        ("    def g(self):\n        x()\n", "B = 2", "        x()\n\n    B = 2\n"),
    ],
    ids=["attribute", "after docstring", "method", "after a method"],
)
def test_member_is_added_at_the_end_of_the_class(
    body: str, src: str, expected: str
) -> None:
    changed = change(f"class A:\n{body}\n\nx = 1\n", Class("A"), AddMember(src))
    assert expected in changed
    assert changed.endswith("\n\n\nx = 1\n")


def test_member_that_is_there_is_refused() -> None:
    source = "class A:\n    def g(self): ...\n"
    refused("VF206", source, edit(Class("A"), AddMember("g = 1")))


ELIF = "def f():\n    if a:\n        b()\n    elif c: d()\n"
BODY = """\
def f():
    # first
    x = 1
    if x:
        y()  # tail
    else:
        z()
    @d
    def g(): ...
    return x
"""


@pytest.mark.parametrize(
    ("pattern", "op", "expected"),
    [
        ("x = 1", InsertBefore("call()"), "def f():\n    call()\n    # first\n"),
        ("x = 1", InsertAfter("call()"), "    x = 1\n    call()\n    if x:\n"),
        ("y()", InsertBefore("call()"), "    if x:\n        call()\n        y()  #"),
        ("y()", InsertAfter("call()"), "y()  # tail\n        call()\n    else:\n"),
        ("if x: ...", InsertAfter("call()"), "        z()\n    call()\n    @d\n"),
        ("return x", InsertBefore("call()"), "def g(): ...\n    call()\n    return"),
    ],
)
def test_statement_insertions(pattern: str, op: Op, expected: str) -> None:
    assert expected in change(BODY, at_statement(pattern), op)


def test_insertion_before_a_decorated_definition_is_above_the_decorator() -> None:
    source = "def f():\n    x()\n    @d\n    def g():\n        return 1\n"
    op = InsertBefore("call()")
    at = at_statement("x()")
    assert change(source, at, InsertAfter("call()")).count("call()\n    @d") == 1
    assert "call()\n    x()" in change(source, at, op)


@pytest.mark.parametrize(
    ("source", "pattern", "op"),
    [
        ("def f(): x()\n", "x()", InsertBefore),
        ("def f(): x()\n", "x()", InsertAfter),
        ("def f():\n    x(); y()\n", "x()", InsertAfter),
        ("def f():\n    x(); y()\n", "y()", InsertBefore),
        ("def f():\n    x(); y()\n", "y()", InsertAfter),
        ("def f():\n    if a: x()\n", "x()", InsertBefore),
        (ELIF, "if c: ...", InsertBefore),
        (ELIF, "if c: ...", InsertAfter),
    ],
)
def test_layout_without_a_line_for_the_source_is_refused(
    source: str, pattern: str, op: type[InsertBefore] | type[InsertAfter]
) -> None:
    refused("VF207", source, edit(at_statement(pattern), op("call()")))


def test_source_goes_before_a_line_of_several_statements() -> None:
    source = "def f():\n    x(); y()\n"
    changed = change(source, at_statement("x()"), InsertBefore("call()"))
    assert changed == "def f():\n    call()\n    x(); y()\n"


@pytest.mark.parametrize(
    "op", [PrependBody("call()"), AppendBody("call()")], ids=["prepend", "append"]
)
def test_one_line_function_is_refused(op: Op) -> None:
    refused("VF207", "def f(): x()\n", edit(F, op))


def test_one_line_class_is_refused() -> None:
    refused("VF207", "class A: ...\n", edit(Class("A"), AddMember("B = 2")))


def test_comment_like_line_of_a_string_does_not_take_the_source() -> None:
    source = 'def f(a="""\n# b"""):\n    x()\n'
    assert '# b"""):\n    call()\n    x()' in change(source, F, PrependBody("call()"))
    tricky = 'def f(\n    a="""\n# b"""): return 1\n'
    refused("VF207", tricky, edit(F, PrependBody("call()")))


@pytest.mark.parametrize(
    ("at", "op"),
    [
        (F, PrependBody("a()\nb()")),
        (F, AppendBody("c()\nd()")),
        (at_statement("c()"), InsertBefore("a()\nb()")),
        (at_statement("b()"), InsertAfter("c()\nd()")),
    ],
)
def test_statements_that_are_there_are_refused(at: Anchor, op: Op) -> None:
    source = "def f():\n    a()\n    b()\n    c()\n    d()\n"
    refused("VF206", source, edit(at, op))


@pytest.mark.parametrize(
    ("line", "old", "new", "expected"),
    [
        ("return old(1)", "old", "new", "return new(1)"),
        ("return self.old(1)", "self.old", "self.new", "return self.new(1)"),
        ("return old.a.b", "old.a", "m.x", "return m.x.b"),
        ("old = 1; return old", "old", "new", "old = 1; return new"),
        ("return [a for a in old]", "old", "new", "return [a for a in new]"),
        ("return 'ü', old", "old", "new", "return 'ü', new"),
    ],
)
def test_swap_replaces_the_one_name_that_is_read(
    line: str, old: str, new: str, expected: str
) -> None:
    source = f"def f(old=1):\n    {line}\n"
    assert change(source, F, SwapName(old, new)) == f"def f(old=1):\n    {expected}\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("return 1", "VF204"),
        ("old = 1", "VF204"),
        ("return old + old", "VF205"),
        ("return f'{old}'", "VF207"),
        ("return a.old", "VF204"),
    ],
)
def test_swap_is_refused_unless_the_name_is_read_once(line: str, code: str) -> None:
    refused(code, f"def f():\n    {line}\n", edit(F, SwapName("old", "new")))


def test_swap_at_a_statement_sees_that_statement_only() -> None:
    source = "def f():\n    x = old\n    return old\n"
    changed = change(source, at_statement("return ..."), SwapName("old", "new"))
    assert changed == "def f():\n    x = old\n    return new\n"


def test_swap_of_a_name_over_two_lines_is_refused() -> None:
    source = "def f():\n    return (a\n        .b)\n"
    refused("VF207", source, edit(F, SwapName("a.b", "c")))


def test_replacement_takes_decorators_along() -> None:
    source = "class A:\n    @d\n    def f(self):\n        x()\n\n    y = 1\n"
    op = ReplaceFunction("def f(self):\n    call()")
    assert change(source, Function("A.f"), op) == (
        "class A:\n    def f(self):\n        call()\n\n    y = 1\n"
    )


@pytest.mark.parametrize(
    ("src", "code"),
    [
        ("def g():\n    pass", "VF109"),
        ("async def f():\n    pass", "VF109"),
        ("def f():\n    x()", "VF206"),
    ],
)
def test_replacement_must_be_another_version_of_the_function(
    src: str, code: str
) -> None:
    refused(code, "def f():\n    x()\n", edit(F, ReplaceFunction(src)))


@pytest.mark.parametrize(
    ("at", "op"),
    [
        (F, AddImport("import a")),
        (Module(), Decorate("d")),
        (Class("A"), PrependBody("call()")),
        (Class("A"), AppendBody("call()")),
        (F, AddMember("a = 1")),
        (F, ExtendLiteral("1")),
        (F, InsertBefore("call()")),
        (F, InsertAfter("call()")),
        (Class("A"), SwapName("a", "b")),
        (Class("A"), ReplaceFunction("def f(): ...")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_operation_at_an_unfit_anchor_is_refused(at: Anchor, op: Op) -> None:
    with pytest.raises(VforkError) as caught:
        check_edit(edit(at, op))
    assert caught.value.code == "VF108"
    assert type(op).__name__ in caught.value.message


@pytest.mark.parametrize(
    ("at", "op", "code"),
    [
        (F, PrependBody("a ="), "VF109"),
        (F, PrependBody("  \n"), "VF109"),
        (F, PrependBody("call('''\n''')"), "VF109"),
        (F, Decorate("a b"), "VF109"),
        (F, Decorate(""), "VF109"),
        (F, SwapName("a()", "b"), "VF109"),
        (F, SwapName("a", "b-c"), "VF109"),
        (F, ReplaceFunction("x = 1"), "VF109"),
        (Function("f()"), PrependBody("call()"), "VF109"),
        (Module(), AddImport("x = 1"), "VF109"),
        (Module(), AddImport("import a\nimport b"), "VF109"),
        (F, PrependBody("a()\nb()\nc()\nd()"), "VF110"),
        (F, PrependBody("if a:\n    if b:\n        c()\n        d()"), "VF110"),
        (at_statement("if a:"), InsertAfter("b()"), "VF112"),
    ],
)
def test_unsound_operation_is_refused_without_a_source(
    at: Anchor, op: Op, code: str
) -> None:
    with pytest.raises(VforkError) as caught:
        check_edit(edit(at, op))
    assert caught.value.code == code


def test_three_statements_are_allowed() -> None:
    changed = apply("def f():\n    x()\n", edit(F, PrependBody("a()\nif b:\n    c()")))
    assert changed == "def f():\n    a()\n    if b:\n        c()\n    x()\n"
