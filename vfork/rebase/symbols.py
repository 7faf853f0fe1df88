# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What names of a tree mean, read from the sources alone: nothing is imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from vfork.overlay import PACKAGE
from vfork.rebase.tree import Tree
from vfork.source import Definition, Place, parse_quietly, places

Kind = str
MODULE, CLASS, FUNCTION, VALUE = "module", "class", "function", "value"
EXTERNAL, OPAQUE = "external", "opaque"

_ENUMS = frozenset({"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"})
# Bases outside of the tree that bring no attributes of interest.
_PLAIN_BASES = _ENUMS | {"object", "ABC", "Generic", "Protocol", "NamedTuple"}
_PLAIN_BASES |= {"TypedDict", "str", "int"}
_DEPTH = 30


@dataclass(frozen=True)
class Symbol:
    """A module, class, function or value, by where it is defined.

    `external`: defined outside of the tree. `opaque`: made when the program runs.
    """

    kind: Kind
    module: str
    name: str
    place: Place | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def node(self) -> ast.stmt | None:
        return self.place.stmt if self.place else None


@dataclass(frozen=True)
class Member:
    """What a class has under a name, and the class of the hierarchy that defines it.

    `kind` is method, property, classmethod, staticmethod, class, field (in the class
    body) or attribute (assigned to `self` in `method`).
    """

    name: str
    kind: str
    owner: Symbol
    node: ast.stmt
    method: ast.FunctionDef | ast.AsyncFunctionDef | None = None

    @property
    def is_callable(self) -> bool:
        return self.kind in ("method", "classmethod", "staticmethod")


