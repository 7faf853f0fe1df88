# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Records in edits.lock that a person read what upstream changed around an edit."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from vfork import lock
from vfork.apply import plan
from vfork.edits import LoadedEditFile, applies, load_edits
from vfork.errors import VforkError
from vfork.fetch import fetch
from vfork.pin import Base
from vfork.rebase.candidate import find
from vfork.release import Release


@dataclass(frozen=True)
class AcceptReport:
    """What was recorded, by edit, and bases that have no build of the release."""

    release: str
    accepted: dict[str, tuple[str, ...]]
    without_build: tuple[str, ...]
    changed: bool


def accept(
    root: Path,
    bases: list[Base],
    ids: list[str],
    *,
    release: str | None = None,
    note: str = "",
    dry_run: bool = False,
) -> AcceptReport:
    """Accepts the surroundings of edits at a release, by default the pinned one.

    Raises VforkError VF645 for an unknown edit or one that does not resolve there, and
    what `find` raises if no base has the release.
    """
    loaded = load_edits(root)
    wanted = [_named(loaded, edit_id) for edit_id in ids]
    found: dict[str, dict[str, lock.Accepted]] = {edit_id: {} for edit_id in ids}
    missing: list[VforkError] = []
    without: list[str] = []
    for pin in bases:
        try:
            base = find(pin, release or pin.version)
        except VforkError as err:
            missing.append(err)
            without.append(pin.name)
            continue
        with Release(fetch(base)) as opened:
            for file, edit_id in wanted:
                entry = _entry(opened, file, edit_id, base)
                if entry is not None:
                    found[edit_id][base.name] = lock.Accepted(
                        base.version, entry.body, entry.around, note
                    )
    if len(missing) == len(bases):
        raise missing[0]
    for edit_id, made in found.items():
        if not made:
            raise VforkError(
                "VF645",
                f"edit {edit_id} is not meant for {release or 'the pinned releases'}",
                hint="see its bases and releases",
            )
    return _record(root, found, release or "pinned", tuple(without), dry_run)


def _record(
    root: Path,
    found: dict[str, dict[str, lock.Accepted]],
    release: str,
    without: tuple[str, ...],
    dry_run: bool,
) -> AcceptReport:
    path = root / lock.LOCK_FILE
    entries = lock.read(root)
    accepted = dict(lock.read_accepted(root))
    for edit_id, made in found.items():
        kept = {a.key: a for a in accepted.get(edit_id, ())}
        kept |= {a.key: a for a in made.values()}
        accepted[edit_id] = tuple(kept.values())
    text = lock.write_text(entries, accepted)
    changed = path.read_text("utf-8") != text
    if changed and not dry_run:
        path.write_text(text, "utf-8")
    return AcceptReport(
        release, {i: tuple(made) for i, made in found.items()}, without, changed
    )


def _named(
    loaded: tuple[LoadedEditFile, ...], edit_id: str
) -> tuple[LoadedEditFile, str]:
    known = {edit.id: file for file in loaded for edit in file.file.edits}
    if edit_id in known:
        return known[edit_id], edit_id
    close = difflib.get_close_matches(edit_id, known)
    raise VforkError(
        "VF645",
        f"there is no edit {edit_id!r}",
        hint=f"did you mean {' or '.join(close)}?" if close else "see `vfork status`",
    )


def _entry(
    release: Release, file: LoadedEditFile, edit_id: str, base: Base
) -> lock.Entry | None:
    edit = next(edit for edit in file.file.edits if edit.id == edit_id)
    if not applies(edit, base.name, base.version):
        return None
    try:
        made = plan(release.read(file.target), file, base.name, base.version)
    except VforkError as err:
        raise _unresolved(err, base, file, edit_id) from err
    for error in made.errors:
        if error.edit and error.edit.id == edit_id:
            raise _unresolved(error, base, file, edit_id)
    return lock.entries(made)[edit_id]


def _unresolved(
    err: VforkError, base: Base, file: LoadedEditFile, edit_id: str
) -> VforkError:
    edit = next(edit for edit in file.file.edits if edit.id == edit_id)
    return VforkError(
        "VF645",
        f"{edit_id} does not resolve on {base.distribution} {base.version}, so there "
        f"is nothing to accept: {err.message}",
        edit=file.ref(edit),
        excerpt=err.excerpt,
        hint="change the edit first; `vfork rebase` proposes places",
    )
