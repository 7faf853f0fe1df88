# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Turns an operation at a resolved place into byte splices of the pristine source."""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace

from vfork.anchors import FUNCTIONS, bound_by_assignment, describe, parse_pattern
from vfork.errors import VforkError
from vfork.literals import extend_literal, parse_elements
from vfork.source import (
    Definition,
    Place,
    Source,
    dump,
    is_docstring,
    parse_quietly,
    places,
)
from vfork.spec import (
    MAX_STATEMENTS,
    AddImport,
    AddMember,
    Anchor,
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
    Op,
    PrependBody,
    ReplaceFunction,
    Statement,
    SwapName,
)
from vfork.splices import Splice

ANCHORS_OF: dict[type, tuple[type, ...]] = {
    AddImport: (Module,),
    Decorate: (Function, Class),
    PrependBody: (Function,),
    AppendBody: (Function, Module),
    AddMember: (Class,),
    ExtendLiteral: (Assigned,),
    InsertBefore: (Statement, Assigned),
    InsertAfter: (Statement, Assigned),
    SwapName: (Function, Statement),
    ReplaceFunction: (Function,),
}
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def check_edit(edit: Edit) -> None:
    """Checks what can be said about an operation without any upstream source.

    Raises VF108, VF109, VF110 or VF112.
    """
    allowed = ANCHORS_OF[type(edit.op)]
    if not isinstance(edit.at, allowed):
        names = " or ".join(kind.__name__ for kind in allowed)
        raise VforkError(
            "VF108",
            f"{type(edit.op).__name__} works at {names}, "
            f"not at {type(edit.at).__name__}",
        )
    if isinstance(edit.at, Statement):
        parse_pattern(edit.at.pattern)
    elif not isinstance(edit.at, Module) and not DOTTED_NAME.fullmatch(edit.at.name):
        raise VforkError("VF109", f"{edit.at.name!r} is not a qualified name")
    match edit.op:
        case Decorate(expr):
            _expression(expr)
        case ExtendLiteral(src):
            parse_elements(src)
        case SwapName(old, new):
            for name in (old, new):
                if not DOTTED_NAME.fullmatch(name):
                    raise VforkError("VF109", f"{name!r} is not a (dotted) name")
        case _:
            _statements(edit.op)


def _statements(op: Op) -> list[ast.stmt]:
    """The statements an operation inserts, checked."""
    assert not isinstance(op, Decorate | ExtendLiteral | SwapName)
    src = op.stmt if isinstance(op, AddImport) else op.src
    try:
        body = parse_quietly(textwrap.dedent(src)).body
    except (SyntaxError, ValueError) as err:
        raise VforkError("VF109", f"source {src!r} does not parse: {err}") from err
    if not body:
        raise VforkError("VF109", f"source {src!r} has no statement")
    if any(_spans_lines(node) for stmt in body for node in ast.walk(stmt)):
        raise VforkError(
            "VF109",
            "the source has a string over several lines, which indenting would change",
            hint="move the text into an overlay module",
        )
    kind = type(op).__name__
    if isinstance(op, AddImport) and not (
        len(body) == 1 and isinstance(body[0], ast.Import | ast.ImportFrom)
    ):
        raise VforkError("VF109", f"{kind} takes one import, not {src!r}")
    if isinstance(op, ReplaceFunction):
        if len(body) != 1 or not isinstance(body[0], FUNCTIONS):
            raise VforkError("VF109", f"{kind} takes one function")
        return body
    count = sum(isinstance(n, ast.stmt) for stmt in body for n in ast.walk(stmt))
    if count > MAX_STATEMENTS:
        raise VforkError(
            "VF110",
            f"{kind} inserts {count} statements, at most {MAX_STATEMENTS} are allowed",
            hint="call one function of an overlay module",
        )
    return body


def _spans_lines(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Constant | ast.JoinedStr)
        and isinstance(getattr(node, "value", ""), str | bytes)
        and node.end_lineno != node.lineno
    )


def _expression(src: str) -> ast.expr:
    try:
        return ast.parse(src.strip(), mode="eval").body
    except (SyntaxError, ValueError) as err:
        raise VforkError("VF109", f"{src!r} is not an expression: {err}") from err


