# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Who calls the functions that edits hook into, and who goes past the hooks."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from vfork.apply import FilePlan
from vfork.overlay import PACKAGE
from vfork.rebase.audit import NOTE, REVIEW, Finding
from vfork.rebase.side import Side
from vfork.rebase.symbols import CLASS, FUNCTION, Symbol, Symbols, absolute
from vfork.rebase.tree import module_name
from vfork.source import Definition
from vfork.spec import Edit, Function, Statement

# A method's calls are found by its name alone, which says little if many have it.
_RARE = 3
# What a hooked function calls is followed where so few files have the name.
_FEW = 12

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Use:
    """A place that reads a name: path, the function around, line, how it is called.

    `shape` is empty where the name is not called.
    """

    path: str
    function: str
    line: int
    shape: str

    @property
    def site(self) -> str:
        return f"{self.path}::{self.function or 'module'}"


@dataclass(frozen=True)
class Watched:
    """A function that an edit hooks into."""

    edit: Edit
    path: str
    name: str

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_method(self) -> bool:
        return "." in self.name


class Reach:
    """The uses of names in one release."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.tree = side.tree
        self.symbols = Symbols(side.tree)

    def watched(self) -> Iterator[Watched]:
        """The functions that the edits of this release stand in."""
        for target, made in self.side.plans.items():
            for planned in made.edits if isinstance(made, FilePlan) else ():
                at = planned.edit.at
                at = at.inside if isinstance(at, Statement) else at
                if isinstance(at, Function):
                    yield Watched(planned.edit, target, at.name)

    def is_rare(self, what: Watched) -> bool:
        """Whether calls of a name are likely calls of the watched function."""
        if not what.is_method:
            return True
        return sum(1 for _ in self.tree.defining(what.last)) <= _RARE

    def uses(self, what: Watched) -> list[Use]:
        """Where a watched function is read, its own body left out."""
        found = []
        for path in self.tree.mentioning(what.last):
            if not self._may_use(path, what):
                continue
            for use in self._names(path).get(what.last, ()):
                own = path == what.path and use.function == what.name
                if not own and self._means(path, use, what):
                    found.append(use)
        return found

    def _may_use(self, path: str, what: Watched) -> bool:
        """Whether a file can import a function's module, by its words alone."""
        if what.is_method or path == what.path:
            return True
        folder, _, name = what.path.rpartition("/")
        if path.rpartition("/")[0] == folder:
            return True
        words = self.tree.blobs[path].words
        parent = folder.rpartition("/")[2]
        return parent.encode() in words or self._reexported(path, what)

    def _reexported(self, path: str, what: Watched) -> bool:
        pattern = rb"\bimport\s+(?:\([^)]*|[^\n(]*)\b%s\b" % what.last.encode()
        if not re.search(pattern, self.tree.blobs[path].data):
            return False
        found = self.symbols.lookup(module_name(path), what.last)
        return found is not None and found.module == module_name(what.path)

    def _means(self, path: str, use: Use, what: Watched) -> bool:
        dotted = use.shape.startswith(".")
        if what.is_method:
            return dotted
        if path == what.path:
            return not dotted
        home = module_name(what.path)
        imports = self._imports(path)
        if dotted:
            return home in imports
        return f"{home}.{what.last}" in imports

    def _imports(self, path: str) -> set[str]:
        """Modules and symbols that a file imports, at any depth."""
        found = set()
        for node in self._import_statements(path):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
                continue
            source = absolute(node, module_name(path), self.tree)
            for alias in node.names:
                if source.partition(".")[0] == PACKAGE:
                    found.add(str(self.symbols.imported(source, alias.name)))
        return found

    def _import_statements(self, path: str) -> list[ast.Import | ast.ImportFrom]:
        module = self.tree.blobs[path].module
        memo = self.tree.store.memo
        key = ("imports", module)
        if key not in memo:
            nodes = ast.walk(module) if module is not None else ()
            memo[key] = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        result: list[ast.Import | ast.ImportFrom] = memo[key]
        return result

    def _names(self, path: str) -> dict[str, list[Use]]:
        """All names that a file reads."""
        module = self.tree.blobs[path].module
        memo = self.tree.store.memo
        key = ("names-read", module, path)
        if key not in memo:
            memo[key] = _names_read(path, module) if module is not None else {}
        result: dict[str, list[Use]] = memo[key]
        return result

    def definitions(self, name: str) -> dict[str, Symbol]:
        """Functions and methods of a name in the tree: site -> class or function."""
        found: dict[str, Symbol] = {}
        for path in self.tree.defining(name):
            module = module_name(path)
            symbol = self.symbols.lookup(module, name)
            if symbol is not None and (symbol.kind, symbol.module) == (
                FUNCTION,
                module,
            ):
                found[f"{path}::{name}"] = symbol
            for other, places in self.symbols.bindings(module).items():
                node = places[0].stmt
                if isinstance(node, ast.ClassDef) and _defines(node, name):
                    cls = Symbol(CLASS, module, other, places[0])
                    found[f"{path}::{other}.{name}"] = cls
        return found

    def functions(self, name: str) -> set[str]:
        """Sites of functions of a name, methods left out."""
        found = self.definitions(name)
        return {site for site, s in found.items() if s.kind == FUNCTION}

    def overrides(self, what: Watched) -> set[str]:
        """Sites of classes below a watched method's class that define it anew."""
        outer = self.symbols.lookup(module_name(what.path), what.name.partition(".")[0])
        return {
            site
            for site, cls in self.definitions(what.last).items()
            if cls.kind == CLASS
            and outer is not None
            and cls != outer
            and outer in self.symbols.hierarchy(cls)[0]
        }

    def callees(self, what: Watched) -> dict[str, set[str]]:
        """What a watched function calls of the tree -> the sites that use it, for
        functions of its own module and methods of its class."""
        node = self._node(what)
        if node is None:
            return {}
        found = {}
        for name in _called_names(node):
            inner = Watched(what.edit, what.path, name)
            if "." in name:
                inner = Watched(
                    what.edit, what.path, f"{what.name.rpartition('.')[0]}{name}"
                )
            if self._node(inner) is not None and self._is_traceable(inner):
                found[inner.name] = {use.site for use in self.uses(inner)}
        return found

    def _is_traceable(self, what: Watched) -> bool:
        files = sum(1 for _ in self.tree.mentioning(what.last))
        return files <= _FEW and self.is_rare(what)

    def _node(self, what: Watched) -> FunctionNode | None:
        first, _, rest = what.name.partition(".")
        symbol = self.symbols.lookup(module_name(what.path), first)
        if symbol is None or symbol.module != module_name(what.path):
            return None
        node: ast.stmt | None = symbol.node
        if rest and symbol.kind == CLASS:
            member = self.symbols.own_members(symbol).get(rest)
            node = member.node if member else None
        return node if isinstance(node, FunctionNode) else None


