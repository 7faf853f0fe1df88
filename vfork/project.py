# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The checkout as a whole: edits resolved on the pinned releases, and all checks."""

import difflib
import io
from dataclasses import dataclass
from pathlib import Path

from vfork import lock
from vfork.apply import FilePlan, Rendered, plan, render_plan
from vfork.edits import LoadedEditFile, applies, load_edits, owner_test_errors
from vfork.errors import VforkError
from vfork.fetch import fetch
from vfork.overlay import check_overlay, overlay_files
from vfork.pin import PIN_FILE, Base
from vfork.release import Release
from vfork.report import REGISTER, register
from vfork.spec import ReplaceFunction

MAX_EDITS = 30
MAX_INSERTED_LINES = 90
MAX_REPLACED_FUNCTIONS = 0


@dataclass(frozen=True)
class BaseResult:
    """The edits on one release: plans, rendered files and what went wrong."""

    base: Base
    plans: dict[str, FilePlan]
    rendered: dict[str, Rendered]
    errors: tuple[VforkError, ...]

    @property
    def inserted(self) -> int:
        """Lines added or changed in all."""
        return sum(s.inserted for r in self.rendered.values() for s in r.spans)

    def lock_entries(self) -> dict[str, lock.Entry]:
        return {
            edit_id: entry
            for file in self.plans.values()
            for edit_id, entry in lock.entries(file).items()
        }


def find_root(start: Path) -> Path:
    """The nearest directory from `start` upward with a pin file. Raises VF306."""
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / PIN_FILE).is_file():
            return folder
    raise VforkError(
        "VF306",
        f"no {PIN_FILE} in {start} or above it",
        hint="run vfork in a checkout of the fork, or name one with -C",
    )


def resolve_all(base: Base, loaded: tuple[LoadedEditFile, ...]) -> BaseResult:
    """Resolves and renders all edits on a fetched release; errors are collected."""
    plans: dict[str, FilePlan] = {}
    rendered: dict[str, Rendered] = {}
    errors: list[VforkError] = []
    with Release(fetch(base)) as release:
        for file in loaded:
            edits = [e for e in file.file.edits if applies(e, base.name, base.version)]
            if not edits:
                continue
            try:
                source = release.read(file.target)
                made = plan(source, file, base.name, base.version)
                plans[file.target] = made
                if not made.errors:
                    rendered[file.target] = render_plan(made)
            except VforkError as err:
                err.edit = err.edit or file.ref(edits[0])
                errors.append(err)
            else:
                errors.extend(made.errors)
    return BaseResult(base, plans, rendered, tuple(errors))


@dataclass(frozen=True)
class CheckResult:
    """All findings of a check. It passed if there are no errors."""

    results: tuple[BaseResult, ...]
    states: tuple[lock.LockState, ...]
    errors: tuple[VforkError, ...]


def check(root: Path, bases: list[Base]) -> CheckResult:
    """Everything that must hold before a build, on the given bases.

    Raises VforkError if the edit files themselves are unsound.
    """
    loaded = load_edits(root)
    results = tuple(resolve_all(base, loaded) for base in bases)
    errors = [error for result in results for error in result.errors]
    errors += owner_test_errors(root, loaded)
    errors += _overlay_errors(root, bases)
    errors += budget_errors(loaded, results)
    states: tuple[lock.LockState, ...] = ()
    if not any(result.errors for result in results):
        states, found = _lock_errors(root, results)
        errors += found
    errors += _register_errors(root, loaded)
    return CheckResult(results, states, tuple(errors))


def _overlay_errors(root: Path, bases: list[Base]) -> list[VforkError]:
    paths = [*overlay_files(root)]
    errors = []
    for base in bases:
        with Release(fetch(base)) as release:
            for path in paths:
                try:
                    check_overlay([path], release)
                except VforkError as err:
                    errors.append(err)
    return errors


