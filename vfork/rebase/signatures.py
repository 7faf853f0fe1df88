# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Parameters of functions and constructors: binding a call, comparing an override."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vfork.rebase.symbols import CLASS, Symbol, Symbols, decorated, parse_annotation

Function = ast.FunctionDef | ast.AsyncFunctionDef

POSITIONAL, EITHER, KEYWORD = "positional-only", "either", "keyword-only"
_DATACLASSES = ("dataclass", "config", "define", "dataclass_transform")
_RECORDS = frozenset({"NamedTuple", "Struct", "BaseModel", "TypedDict"})


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: str
    required: bool


@dataclass(frozen=True)
class Signature:
    """What can be passed, `self` left out. `text` is for people and comparing."""

    parameters: tuple[Parameter, ...]
    var_positional: bool
    var_keyword: bool
    text: str

    def positional(self) -> list[Parameter]:
        return [p for p in self.parameters if p.kind != KEYWORD]

    def by_name(self) -> dict[str, Parameter]:
        return {p.name: p for p in self.parameters if p.kind != POSITIONAL}


def of_function(node: Function, *, bound: bool) -> Signature:
    """The signature of a function; `bound` leaves its first parameter out."""
    arguments = node.args
    given = [(p, POSITIONAL) for p in arguments.posonlyargs]
    given += [(p, EITHER) for p in arguments.args]
    optional = len(arguments.defaults)
    parameters = [
        Parameter(p.arg, kind, index < len(given) - optional)
        for index, (p, kind) in enumerate(given)
    ]
    parameters = parameters[1:] if bound else parameters
    parameters += [
        Parameter(p.arg, KEYWORD, default is None)
        for p, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return Signature(
        tuple(parameters),
        arguments.vararg is not None,
        arguments.kwarg is not None,
        function_text(node),
    )


def function_text(node: Function) -> str:
    """The head of a function as one line: decorators, parameters, result."""
    marks = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{marks}{keyword} {node.name}({ast.unparse(node.args)}){result}"


def of_class(symbols: Symbols, cls: Symbol) -> Signature | None:
    """The signature of a class's constructor, None if it cannot be told."""
    order, complete = symbols.hierarchy(cls)
    for part in order:
        own = symbols.own_members(part)
        init = own.get("__init__")
        if init is not None and isinstance(init.node, Function):
            return of_function(init.node, bound=True)
        if "__new__" in own:
            return None
        if _has_fields(symbols, part):
            return _of_fields(symbols, order[order.index(part) :])
    if complete and not symbols.is_enum(cls):
        return Signature((), False, False, f"{cls.name}()")
    return None


def _has_fields(symbols: Symbols, cls: Symbol) -> bool:
    assert isinstance(cls.node, ast.ClassDef)
    if decorated(cls.node, *_DATACLASSES):
        return True
    return any(b is not None and b.name in _RECORDS for b in symbols.bases(cls))


def _of_fields(symbols: Symbols, order: Sequence[Symbol]) -> Signature:
    """The constructor that a dataclass or a record makes of its fields."""
    fields: dict[str, tuple[Parameter, str]] = {}
    for part in reversed(order):
        assert isinstance(part.node, ast.ClassDef)
        keyword_only = _flag(part.node, "kw_only")
        for stmt in part.node.body:
            if not isinstance(stmt, ast.AnnAssign) or not isinstance(
                stmt.target, ast.Name
            ):
                continue
            annotation = ast.unparse(stmt.annotation)
            if annotation == "KW_ONLY" or annotation.endswith(".KW_ONLY"):
                keyword_only = True
                continue
            if "ClassVar" in annotation or _flag(stmt.value, "init") is False:
                continue
            kind = KEYWORD if keyword_only else EITHER
            required = stmt.value is None or not _has_default(stmt.value)
            name = stmt.target.id
            parameter = Parameter(name, kind, required)
            fields[name] = (parameter, ast.unparse(stmt))
    parameters = [p for p, _ in fields.values()]
    # Keyword-only fields come last, as in the constructor.
    parameters.sort(key=lambda p: p.kind == KEYWORD)
    text = ", ".join(text for _, text in fields.values())
    return Signature(tuple(parameters), False, False, f"{order[0].name}({text})")


def _flag(node: ast.AST | None, name: str) -> bool | None:
    """A keyword with a constant, of a call or of a class's decorators and bases."""
    keywords: list[ast.keyword] = []
    if isinstance(node, ast.ClassDef):
        keywords = list(node.keywords)
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call):
                keywords += decorator.keywords
    elif isinstance(node, ast.Call):
        keywords = node.keywords
    for keyword in keywords:
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            return bool(keyword.value.value)
    return None


