# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Finds what an anchor names in a source: exactly one place, or an error."""

import ast
import difflib
import textwrap
from collections.abc import Sequence

from vfork.errors import VforkError
from vfork.source import (
    Definition,
    Place,
    Source,
    parse_quietly,
    places,
    qualified_names,
)
from vfork.spec import Anchor, Assigned, Class, Function, Module, Statement

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def describe(anchor: Anchor) -> str:
    match anchor:
        case Module():
            return "module"
        case Function(name):
            return f"function {name}"
        case Class(name):
            return f"class {name}"
        case Assigned(name):
            return f"assignment of {name}"
        case Statement(inside, pattern):
            return f"statement `{_one_line(pattern)}` in {inside.name}"


def resolve(source: Source, anchor: Anchor) -> Place | None:
    """The place an anchor means; None stands for the module.

    Raises VF204 without a match, VF205 with several.
    """
    match anchor:
        case Module():
            return None
        case Function(name):
            return _only(source, anchor, _functions(source, name))
        case Class(name):
            found = _definitions(source.tree, name.split("."))
            classes = [p for p in found if isinstance(p.stmt, ast.ClassDef)]
            return _only(source, anchor, classes)
        case Assigned(name):
            return _only(source, anchor, _assignments(source, name))
        case Statement(inside, pattern):
            outer = _only(source, inside, _functions(source, inside.name)).stmt
            assert isinstance(outer, Definition)
            wanted = parse_pattern(pattern)
            hits = [p for p in places(outer) if matches(wanted, p.stmt)]
            return _only(source, anchor, hits, searched=outer)


def _functions(source: Source, name: str) -> list[Place]:
    return [
        place
        for place in _definitions(source.tree, name.split("."))
        if isinstance(place.stmt, FUNCTIONS) and not _is_overload(place.stmt)
    ]


def _definitions(scope: ast.Module | Definition, names: Sequence[str]) -> list[Place]:
    head, *rest = names
    found: list[Place] = []
    for place in places(scope):
        if isinstance(place.stmt, Definition) and place.stmt.name == head:
            found.extend(_definitions(place.stmt, rest) if rest else [place])
    return found


def _assignments(source: Source, name: str) -> list[Place]:
    *outer, last = name.split(".")
    scopes: list[ast.Module | Definition] = [source.tree]
    if outer:
        found = [place.stmt for place in _definitions(source.tree, outer)]
        scopes = [stmt for stmt in found if isinstance(stmt, Definition)]
    return [
        place
        for scope in scopes
        for place in places(scope)
        if last in bound_by_assignment(place.stmt)
    ]


def bound_by_assignment(stmt: ast.stmt) -> list[str]:
    """Plain names that a statement binds to a value, unpacking left out."""
    targets: list[ast.expr] = []
    if isinstance(stmt, ast.Assign):
        targets = stmt.targets
    elif isinstance(stmt, ast.AnnAssign) and stmt.value is not None:
        targets = [stmt.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Name) and decorator.id == "overload":
            return True
        if isinstance(decorator, ast.Attribute) and decorator.attr == "overload":
            return True
    return False


def _only(
    source: Source,
    anchor: Anchor,
    found: list[Place],
    searched: Definition | None = None,
) -> Place:
    if len(found) == 1:
        return found[0]
    if found:
        lines = ", ".join(str(place.stmt.lineno) for place in found)
        raise VforkError(
            "VF205",
            f"{describe(anchor)} matches {len(found)} times in {source.name}, "
            f"expected once (lines {lines})",
            excerpt=source.excerpt(place.stmt for place in found),
            hint="make the anchor more exact; counts other than one are not offered",
        )
    message = f"{describe(anchor)} is not in {source.name}"
    if searched is not None:
        raise VforkError(
            "VF204",
            message,
            excerpt=source.head(searched),
            hint="read the new code of the function, then change the pattern",
        )
    assert not isinstance(anchor, Module | Statement)
    excerpt, hint = _near(source, anchor.name)
    raise VforkError("VF204", message, excerpt=excerpt, hint=hint)


