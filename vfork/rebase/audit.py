# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Compares what the fork uses of two releases."""

import ast
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from vfork.apply import FilePlan, Rendered
from vfork.rebase import facts
from vfork.rebase.facts import Fact, Facts, Key
from vfork.rebase.reader import Reader
from vfork.rebase.scopes import Passed, bound_names
from vfork.rebase.side import Side
from vfork.rebase.similar import named
from vfork.rebase.symbols import CLASS, Symbol, Symbols
from vfork.rebase.tree import Tree, module_name
from vfork.source import parse_quietly
from vfork.spec import AppendBody, Class, Edit, Function, Module, Statement

BREAKS, REVIEW, NOTE = "breaks", "review", "note"
SEVERITIES = (BREAKS, REVIEW, NOTE)

_PROBLEMS = {
    "import": "VF621",
    "attribute": "VF622",
    "call": "VF623",
    "override": "VF624",
    "abstract": "VF625",
    "string": "VF626",
    "operation": "VF627",
    "free-name": "VF628",
}
_SHAPES = {
    "base": "VF633",
    "hierarchy": "VF633",
    "anchor-class": "VF633",
    "operation": "VF627",
    "string": "VF632",
    "soft-attribute": "VF632",
}
_MEANING = {
    "VF631": "its signature changed",
    "VF632": "its value, default or type changed",
    "VF633": "its bases or decorators changed",
    "VF627": "the operation is called or registered in another way",
}


@dataclass(frozen=True)
class Finding:
    """One difference that touches the fork.

    `places` are where ours uses `target`: path:line of the overlay, or the id of an
    edit. `old` and `new` tell the difference where words do not.
    """

    code: str
    severity: str
    target: str
    message: str
    places: tuple[str, ...] = ()
    old: str = ""
    new: str = ""
    hint: str = ""
    bases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Audit:
    """Findings, worst first, and counts of what was looked at on the new release."""

    findings: tuple[Finding, ...]
    uses: int
    unknown: int
    mended: int


def audit(old: Side, new: Side) -> Audit:
    """The uses of upstream whose soundness or meaning differs between two releases."""
    before, after = read_side(old), read_side(new)
    findings: list[Finding] = []
    mended = 0
    for key, fact in after.items():
        was = before.get(key)
        if was is None:
            continue
        mended += bool(was.problem and not fact.problem)
        findings += _differences(was, fact, old.tree, new.tree)
    return Audit(
        tuple(merge(findings)),
        uses=len(after),
        unknown=sum(not fact.known for fact in after.values()),
        mended=mended,
    )


def read_side(side: Side) -> Facts:
    """All facts of a release."""
    symbols = Symbols(side.image)
    found: Facts = {}
    # What edits pass to functions of ours has types even where these say `Any`.
    passed: Passed = {}
    for target, rendered in side.rendered.items():
        if isinstance(rendered, Rendered):
            keep = _keep_inserted(rendered)
            module = module_name(target)
            reader = Reader(symbols, module, keep, free_names=True, passed=passed)
            found |= reader.read()
    for path in sorted(side.image.overlay):
        keep_all = _keep_all(path)
        reader = Reader(symbols, module_name(path), keep_all, passed=dict(passed))
        found |= reader.read()
    found |= _anchor_facts(side)
    return found


def _keep_all(path: str) -> Callable[[int], tuple[str, int] | None]:
    return lambda line: (path, line)


def _keep_inserted(rendered: Rendered) -> Callable[[int], tuple[str, int] | None]:
    lines = {
        span.line + offset: (span.id, offset + 1)
        for span in rendered.spans
        for offset in range(span.inserted)
    }
    return lines.get


def _anchor_facts(side: Side) -> Facts:
    """Facts of what edits stand in or bind anew, on the pristine release."""
    symbols = Symbols(side.tree)
    found: Facts = {}
    for target, made in side.plans.items():
        if not isinstance(made, FilePlan):
            continue
        for planned in made.edits:
            for fact in _facts_of_edit(symbols, module_name(target), planned.edit):
                found[fact.key] = fact
    return found


def _facts_of_edit(symbols: Symbols, module: str, edit: Edit) -> Iterable[Fact]:
    at = edit.at.inside if isinstance(edit.at, Statement) else edit.at
    if isinstance(at, Function | Class):
        first, _, rest = at.name.partition(".")
        symbol = symbols.lookup(module, first)
        if symbol is not None and symbol.kind == CLASS:
            key = Key(edit.id, 0, "anchor-class", first)
            if rest or isinstance(at, Class):
                yield Fact(key, str(symbol), shape=facts.symbol_shape(symbols, symbol))
    if isinstance(edit.at, Module) and isinstance(edit.op, AppendBody):
        body = parse_quietly(textwrap.dedent(edit.op.src))
        for name in sorted(bound_names(body)):
            symbol = symbols.lookup(module, name)
            if symbol is not None and symbol.module == module and symbol.node:
                key = Key(edit.id, 0, "rebound", name)
                yield _rebound_fact(symbols, key, symbol)