class Symbols:
    """Looks up names in a tree; answers are kept."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._lookups: dict[tuple[str, str], Symbol | None] = {}
        self._hierarchies: dict[Symbol, tuple[tuple[Symbol, ...], bool]] = {}
        self._local_bases: dict[Symbol, list[Symbol | None]] = {}
        self._found: dict[tuple[Symbol, str], Member | None] = {}

    def is_ours(self, symbol: Symbol) -> bool:
        """Whether a symbol is defined in the overlay."""
        return self.path(symbol) in self.tree.overlay

    def path(self, symbol: Symbol) -> str | None:
        return self.tree.module_path(symbol.module)

    def body(self, module: str) -> ast.Module | None:
        path = self.tree.module_path(module)
        return self.tree.blobs[path].module if path else None

    def module(self, name: str) -> Symbol | None:
        """A module or a package, with or without an `__init__.py`."""
        if self.tree.module_path(name) or name in self.tree.packages:
            return Symbol(MODULE, name, "")
        return None

    def bindings(self, module: str) -> dict[str, list[Place]]:
        """The statements that bind each name of a module, `*` for star imports."""
        body = self.body(module)
        if body is None:
            return {}
        memo = self.tree.store.memo
        key = ("bindings", body)
        if key not in memo:
            found: dict[str, list[Place]] = {}
            for place in places(body):
                for name in bound_by(place.stmt):
                    found.setdefault(name, []).append(place)
            memo[key] = found
        result: dict[str, list[Place]] = memo[key]
        return result

    def lookup(self, module: str, name: str, depth: int = 0) -> Symbol | None:
        """What a module's name means, imports followed; None if it has no such name."""
        key = (module, name)
        if key not in self._lookups:
            if depth > _DEPTH:
                return None
            self._lookups[key] = None
            self._lookups[key] = self._lookup(module, name, depth)
        return self._lookups[key]

    def _lookup(self, module: str, name: str, depth: int) -> Symbol | None:
        bindings = self.bindings(module)
        for place in _preferred(bindings.get(name, [])):
            found = self._bound(module, name, place, depth)
            if found is not None:
                return found
        for place in bindings.get("*", []):
            assert isinstance(place.stmt, ast.ImportFrom)
            source = absolute(place.stmt, module, self.tree)
            found = self.lookup(source, name, depth + 1) if source else None
            if found is not None and not name.startswith("_"):
                return found
        inner = self.module(f"{module}.{name}") if module else None
        if inner is not None:
            return inner
        compiled = f"{module}.{name}" in self.tree.compiled
        if compiled or "__getattr__" in bindings:
            return Symbol(OPAQUE, module, name)
        return None

    def _bound(self, module: str, name: str, place: Place, depth: int) -> Symbol | None:
        stmt = place.stmt
        if isinstance(stmt, ast.ClassDef):
            return Symbol(CLASS, module, name, place)
        if isinstance(stmt, Definition):
            return Symbol(FUNCTION, module, name, place)
        if isinstance(stmt, ast.Import):
            return self._imported_module(stmt, name)
        if isinstance(stmt, ast.ImportFrom):
            source = absolute(stmt, module, self.tree)
            original = next(a.name for a in stmt.names if (a.asname or a.name) == name)
            return self.imported(source, original, depth + 1)
        value = getattr(stmt, "value", None)
        if isinstance(value, ast.Name | ast.Attribute) and depth < _DEPTH:
            alias = self.resolve(module, value, depth + 1)
            if alias is not None and alias.kind in (CLASS, FUNCTION, MODULE):
                return alias
        return Symbol(VALUE, module, name, place)

    def _imported_module(self, stmt: ast.Import, name: str) -> Symbol | None:
        for alias in stmt.names:
            if alias.asname == name:
                return self.module(alias.name) or Symbol(EXTERNAL, alias.name, "")
            if alias.asname is None and alias.name.split(".")[0] == name:
                return self.module(name) or Symbol(EXTERNAL, name, "")
        return None

    def imported(self, source: str, name: str, depth: int = 0) -> Symbol | None:
        """What `from source import name` brings; None if it fails."""
        if self.module(source) is None:
            if source in self.tree.compiled:
                return Symbol(OPAQUE, source, name)
            inside = source.split(".")[0] == PACKAGE
            return None if inside else Symbol(EXTERNAL, source, name)
        return self.lookup(source, name, depth)

    def resolve(self, module: str, expr: ast.expr, depth: int = 0) -> Symbol | None:
        """What a dotted expression means at the top of a module."""
        if isinstance(expr, ast.Name):
            return self.lookup(module, expr.id, depth)
        if isinstance(expr, ast.Attribute):
            outer = self.resolve(module, expr.value, depth)
            if outer is None:
                return None
            if outer.kind == MODULE:
                return self.lookup(outer.module, expr.attr, depth)
            if outer.kind == EXTERNAL:
                return Symbol(EXTERNAL, str(outer), expr.attr)
            if outer.kind == CLASS:
                return self.inner_class(outer, expr.attr)
        return None

    def inner_class(self, outer: Symbol, name: str) -> Symbol | None:
        assert isinstance(outer.node, ast.ClassDef)
        for place in places(outer.node):
            if isinstance(place.stmt, ast.ClassDef) and place.stmt.name == name:
                return Symbol(CLASS, outer.module, f"{outer.name}.{name}", place)
        return None

    # Classes

    def bases(self, cls: Symbol) -> Iterator[Symbol | None]:
        """The direct bases; None for those that cannot be told."""
        assert isinstance(cls.node, ast.ClassDef)
        if cls in self._local_bases:
            yield from self._local_bases[cls]
            return
        for base in cls.node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            yield self.resolve(cls.module, base)

    def local_class(
        self, module: str, node: ast.ClassDef, bases: list[Symbol | None]
    ) -> Symbol:
        """A class in a function, whose bases the names in the function tell."""
        place = Place(node, [node], 0, node)
        cls = Symbol(CLASS, module, f"{node.name}@{node.lineno}", place)
        self._local_bases[cls] = bases
        return cls

    def hierarchy(self, cls: Symbol) -> tuple[tuple[Symbol, ...], bool]:
        """The class and its bases in the tree, nearest first, and whether these are
        all that matter: not if a base from elsewhere may add attributes."""
        if cls not in self._hierarchies:
            self._hierarchies[cls] = ((cls,), True)
            order: list[Symbol] = [cls]
            complete = True
            for base in self.bases(cls):
                if base is None or base.kind != CLASS:
                    plain = base is not None and base.name in _PLAIN_BASES
                    complete = complete and plain
                    continue
                inner, whole = self.hierarchy(base)
                order = [s for s in order if s not in inner] + [*inner]
                complete = complete and whole
            self._hierarchies[cls] = (tuple(order), complete)
        return self._hierarchies[cls]

    def is_enum(self, cls: Symbol) -> bool:
        for part in self.hierarchy(cls)[0]:
            for base in self.bases(part):
                if base is not None and base.name in _ENUMS:
                    return True
        return False

    def member(self, cls: Symbol, name: str) -> Member | None:
        """A member by name, inherited ones included."""
        key = (cls, name)
        if key not in self._found:
            self._found[key] = self.member_after(cls, name, 0)
        return self._found[key]

    def member_after(self, cls: Symbol, name: str, skip: int) -> Member | None:
        """As `member`, without the first `skip` classes of the hierarchy."""
        for part in self.hierarchy(cls)[0][skip:]:
            found = self.own_members(part).get(name)
            if found is not None:
                return found
        return None

    def own_members(self, cls: Symbol) -> dict[str, Member]:
        node = cls.node
        assert isinstance(node, ast.ClassDef)
        memo = self.tree.store.memo
        key = ("members", node, cls)
        if key not in memo:
            memo[key] = _own_members(cls, node)
        result: dict[str, Member] = memo[key]
        return result


