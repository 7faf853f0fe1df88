# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Names of functions and classes, and what they hold where that is known."""

import ast

from vfork.rebase.symbols import Symbol
from vfork.rebase.values import Value
from vfork.source import Definition

# (module, function, parameter) -> what every call passes, as far as known.
Passed = dict[tuple[str, str, str], Value | None]

_NAMED = Definition | ast.ExceptHandler | ast.MatchAs | ast.MatchStar


class Scope:
    """Names of one function or class body."""

    def __init__(self, outer: "Scope | None" = None, cls: Symbol | None = None) -> None:
        self.outer = outer
        self.cls = cls
        self.values: dict[str, Value | None] = {}
        self.names: set[str] = set()

    def find(self, name: str) -> tuple[bool, Value | None]:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return True, scope.values[name]
            if name in scope.names:
                return True, None
            scope = scope.outer
        return False, None

    def own_class(self) -> Symbol | None:
        scope: Scope | None = self
        while scope is not None and scope.cls is None:
            scope = scope.outer
        return scope.cls if scope else None


def bound_names(node: ast.AST) -> set[str]:
    """All names that a function, class or comprehension binds, at any depth."""
    names: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store | ast.Del):
            names.add(inner.id)
        elif isinstance(inner, ast.arg):
            names.add(inner.arg)
        elif isinstance(inner, ast.alias):
            names.add(inner.asname or inner.name.split(".")[0])
        elif isinstance(inner, _NAMED) and inner is not node and inner.name:
            names.add(inner.name)
    return names
