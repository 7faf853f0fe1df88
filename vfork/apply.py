# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Applies the edits of one file to its pristine source, as a pure function."""

from dataclasses import dataclass
from itertools import combinations

from vfork.anchors import resolve
from vfork.edits import LoadedEditFile, applies, blame
from vfork.errors import EditRef, VforkError
from vfork.ops import splices
from vfork.source import Place, Source, compile_quietly
from vfork.spec import Edit
from vfork.splices import Splice

NOTICE = b"# Modified by the vllm-glm-dsa project; see vllm/glm_dsa_manifest.json."


@dataclass(frozen=True)
class Span:
    """Where an edit is: its first line upstream and in the edited file (from 1), and
    how many lines it adds or changes."""

    id: str
    upstream_line: int
    line: int
    inserted: int


@dataclass(frozen=True)
class Rendered:
    """An edited file, with one span per edit that applies."""

    data: bytes
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class PlannedEdit:
    """An edit, the place of its anchor (None: the module) and what it changes."""

    edit: Edit
    ref: EditRef
    place: Place | None
    splices: tuple[Splice, ...]


@dataclass(frozen=True)
class FilePlan:
    """All edits of a file resolved on one pristine source."""

    source: Source
    edits: tuple[PlannedEdit, ...]
    errors: tuple[VforkError, ...]


def plan(source: bytes, loaded: LoadedEditFile, base: str, version: str) -> FilePlan:
    """Resolves the edits that are meant for a base; every error is collected.

    Raises VF202 or VF203 if the source itself is unfit.
    """
    if NOTICE in source:
        raise VforkError(
            "VF203",
            f"{loaded.target} carries the notice of an edited file",
            hint="edits apply to the pristine release only; fetch it again",
        )
    return plan_parsed(Source.parse(loaded.target, source), loaded, base, version)


def plan_parsed(
    parsed: Source, loaded: LoadedEditFile, base: str, version: str
) -> FilePlan:
    """As `plan`, for a pristine source at hand."""
    planned: list[PlannedEdit] = []
    errors: list[VforkError] = []
    for edit in loaded.file.edits:
        if not applies(edit, base, version):
            continue
        ref = loaded.ref(edit)
        try:
            with blame(ref):
                place = resolve(parsed, edit.at)
                made = tuple(splices(parsed, edit, place))
        except VforkError as err:
            errors.append(err)
        else:
            planned.append(PlannedEdit(edit, ref, place, made))
    errors.extend(_overlaps(parsed, planned))
    return FilePlan(parsed, tuple(planned), tuple(errors))


def render(
    source: bytes,
    loaded: LoadedEditFile,
    base: str,
    version: str,
    *,
    notice: bool = True,
) -> Rendered:
    """The edited source. Bytes outside the edits' splices stay as they are.

    Without edits for this base, that is the source itself. `notice=False` leaves out
    the closing comment that marks a changed file. Raises the first error of the plan.
    """
    return render_plan(plan(source, loaded, base, version), notice=notice)


def render_plan(file: FilePlan, *, notice: bool = True) -> Rendered:
    """As `render`, for a plan at hand."""
    for error in file.errors:
        raise error
    if not file.edits:
        return Rendered(file.source.data, ())
    data, spans = _join(file)
    if notice:
        newline = file.source.newline
        if not data.endswith((b"\n", b"\r")):
            data += newline
        data += NOTICE + newline
    try:
        compile_quietly(data, file.source.name)
    except (SyntaxError, ValueError) as err:
        raise VforkError(
            "VF209",
            f"{file.source.name} does not compile after the edits "
            f"{', '.join(p.edit.id for p in file.edits)}: {err}",
            hint="look at `vfork diff`; a source may be at home only in a function",
        ) from err
    return Rendered(data, spans)


def _ordered(edits: tuple[PlannedEdit, ...]) -> list[tuple[Splice, str]]:
    pairs = [(splice, p.edit.id) for p in edits for splice in p.splices]
    pairs.sort(key=lambda pair: (pair[0].start, -pair[0].depth, pair[0].rank))
    seen: set[Splice] = set()
    kept = []
    for splice, edit_id in pairs:
        if splice not in seen:
            kept.append((splice, edit_id))
        if splice.once:
            seen.add(splice)
    return kept


def _join(file: FilePlan) -> tuple[bytes, tuple[Span, ...]]:
    source = file.source
    pieces: list[bytes] = []
    first: dict[str, tuple[int, int]] = {}
    inserted: dict[str, int] = {}
    done = 0
    line = 1
    for splice, edit_id in _ordered(file.edits):
        kept = source.data[done : splice.start]
        pieces += [kept, splice.text]
        line += _line_ends(kept)
        upstream = _line_ends(source.data[: splice.start]) + 1
        at_end = splice.text.startswith((b"\n", b"\r"))
        first.setdefault(edit_id, (upstream, line + at_end))
        inserted[edit_id] = inserted.get(edit_id, 0) + splice.lines
        line += _line_ends(splice.text)
        done = splice.end
    pieces.append(source.data[done:])
    spans = (
        Span(p.edit.id, *first[p.edit.id], inserted[p.edit.id])
        for p in file.edits
        if p.edit.id in first
    )
    return b"".join(pieces), tuple(spans)


def _line_ends(data: bytes) -> int:
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


def _overlaps(source: Source, planned: list[PlannedEdit]) -> list[VforkError]:
    """Insertions may meet each other, but nothing may meet a replaced span."""
    found: dict[tuple[str, str], VforkError] = {}
    pairs = [(splice, p) for p in planned for splice in p.splices]
    for (one, owner), (two, rival) in combinations(pairs, 2):
        insertions = one.start == one.end and two.start == two.end
        touching = one.start <= two.end and two.start <= one.end
        if owner is rival or insertions or not touching:
            continue
        line = _line_ends(source.data[: max(one.start, two.start)]) + 1
        found[owner.edit.id, rival.edit.id] = VforkError(
            "VF208",
            f"edits {owner.edit.id} and {rival.edit.id} overlap in line {line} "
            f"of {source.name}",
            edit=rival.ref,
            hint="make one edit of the two, or anchor them apart",
        )
    return [*found.values()]
