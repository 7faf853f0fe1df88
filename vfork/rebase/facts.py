# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Facts: what one use of upstream relies on, at one release."""

import ast
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from vfork.rebase.signatures import Function, function_text
from vfork.rebase.symbols import (
    FUNCTION,
    VALUE,
    Member,
    Symbol,
    Symbols,
)
from vfork.source import Definition, dump, enclosing, is_docstring, places

_LONG = 2000


@dataclass(frozen=True)
class Key:
    """Names a use on both releases: the file or edit, the line in it, what, on what."""

    subject: str
    line: int
    kind: str
    text: str


@dataclass(frozen=True)
class Fact:
    """A use as one release has it.

    `target` is what is used. `problem` says why it cannot work, empty if it can.
    `known` is False where this cannot be told. `shape` is what a caller sees of the
    target, `parts` fingerprints of its code by name. `where` is path:line upstream.
    """

    key: Key
    target: str
    problem: str = ""
    known: bool = True
    shape: str = ""
    parts: tuple[tuple[str, str], ...] = ()
    where: str = ""
    symbol: Symbol | None = field(default=None, compare=False)


Facts = dict[Key, Fact]


def fingerprint(*nodes: ast.AST) -> str:
    return hashlib.sha256(dump(*nodes).encode()).hexdigest()


def body_of(symbols: Symbols, node: ast.stmt) -> str:
    """A fingerprint of a function's statements, its docstring left out."""
    memo = symbols.tree.store.memo
    key = ("body", node)
    if key not in memo:
        block = node.body if isinstance(node, Definition) else [node]
        if is_docstring(block[0]):
            block = block[1:]
        memo[key] = fingerprint(*block)
    result: str = memo[key]
    return result


def symbol_shape(symbols: Symbols, symbol: Symbol) -> str:
    """What an importer sees of a symbol: head of a definition, short values."""
    node = symbol.node
    if node is None:
        return symbol.kind
    memo = symbols.tree.store.memo
    key = ("shape", node, symbol.name)
    if key not in memo:
        memo[key] = _conditions(symbol) + _head(symbol, node)
    result: str = memo[key]
    return result


def _head(symbol: Symbol, node: ast.stmt) -> str:
    if isinstance(node, Function):
        return function_text(node)
    if isinstance(node, ast.ClassDef):
        return class_text(node)
    if symbol.kind == VALUE:
        return value_text(node)
    return symbol.kind


def class_text(node: ast.ClassDef) -> str:
    marks = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
    bases = ", ".join(ast.unparse(b) for b in (*node.bases, *node.keywords))
    return f"{marks}class {node.name}({bases})"


def value_text(node: ast.stmt) -> str:
    """An assignment; of a long one the beginning and a fingerprint."""
    text = " ".join(ast.unparse(node).split())
    if len(text) <= _LONG:
        return text
    return f"{text[:60]}... [{fingerprint(node)[:12]}]"


def _conditions(symbol: Symbol) -> str:
    assert symbol.place is not None
    found = ""
    for stmt, block in enclosing(symbol.place):
        test = getattr(stmt, "test", None)
        text = f" {ast.unparse(test)}" if test is not None else ""
        branch = next(
            (name for name, value in ast.iter_fields(stmt) if value is block), ""
        )
        found += f"{type(stmt).__name__.lower()}{text} ({branch}): "
    return found


def member_shape(member: Member) -> str:
    """What a user of a class sees of a member."""
    node = member.node
    if isinstance(node, Function):
        return f"{member.kind}: {function_text(node)}"
    if isinstance(node, ast.ClassDef):
        return class_text(node)
    if member.kind == "attribute" and isinstance(node, ast.AnnAssign):
        return f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    if member.kind == "attribute":
        return f"{member.name} is assigned"
    return value_text(node)


def place_text(symbols: Symbols, symbol: Symbol, node: ast.stmt | None = None) -> str:
    path = symbols.path(symbol) or symbol.module
    stmt = node or symbol.node
    return f"{path}:{stmt.lineno}" if stmt is not None else path


