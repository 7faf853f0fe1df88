# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The PEP 517 hooks and the source distribution, called directly and through pip."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.vfork.conftest import EDIT, git, write
from vfork import backend
from vfork.errors import VforkError
from vfork.release import Release

REPOSITORY = Path(__file__).parents[2]
CPU_VERSION = "1.2.0+glmdsa.3.cpu"


@pytest.fixture
def source(seeded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project as the working directory, to be built for the CPU."""
    monkeypatch.chdir(seeded)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    return seeded


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_named_device_is_taken(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", device)
    assert backend.target_device() == device


@pytest.mark.parametrize(
    ("seen", "device"), [(True, "cuda"), (False, "cpu")], ids=["seen", "not-seen"]
)
@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_default_device_is_cuda_where_one_is_seen(
    monkeypatch: pytest.MonkeyPatch, value: str | None, seen: bool, device: str
) -> None:
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_TARGET_DEVICE", value)
    monkeypatch.setattr(backend, "cuda_device_seen", lambda: seen)
    assert backend.target_device() == device


def test_other_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "rocm")
    with pytest.raises(VforkError, match="'rocm', not one of: cpu, cuda") as caught:
        backend.target_device()
    assert caught.value.code == "VF508"


@pytest.mark.parametrize(
    ("path", "seen"),
    [("/proc/driver/nvidia", True), ("/dev/nvidia0", True), ("", False)],
)
def test_device_is_seen_by_driver_or_node(
    monkeypatch: pytest.MonkeyPatch, path: str, seen: bool
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os.path, "exists", lambda asked: asked == path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert backend.cuda_device_seen() == seen


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        pytest.param("echo 'GPU 0: Some Device (UUID: x)'", True, id="lists-one"),
        pytest.param("echo 'No devices were found'", False, id="lists-none"),
        pytest.param("echo GPU; exit 9", False, id="fails"),
    ],
)
def test_nvidia_smi_is_asked_where_nothing_else_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, seen: bool
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os.path, "exists", lambda asked: False)
    monkeypatch.setattr(shutil, "which", lambda name: str(tool))
    assert backend.cuda_device_seen() == seen


def test_other_systems_have_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os.path, "exists", lambda asked: True)
    assert not backend.cuda_device_seen()


def test_prepared_metadata_is_that_of_the_wheel(source: Path, tmp_path: Path) -> None:
    name = backend.prepare_metadata_for_build_wheel(str(tmp_path / "metadata"))
    built = backend.build_wheel(str(tmp_path / "dist"))
    assert name == f"vllm-{CPU_VERSION}.dist-info"
    with Release(tmp_path / "dist" / built) as wheel:
        prepared = {
            f"{name}/{path.relative_to(tmp_path / 'metadata' / name).as_posix()}"
            for path in (tmp_path / "metadata" / name).rglob("*")
            if path.is_file()
        }
        assert prepared == {n for n in wheel.names() if n.startswith(name)} - {
            f"{name}/RECORD"
        }
        for path in prepared:
            assert (tmp_path / "metadata" / path).read_bytes() == wheel.read(path)


def test_hook_ends_with_the_error_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    for hook in (
        backend.build_wheel,
        backend.build_sdist,
        backend.prepare_metadata_for_build_wheel,
    ):
        with pytest.raises(SystemExit, match="^VF508: VLLM_TARGET_DEVICE is 'tpu'"):
            hook(str(tmp_path))


def test_sdist_holds_what_git_tracks_and_pkg_info(source: Path, tmp_path: Path) -> None:
    write(source, {"untracked.txt": "", "NOTICE": "changed\n", ".ci/run": "exit 0\n"})
    (source / ".ci/run").chmod(0o755)
    git(source, "add", ".ci/run")
    name = backend.build_sdist(str(tmp_path))
    assert name == f"vllm-{CPU_VERSION}.tar.gz"
    with tarfile.open(tmp_path / name) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
        notice = archive.extractfile(members["NOTICE"])
        assert notice is not None and notice.read() == b"changed\n"
    assert {*members} == {*git(source, "ls-files").split(), "PKG-INFO"}
    assert {n for n, m in members.items() if m.mode & 0o111} == {".ci/run"}


def test_sdist_makes_its_directory(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "dist"
    assert (out / backend.build_sdist(str(out))).is_file()


def test_sdist_again_and_from_the_unpacked_sdist_is_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = [tmp_path / name for name in ("first", "second", "third")]
    name = backend.build_sdist(str(outs[0]))
    os.utime(source / "NOTICE", (1_900_000_000, 1_900_000_000))
    backend.build_sdist(str(outs[1]))
    with tarfile.open(outs[0] / name) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    unpacked = tmp_path / "unpacked" / f"vllm-{CPU_VERSION}"
    write(unpacked, {"vllm/extra/__pycache__/hook.cpython-311.pyc": ""})
    monkeypatch.chdir(unpacked)
    assert backend.build_sdist(str(outs[2])) == name
    first, *others = [(out / name).read_bytes() for out in outs]
    assert others == [first, first]
    gzip_time = int.from_bytes(first[4:8], "little")
    assert gzip_time == 315532800, "the archive holds the time it was built"


def test_wheel_from_the_unpacked_sdist_is_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = backend.build_wheel(str(tmp_path / "clone"))
    sdist = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path / f"vllm-{CPU_VERSION}")
    assert backend.build_wheel(str(tmp_path / "sdist")) == name
    first, second = (tmp_path / where / name for where in ("clone", "sdist"))
    assert first.read_bytes() == second.read_bytes()


def test_sdist_of_a_damaged_clone_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / ".git/index").write_bytes(b"damaged")
    with pytest.raises(SystemExit, match="^VF510: git cannot list"):
        backend.build_sdist(str(tmp_path))


def test_pip_wheel_builds_from_a_clone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user does, but with the build requirements that the tests have."""
    shutil.copytree(
        REPOSITORY / "vfork",
        source / "vfork",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(REPOSITORY / "pyproject.toml", source)
    git(source, "add", ".")
    git(source, "commit", "-q", "-m", "the tool")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(source), str(clone))
    monkeypatch.chdir(tmp_path)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    ran = subprocess.run(
        [*pip, "--wheel-dir", "dist", str(clone)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    version = "1.2.0+glmdsa.4.cpu"
    assert wheel.name == f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert git(clone, "status", "--short").strip() in ("", "?? vfork/__pycache__/")
    with Release(wheel) as built:
        assert built.read("vllm/_version.py").decode().count(version) == 1


def test_pip_shows_the_error_without_a_traceback(source: Path, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "vfork", source / "vfork")
    shutil.copy(REPOSITORY / "pyproject.toml", source)
    broken = EDIT.replace('Function("start")', 'Function("stop")')
    write(source, {"edits/vllm/engine.py": broken})
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    ran = subprocess.run(
        [*pip, "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "VF204" in ran.stderr and "engine-start" in ran.stderr
    assert "Traceback" not in ran.stderr