def splices(source: Source, edit: Edit, place: Place | None) -> list[Splice]:
    """What an edit changes. `place` is what its anchor resolves to."""
    check_edit(edit)
    match edit.op:
        case AddImport():
            return [_add_import(source, edit.op)]
        case Decorate(expr):
            return [_decorate(source, _at(place), expr)]
        case PrependBody():
            return [_prepend(source, edit, _definition(place))]
        case AppendBody():
            scope = source.tree if place is None else _definition(place)
            return [_append(source, edit, scope)]
        case AddMember():
            return [_add_member(source, edit, _definition(place))]
        case ExtendLiteral(src):
            stmt = _at(place).stmt
            assert isinstance(stmt, ast.Assign | ast.AnnAssign)
            return extend_literal(source, stmt, src)
        case InsertBefore():
            return [_insert_before(source, edit, _at(place))]
        case InsertAfter():
            return [_insert_after(source, edit, _at(place))]
        case SwapName(old, new):
            return [_swap(source, edit.at, _at(place).stmt, old, new)]
        case ReplaceFunction():
            return [_replace(source, edit.op, _at(place))]


def _at(place: Place | None) -> Place:
    assert place is not None
    return place


def _definition(place: Place | None) -> Definition:
    stmt = _at(place).stmt
    assert isinstance(stmt, Definition)
    return stmt


def leading_imports(tree: ast.Module) -> list[ast.stmt]:
    """The imports at the top of a module, up to the first other statement."""
    start = 1 if tree.body and is_docstring(tree.body[0]) else 0
    stop = start
    while stop < len(tree.body) and isinstance(
        tree.body[stop], ast.Import | ast.ImportFrom
    ):
        stop += 1
    return tree.body[start:stop]


def _add_import(source: Source, op: AddImport) -> Splice:
    body = _statements(op)
    (new,) = body
    assert isinstance(new, ast.Import | ast.ImportFrom)
    wanted = set(_imported(new))
    for place in places(source.tree):
        same = wanted & set(bound_names(place.stmt))
        if same:
            raise _already(source, place.stmt, f"{', '.join(sorted(same))} is bound")
    tree = source.tree
    imports = leading_imports(tree)
    if imports:
        splice = _after(source, imports[-1], op.stmt)
    elif tree.body and is_docstring(tree.body[0]):
        splice = _after(source, tree.body[0], op.stmt)
    elif tree.body:
        splice = _before(source, tree.body[0], op.stmt)
    else:
        splice = _at_end(source, op.stmt)
    return replace(splice, rank=-1)


def _decorate(source: Source, place: Place, expr: str) -> Splice:
    node = place.stmt
    assert isinstance(node, Definition)
    for decorator in node.decorator_list:
        if dump(decorator) == dump(_expression(expr)):
            raise _already(source, node, f"{node.name} has the decorator")
    indent = _indent(source, node, node.lineno)
    text = _lines(source, "@" + expr.strip(), indent)
    start = source.line_start(node.lineno)
    return Splice(start, start, text, depth=len(indent), rank=2)


def _prepend(source: Source, edit: Edit, node: Definition) -> Splice:
    assert isinstance(edit.op, PrependBody)
    body = _statements(edit.op)
    first = 1 if is_docstring(node.body[0]) else 0
    _refuse_repeat(source, body, node.body[first : first + len(body)])
    if first:
        return _after(source, node.body[0], edit.op.src)
    return _before(source, node.body[0], edit.op.src)


def _append(source: Source, edit: Edit, scope: ast.Module | Definition) -> Splice:
    assert isinstance(edit.op, AppendBody)
    body = _statements(edit.op)
    if not scope.body:
        return _at_end(source, edit.op.src)
    _refuse_repeat(source, body, scope.body[-len(body) :])
    last = scope.body[-1]
    _refuse_unreachable(source, last)
    splice = _after(source, last, edit.op.src)
    if isinstance(scope, ast.Module) and isinstance(last, Definition):
        splice = replace(splice, text=source.newline * 2 + splice.text)
    return splice


