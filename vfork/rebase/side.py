# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""All edits resolved on one release's tree, and the fork laid over it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from vfork import lock
from vfork.apply import FilePlan, PlannedEdit, Rendered, plan_parsed, render_plan
from vfork.edits import LoadedEditFile, applies
from vfork.errors import VforkError
from vfork.pin import Base
from vfork.rebase.tree import Tree


@dataclass(frozen=True, eq=False)
class Side:
    """One release as a base. `overlay` has the Python files of the fork's own.

    `stand_in`: the files are another base's, since this one has no build.
    """

    base: Base
    tree: Tree
    loaded: tuple[LoadedEditFile, ...]
    overlay: Mapping[str, bytes]
    stand_in: bool = False

    @cached_property
    def plans(self) -> dict[str, FilePlan | VforkError]:
        """Edit files meant for this base: the plan, or why the source is unfit."""
        made: dict[str, FilePlan | VforkError] = {}
        for file in self.loaded:
            if any(self.wants(file, edit.id) for edit in file.file.edits):
                try:
                    made[file.target] = self._plan(file)
                except VforkError as err:
                    made[file.target] = err
        return made

    def _plan(self, file: LoadedEditFile) -> FilePlan:
        source = self.tree.source(file.target)
        # Sources and edit files may be shared with other sides, and so is the plan.
        key = ("plan", source.tree, file, self.base.name, self.base.version)
        memo = self.tree.store.memo
        if key not in memo:
            memo[key] = plan_parsed(source, file, self.base.name, self.base.version)
        made: FilePlan = memo[key]
        return made

    def wants(self, file: LoadedEditFile, edit_id: str) -> bool:
        """Whether an edit is meant for this base at this release."""
        return any(
            edit.id == edit_id and applies(edit, self.base.name, self.base.version)
            for edit in file.file.edits
        )

    def outcome(self, file: LoadedEditFile, edit_id: str) -> PlannedEdit | VforkError:
        """How an edit that is wanted here resolved."""
        made = self.plans[file.target]
        if isinstance(made, VforkError):
            return made
        for error in made.errors:
            if error.edit and error.edit.id == edit_id:
                return error
        rendered = self.rendered[file.target]
        if isinstance(rendered, VforkError):
            return rendered
        return next(p for p in made.edits if p.edit.id == edit_id)

    def entry(self, file: LoadedEditFile, edit_id: str) -> lock.Entry | None:
        """The lock entry of an edit, None if it does not resolve."""
        made = self.plans.get(file.target)
        if not isinstance(made, FilePlan):
            return None
        key = ("entries", made.source.tree, file, self.base.name, self.base.version)
        memo = self.tree.store.memo
        if key not in memo:
            memo[key] = lock.entries(made)
        entries: dict[str, lock.Entry] = memo[key]
        return entries.get(edit_id)

    @cached_property
    def rendered(self) -> dict[str, Rendered | VforkError]:
        """Edited files, with the edits that resolve; an error if one does not
        compile."""
        return {
            target: self._render(made)
            for target, made in self.plans.items()
            if isinstance(made, FilePlan)
        }

    def _render(self, made: FilePlan) -> Rendered | VforkError:
        memo = self.tree.store.memo
        key = ("rendered", made.source.tree, tuple(p.edit for p in made.edits))
        if key not in memo:
            bad = {error.edit.id for error in made.errors if error.edit}
            sound = tuple(p for p in made.edits if p.edit.id not in bad)
            try:
                memo[key] = render_plan(
                    dataclasses.replace(made, edits=sound, errors=()), notice=False
                )
            except VforkError as err:
                memo[key] = err
        result: Rendered | VforkError = memo[key]
        return result

    @cached_property
    def image(self) -> Tree:
        """The release with the edits that resolve and the overlay laid over it."""
        edited = {
            target: result.data
            for target, result in self.rendered.items()
            if isinstance(result, Rendered)
        }
        new = {p: data for p, data in self.overlay.items() if p not in self.tree}
        return self.tree.laid_over(edited, new)