def _has_default(value: ast.expr) -> bool:
    """Whether a field's value gives it a default: `field(init=True)` does not."""
    if not isinstance(value, ast.Call):
        return True
    last = ast.unparse(value.func).rpartition(".")[2]
    if last not in ("field", "Field"):
        return True
    named = {keyword.arg for keyword in value.keywords}
    first = value.args and not (
        isinstance(value.args[0], ast.Constant) and value.args[0].value is Ellipsis
    )
    return bool(first or named & {"default", "default_factory"})


def bind(signature: Signature, call: ast.Call) -> str:
    """Why a call does not fit a signature; empty if it does or cannot be told."""
    spread = any(isinstance(a, ast.Starred) for a in call.args)
    keywords = [k.arg for k in call.keywords if k.arg is not None]
    unpacked = len(keywords) < len(call.keywords)
    positional = signature.positional()
    count = sum(not isinstance(a, ast.Starred) for a in call.args)
    if count > len(positional) and not signature.var_positional:
        return f"it takes {len(positional)} positional arguments, {count} are given"
    names = signature.by_name()
    taken = {p.name for p in positional[:count]}
    for name in keywords:
        if name not in names and not signature.var_keyword:
            return f"it has no parameter {name!r}"
        if name in taken and name in names and not spread:
            return f"parameter {name!r} is given twice"
    missing = [
        p.name
        for p in signature.parameters
        if p.required and p.name not in taken and p.name not in keywords
    ]
    if missing and not spread and not unpacked:
        return f"required parameters are not given: {', '.join(missing)}"
    return ""


def override_problem(base: Signature, ours: Signature) -> str:
    """Why our method cannot stand in for the base's; empty if it can."""
    problems = [*_order_problems(base, ours), *_name_problems(base, ours)]
    return "; ".join(dict.fromkeys(problems))


def _order_problems(base: Signature, ours: Signature) -> Iterator[str]:
    """What goes wrong if the method is called with positional arguments."""
    theirs, mine = base.positional(), ours.positional()
    if base.var_positional and not ours.var_positional:
        yield "ours does not take *arguments"
    if not ours.var_positional:
        accepted = ours.by_name()
        for parameter in theirs[len(mine) :]:
            if not ours.var_keyword and parameter.name not in accepted:
                yield f"ours does not take {parameter.name}"
    for one, two in zip(theirs, mine, strict=False):
        if one.kind == EITHER and one.name != two.name:
            yield f"ours has {two.name} where the base has {one.name}"


def _name_problems(base: Signature, ours: Signature) -> Iterator[str]:
    """What goes wrong if the method is called with keywords, or without some."""
    accepted = ours.by_name()
    if base.var_keyword and not ours.var_keyword:
        yield "ours does not take **keywords"
    for parameter in base.parameters:
        lost = parameter.name not in accepted and not ours.var_keyword
        if parameter.kind == KEYWORD and lost:
            yield f"ours does not take {parameter.name}"
        mine = accepted.get(parameter.name)
        if mine is not None and mine.required and not parameter.required:
            yield f"ours requires {parameter.name}, which is optional in the base"
    known = {p.name for p in base.parameters}
    replaced = len(base.positional())
    for index, parameter in enumerate(ours.parameters):
        extra = parameter.kind == KEYWORD or index >= replaced
        if parameter.required and extra and parameter.name not in known:
            yield f"ours requires {parameter.name}, which the base does not have"


def annotation_class(
    symbols: Symbols, module: str, expr: ast.expr | None
) -> tuple[Symbol, bool] | None:
    """The class of the tree that an annotation means, and whether it is the class
    itself (`type[X]`) rather than an instance. Of a union, its one class."""
    expr = parse_annotation(expr) if expr is not None else None
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.BitOr):
        sides = (expr.left, expr.right)
        found = [annotation_class(symbols, module, side) for side in sides]
        known = [f for f in found if f is not None]
        others = [s for s, f in zip(sides, found, strict=True) if f is None]
        plain = all(isinstance(s, ast.Constant) and s.value is None for s in others)
        return known[0] if len(known) == 1 and plain else None
    if isinstance(expr, ast.Subscript):
        outer = ast.unparse(expr.value).rpartition(".")[2]
        inner = expr.slice
        if outer in ("Optional", "ClassVar", "Final", "InitVar", "Required"):
            return annotation_class(symbols, module, inner)
        if outer == "Annotated" and isinstance(inner, ast.Tuple):
            return annotation_class(symbols, module, inner.elts[0])
        if outer in ("type", "Type"):
            found_class = annotation_class(symbols, module, inner)
            return (found_class[0], True) if found_class else None
        return annotation_class(symbols, module, expr.value)
    if isinstance(expr, ast.Name | ast.Attribute):
        symbol = symbols.resolve(module, expr)
        if symbol is not None and symbol.kind == CLASS:
            return symbol, False
    return None