def compare_reach(old: Side, new: Side) -> list[Finding]:
    """What changed in who reaches the functions that edits hook into."""
    before, after = Reach(old), Reach(new)
    known = {(w.path, w.name): w for w in before.watched()}
    found: list[Finding] = []
    seen = set()
    for what in after.watched():
        key = (what.path, what.name)
        if key in known and key not in seen:
            seen.add(key)
            found += _callers(before, after, what)
            found += _bypasses(before, after, what)
    return found


def _callers(before: Reach, after: Reach, what: Watched) -> Iterator[Finding]:
    if what.last.startswith("__"):
        return
    if not (before.is_rare(what) and after.is_rare(what)):
        return
    old, new = before.uses(what), after.uses(what)
    sites = [{use.site for use in uses} for uses in (old, new)]
    target = f"{module_name(what.path)}.{what.name}"
    gone = sorted(s for s in sites[0] - sites[1] if _still_there(after, s))
    if gone:
        yield Finding(
            "VF638",
            REVIEW,
            target,
            f"no longer called from {_listed(gone)}",
            (what.edit.id,),
            hint="what these call instead may go past the edit",
        )
    come = sorted(sites[1] - sites[0])
    if come:
        yield Finding(
            "VF639", NOTE, target, f"called also from {_listed(come)}", (what.edit.id,)
        )
    shapes = [{use.shape for use in uses if "(" in use.shape} for uses in (old, new)]
    fresh = sorted(shapes[1] - shapes[0])
    if fresh:
        yield Finding(
            "VF639",
            REVIEW,
            target,
            "it is called in a new way",
            (what.edit.id,),
            old="; ".join(sorted(shapes[0] - shapes[1])),
            new="; ".join(fresh),
            hint="see whether what the edit inserts takes these arguments",
        )