def budget_errors(
    loaded: tuple[LoadedEditFile, ...], results: tuple[BaseResult, ...]
) -> list[VforkError]:
    """VF305 for each budget that is exceeded."""
    edits = [edit for file in loaded for edit in file.file.edits]
    replaced = sum(isinstance(edit.op, ReplaceFunction) for edit in edits)
    counts = [
        ("edits", len(edits), MAX_EDITS),
        ("replaced functions", replaced, MAX_REPLACED_FUNCTIONS),
    ]
    counts += [
        (f"inserted lines on {r.base.name}", r.inserted, MAX_INSERTED_LINES)
        for r in results
    ]
    return [
        VforkError(
            "VF305",
            f"{found} {what}, at most {limit} are allowed",
            hint="move logic into the overlay; raising a budget is its own commit",
        )
        for what, found, limit in counts
        if found > limit
    ]


def new_lock(root: Path, results: tuple[BaseResult, ...]) -> tuple[lock.Lock, str]:
    """The lock on disk (empty if there is none) and the text it should have.

    Bases that `results` leaves out keep their entries. Raises VF308 if upstream changed
    around an edit and nobody accepted that.
    """
    there = (root / lock.LOCK_FILE).exists()
    old = lock.read(root) if there else {}
    accepted = lock.read_accepted(root) if there else {}
    fresh = {result.base.name: result.lock_entries() for result in results}
    unread = lock.unreviewed(old, fresh, accepted)
    if unread:
        ids = " ".join(dict.fromkeys(edit_id for _, edit_id in unread))
        raise VforkError(
            "VF308",
            f"upstream changed around {len(unread)} edits, and nobody accepted it: "
            + ", ".join(f"{edit_id} ({base})" for base, edit_id in unread),
            hint=f"read the changes with `vfork rebase`, then run `vfork accept {ids}`",
        )
    return old, lock.write_text({**old, **fresh}, accepted)


def _lock_errors(
    root: Path, results: tuple[BaseResult, ...]
) -> tuple[tuple[lock.LockState, ...], list[VforkError]]:
    try:
        old = lock.read(root)
    except VforkError as err:
        return (), [err]
    fresh = {result.base.name: result.lock_entries() for result in results}
    states = lock.compare(old, fresh)
    if {**old, **fresh} == old:
        return states, []
    changed = [f"{s.base}: {s.id} is {s.state}" for s in states if s.state != "same"]
    return states, [
        VforkError(
            "VF302",
            f"{lock.LOCK_FILE} is out of date: "
            + ("; ".join(changed) or "hashes or lines of the upstream files changed"),
            hint="read the upstream change around each edit, then run `vfork lock`",
        )
    ]


def _register_errors(
    root: Path, loaded: tuple[LoadedEditFile, ...]
) -> list[VforkError]:
    path = root / REGISTER
    if path.is_file() and path.read_text("utf-8") == register(loaded):
        return []
    return [
        VforkError(
            "VF303",
            f"{REGISTER} is {'out of date' if path.is_file() else 'missing'}",
            hint=f"run `vfork status --markdown {REGISTER}`",
        )
    ]


def unified_diff(result: BaseResult, *, notice: bool = True) -> str:
    """The edits on one release as a diff. Raises the first error of the result."""
    for error in result.errors:
        raise error
    pieces: list[str] = []
    for target, file in sorted(result.plans.items()):
        after = render_plan(file, notice=notice).data
        lines = difflib.unified_diff(
            _text_lines(file.source.data),
            _text_lines(after),
            f"a/{target}",
            f"b/{target}",
        )
        for line in lines:
            pieces.append(line)
            if not line.endswith("\n"):
                pieces.append("\n\\ No newline at end of file\n")
    return "".join(pieces)


def _text_lines(data: bytes) -> list[str]:
    """Lines that end in a line feed; `str.splitlines` also splits at form feeds."""
    return io.StringIO(data.decode("utf-8"), newline="\n").readlines()