def _add_member(source: Source, edit: Edit, node: Definition) -> Splice:
    assert isinstance(edit.op, AddMember)
    body = _statements(edit.op)
    wanted = {name for stmt in body for name in bound_names(stmt)}
    for place in places(node):
        same = wanted & set(bound_names(place.stmt))
        if same:
            raise _already(source, place.stmt, f"{', '.join(sorted(same))} is bound")
    splice = _after(source, node.body[-1], edit.op.src)
    if isinstance(body[0], Definition) or isinstance(node.body[-1], Definition):
        splice = replace(splice, text=source.newline + splice.text)
    return splice


def _insert_before(source: Source, edit: Edit, place: Place) -> Splice:
    assert isinstance(edit.op, InsertBefore)
    body = _statements(edit.op)
    start = max(0, place.index - len(body))
    _refuse_repeat(source, body, place.block[start : place.index])
    return _before(source, place.stmt, edit.op.src)


def _insert_after(source: Source, edit: Edit, place: Place) -> Splice:
    assert isinstance(edit.op, InsertAfter)
    body = _statements(edit.op)
    behind = place.index + 1
    _refuse_repeat(source, body, place.block[behind : behind + len(body)])
    _refuse_unreachable(source, place.stmt)
    return _after(source, place.stmt, edit.op.src)


def _swap(source: Source, at: Anchor, stmt: ast.stmt, old: str, new: str) -> Splice:
    wanted = dump(_expression(old))
    searched = stmt.body if isinstance(stmt, Definition) else [stmt]
    hits = [
        (node, quoted, part)
        for part in searched
        for node, quoted in _loads(part)
        if dump(node) == wanted
    ]
    where = f"{old} in {describe(at)}"
    if not hits:
        raise VforkError(
            "VF204",
            f"{where} is not read in {source.name}",
            excerpt=source.head(stmt),
            hint=f"see whether upstream uses {new} by now, or another name",
        )
    if len(hits) > 1:
        raise VforkError(
            "VF205",
            f"{where} is read {len(hits)} times in {source.name}, expected once",
            excerpt=source.excerpt(_as_statement(node) for node, _, _ in hits),
            hint="anchor the swap at one Statement of the function",
        )
    node, quoted, part = hits[0]
    # Before Python 3.12, positions inside an f-string are not to be trusted.
    if quoted or source.text(node) != old.encode():
        raise _layout(source, part, f"{old} is inside an f-string or over two lines")
    return Splice(source.start(node), source.end(node), new.encode())


def _loads(root: ast.AST, quoted: bool = False) -> Iterator[tuple[ast.expr, bool]]:
    """Names and attributes that are read, and whether inside an f-string."""
    quoted = quoted or isinstance(root, ast.JoinedStr)
    if isinstance(root, ast.Name | ast.Attribute) and isinstance(root.ctx, ast.Load):
        yield root, quoted
    for child in ast.iter_child_nodes(root):
        yield from _loads(child, quoted)


def _as_statement(node: ast.expr) -> ast.stmt:
    return ast.copy_location(ast.Expr(node), node)


def _replace(source: Source, op: ReplaceFunction, place: Place) -> Splice:
    old, (new,) = place.stmt, _statements(op)
    assert isinstance(old, Definition) and isinstance(new, Definition)
    if (type(new), new.name) != (type(old), old.name):
        raise VforkError(
            "VF109",
            f"the replacement is {type(new).__name__} {new.name}, "
            f"expected {type(old).__name__} {old.name}",
        )
    if dump(new) == dump(old):
        raise _already(source, old, "the function is the same")
    first = _first_line(old)
    indent = _indent(source, old, first)
    start = source.line_start(first)
    _refuse_shared_end(source, old)
    text = _lines(source, op.src, indent).removesuffix(source.newline)
    return Splice(start, source.end(old), text, depth=len(indent))


# The layout around an insertion


def _first_line(stmt: ast.stmt) -> int:
    if isinstance(stmt, Definition) and stmt.decorator_list:
        return stmt.decorator_list[0].lineno
    return stmt.lineno