def _still_there(after: Reach, site: str) -> bool:
    path = site.partition("::")[0]
    return path in after.tree


def _bypasses(before: Reach, after: Reach, what: Watched) -> Iterator[Finding]:
    target = f"{module_name(what.path)}.{what.name}"
    hint = "see whether the edit is needed there, too"
    if what.is_method:
        come = sorted(after.overrides(what) - before.overrides(what))
        if come:
            yield Finding(
                "VF637",
                REVIEW,
                target,
                f"new overrides of it: {_listed(come)}",
                (what.edit.id,),
                hint=hint,
            )
    elif len(before.definitions(what.last)) <= _RARE:
        old, new = (r.functions(what.last) for r in (before, after))
        come = sorted(new - old)
        if come:
            yield Finding(
                "VF637",
                REVIEW,
                target,
                f"new functions of that name: {_listed(come)}",
                (what.edit.id,),
                hint=hint,
            )
    own = f"{what.path}::{what.name}"
    now = after.callees(what)
    for name, sites in before.callees(what).items():
        come = sorted(now.get(name, set()) - sites)
        if sites == {own} and come:
            yield Finding(
                "VF637",
                REVIEW,
                target,
                f"{name} was called from it only, now also from {_listed(come)}",
                (what.edit.id,),
                hint=hint,
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _defines(node: ast.ClassDef, name: str) -> bool:
    return any(isinstance(s, FunctionNode) and s.name == name for s in node.body)


def _called_names(node: FunctionNode) -> set[str]:
    """Names called in a function; methods of `self` or `cls` with a dot before."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            func = inner.func
            if isinstance(func, ast.Name):
                found.add(func.id)
            elif isinstance(func, ast.Attribute) and _is_own(func.value):
                found.add(f".{func.attr}")
    return found


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _names_read(path: str, module: ast.Module) -> dict[str, list[Use]]:
    found: dict[str, list[Use]] = {}

    def visit(node: ast.AST, function: str, call: ast.Call | None) -> None:
        if isinstance(node, Definition):
            function = f"{function}.{node.name}" if function else node.name
        elif isinstance(node, ast.Call):
            visit(node.func, function, node)
            for part in (*node.args, *node.keywords):
                visit(part, function, None)
            return
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if isinstance(node.ctx, ast.Load):
                dot = "." if isinstance(node, ast.Attribute) else ""
                shape = dot + (_call_shape(call) if call else "")
                found.setdefault(name, []).append(
                    Use(path, function, node.lineno, shape)
                )
        for child in ast.iter_child_nodes(node):
            visit(child, function, None)

    visit(module, "", None)
    return found


def _call_shape(call: ast.Call) -> str:
    """Number of positional arguments and the names of keywords: `(2, model=)`."""
    parts = [str(len(call.args))] if call.args else []
    parts += sorted(f"{k.arg}=" if k.arg else "**" for k in call.keywords)
    return f"({', '.join(parts)})"
