# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Facts about our subclasses of upstream's classes, dotted strings and operations."""

import ast
from collections.abc import Callable, Iterator

from vfork.rebase import facts
from vfork.rebase.facts import Fact, Key
from vfork.rebase.signatures import Function, of_function, override_problem
from vfork.rebase.symbols import CLASS, Member, Symbol, Symbols

OUR_OPERATIONS = "vllm_glm_dsa"

MakeKey = Callable[[ast.AST, str, str], Key | None]


def class_facts(symbols: Symbols, cls: Symbol, make_key: MakeKey) -> Iterator[Fact]:
    """Facts of a class of ours: its bases, what they leave abstract, its overrides."""
    node = cls.node
    assert isinstance(node, ast.ClassDef)
    if any(base is None for base in symbols.bases(cls)):
        # A base is gone, which the fact of its import tells.
        return
    order, _ = symbols.hierarchy(cls)
    theirs = [part for part in order if not symbols.is_ours(part)]
    if not theirs:
        return
    for part in theirs:
        key = make_key(node, "base", str(part))
        if key is not None:
            yield Fact(
                key,
                str(part),
                shape=facts.symbol_shape(symbols, part),
                parts=facts.class_parts(symbols, [part]),
                where=facts.place_text(symbols, part),
                symbol=part,
            )
    key = make_key(node, "abstract", node.name)
    if key is not None:
        yield _abstract_fact(symbols, key, cls)
    key = make_key(node, "hierarchy", node.name)
    if key is not None:
        yield Fact(key, str(cls), shape=", ".join(map(str, theirs)))
    for member in symbols.own_members(cls).values():
        if member.owner == cls and not _is_private(member.name):
            line = member.node if member.kind != "attribute" else node
            key = make_key(line, "override", f"{node.name}.{member.name}")
            if key is not None:
                yield _override_fact(symbols, key, cls, member)


def _is_private(name: str) -> bool:
    return name in ("__slots__", "__doc__", "__module__")


def _abstract_fact(symbols: Symbols, key: Key, cls: Symbol) -> Fact:
    left = facts.abstract_names(symbols, cls)
    assert isinstance(cls.node, ast.ClassDef)
    own = [n for n in left if n in symbols.own_members(cls)]
    missing = [name for name in left if name not in own]
    problem = f"it does not define {', '.join(missing)}" if missing else ""
    return Fact(key, str(cls), problem=problem)


def _override_fact(symbols: Symbols, key: Key, cls: Symbol, ours: Member) -> Fact:
    """What our member takes the place of; shape `absent` if of nothing."""
    skip = 1
    theirs = symbols.member_after(cls, ours.name, skip)
    while theirs is not None and symbols.is_ours(theirs.owner):
        order = symbols.hierarchy(cls)[0]
        skip = order.index(theirs.owner) + 1
        theirs = symbols.member_after(cls, ours.name, skip)
    target = f"{cls}.{ours.name}"
    if theirs is None:
        return Fact(key, target, shape="absent")
    parts: tuple[tuple[str, str], ...] = ()
    problem = ""
    if isinstance(theirs.node, Function):
        name = f"{theirs.owner.name}.{ours.name}"
        parts = ((name, facts.body_of(symbols, theirs.node)),)
        problem = _incompatible(theirs, ours)
    return Fact(
        key,
        f"{theirs.owner}.{ours.name}",
        problem=problem,
        shape=facts.member_shape(theirs),
        parts=parts,
        where=facts.place_text(symbols, theirs.owner, theirs.node),
        symbol=theirs.owner,
    )


def _incompatible(theirs: Member, ours: Member) -> str:
    if not isinstance(theirs.node, Function) or not isinstance(ours.node, Function):
        return ""
    if theirs.kind != ours.kind:
        return f"ours is a {ours.kind}, the base has a {theirs.kind}"
    asynchronous = [isinstance(m.node, ast.AsyncFunctionDef) for m in (theirs, ours)]
    if asynchronous[0] != asynchronous[1]:
        return "only one of ours and the base's is async"
    if ours.kind == "property":
        return ""
    bound = ours.kind != "staticmethod"
    base, mine = (of_function(m.node, bound=bound) for m in (theirs, ours))  # type: ignore[arg-type]
    return override_problem(base, mine)


def string_fact(symbols: Symbols, key: Key, text: str) -> Fact | None:
    """A dotted string such as `vllm.a.b.Class` or `vllm.a.b:name`.

    None if it names nothing that can be told from a logger's name.
    """
    if text in symbols.tree.compiled:
        return Fact(key, text, shape="compiled")
    module, _, name = text.partition(":")
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        found = symbols.module(".".join(parts[:count]))
        if found is not None:
            rest = parts[count:] + ([*name.split(".")] if name else [])
            return _named_in(symbols, key, text, found, rest)
    return Fact(key, text, problem=f"{text} names nothing")


def _named_in(
    symbols: Symbols, key: Key, text: str, module: Symbol, rest: list[str]
) -> Fact | None:
    if not rest:
        return Fact(key, text, shape="module")
    found = symbols.lookup(module.module, rest[0])
    for name in rest[1:]:
        if found is None or found.kind != CLASS:
            break
        fact, member = facts.member_fact(symbols, key, found, name)
        if member is None:
            return fact
        return fact or Fact(key, text, shape="ours")
    if found is None:
        return Fact(key, text, problem=f"{module} has no {rest[0]}")
    if symbols.is_ours(found):
        return Fact(key, text, shape="ours")
    if found.kind in ("opaque", "external"):
        return Fact(key, text, known=False)
    return facts.symbol_fact(symbols, key, text, found)


def operation_fact(
    symbols: Symbols, key: Key, namespace: str, name: str
) -> Fact | None:
    """A `torch.ops` operation: the compiled schema, and how Python of the tree
    registers and calls it."""
    if namespace == OUR_OPERATIONS:
        return None
    target = f"torch.ops.{namespace}.{name}"
    texts = set(symbols.tree.schemas(name))
    where = ""
    for path in symbols.tree.mentioning(name):
        module = symbols.tree.blobs[path].module
        if path in symbols.tree.overlay or module is None:
            continue
        for node in ast.walk(module):
            text = _operation_text(node, namespace, name)
            if text:
                texts.add(text)
                where = where or f"{path}:{getattr(node, 'lineno', 1)}"
    if not texts:
        return Fact(key, target, problem=f"the release has no {target}")
    return Fact(key, target, shape="; ".join(sorted(texts)), where=where)


def _operation_text(node: ast.AST, namespace: str, name: str) -> str:
    """How a call of an operation, its fake or its registration is written."""
    if isinstance(node, Function) and any(
        f"{namespace}::{name}" in ast.unparse(d) for d in node.decorator_list
    ):
        return f"schema of {ast.unparse(node.args)}"
    if not isinstance(node, ast.Call):
        return ""
    func = ast.unparse(node.func)
    if func in (
        f"torch.ops.{namespace}.{name}",
        f"torch.ops.{namespace}.{name}.default",
    ):
        keywords = sorted(k.arg or "**" for k in node.keywords)
        return f"called with {len(node.args)} arguments, {keywords}"
    if func.endswith("direct_register_custom_op"):
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if given.get("op_name") == repr(name):
            return f"registered as {given.get('op_func')}"
    return ""
