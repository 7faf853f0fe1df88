# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
import json
import subprocess
from pathlib import Path

import pytest

from tests.vfork.conftest import SUMS
from vfork.cli import main
from vfork.overlap import RUN

LINES = SUMS.decode().splitlines()


def findings(
    root: Path, capsys: pytest.CaptureFixture[str], lines: list[str]
) -> list[str]:
    """Messages of `vfork overlap` on a checkout that holds a module of `lines`."""
    (root / "ours.py").write_text("\n".join(lines) + "\n", "utf-8")
    subprocess.run(["git", "-C", str(root), "add", "-A"], check=True)
    status = main(["-C", str(root), "overlap", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert status == bool(found)
    assert {finding["code"] for finding in found} <= {"VF307"}
    return [finding["message"] for finding in found]


def test_run_of_release_lines_is_found_in_each_base(
    seeded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = ["x = 1", *LINES[3 : 3 + RUN]]
    message = f"ours.py:2 repeats {RUN} or more lines of vllm/sums.py:4"
    assert findings(seeded, capsys, copied) == [message, message]


def test_white_space_and_common_lines_do_not_hide_a_copy(
    seeded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = [line.replace(" ", "  ") for line in LINES[:RUN]]
    copied[4:4] = ["    else:", "# a comment of ours", "from vllm import something"]
    assert len(findings(seeded, capsys, copied)) == 2


def test_shorter_run_is_fine(seeded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(seeded, capsys, LINES[: RUN - 1]) == []


def test_own_line_in_between_ends_a_run(
    seeded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = LINES[: RUN + 2]
    ours[RUN // 2] = "    something_of_our_own()"
    assert findings(seeded, capsys, ours) == []


def test_untracked_files_do_not_count(
    seeded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (seeded / ".gitignore").write_text("scratch/\n", "utf-8")
    (seeded / "scratch").mkdir()
    (seeded / "scratch/copy.py").write_bytes(SUMS)
    assert findings(seeded, capsys, []) == []
