# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""One rebase: both releases of every base, three passes, and what came of them."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from vfork import lock
from vfork.edits import load_edits
from vfork.errors import VforkError
from vfork.fetch import fetch
from vfork.overlay import check_overlay, overlay_files
from vfork.pin import Base
from vfork.rebase.audit import BREAKS, Finding, audit, merge
from vfork.rebase.candidate import find
from vfork.rebase.mentions import compare_mentions
from vfork.rebase.reach import compare_reach
from vfork.rebase.requirements import compare_requirements
from vfork.rebase.side import Side
from vfork.rebase.states import CODES, FINE, STATES, EditState, edit_states
from vfork.rebase.tree import Store, Tree
from vfork.rebase.trial import Environment, Step, try_release
from vfork.release import Release


@dataclass(frozen=True)
class BaseReport:
    """What a release means for one base. `stand_in` names whose files were read."""

    old: Side
    new: Side
    states: tuple[EditState, ...]
    findings: tuple[Finding, ...]
    uses: int
    unknown: int
    mended: int
    stand_in: str = ""

    @property
    def name(self) -> str:
        return self.new.base.name


@dataclass(frozen=True)
class Rebase:
    """The whole report. `without_build`: bases the index has no such release of; one
    without the old release is not in `bases`."""

    release: str
    bases: tuple[BaseReport, ...]
    findings: tuple[Finding, ...]
    steps: tuple[Step, ...]
    locked: lock.Lock
    accepted: lock.AcceptedEdits
    without_build: dict[str, VforkError]
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: float = 0.0

    def is_accepted(self, state: EditState) -> bool:
        entry = state.entry
        if entry is None:
            return False
        return (entry.body, entry.around) in lock.read_keys(
            self.locked, self.accepted, state.edit.id
        )

    def errors(self) -> list[VforkError]:
        """Everything to act on, worst first."""
        found = {}
        for report in self.bases:
            for state in report.states:
                if state.state not in FINE and not self.is_accepted(state):
                    found[state.edit.id, state.state] = VforkError(
                        state.code,
                        f"{state.edit.id} is {state.state}: {state.message}",
                        edit=state.file.ref(state.edit),
                        excerpt=state.new,
                        hint=state.hint,
                    )
        errors = sorted(found.values(), key=lambda err: err.code)
        errors += [
            VforkError(
                finding.code,
                f"{finding.target}: {finding.message} ({', '.join(finding.places)})",
                hint=finding.hint,
            )
            for finding in self.findings
            if finding.severity == BREAKS
        ]
        errors += [
            VforkError(s.code, f"{s.base}: {s.name}: {s.detail}", excerpt=s.excerpt)
            for s in self.steps
            if s.state == "failed"
        ]
        return errors


@dataclass(frozen=True)
class Target:
    """What to compare: `release` with `old`, or with the pinned release if None."""

    release: str
    old: str | None = None


def rebase(
    root: Path, pins: list[Base], target: Target, environment: Environment | None
) -> Rebase:
    """Compares a release with the pinned ones, and tries it if there is an
    `environment`.

    Raises VforkError VF641 or VF403 if no base has the release, VF101 to VF112 for
    unsound edit files.
    """
    started = _cpu_seconds()
    seconds: dict[str, float] = {}
    with without_collection():
        with _timed(seconds, "fetch"):
            pairs, without = _find(pins, target)
        with _timed(seconds, "read"):
            sides = _sides(root, pairs)
        reports = []
        for old, new, stand_in in sides:
            with _timed(seconds, f"compare {new.base.name}"):
                reports.append(_compare(root, old, new, stand_in))
        steps: list[Step] = []
        if environment is not None:
            for report in reports:
                if not report.stand_in and report.old.tree is not report.new.tree:
                    with _timed(seconds, f"try {report.name}"):
                        steps += try_release(root, report.new, environment)
    there = (root / lock.LOCK_FILE).is_file()
    tagged = [
        replace(finding, bases=(report.name,))
        for report in reports
        for finding in report.findings
    ]
    return Rebase(
        target.release,
        tuple(reports),
        tuple(merge(tagged)),
        tuple(steps),
        lock.read(root) if there else {},
        lock.read_accepted(root) if there else {},
        without,
        seconds,
        round(_cpu_seconds() - started, 1),
    )


def _cpu_seconds() -> float:
    """Of this process and the ones it ran."""
    return sum(os.times()[:4])


@contextmanager
def without_collection() -> Iterator[None]:
    """Stops the search for cycles of objects for a while.

    Syntax trees are many objects without cycles; to search them again and again would
    take most of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - start, 1)


def _find(
    pins: list[Base], target: Target
) -> tuple[list[tuple[Base, Base | None]], dict[str, VforkError]]:
    """The old and the new release of each base; None where there is no new one.

    A base without the old release is left out. Both kinds have their error told.
    """
    without: dict[str, VforkError] = {}
    pairs: list[tuple[Base, Base | None]] = []
    for pin in pins:
        try:
            old = find(pin, target.old) if target.old else pin
        except VforkError as err:
            without[pin.name] = err
            continue
        try:
            pairs.append((old, find(pin, target.release)))
        except VforkError as err:
            without[pin.name] = err
            pairs.append((old, None))
    if all(new is None for _, new in pairs):
        raise without[pins[0].name]
    return pairs, without


def _sides(
    root: Path, pairs: list[tuple[Base, Base | None]]
) -> list[tuple[Side, Side, str]]:
    store = Store()
    loaded = load_edits(root)
    overlay = {
        path: member.data
        for path, member in overlay_files(root).items()
        if path.endswith(".py")
    }
    trees: dict[str, Tree] = {}

    def tree(base: Base) -> Tree:
        if base.wheel not in trees:
            label = f"{base.distribution} {base.version}"
            with Release(fetch(base)) as release:
                trees[base.wheel] = Tree.of_release(release, label, store)
        return trees[base.wheel]

    spare = next(new for _, new in pairs if new is not None)
    sides = []
    for old, new in pairs:
        base = new or replace(old, version=spare.version)
        source = new or spare
        sides.append(
            (
                Side(old, tree(old), loaded, overlay),
                Side(base, tree(source), loaded, overlay, stand_in=new is None),
                "" if new else spare.name,
            )
        )
    return sides


def _compare(root: Path, old: Side, new: Side, stand_in: str) -> BaseReport:
    states = edit_states(old, new)
    states.sort(key=lambda s: STATES.index(s.state))
    result = audit(old, new)
    findings = [*result.findings]
    findings += compare_reach(old, new)
    findings += compare_mentions(old, new)
    if not stand_in:
        with Release(fetch(old.base)) as one, Release(fetch(new.base)) as two:
            findings += compare_requirements(one, two, new.base)
            findings += _collisions(root, two)
    return BaseReport(
        old,
        new,
        tuple(states),
        tuple(merge(findings)),
        result.uses,
        result.unknown,
        result.mended,
        stand_in,
    )


def _collisions(root: Path, release: Release) -> list[Finding]:
    """Overlay paths that upstream has by now."""
    found = []
    for path in overlay_files(root):
        try:
            check_overlay([path], release)
        except VforkError as err:
            found.append(
                Finding(
                    CODES["already-upstream"],
                    BREAKS,
                    path,
                    err.message,
                    (path,),
                    hint=err.hint,
                )
            )
    return found
