# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Looks in a new release for what an anchor meant in the old one."""

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from vfork.anchors import bound_by_assignment, matches, parse_pattern
from vfork.rebase.tree import Tree, is_vendored
from vfork.source import (
    Definition,
    Place,
    Source,
    blocks,
    is_docstring,
    places,
    qualified_names,
)
from vfork.spec import Anchor, Module, Statement

THRESHOLD = 0.6
"""Candidates that are less alike are not proposed."""

_MAX_TOKENS = 3000
_MAX_CANDIDATES = 3
_TOKEN = re.compile(r"\w+|\S")


@dataclass(frozen=True)
class Candidate:
    """What an anchor may have become. `similarity` is between 0 and 1."""

    path: str
    name: str
    line: int
    similarity: float

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}"
        name = f"{self.name} in " if self.name else ""
        return f"{name}{where} (similarity {self.similarity:.2f})"


def likeness(one: ast.AST, two: ast.AST) -> float:
    """How alike the code of two nodes is, their own names and docstrings aside."""
    matcher = difflib.SequenceMatcher(None, _tokens(one), _tokens(two), autojunk=False)
    if matcher.real_quick_ratio() < THRESHOLD or matcher.quick_ratio() < THRESHOLD:
        return 0.0
    return matcher.ratio()


def _tokens(node: ast.AST) -> list[str]:
    text = ast.unparse(node)
    if isinstance(node, Definition):
        text = re.sub(rf"\b{re.escape(node.name)}\b", "_", text)
        if is_docstring(node.body[0]):
            text = text.replace(ast.unparse(node.body[0]), "", 1)
    tokens = _TOKEN.findall(text)
    # Lines are compared instead where tokens would take too long.
    return tokens if len(tokens) <= _MAX_TOKENS else text.splitlines()


def candidates(
    anchor: Anchor, place: Place | None, old: Source, old_tree: Tree, new_tree: Tree
) -> list[Candidate]:
    """Places of the new release that may be meant by an anchor that is gone there.

    `place` is where the anchor was in `old`. Best first, at most three.
    """
    if isinstance(anchor, Module) or place is None:
        found = _files(old, old_tree, new_tree)
    elif isinstance(anchor, Statement):
        found = _statements(anchor, place, old, old_tree, new_tree)
    else:
        found = _named(anchor.name, place.stmt, old, old_tree, new_tree)
    found = [c for c in found if c.similarity >= THRESHOLD]
    found.sort(key=lambda c: (-c.similarity, c.path != old.name, c.path, c.line))
    return found[:_MAX_CANDIDATES]


def named(
    path: str, name: str, node: ast.stmt, old_tree: Tree, new_tree: Tree
) -> list[Candidate]:
    """As `candidates`, for a definition or assignment outside of any edit."""
    found = _named(name, node, old_tree.source(path), old_tree, new_tree)
    found = [c for c in found if c.similarity >= THRESHOLD]
    found.sort(key=lambda c: (-c.similarity, c.path, c.line))
    return found[:_MAX_CANDIDATES]


def _files(old: Source, old_tree: Tree, new_tree: Tree) -> list[Candidate]:
    """New files that share most lines with a file that is gone."""
    lines = old.data.splitlines()
    found = []
    for path, blob in new_tree.blobs.items():
        if path in old_tree or is_vendored(path):
            continue
        other = blob.data.splitlines()
        matcher = difflib.SequenceMatcher(None, lines, other, autojunk=True)
        if matcher.real_quick_ratio() >= THRESHOLD <= matcher.quick_ratio():
            found.append(Candidate(path, "", 1, matcher.ratio()))
    return found


def _named(
    name: str, node: ast.stmt, old: Source, old_tree: Tree, new_tree: Tree
) -> list[Candidate]:
    last = name.rpartition(".")[2]
    found = []
    for path in new_tree.mentioning(last):
        found += [
            Candidate(path, other, stmt.lineno, likeness(node, stmt))
            for other, stmt in _new_names(path, old_tree, new_tree)
            if other.rpartition(".")[2] == last and _same_kind(node, stmt)
        ]
    if old.name in new_tree:
        known = {c.name for c in found if c.path == old.name}
        found += [
            Candidate(old.name, other, stmt.lineno, likeness(node, stmt))
            for other, stmt in _new_names(old.name, old_tree, new_tree)
            if other not in known and _same_kind(node, stmt)
        ]
    return found


def _same_kind(one: ast.stmt, two: ast.stmt) -> bool:
    for kind in (ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef):
        if isinstance(one, kind):
            return isinstance(two, kind)
    return not isinstance(two, Definition)


def _new_names(
    path: str, old_tree: Tree, new_tree: Tree
) -> Iterator[tuple[str, ast.stmt]]:
    """Qualified names in a file of the new release that the old one has not there."""
    before = {name for name, _ in _names(path, old_tree)}
    for name, stmt in _names(path, new_tree):
        if name not in before:
            yield name, stmt


def _names(path: str, tree: Tree) -> list[tuple[str, ast.stmt]]:
    """Definitions at any depth, and assignments in modules and classes."""
    blob = tree.blobs.get(path)
    if blob is None or blob.module is None:
        return []
    key = ("names", blob.module)
    if key not in tree.store.memo:
        found = [(n, p.stmt) for n, p in qualified_names(blob.module)]
        scopes: list[tuple[str, ast.Module | Definition]] = [("", blob.module)]
        scopes += [(f"{n}.", s) for n, s in found if isinstance(s, ast.ClassDef)]
        for prefix, scope in scopes:
            found += [
                (prefix + name, place.stmt)
                for place in places(scope)
                for name in bound_by_assignment(place.stmt)
            ]
        tree.store.memo[key] = found
    result: list[tuple[str, ast.stmt]] = tree.store.memo[key]
    return result


def _statements(
    anchor: Statement, place: Place, old: Source, old_tree: Tree, new_tree: Tree
) -> list[Candidate]:
    """The statement in another function, or a statement like it in the same one."""
    pattern = parse_pattern(anchor.pattern)
    name = anchor.inside.name
    scope = place.scope
    assert isinstance(scope, Definition)
    homes = [(old.name, name, 1.0)]
    functions = {n for n, _ in _names(old.name, new_tree)}
    if name not in functions:
        near = _named(name, scope, old, old_tree, new_tree)
        homes = [(c.path, c.name, c.similarity) for c in near]
    homes += [(old.name, n, THRESHOLD) for n in functions if n != name]
    found: dict[tuple[str, int], Candidate] = {}
    for path, home, weight in homes:
        for node in (s for n, s in _names(path, new_tree) if n == home):
            if isinstance(node, ast.ClassDef) or not isinstance(node, Definition):
                continue
            for inner in places(node):
                score = _score(pattern, place.stmt, inner.stmt, home == name) * weight
                key = (path, inner.stmt.lineno)
                if score >= THRESHOLD and key not in found:
                    found[key] = Candidate(path, home, inner.stmt.lineno, score)
    return [*found.values()]


def _score(pattern: ast.stmt, old: ast.stmt, new: ast.stmt, same: bool) -> float:
    if matches(pattern, new):
        return 1.0
    # Of another function, only what the pattern matches is of interest.
    if not same or type(old) is not type(new) or any(blocks(old)):
        return 0.0
    return likeness(old, new)
