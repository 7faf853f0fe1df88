# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Generated changes to the pinned CUDA release: is each told, and none misread?"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.vfork_mutations import KINDS, Mutant, Places, first_line, mutants
from vfork.edits import applies, load_edits
from vfork.fetch import fetch
from vfork.overlay import overlay_files
from vfork.pin import pinned
from vfork.rebase.audit import BREAKS, Finding, audit
from vfork.rebase.run import without_collection
from vfork.rebase.side import Side
from vfork.rebase.states import EditState, edit_states
from vfork.rebase.tree import Store, Tree
from vfork.release import Release
from vfork.source import parse_quietly, qualified_names
from vfork.spec import Function, Statement

ROOT = Path(__file__).parents[2]
EACH, COUNT = 5, 40
"""Changes of each of the eight kinds, as far as there are so many, and in all."""


@pytest.fixture(scope="module")
def pristine() -> Iterator[Side]:
    pin = pinned(ROOT, "cuda")
    loaded = load_edits(ROOT)
    overlay = {p: m.data for p, m in overlay_files(ROOT).items() if p.endswith(".py")}
    with without_collection(), Release(fetch(pin)) as release:
        tree = Tree.of_release(release, "the release", Store())
        yield Side(pin, tree, loaded, overlay)
        # Errors keep frames alive, and with them millions of nodes.
        tree.store.memo.clear()
        for blob in tree.blobs.values():
            vars(blob).clear()


@pytest.fixture(scope="module")
def chosen(pristine: Side) -> list[Mutant]:
    base = pristine.base
    edits = [
        replace(file, file=replace(file.file, edits=kept))
        for file in pristine.loaded
        if (
            kept := tuple(
                e for e in file.file.edits if applies(e, base.name, base.version)
            )
        )
    ]
    files = {path: blob.data for path, blob in pristine.tree.blobs.items()}
    places = Places(files, pristine.overlay, edits)
    found = [mutants(places, kind) for kind in KINDS]
    assert all(found)
    first = [m for group in found for m in group[:EACH]]
    more = [m for group in found for m in group[EACH:]]
    return [*first, *more][:COUNT]


def mutated(pristine: Side, files: dict[str, bytes]) -> Side:
    tree = pristine.tree
    blobs = {path: tree.store.blob(path, data) for path, data in files.items()}
    changed = replace(tree, label="the change", blobs={**tree.blobs, **blobs})
    return replace(pristine, tree=changed)


def told(old: Side, new: Side) -> tuple[list[EditState], tuple[Finding, ...]]:
    states = [s for s in edit_states(old, new) if s.state != "same"]
    return states, audit(old, new).findings


def test_generated_changes_are_reported_and_none_is_silently_wrong(
    pristine: Side, chosen: list[Mutant]
) -> None:
    assert len(chosen) == COUNT
    assert told(pristine, mutated(pristine, {})) == ([], ())
    missed: list[str] = []
    for mutant in chosen:
        for path, data in mutant.files.items():
            compile(data, path, "exec", dont_inherit=True)
        new = mutated(pristine, dict(mutant.files))
        states, findings = told(pristine, new)
        broken = [f for f in findings if f.severity == BREAKS]
        if not states and not findings:
            missed.append(str(mutant))
        # What cannot work must be something to act on, not a note among others.
        assert not mutant.breaks or states or broken, mutant
        misread = silently_wrong(pristine, new, mutant, {s.edit.id for s in states})
        assert not misread, (str(mutant), misread)
    assert len(missed) <= 2, missed


def silently_wrong(
    old: Side, new: Side, mutant: Mutant, reported: set[str]
) -> list[str]:
    """Edits that are called the same although the text of their place differs."""
    found = []
    for file in old.loaded:
        if file.target not in mutant.files:
            continue
        for edit in file.file.edits:
            at = edit.at.inside if isinstance(edit.at, Statement) else edit.at
            if not isinstance(at, Function) or edit.id in reported:
                continue
            if old.wants(file, edit.id) and _text(old, file.target, at.name) != _text(
                new, file.target, at.name
            ):
                found.append(edit.id)
    return found


def _text(side: Side, path: str, name: str) -> list[bytes]:
    """All definitions of a qualified name, as written."""
    data = side.tree.blobs[path].data
    lines = data.splitlines()
    return [
        b"\n".join(lines[first_line(place.stmt) - 1 : place.stmt.end_lineno])
        for qualified, place in qualified_names(parse_quietly(data))
        if qualified == name
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"# another comment\n" + data,
        lambda data: data.replace(b"\n\n\n", b"\n\n\n\n"),
        lambda data: data + b"\n\ndef added_by_upstream():\n    return 1\n",
    ],
    ids=["comment", "blank-lines", "function-at-the-end"],
)
def test_harmless_changes_to_every_file_ask_for_nothing(
    pristine: Side, change: object
) -> None:
    """Layout is never reported; a new function only where an edit ends a module."""
    assert callable(change)
    edited = [file.target for file in pristine.loaded if file.target in pristine.plans]
    used = ["vllm/v1/attention/backend.py", "vllm/config/model.py", "vllm/logger.py"]
    files = {
        path: change(pristine.tree.blobs[path].data)
        for path in (*edited, *used)
        if not pristine.tree.blobs[path].data.startswith(b"#!")
    }
    states, findings = told(pristine, mutated(pristine, files))
    assert findings == ()
    added = any(b"added_by_upstream" in data for data in files.values())
    assert not states or added
    assert {s.edit.at.__class__.__name__ for s in states} <= {"Module"}
