# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What became of each edit's place between two releases."""

import ast
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from vfork import lock
from vfork.anchors import describe, resolve
from vfork.apply import FilePlan, PlannedEdit
from vfork.edits import LoadedEditFile
from vfork.errors import VforkError
from vfork.ops import leading_imports
from vfork.rebase.side import Side
from vfork.rebase.similar import Candidate, candidates
from vfork.source import Source
from vfork.spec import AddImport, Edit, Statement, SwapName

CODES = {
    "file-gone": "VF601",
    "anchor-gone": "VF602",
    "ambiguous": "VF603",
    "unfit": "VF604",
    "moved": "VF605",
    "renamed": "VF606",
    "already-upstream": "VF607",
    "neighbourhood-changed": "VF608",
    "body-changed": "VF609",
    "new": "VF610",
    "retired": "VF611",
    "same": "VF612",
}
"""State -> code, worst first."""

STATES = tuple(CODES)
FINE = ("new", "retired", "same")
ACCEPTABLE = ("neighbourhood-changed", "body-changed")


@dataclass(frozen=True)
class EditState:
    """What became of one edit. `old` and `new` are excerpts of both releases."""

    base: str
    file: LoadedEditFile
    edit: Edit
    state: str
    message: str
    old: str = ""
    new: str = ""
    hint: str = ""
    candidates: tuple[Candidate, ...] = ()
    entry: lock.Entry | None = None

    @property
    def code(self) -> str:
        return CODES[self.state]


def edit_states(old: Side, new: Side) -> list[EditState]:
    """The state of every edit that is meant for the base at one of the releases."""
    return [
        _state(old, new, file, edit)
        for file in new.loaded
        for edit in file.file.edits
        if old.wants(file, edit.id) or new.wants(file, edit.id)
    ]


def _state(old: Side, new: Side, file: LoadedEditFile, edit: Edit) -> EditState:
    made = partial(EditState, new.base.name, file, edit)
    if not new.wants(file, edit.id):
        limit = f"{edit.releases or edit.bases}"
        return made("retired", f"it is not meant for {new.tree.label}: {limit}")
    before = old.outcome(file, edit.id) if old.wants(file, edit.id) else None
    after = new.outcome(file, edit.id)
    if isinstance(after, PlannedEdit):
        if isinstance(before, PlannedEdit):
            return _compared(old, new, file, before, after)
        why = before.message if before else "it was not meant for it"
        return made(
            "new",
            f"it resolves on {new.tree.label} only; on {old.tree.label}: {why}",
            new=_where(after, new.plans[file.target]),
            entry=new.entry(file, edit.id),
        )
    found, shown = _search(old, new, file, edit, before)
    state = _failure(after, edit, new, file, found)
    excerpt = after.excerpt
    if found:
        best = found[0]
        source = new.tree.source(best.path)
        excerpt = _line_excerpt(source, best.line)
    message = after.message
    if isinstance(before, VforkError):
        message += f"; nor did it resolve on {old.tree.label}"
    return made(
        state,
        message,
        old=shown,
        new=excerpt,
        hint=_hint(state, after, found),
        candidates=tuple(found),
    )


def _failure(
    error: VforkError,
    edit: Edit,
    new: Side,
    file: LoadedEditFile,
    found: list[Candidate],
) -> str:
    if error.code == "VF206":
        return "already-upstream"
    if error.code == "VF205":
        return "ambiguous"
    if error.code not in ("VF201", "VF204"):
        return "unfit"
    if isinstance(edit.op, SwapName) and _swapped(new, file, edit):
        return "already-upstream"
    if found:
        return "renamed" if found[0].path == file.target else "moved"
    return "file-gone" if error.code == "VF201" else "anchor-gone"


def _swapped(new: Side, file: LoadedEditFile, edit: Edit) -> bool:
    """Whether the new release reads the name that a SwapName would bring."""
    assert isinstance(edit.op, SwapName)
    try:
        place = resolve(new.tree.source(file.target), edit.at)
    except VforkError:
        return False
    assert place is not None
    return any(
        isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == edit.op.new
        for node in ast.walk(place.stmt)
    )


def _search(
    old: Side,
    new: Side,
    file: LoadedEditFile,
    edit: Edit,
    before: PlannedEdit | VforkError | None,
) -> tuple[list[Candidate], str]:
    """Candidates in the new release, and the excerpt of the old one."""
    if not isinstance(before, PlannedEdit):
        return [], ""
    made = old.plans[file.target]
    assert isinstance(made, FilePlan)
    shown = _where(before, made)
    after = new.plans[file.target]
    if isinstance(after, FilePlan) and _resolves(after.source, edit):
        return [], shown
    return candidates(edit.at, before.place, made.source, old.tree, new.tree), shown


def _resolves(source: Source, edit: Edit) -> bool:
    try:
        resolve(source, edit.at)
    except VforkError as err:
        return err.code == "VF205"
    return True


