# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Generated changes to files of a release, at places that the fork relies on.

The places are found by simple means that share nothing with the audit: names that the
overlay imports, what it calls, overrides and reads of them, and anchors of edits.
"""

import ast
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from vfork.edits import LoadedEditFile
from vfork.source import Definition, parse_quietly
from vfork.spec import Class, Function, Statement

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Target:
    """A definition of the release: its file, qualified name and node.

    `why` says how the fork relies on it: anchor, import, call, override.
    """

    path: str
    name: str
    node: Definition
    why: str


@dataclass(frozen=True)
class Mutant:
    """One change: the files that differ. `breaks`: the fork cannot work as it is."""

    kind: str
    target: Target
    files: Mapping[str, bytes]
    breaks: bool

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.target.path}::{self.target.name} ({self.target.why})"
        )


class Places:
    """What the fork relies on in a release."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        overlay: Mapping[str, bytes],
        edits: list[LoadedEditFile],
    ) -> None:
        self.files = files
        self.overlay = [parse_quietly(data) for data in overlay.values()]
        self.edits = edits
        self._trees: dict[str, ast.Module] = {}
        self.imported = {t.name: t for t in self._imported()}

    def tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = parse_quietly(self.files[path])
        return self._trees[path]

    def anchors(self) -> Iterator[Target]:
        for file in self.edits:
            for edit in file.file.edits:
                at = edit.at.inside if isinstance(edit.at, Statement) else edit.at
                if isinstance(at, Function | Class):
                    node = self._find(self.tree(file.target), at.name)
                    if node is not None:
                        yield Target(file.target, at.name, node, "anchor")

    def _find(self, tree: ast.Module, name: str) -> Definition | None:
        body: list[ast.stmt] = tree.body
        node: Definition | None = None
        for part in name.split("."):
            found = [s for s in body if isinstance(s, Definition) and s.name == part]
            if len(found) != 1:
                return None
            node = found[0]
            body = node.body
        return node

    def _imported(self) -> Iterator[Target]:
        for tree in self.overlay:
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    stem = node.module.replace(".", "/")
                    for path in (f"{stem}.py", f"{stem}/__init__.py"):
                        if path in self.files:
                            for alias in node.names:
                                yield from self._top(path, alias.name)

    def _top(self, path: str, name: str) -> Iterator[Target]:
        node = self._find(self.tree(path), name)
        if node is not None:
            yield Target(path, name, node, "import")

    def functions(self) -> list[Target]:
        return [t for t in self.imported.values() if isinstance(t.node, FunctionNode)]

    def classes(self) -> list[Target]:
        return [t for t in self.imported.values() if isinstance(t.node, ast.ClassDef)]

    def calls(self) -> Iterator[tuple[Target, ast.Call]]:
        """Calls of imported functions by their plain names."""
        for tree in self.overlay:
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    target = self.imported.get(node.func.id)
                    if target is not None and isinstance(target.node, FunctionNode):
                        spread = any(k.arg is None for k in node.keywords)
                        if not spread and not target.node.args.vararg:
                            yield (
                                Target(target.path, target.name, target.node, "call"),
                                node,
                            )

    def overrides(self) -> Iterator[Target]:
        """Methods of imported classes that our direct subclasses define, too."""
        for tree in self.overlay:
            for ours in ast.walk(tree):
                if not isinstance(ours, ast.ClassDef):
                    continue
                # What takes any arguments, no signature can break.
                own = {
                    s.name
                    for s in ours.body
                    if isinstance(s, FunctionNode) and not s.args.vararg
                }
                for base in ours.bases:
                    base = base.value if isinstance(base, ast.Subscript) else base
                    target = self.imported.get(ast.unparse(base))
                    if target is None or not isinstance(target.node, ast.ClassDef):
                        continue
                    for stmt in target.node.body:
                        if isinstance(stmt, FunctionNode) and stmt.name in own:
                            name = f"{target.name}.{stmt.name}"
                            yield Target(target.path, name, stmt, "override")

    def members(self) -> Iterator[tuple[Target, ast.Assign]]:
        """Members of imported enums that the overlay reads."""
        for tree in self.overlay:
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    target = self.imported.get(node.value.id)
                    if target is None or not isinstance(target.node, ast.ClassDef):
                        continue
                    if "Enum" not in "".join(map(ast.unparse, target.node.bases)):
                        continue
                    for stmt in target.node.body:
                        if isinstance(stmt, ast.Assign) and (
                            ast.unparse(stmt.targets[0]) == node.attr
                        ):
                            name = f"{target.name}.{node.attr}"
                            yield Target(target.path, name, target.node, "member"), stmt

    # Changes

    def lines(self, path: str) -> list[bytes]:
        return self.files[path].splitlines(keepends=True)

    def without(self, path: str, node: ast.stmt) -> bytes:
        lines = self.lines(path)
        lines[first_line(node) - 1 : node.end_lineno] = []
        return b"".join(lines)

    def text(self, path: str, node: ast.stmt) -> str:
        return b"".join(
            self.lines(path)[first_line(node) - 1 : node.end_lineno]
        ).decode()

    def replaced(self, path: str, node: ast.AST, text: str) -> bytes:
        """The file with another text in place of an expression or an argument."""
        lines = self.lines(path)
        start = (node.lineno, node.col_offset)  # type: ignore[attr-defined]
        stop = (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        before = b"".join(lines[: start[0] - 1]) + lines[start[0] - 1][: start[1]]
        after = lines[stop[0] - 1][stop[1] :] + b"".join(lines[stop[0] :])
        return before + text.encode() + after


def first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def mutants(places: Places, kind: str) -> list[Mutant]:
    """All changes of a kind that apply, each once, in an order of their own."""
    make = KINDS[kind]
    found = {str(mutant): mutant for mutant in make(places)}
    ordered = [found[key] for key in sorted(found)]
    random.Random(f"1 {kind}").shuffle(ordered)
    return ordered


def _rename(places: Places) -> Iterator[Mutant]:
    anchors = [t for t in places.anchors() if isinstance(t.node, FunctionNode)]
    for t in (*places.functions(), *anchors):
        # As a real rename would, in all of the file.
        last = t.name.rpartition(".")[2]
        if last.startswith("__"):
            continue
        data = places.files[t.path].replace(
            f"def {last}(".encode(), f"def {last}_impl(".encode()
        )
        yield Mutant("rename", t, {t.path: data}, breaks=True)


def _move(places: Places) -> Iterator[Mutant]:
    anchors = [t for t in places.anchors() if isinstance(t.node, ast.ClassDef)]
    for t in (*places.classes(), *anchors):
        if "." not in t.name:
            files = {
                t.path: places.without(t.path, t.node),
                "vllm/moved_here.py": places.text(t.path, t.node).encode(),
            }
            yield Mutant("move", t, files, breaks=True)


def _add_required(places: Places) -> Iterator[Mutant]:
    targets = [t for t, _ in places.calls()] + [*places.overrides()]
    for t in (*targets, *places.anchors()):
        if isinstance(t.node, FunctionNode):
            changed = _with_parameter(places, t)
            if changed is not None:
                yield Mutant("add-required", t, {t.path: changed}, breaks=True)


def _with_parameter(places: Places, target: Target) -> bytes | None:
    """The first parameter that is not `self` gets a new one in front."""
    assert isinstance(target.node, FunctionNode)
    arguments = target.node.args.args
    method = bool(arguments) and arguments[0].arg in ("self", "cls")
    rest = arguments[1:] if method else arguments
    if target.node.args.posonlyargs or not rest:
        return None
    old = ast.unparse(rest[0])
    return places.replaced(target.path, rest[0], f"added_first, {old}")


def _change_default(places: Places) -> Iterator[Mutant]:
    targets = [*places.functions(), *places.overrides(), *places.anchors()]
    for t in targets:
        if isinstance(t.node, FunctionNode):
            defaults = [*t.node.args.defaults, *t.node.args.kw_defaults]
            for default in (d for d in defaults if d is not None):
                data = places.replaced(t.path, default, "OTHER_DEFAULT")
                yield Mutant("change-default", t, {t.path: data}, breaks=False)
                break


def _drop_member(places: Places) -> Iterator[Mutant]:
    for target, stmt in places.members():
        data = places.without(target.path, stmt)
        yield Mutant("drop-member", target, {target.path: data}, breaks=True)


def _reorder(places: Places) -> Iterator[Mutant]:
    """Two neighbouring statements of a body change places."""
    anchors = [t for t in places.anchors() if isinstance(t.node, FunctionNode)]
    for t in (*anchors, *places.functions()):
        body = t.node.body[1:]
        for one, two in zip(body, body[1:], strict=False):
            if ast.dump(one) == ast.dump(two) or isinstance(two, ast.Return):
                continue
            lines = places.lines(t.path)
            first = lines[one.lineno - 1 : one.end_lineno]
            between = lines[one.end_lineno : two.lineno - 1]
            second = lines[two.lineno - 1 : two.end_lineno]
            lines[one.lineno - 1 : two.end_lineno] = second + between + first
            yield Mutant("reorder", t, {t.path: b"".join(lines)}, breaks=False)
            break


def _wrap(places: Places) -> Iterator[Mutant]:
    """A definition, with its decorators, becomes conditional."""
    for t in (*places.imported.values(), *places.anchors()):
        start, stop = first_line(t.node), t.node.end_lineno
        lines = places.lines(t.path)
        text = places.text(t.path, t.node)
        column = " " * t.node.col_offset
        inner = textwrap.indent(text, "    ")
        wrapped = f"{column}if SOME_FEATURE:\n{inner}"
        lines[start - 1 : stop] = [wrapped.encode()]
        yield Mutant("wrap", t, {t.path: b"".join(lines)}, breaks=False)


def _called_signature(places: Places) -> Iterator[Mutant]:
    """A parameter that a call of ours gives by name is renamed, or all but the first
    are taken away from a call that gives more."""
    for target, call in places.calls():
        assert isinstance(target.node, FunctionNode)
        arguments = target.node.args
        named = {k.arg for k in call.keywords}
        for p in (*arguments.args, *arguments.kwonlyargs):
            if p.arg in named:
                text = ast.unparse(p).replace(p.arg, f"{p.arg}_value", 1)
                data = places.replaced(target.path, p, text)
                yield Mutant(
                    "called-signature", target, {target.path: data}, breaks=True
                )
                break
        else:
            if call.args and arguments.args and not arguments.posonlyargs:
                data = places.replaced(
                    target.path,
                    arguments.args[0],
                    f"*, {ast.unparse(arguments.args[0])}",
                )
                if not arguments.kwonlyargs and not arguments.vararg:
                    yield Mutant(
                        "called-signature", target, {target.path: data}, breaks=True
                    )


KINDS: dict[str, Callable[[Places], Iterator[Mutant]]] = {
    "rename": _rename,
    "move": _move,
    "add-required": _add_required,
    "change-default": _change_default,
    "drop-member": _drop_member,
    "reorder": _reorder,
    "wrap": _wrap,
    "called-signature": _called_signature,
}