def import_fact(symbols: Symbols, key: Key, source: str, name: str) -> Fact | None:
    """The fact of `from source import name`; None if it is not about upstream."""
    target = f"{source}.{name}" if name else source
    found = symbols.imported(source, name) if name else symbols.module(source)
    if found is None and target in symbols.tree.compiled:
        return Fact(key, target, shape="compiled")
    if found is None:
        return Fact(key, target, problem=f"{target} does not exist")
    if symbols.is_ours(found) or found.kind in ("external", "module"):
        return None if symbols.is_ours(found) else Fact(key, target, shape=found.kind)
    if found.kind == "opaque":
        return Fact(key, target, known=False)
    return symbol_fact(symbols, key, target, found)


def symbol_fact(symbols: Symbols, key: Key, target: str, found: Symbol) -> Fact:
    parts: tuple[tuple[str, str], ...] = ()
    if found.kind == FUNCTION and found.node is not None:
        parts = ((found.name, body_of(symbols, found.node)),)
    return Fact(
        key,
        target,
        shape=symbol_shape(symbols, found),
        parts=parts,
        where=place_text(symbols, found),
        symbol=found,
    )


def member_fact(
    symbols: Symbols, key: Key, cls: Symbol, name: str, *, skip: int = 0
) -> tuple[Fact | None, Member | None]:
    """The fact of using a member of a class, None if that is not upstream's."""
    member = (
        symbols.member_after(cls, name, skip) if skip else symbols.member(cls, name)
    )
    target = f"{cls}.{name}"
    if member is None:
        order, complete = symbols.hierarchy(cls)
        if all(symbols.is_ours(part) for part in order):
            return None, None
        if _implicit(symbols, cls, name):
            return None, None
        if not complete or symbols.member(cls, "__getattr__"):
            return Fact(key, target, known=False), None
        return Fact(key, target, problem=f"{cls} has no {name}"), None
    if symbols.is_ours(member.owner):
        return None, member
    parts: tuple[tuple[str, str], ...] = ()
    if isinstance(member.node, Function):
        parts = ((name, body_of(symbols, member.node)),)
    fact = Fact(
        key,
        f"{member.owner}.{name}",
        shape=member_shape(member),
        parts=parts,
        where=place_text(symbols, member.owner, member.node),
        symbol=member.owner,
    )
    return fact, member


def _implicit(symbols: Symbols, cls: Symbol, name: str) -> bool:
    """Names that every class or every enum and record has."""
    if name.startswith("__") and name.endswith("__"):
        return True
    if symbols.is_enum(cls):
        return name in ("name", "value", "_value_", "_member_map_")
    return name in ("_asdict", "_replace", "_fields", "_make", "register")


def abstract_names(symbols: Symbols, cls: Symbol) -> list[str]:
    """Methods that a class leaves abstract."""
    order, _ = symbols.hierarchy(cls)
    names: dict[str, None] = {}
    for part in order:
        for name in symbols.own_members(part):
            names.setdefault(name)
    found = []
    for name in names:
        member = symbols.member(cls, name)
        if member is not None and _is_abstract(member.node):
            found.append(name)
    return sorted(found)


def _is_abstract(node: ast.stmt) -> bool:
    return any(
        ast.unparse(d).rpartition(".")[2].startswith("abstract")
        for d in getattr(node, "decorator_list", ())
    )


def class_parts(
    symbols: Symbols, classes: Iterable[Symbol]
) -> tuple[tuple[str, str], ...]:
    """Fingerprints of all functions of classes, by qualified name."""
    return tuple(
        (f"{cls.name}.{place.stmt.name}", body_of(symbols, place.stmt))
        for cls in classes
        if isinstance(cls.node, ast.ClassDef)
        for place in places(cls.node)
        if isinstance(place.stmt, Function)
    )
