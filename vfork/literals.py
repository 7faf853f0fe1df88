# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Appends elements to a list, tuple, set, dict or `Literal[...]` in a source."""

import ast
import textwrap
from collections.abc import Sequence

from vfork.errors import VforkError
from vfork.source import Source, dump, parse_quietly
from vfork.splices import Splice

Container = ast.List | ast.Tuple | ast.Set | ast.Dict | ast.Subscript


def parse_elements(src: str) -> ast.List | ast.Dict:
    """The elements that `src` holds, as in a list or a dict. Raises VF109."""
    text = textwrap.dedent(src).strip()
    for brackets in ("[]", "{}"):
        try:
            body = parse_quietly(f"{brackets[0]}\n{text}\n{brackets[1]}").body
        except (SyntaxError, ValueError):
            continue
        node = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else 0
        if isinstance(node, ast.List | ast.Dict) and _parts(node):
            return node
    raise VforkError("VF109", f"{src!r} is neither list elements nor dict items")


def extend_literal(
    source: Source, stmt: ast.Assign | ast.AnnAssign, src: str
) -> list[Splice]:
    """The splices that append `src` to the container bound by `stmt`."""
    node = _container(source, stmt)
    new = parse_elements(src)
    if isinstance(node, ast.Dict) != isinstance(new, ast.Dict):
        raise _refusal(source, stmt, f"{src!r} does not fit a {type(node).__name__}")
    there = {_key(part) for part in _parts(node)}
    for part in _parts(new):
        if _key(part) in there:
            raise VforkError(
                "VF206",
                f"upstream has {ast.unparse(part[0])} already: "
                f"line {stmt.lineno} of {source.name}",
                excerpt=source.excerpt([stmt]),
                hint="drop the edit",
            )
    made = _splices(source, node, textwrap.dedent(src).strip().rstrip(","))
    _verify(source, stmt, node, new, made)
    return made


def _container(source: Source, stmt: ast.Assign | ast.AnnAssign) -> Container:
    value = stmt.value
    if isinstance(value, ast.List | ast.Tuple | ast.Set | ast.Dict):
        return value
    if isinstance(value, ast.Subscript):
        name = value.value
        last = name.attr if isinstance(name, ast.Attribute) else None
        if last == "Literal" or isinstance(name, ast.Name) and name.id == "Literal":
            return value
    raise _refusal(source, stmt, "the value is not a list, tuple, set, dict or Literal")


def _parts(node: Container) -> list[list[ast.expr]]:
    """Elements in source order; a dict item is its key and value, `**x` is one."""
    if isinstance(node, ast.Dict):
        return [
            [value] if key is None else [key, value]
            for key, value in zip(node.keys, node.values, strict=True)
        ]
    if isinstance(node, ast.Subscript):
        if isinstance(node.slice, ast.Tuple):
            return [[element] for element in node.slice.elts]
        return [[node.slice]]
    return [[element] for element in node.elts]


def _key(part: Sequence[ast.expr]) -> str:
    return dump(part[0])


def _splices(source: Source, node: Container, src: str) -> list[Splice]:
    data = source.data
    end = source.end(node)
    bare = isinstance(node, ast.Tuple) and data[end - 1 : end] != b")"
    close = end if bare else end - 1
    parts = _parts(node)
    text = source.newline.join(src.encode().splitlines())
    if not parts:
        start = source.start(node) + 1
        return [Splice(start, start, text + b",")]
    tail = source.end(parts[-1][-1])
    comma, at = _find_comma(data, tail, close)
    stop = min(
        (p for p in (data.find(b"\n", at), data.find(b"\r", at)) if p >= 0),
        default=close,
    )
    if stop >= close:
        if comma:
            return [Splice(at, at, b" " + text + b",")]
        return [Splice(at, at, b", " + text)]
    first = parts[-1][0]
    line = source.line(first.lineno)
    indent = line[: len(line) - len(line.lstrip(b" \t"))]
    if first.lineno == node.lineno:
        indent += b"    "
    lines = b"".join(
        source.newline + indent + row.rstrip().encode()
        for row in (src + ",").split("\n")
    )
    added = Splice(stop, stop, lines)
    return [added] if comma else [Splice(at, at, b",", once=True), added]


def _find_comma(data: bytes, at: int, close: int) -> tuple[bool, int]:
    """Whether a comma follows the last element, and the offset behind it or, without
    one, behind the element and the parentheses around it."""
    behind = at
    while at < close:
        byte = data[at : at + 1]
        if byte == b",":
            return True, at + 1
        if byte == b"#":
            while at < close and data[at : at + 1] not in (b"\n", b"\r"):
                at += 1
            continue
        at += 1
        if byte == b")":
            behind = at
    return False, behind


def _verify(
    source: Source,
    stmt: ast.Assign | ast.AnnAssign,
    node: Container,
    new: ast.List | ast.Dict,
    made: list[Splice],
) -> None:
    """Checks by parsing that exactly the new elements were appended."""
    start, end = source.start(node), source.end(node)
    text, done = b"(", start
    for splice in made:
        text += source.data[done : splice.start] + splice.text
        done = splice.end
    text += source.data[done:end] + b"\n)"
    wanted = [*_parts(node), *_parts(new)]
    try:
        body = parse_quietly(text).body
    except SyntaxError:
        body = []
    got = body[0].value if body and isinstance(body[0], ast.Expr) else None
    if not isinstance(got, type(node)) or [
        [dump(e) for e in part] for part in _parts(got)
    ] != [[dump(e) for e in part] for part in wanted]:
        raise _refusal(source, stmt, "the way the brackets are written is unknown")


def _refusal(source: Source, stmt: ast.stmt, why: str) -> VforkError:
    return VforkError(
        "VF207",
        f"{why}: line {stmt.lineno} of {source.name}",
        excerpt=source.excerpt([stmt]),
        hint="choose another anchor or operation",
    )