def _hint(state: str, error: VforkError, found: list[Candidate]) -> str:
    if state == "already-upstream":
        return (
            "compare upstream's version with ours; if it does the same, drop the edit"
        )
    if found:
        places = "; ".join(map(str, found))
        verb = "move the edit file there" if state == "moved" else "change the anchor"
        return f"candidates: {places}. Read the new code; if it is the same, {verb}"
    return error.hint


def _compared(
    old: Side, new: Side, file: LoadedEditFile, before: PlannedEdit, after: PlannedEdit
) -> EditState:
    one, two = (side.entry(file, after.edit.id) for side in (old, new))
    assert one is not None and two is not None
    state = "same"
    message = f"{describe(after.edit.at)} and its surroundings are the same"
    if one.around != two.around:
        state = "neighbourhood-changed"
        message = f"what is next to the insertion changed: {describe(after.edit.at)}"
    elif one.body != two.body:
        state = "body-changed"
        message = f"{describe(after.edit.at)}: the definition around it changed"
    shown = ("", "")
    if state != "same":
        plans = (old.plans[file.target], new.plans[file.target])
        shown = _changed(before, after, *plans)
    return EditState(
        new.base.name,
        file,
        after.edit,
        state,
        message,
        old=shown[0],
        new=shown[1],
        hint=""
        if state == "same"
        else "read both; if the edit is still right, run "
        f"`vfork accept {after.edit.id} --release {new.base.version}`",
        entry=two,
    )


# Excerpts


def _source(made: FilePlan | VforkError) -> Source:
    assert isinstance(made, FilePlan)
    return made.source


def _where(planned: PlannedEdit, made: FilePlan | VforkError) -> str:
    source = _source(made)
    if planned.place is None:
        return source.excerpt(_module_part(source, planned.edit)[-1:])
    return source.excerpt([planned.place.stmt])


def _line_excerpt(source: Source, line: int) -> str:
    return source.excerpt([ast.Pass(lineno=line)])


def _module_part(source: Source, edit: Edit) -> list[ast.stmt]:
    if isinstance(edit.op, AddImport):
        return leading_imports(source.tree)
    return source.tree.body


def _changed(
    before: PlannedEdit,
    after: PlannedEdit,
    old: FilePlan | VforkError,
    new: FilePlan | VforkError,
) -> tuple[str, str]:
    """Excerpts of both sources in which the lines that differ are marked."""
    one, two = _source(old), _source(new)
    if before.place is None or after.place is None:
        parts = _module_part(one, before.edit), _module_part(two, after.edit)
        return _outlines(one, two, *parts)
    stmts = [_enclosing(p) for p in (before, after)]
    if isinstance(stmts[0], ast.ClassDef) and isinstance(stmts[1], ast.ClassDef):
        return _outlines(one, two, stmts[0].body, stmts[1].body)
    return _lines(one, two, *stmts)


def _enclosing(planned: PlannedEdit) -> ast.stmt:
    assert planned.place is not None
    scope = planned.place.scope
    if isinstance(planned.edit.at, Statement) and not isinstance(scope, ast.Module):
        return scope
    return planned.place.stmt


def _outlines(
    one: Source, two: Source, old: list[ast.stmt], new: list[ast.stmt]
) -> tuple[str, str]:
    """Statements whose header has no like in the other list, or the last of each."""
    headers = [{lock.header(stmt) for stmt in block} for block in (old, new)]
    gone = [stmt for stmt in old if lock.header(stmt) not in headers[1]]
    come = [stmt for stmt in new if lock.header(stmt) not in headers[0]]
    return one.excerpt(gone or old[-1:], 0), two.excerpt(come or new[-1:], 0)


def _lines(one: Source, two: Source, old: ast.stmt, new: ast.stmt) -> tuple[str, str]:
    first, second = _first_line(old), _first_line(new)
    matcher = difflib.SequenceMatcher(
        None, _texts(one, old), _texts(two, new), autojunk=False
    )
    marked: tuple[list[int], list[int]] = ([], [])
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            marked[0].extend(range(first + i1, first + i2))
            marked[1].extend(range(second + j1, second + j2))
    return _marked(one, marked[0] or [first]), _marked(two, marked[1] or [second])


def _texts(source: Source, stmt: ast.stmt) -> list[bytes]:
    """Lines of a statement; the white space around them does not matter."""
    stop = stmt.end_lineno or stmt.lineno
    return [source.line(n).strip() for n in range(_first_line(stmt), stop + 1)]


def _first_line(stmt: ast.stmt) -> int:
    lines: list[int] = [d.lineno for d in getattr(stmt, "decorator_list", ())]
    return min([stmt.lineno, *lines])


def _marked(source: Source, lines: Iterable[int]) -> str:
    return source.excerpt([ast.Pass(lineno=line) for line in lines], 1)