def _near(source: Source, name: str) -> tuple[str, str]:
    """Excerpt and hint with the names most like the one that is not found."""
    known: dict[str, ast.stmt] = {}
    for qualified, place in qualified_names(source.tree):
        known[qualified] = place.stmt
        assert isinstance(place.stmt, Definition)
        _add_assigned(known, f"{qualified}.", place.stmt)
    _add_assigned(known, "", source.tree)
    last = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=3)
    close += [n for n in known if n.rpartition(".")[2] == last and n not in close][:3]
    if not close:
        return "", "it was removed or moved to another file"
    excerpt = source.excerpt((known[n] for n in close), around=0)
    return excerpt, f"did it become {' or '.join(close)}? Mind the kind of anchor, too"


def _add_assigned(
    known: dict[str, ast.stmt], prefix: str, scope: ast.Module | Definition
) -> None:
    for place in places(scope):
        for name in bound_by_assignment(place.stmt):
            known.setdefault(prefix + name, place.stmt)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def parse_pattern(pattern: str) -> ast.stmt:
    """The statement a pattern consists of. Raises VF112."""
    try:
        body = parse_quietly(textwrap.dedent(pattern).strip()).body
    except (SyntaxError, ValueError) as err:
        raise VforkError(
            "VF112",
            f"pattern {pattern!r} does not parse: {err}",
            hint="a compound statement needs its block; write `...` for any block",
        ) from err
    if len(body) != 1 or _is_any_block(body):
        raise VforkError(
            "VF112",
            f"pattern {pattern!r} must be one statement that says something",
        )
    return body[0]


def matches(pattern: ast.AST, node: ast.AST) -> bool:
    """Whether a node has the structure of a pattern; see `vfork.spec.Statement`."""
    if _is_wildcard(pattern) and isinstance(node, ast.expr):
        return True
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Constant) and isinstance(node, ast.Constant):
        return (type(pattern.value), pattern.value) == (type(node.value), node.value)
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        return matches(pattern.func, node.func) and _match_arguments(pattern, node)
    header_only = _is_any_block(getattr(pattern, "body", None))
    return all(
        (header_only and wanted == [] and name in ("orelse", "finalbody", "handlers"))
        or _match_value(wanted, getattr(node, name))
        for name, wanted in ast.iter_fields(pattern)
        if name not in ("ctx", "kind", "type_comment")
    )


def _match_value(wanted: object, found: object) -> bool:
    if isinstance(wanted, ast.AST):
        return isinstance(found, ast.AST) and matches(wanted, found)
    if isinstance(wanted, list) and isinstance(found, list):
        if _is_any_block(wanted):
            return bool(found)
        return len(wanted) == len(found) and all(map(_match_value, wanted, found))
    return wanted == found


def _match_arguments(pattern: ast.Call, node: ast.Call) -> bool:
    if not any(map(_is_wildcard, pattern.args)):
        return _match_value(pattern.args, node.args) and _match_value(
            pattern.keywords, node.keywords
        )
    return _match_spread(pattern.args, node.args) and all(
        any(matches(wanted, found) for found in node.keywords)
        for wanted in pattern.keywords
    )


def _match_spread(wanted: list[ast.expr], found: list[ast.expr]) -> bool:
    if not wanted:
        return not found
    if _is_wildcard(wanted[0]):
        return any(
            _match_spread(wanted[1:], found[skip:]) for skip in range(len(found) + 1)
        )
    return (
        bool(found)
        and matches(wanted[0], found[0])
        and _match_spread(wanted[1:], found[1:])
    )


def _is_wildcard(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _is_any_block(block: object) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 1
        and isinstance(block[0], ast.Expr)
        and _is_wildcard(block[0].value)
    )
