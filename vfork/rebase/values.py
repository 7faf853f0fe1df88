# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What kind of object an expression of a tree makes, as far as annotations tell."""

import ast
from dataclasses import dataclass

from vfork.rebase.signatures import Function, annotation_class
from vfork.rebase.symbols import (
    CLASS,
    FUNCTION,
    MODULE,
    VALUE,
    Member,
    Symbol,
    Symbols,
    decorated,
)

_DEPTH = 12


@dataclass(frozen=True)
class Value:
    """`form` says what `symbol` is to the object: module, class (the class itself),
    instance, function, or super (of the class).

    A method is a function whose symbol is its class, with `member`; `bound` if its
    first parameter is taken.
    """

    form: str
    symbol: Symbol
    member: Member | None = None
    bound: bool = False


def of_symbol(symbols: Symbols, symbol: Symbol | None, depth: int = 0) -> Value | None:
    """The object that a name at the top of a module holds."""
    if symbol is None or depth > _DEPTH:
        return None
    if symbol.kind == MODULE:
        return Value("module", symbol)
    if symbol.kind == CLASS:
        return Value("class", symbol)
    if symbol.kind == FUNCTION:
        return Value("function", symbol)
    if symbol.kind == VALUE:
        stmt = symbol.node
        if isinstance(stmt, ast.AnnAssign):
            found = of_annotation(symbols, symbol.module, stmt.annotation)
            if found is not None:
                return found
        return _of_expression(
            symbols, symbol.module, getattr(stmt, "value", None), depth + 1
        )
    return None


def of_annotation(
    symbols: Symbols, module: str, annotation: ast.expr | None
) -> Value | None:
    found = annotation_class(symbols, module, annotation)
    if found is None:
        return None
    symbol, itself = found
    return Value("class" if itself else "instance", symbol)


def of_member(symbols: Symbols, outer: Value, member: Member) -> Value | None:
    """The object that a class or an instance has as a member."""
    owner, node = member.owner, member.node
    if member.is_callable:
        bound = member.kind == "classmethod" or (
            member.kind == "method" and outer.form in ("instance", "super")
        )
        return Value("function", owner, member, bound)
    if member.kind == "property" and isinstance(node, Function):
        return of_annotation(symbols, owner.module, node.returns)
    if member.kind == "class":
        inner = symbols.inner_class(owner, member.name)
        return Value("class", inner) if inner else None
    if member.kind == "field" and symbols.is_enum(owner):
        return Value("instance", owner)
    if isinstance(node, ast.AnnAssign):
        return of_annotation(symbols, owner.module, node.annotation)
    value = getattr(node, "value", None)
    if member.method is not None and isinstance(value, ast.Name):
        return of_parameter(symbols, owner.module, member.method, value.id)
    return _of_expression(symbols, owner.module, value, 0)


def of_parameter(
    symbols: Symbols, module: str, function: Function, name: str
) -> Value | None:
    arguments = function.args
    for p in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if p.arg == name:
            return of_annotation(symbols, module, p.annotation)
    return None


def of_result(symbols: Symbols, called: Value | None) -> Value | None:
    """The object that a call of a class or function gives."""
    if called is None:
        return None
    if called.form == "class":
        return Value("instance", called.symbol)
    if called.form == "function":
        node = called.member.node if called.member else called.symbol.node
        if isinstance(node, ast.FunctionDef) and not decorated(
            node, "contextmanager", "overload"
        ):
            return of_annotation(symbols, called.symbol.module, node.returns)
    return None


def _of_expression(
    symbols: Symbols, module: str, expr: ast.expr | None, depth: int
) -> Value | None:
    if isinstance(expr, ast.Call):
        called = of_symbol(symbols, symbols.resolve(module, expr.func), depth)
        return of_result(symbols, called)
    return None
