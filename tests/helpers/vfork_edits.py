# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Short ways to declare edits and to apply them to a synthetic source."""

from pathlib import Path

import pytest

from vfork.apply import render
from vfork.edits import LoadedEditFile
from vfork.errors import VforkError
from vfork.spec import Anchor, Edit, EditFile, Op

TARGET = "vllm/colors.py"


def edit(at: Anchor, op: Op, *, id: str = "the-edit", releases: str = "") -> Edit:
    return Edit(
        id=id,
        why="because",
        drop_when="upstream does it",
        forwarded="no: a test",
        at=at,
        op=op,
        test="tests/test_colors.py",
        releases=releases,
    )


def load(*edits: Edit) -> LoadedEditFile:
    return LoadedEditFile(TARGET, Path("edits", TARGET), EditFile("test", edits))


def apply(source: str | bytes, *edits: Edit) -> str:
    """The edited source, without the notice, line ends kept."""
    data = source if isinstance(source, bytes) else source.encode()
    return render(data, load(*edits), "cpu", "1.2", notice=False).data.decode()


def change(source: str | bytes, at: Anchor, op: Op) -> str:
    """The source after one edit."""
    return apply(source, edit(at, op))


def refused(code: str, source: str | bytes, *edits: Edit) -> VforkError:
    """The error with the code that applying the edits must raise."""
    with pytest.raises(VforkError) as caught:
        apply(source, *edits)
    assert caught.value.code == code, caught.value
    assert caught.value.edit or code in ("VF202", "VF203", "VF209")
    return caught.value
