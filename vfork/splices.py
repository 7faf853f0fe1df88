# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""A byte splice: the only way an edit changes a source."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Splice:
    """Replaces `data[start:end]` by `text`; an insertion if both are equal.

    Insertions at one offset are ordered by `depth` (the deeper block was above, so it
    comes first), then by `rank` (imports, what belongs to the line above, what belongs
    to the line below, decorators), then as the edits are listed. Equal splices marked
    `once` are made once, however many edits ask for them.
    """

    start: int
    end: int
    text: bytes
    depth: int = 0
    rank: int = 0
    once: bool = False

    @property
    def lines(self) -> int:
        """Lines that are added or, by a splice within a line, changed."""
        return max(1, sum(bool(line.strip()) for line in self.text.splitlines()))