def _indent(source: Source, stmt: ast.stmt, line: int) -> bytes:
    """The white space before a statement, which must be first on its line."""
    start = source.line_start(line)
    text = source.line(line)
    indent = text[: len(text) - len(text.lstrip(b" \t\f"))]
    begin = start + len(indent)
    at_decorator = line != stmt.lineno and text[len(indent) :].startswith(b"@")
    if begin != source.start(stmt) and not at_decorator:
        raise _layout(source, stmt, "the statement is not the first on its line")
    if source.data.startswith(b"elif", begin) and isinstance(stmt, ast.If):
        raise _layout(source, stmt, "there is no place for a statement at `elif`")
    return indent.replace(b"\f", b"")


def _before(source: Source, stmt: ast.stmt, src: str) -> Splice:
    """An insertion before a statement and the comment lines right above it.

    Comments that open the file stay at its top.
    """
    first = line = _first_line(stmt)
    indent = _indent(source, stmt, first)
    while line > 1 and _is_comment(source, line - 1):
        line -= 1
    start = source.line_start(line if line > 1 else first)
    text = _lines(source, src, indent)
    return Splice(start, start, text, depth=len(indent), rank=1)


def _is_comment(source: Source, line: int) -> bool:
    text = source.line(line).lstrip()
    return text.startswith(b"#") and not source.in_string(source.line_start(line))


def _after(source: Source, stmt: ast.stmt, src: str) -> Splice:
    indent = _indent(source, stmt, _first_line(stmt))
    _refuse_shared_end(source, stmt)
    assert stmt.end_lineno is not None
    stop = source.line_stop(stmt.end_lineno)
    text = _lines(source, src, indent)
    if stop == len(source.data) and not source.data.endswith((b"\n", b"\r")):
        text = source.newline + text.removesuffix(source.newline)
    return Splice(stop, stop, text, depth=len(indent))


def _at_end(source: Source, src: str) -> Splice:
    """An insertion at the end of a file without statements."""
    stop = len(source.data)
    text = _lines(source, src, b"")
    if source.line(len(source.line_starts)):
        text = source.newline + text.removesuffix(source.newline)
    return Splice(stop, stop, text)


def _lines(source: Source, src: str, indent: bytes) -> bytes:
    lines = textwrap.dedent(src).strip("\n").rstrip().split("\n")
    return b"".join(
        (indent + line.rstrip().encode() if line.strip() else b"") + source.newline
        for line in lines
    )


def _refuse_shared_end(source: Source, stmt: ast.stmt) -> None:
    assert stmt.end_lineno is not None
    end = source.end(stmt)
    rest = source.data[end : source.line_stop(stmt.end_lineno)].strip()
    if rest and not rest.startswith(b"#"):
        raise _layout(source, stmt, "something follows the statement on its last line")


def _refuse_unreachable(source: Source, stmt: ast.stmt) -> None:
    if isinstance(stmt, LEAVES):
        raise VforkError(
            "VF210",
            f"nothing runs after the `{type(stmt).__name__.lower()}` "
            f"in line {stmt.lineno} of {source.name}",
            excerpt=source.excerpt([stmt]),
            hint="insert before it",
        )


def _refuse_repeat(source: Source, new: list[ast.stmt], there: list[ast.stmt]) -> None:
    if dump(*new) == dump(*there):
        raise _already(source, there[0], "the statements are there")


def _already(source: Source, stmt: ast.stmt, what: str) -> VforkError:
    return VforkError(
        "VF206",
        f"upstream has it already: {what} in line {stmt.lineno} of {source.name}",
        excerpt=source.excerpt([stmt]),
        hint="drop the edit if upstream caught up, else choose another name",
    )


def _layout(source: Source, stmt: ast.stmt, why: str) -> VforkError:
    return VforkError(
        "VF207",
        f"{why}: line {stmt.lineno} of {source.name}",
        excerpt=source.excerpt([stmt]),
        hint="choose another anchor or operation",
    )


def _imported(stmt: ast.Import | ast.ImportFrom) -> list[str]:
    """Bound names of an import; of `import a.b`, all of the dotted name."""
    return [alias.asname or alias.name for alias in stmt.names]


def bound_names(stmt: ast.stmt) -> list[str]:
    """Names that a definition, an import or a plain assignment binds."""
    if isinstance(stmt, ast.Import | ast.ImportFrom):
        return _imported(stmt)
    if isinstance(stmt, Definition):
        return [stmt.name]
    return bound_by_assignment(stmt)
