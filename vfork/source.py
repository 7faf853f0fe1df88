# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""A Python source as bytes and as a syntax tree, and the way between the two."""

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from vfork.errors import VforkError

BOM = b"\xef\xbb\xbf"
EXCERPT_LINES = 40

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Positioned = ast.stmt | ast.expr


def parse_quietly(data: bytes | str) -> ast.Module:
    """`ast.parse` without the warnings that upstream's string escapes may raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(data)


def compile_quietly(data: bytes, name: str) -> None:
    """Raises SyntaxError if a source does not compile; nothing is kept or run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(data, name, "exec", dont_inherit=True)


@dataclass(frozen=True)
class Place:
    """A statement and where it stands: its block, and the scope around the block."""

    stmt: ast.stmt
    block: list[ast.stmt]
    index: int
    scope: ast.Module | Definition


@dataclass(frozen=True, eq=False)
class Source:
    """A file of a release. Offsets are byte offsets into `data`, a BOM included."""

    name: str
    data: bytes
    tree: ast.Module

    @staticmethod
    def parse(name: str, data: bytes) -> "Source":
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            data.decode(encoding)
            tree = parse_quietly(data)
        except (SyntaxError, ValueError) as err:
            raise VforkError(
                "VF202", f"{name} cannot be read as Python: {err}"
            ) from err
        if encoding not in ("utf-8", "utf-8-sig"):
            raise VforkError(
                "VF202",
                f"{name} is encoded as {encoding}, expected UTF-8",
                hint="only UTF-8 sources can be edited",
            )
        return Source(name, data, tree)

    @cached_property
    def line_starts(self) -> list[int]:
        """Offsets at which lines 1, 2, ... start, by the tokenizer's line ends."""
        first = len(BOM) if self.data.startswith(BOM) else 0
        return [first, *(m.end() for m in re.finditer(rb"\r\n|\n|\r", self.data))]

    @cached_property
    def newline(self) -> bytes:
        """The commonest line end of the file."""
        crlf = self.data.count(b"\r\n")
        counts = {
            b"\n": self.data.count(b"\n") - crlf,
            b"\r\n": crlf,
            b"\r": self.data.count(b"\r") - crlf,
        }
        return max(counts, key=lambda end: counts[end])

    def line_start(self, number: int) -> int:
        return self.line_starts[number - 1]

    def line_stop(self, number: int) -> int:
        """The offset behind a line, its line end included."""
        if number < len(self.line_starts):
            return self.line_starts[number]
        return len(self.data)

    def line(self, number: int) -> bytes:
        """A line without its line end."""
        text = self.data[self.line_start(number) : self.line_stop(number)]
        return text.rstrip(b"\r\n")

    def start(self, node: Positioned) -> int:
        return self.line_start(node.lineno) + node.col_offset

    def end(self, node: Positioned) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.line_start(node.end_lineno) + node.end_col_offset

    def text(self, node: Positioned) -> bytes:
        return self.data[self.start(node) : self.end(node)]

    def in_string(self, offset: int) -> bool:
        """Whether the start of a line is inside a string literal."""
        return any(start < offset < end for start, end in self._long_strings)

    @cached_property
    def _long_strings(self) -> list[tuple[int, int]]:
        return [
            (self.start(node), self.end(node))
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant | ast.JoinedStr)
            and node.end_lineno != node.lineno
        ]

    def excerpt(self, nodes: Iterable[ast.stmt], around: int = 2) -> str:
        """Numbered lines around the first lines of nodes, which are marked by `>`."""
        marked = {node.lineno for node in nodes}
        last = len(self.line_starts)
        shown = sorted(
            {
                number
                for mark in marked
                for number in range(mark - around, mark + around + 1)
                if 1 <= number <= last
            }
        )
        return self._numbered(shown, marked)

    def head(self, node: ast.stmt, limit: int = 12) -> str:
        """The first numbered lines of a node."""
        assert node.end_lineno is not None
        stop = min(node.end_lineno, node.lineno + limit - 1)
        return self._numbered(list(range(node.lineno, stop + 1)), set())

    def _numbered(self, numbers: list[int], marked: set[int]) -> str:
        lines = []
        before = None
        for number in numbers[:EXCERPT_LINES]:
            if before is not None and number != before + 1:
                lines.append("  ...")
            mark = ">" if number in marked else " "
            text = self.line(number).decode("utf-8")
            lines.append(f"{mark} {number:5d} {text}".rstrip())
            before = number
        if len(numbers) > EXCERPT_LINES:
            lines.append("  ...")
        return "\n".join(lines)


def blocks(stmt: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of a compound statement, those of handlers and cases included."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(stmt, name, None)
        if block:
            yield block
    for inner in (*getattr(stmt, "handlers", ()), *getattr(stmt, "cases", ())):
        yield inner.body


def places(scope: ast.Module | Definition) -> Iterator[Place]:
    """All statements of a scope, nested blocks included, inner scopes not."""
    yield from _places(scope, scope.body)


def _places(scope: ast.Module | Definition, block: list[ast.stmt]) -> Iterator[Place]:
    for index, stmt in enumerate(block):
        yield Place(stmt, block, index, scope)
        if not isinstance(stmt, Definition):
            for inner in blocks(stmt):
                yield from _places(scope, inner)


def enclosing(place: Place) -> list[tuple[ast.stmt, list[ast.stmt]]]:
    """The compound statements around a place inside its scope, outermost first, each
    with the one of its blocks that leads there."""
    chain: list[tuple[ast.stmt, list[ast.stmt]]] = []
    block = place.scope.body
    while place.block is not block:
        for stmt in block:
            inner = None if isinstance(stmt, Definition) else _toward(stmt, place)
            if inner is not None:
                chain.append((stmt, inner))
                block = inner
                break
        else:
            break
    return chain


def _toward(stmt: ast.stmt, place: Place) -> list[ast.stmt] | None:
    """The block of a statement in which a place is, at whatever depth."""
    for block in blocks(stmt):
        if block is place.block:
            return block
        for inner in block:
            if not isinstance(inner, Definition) and _toward(inner, place) is not None:
                return block
    return None


def qualified_names(
    scope: ast.Module | Definition, prefix: str = ""
) -> Iterator[tuple[str, Place]]:
    """Qualified names of all functions and classes, in source order."""
    for place in places(scope):
        if isinstance(place.stmt, Definition):
            name = prefix + place.stmt.name
            yield name, place
            yield from qualified_names(place.stmt, name + ".")


def is_docstring(stmt: ast.stmt) -> bool:
    return (
        isinstance(stmt, ast.Expr)
        and isinstance(stmt.value, ast.Constant)
        and isinstance(stmt.value.value, str)
    )


def dump(*nodes: ast.AST) -> str:
    """The structure of nodes as text, without positions.

    Unlike `ast.dump`, it reads the same on every Python version: absent and empty
    fields are left out.
    """
    return "\n".join(map(_dump, nodes))


def _dump(value: object) -> str:
    if isinstance(value, ast.AST):
        fields = (
            f"{name}={_dump(inner)}"
            for name, inner in ast.iter_fields(value)
            if name not in ("ctx", "kind", "type_comment", "type_ignores")
            and inner is not None
            and inner != []
        )
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return f"[{','.join(map(_dump, value))}]"
    return repr(value)