def bound_by(stmt: ast.stmt) -> list[str]:
    """Names that a statement of a module or class binds; `*` for a star import."""
    if isinstance(stmt, Definition):
        return [stmt.name]
    if isinstance(stmt, ast.Import):
        return [a.asname or a.name.split(".")[0] for a in stmt.names]
    if isinstance(stmt, ast.ImportFrom):
        return [a.asname or a.name for a in stmt.names]
    if isinstance(stmt, ast.AnnAssign):
        return [stmt.target.id] if isinstance(stmt.target, ast.Name) else []
    targets: list[ast.expr] = []
    if isinstance(stmt, ast.Assign):
        targets = stmt.targets
    elif isinstance(stmt, ast.For):
        targets = [stmt.target]
    elif isinstance(stmt, ast.With):
        targets = [i.optional_vars for i in stmt.items if i.optional_vars]
    return [
        node.id
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def absolute(stmt: ast.ImportFrom, module: str, tree: Tree) -> str:
    """The module that an import names, relative ones resolved."""
    if not stmt.level:
        return stmt.module or ""
    path = tree.module_path(module) or ""
    parts = module.split(".")
    up = stmt.level - path.endswith("/__init__.py")
    kept = parts[: len(parts) - up] if up else parts
    return ".".join([*kept, *([stmt.module] if stmt.module else [])])


def _preferred(found: list[Place]) -> list[Place]:
    """Bindings, the likeliest meaning first: definitions, imports, assignments."""

    def rank(place: Place) -> int:
        if isinstance(place.stmt, Definition):
            return 1 if decorated(place.stmt, "overload") else 0
        if isinstance(place.stmt, ast.Import | ast.ImportFrom):
            return 2
        return 3 if isinstance(place.stmt, ast.AnnAssign) else 4

    return sorted(found, key=rank)


def decorated(node: ast.stmt, *names: str) -> bool:
    """Whether a definition has a decorator with one of these last names."""
    for decorator in getattr(node, "decorator_list", ()):
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        last = target.attr if isinstance(target, ast.Attribute) else None
        if last in names or isinstance(target, ast.Name) and target.id in names:
            return True
    return False


def _own_members(cls: Symbol, node: ast.ClassDef) -> dict[str, Member]:
    found: dict[str, Member] = {}
    methods = []
    for place in places(node):
        stmt = place.stmt
        for name in bound_by(stmt):
            if isinstance(stmt, ast.FunctionDef | ast.AsyncFunctionDef):
                methods.append(stmt)
                if name in found and found[name].kind == "property":
                    continue
                found[name] = Member(name, _method_kind(stmt), cls, stmt)
            elif isinstance(stmt, ast.ClassDef):
                found[name] = Member(name, "class", cls, stmt)
            elif isinstance(stmt, ast.Assign | ast.AnnAssign):
                found.setdefault(name, Member(name, "field", cls, stmt))
    for method in methods:
        for stmt, name in _self_attributes(method):
            known = found.get(name)
            if known is None or _annotates(stmt) and known.kind == "attribute":
                found[name] = Member(name, "attribute", cls, stmt, method)
    return found


def _annotates(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.AnnAssign)


def _method_kind(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if decorated(node, "property", "cached_property", "setter"):
        return "property"
    for kind in ("classmethod", "staticmethod"):
        if decorated(node, kind):
            return kind
    return "method"


def _self_attributes(
    method: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[ast.stmt, str]]:
    arguments = [*method.args.posonlyargs, *method.args.args]
    if not arguments or decorated(method, "staticmethod", "classmethod"):
        return
    own = arguments[0].arg
    for node in ast.walk(method):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == own
                ):
                    assert isinstance(node, ast.stmt)
                    yield node, part.attr


def parse_annotation(expr: ast.expr) -> ast.expr | None:
    """An annotation, a quoted one parsed."""
    if isinstance(expr, ast.Constant) and isinstance(expr.value, str):
        try:
            body = parse_quietly(expr.value.strip()).body
        except (SyntaxError, ValueError):
            return None
        if len(body) == 1 and isinstance(body[0], ast.Expr):
            return body[0].value
        return None
    return expr