def _rebound_fact(symbols: Symbols, key: Key, symbol: Symbol) -> Fact:
    """All that callers of a definition see which an edit takes the place of."""
    fact = facts.symbol_fact(symbols, key, str(symbol), symbol)
    if symbol.kind != CLASS:
        return fact
    heads = [
        facts.member_shape(member)
        for member in symbols.own_members(symbol).values()
        if member.is_callable
    ]
    return replace(
        fact,
        shape="; ".join([fact.shape, *heads]),
        parts=facts.class_parts(symbols, [symbol]),
    )


# Differences


def _differences(old: Fact, new: Fact, one: Tree, two: Tree) -> list[Finding]:
    if new.problem and not _is_own_way(old):
        if new.problem == old.problem or not old.known:
            return []
        return [_broken(old, new, one, two)]
    if old.problem and not _is_own_way(old):
        return []
    if old.known and not new.known:
        return [_lost(old, new)]
    if not old.known or not new.known:
        return []
    if new.key.kind == "override" and old.shape != new.shape:
        if new.shape == "absent":
            return [_overrides_nothing(old, new)]
        if old.shape == "absent":
            return [_collides(old, new)]
    if old.shape != new.shape:
        return [_reshaped(old, new)]
    return _code_changes(old, new)


def _is_own_way(old: Fact) -> bool:
    """Whether it is a constructor that never had the base's parameters."""
    constructor = old.key.text.endswith(".__init__") and old.key.kind == "override"
    return constructor and bool(old.problem)


def _made(
    code: str,
    severity: str,
    fact: Fact,
    message: str,
    *,
    old: str = "",
    new: str = "",
    hint: str = "",
) -> Finding:
    key = fact.key
    place = f"{key.subject}:{key.line}" if key.line else key.subject
    return Finding(code, severity, fact.target, message, (place,), old, new, hint)


def _broken(old: Fact, new: Fact, one: Tree, two: Tree) -> Finding:
    kind = new.key.kind
    code = _PROBLEMS.get(kind, "VF621")
    if kind == "attribute" and old.symbol and str(old.symbol) == old.target:
        code = "VF621"
    return _made(
        code,
        BREAKS,
        replace(new, target=old.target),
        new.problem,
        old=old.shape,
        new=new.shape,
        hint=_moved(old, one, two),
    )


def _moved(old: Fact, one: Tree, two: Tree) -> str:
    """Where a name that is gone may be now."""
    symbol = old.symbol
    path = one.module_path(symbol.module) if symbol else None
    if symbol is None or symbol.node is None or path is None:
        return ""
    node: ast.stmt = symbol.node
    name = symbol.name
    found = named(path, name, node, one, two)
    return f"did it become {' or '.join(map(str, found))}?" if found else ""


def _lost(old: Fact, new: Fact) -> Finding:
    if new.key.kind == "attribute":
        message = "it is not defined any more where it was found"
        code = "VF622"
        return _made(code, BREAKS, replace(new, target=old.target), message)
    message = "its definition cannot be told from the sources any more"
    return _made("VF635", REVIEW, replace(new, target=old.target), message)


def _overrides_nothing(old: Fact, new: Fact) -> Finding:
    return _made(
        "VF624",
        BREAKS,
        replace(new, target=old.target),
        "the base has it no longer: nothing may call or read ours",
        old=old.shape,
        hint="look for what took its place in the base and its callers",
    )


def _collides(old: Fact, new: Fact) -> Finding:
    return _made(
        "VF634",
        REVIEW,
        new,
        "the base has this name now, which was ours alone",
        new=new.shape,
        hint="see whether upstream means the same; else rename ours",
    )


def _reshaped(old: Fact, new: Fact) -> Finding:
    code = _SHAPES.get(new.key.kind) or _shape_code(old, new)
    message = _MEANING[code]
    if new.key.kind == "hierarchy":
        message = "the upstream classes that it inherits from changed"
    return _made(code, REVIEW, new, message, old=old.shape, new=new.shape)


def _shape_code(old: Fact, new: Fact) -> str:
    texts = (old.shape, new.shape)
    if new.key.kind != "call" and any("class " in text for text in texts):
        return "VF633"
    if new.key.kind == "call" or any("def " in text for text in texts):
        return "VF631"
    return "VF632"


def _code_changes(old: Fact, new: Fact) -> list[Finding]:
    before, after = dict(old.parts), dict(new.parts)
    changed = [name for name in after if after[name] != before.get(name, after[name])]
    gone = [f"{name} (gone)" for name in before if name not in after]
    come = [f"{name} (new)" for name in after if name not in before]
    names = [*changed, *gone, *come]
    if not names:
        return []
    message = f"the code changed of {', '.join(names)}"
    return [_made("VF636", NOTE, new, message, old=old.where, new=new.where)]


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Equal findings as one with all places and bases, worst first."""
    merged: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.target, finding.message, finding.new)
        known = merged.get(key)
        if known is None:
            merged[key] = finding
        else:
            merged[key] = replace(
                known,
                places=tuple(dict.fromkeys((*known.places, *finding.places))),
                bases=tuple(dict.fromkeys((*known.bases, *finding.bases))),
            )
    return sorted(
        merged.values(),
        key=lambda f: (SEVERITIES.index(f.severity), f.code, f.target),
    )
