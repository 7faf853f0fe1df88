# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The compiled extension: architectures, when it is built, cache, wheel, real build."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vfork.conftest import write
from vfork import backend
from vfork.assemble import assemble
from vfork.cli import main
from vfork.errors import VforkError
from vfork.extension import (
    ARCHS,
    MEMBER,
    SWITCH,
    Extension,
    build_extension,
    build_requirements,
    chosen_archs,
    extension_for,
    nvcc,
)
from vfork.extension_check import check_file
from vfork.pin import Base
from vfork.release import Release, record_entry
from vfork.sync import sync
from vfork.wheel import build_wheel

GetBase = Callable[[str], Base]
REPOSITORY = Path(__file__).parents[2]
ALL = ("8.0", "8.6", "8.9", "9.0", "10.0f", "12.0f")
EXTENSION = Extension(b"\x7fELF code", ("9.0", "12.0f"), "nvcc 13.0.88")
# Stand in for the tools: a build writes what the sources say. The real CMake chooses.
CMAKE = """#!/bin/sh
case "$1" in
--version) echo "cmake version 3.24.0";;
-P) exec {cmake} "$@";;
-S) mkdir -p "$4" && cat "$2/csrc/kernel.cu" > "$4/_glm_dsa_C.abi3.so"
    echo "$VLLM_GLM_DSA_CUDA_ARCHS" >> {log};;
--build) ! grep -q BROKEN "$2/_glm_dsa_C.abi3.so" && exit; echo "no such type"; exit 1;;
esac
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ARCHS, SWITCH, "CUDACXX"):
        monkeypatch.delenv(name, raising=False)


def without_tools(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes `folder` the only place where programs are looked for."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("CUDA_HOME", str(folder / "none"))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


@pytest.fixture
def kernels(seeded: Path) -> Path:
    """The project, with a source to compile and the real choice of architectures."""
    write(seeded, {"csrc/kernel.cu": "code\n"})
    shutil.copytree(REPOSITORY / "cmake", seeded / "cmake")
    return seeded


@pytest.fixture
def log(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands in for all tools; each build writes its architectures there."""
    log = tmp_path / "log"
    scripts = {
        "cmake": CMAKE.format(cmake=shutil.which("cmake"), log=log),
        "nvcc": "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n",
        "g++": "#!/bin/sh\necho 12.2.0\n",
        "ninja": "#!/bin/sh\n",
    }
    tools = {name: shutil.which(name) for name in ("cat", "grep", "mkdir", "sh")}
    without_tools(monkeypatch, tmp_path / "bin")
    write(tmp_path / "bin", scripts)
    for name in scripts:
        (tmp_path / "bin" / name).chmod(0o755)
    for name, path in tools.items():
        (tmp_path / "bin" / name).symlink_to(str(path))
    return log


@pytest.mark.parametrize(
    ("request_", "archs"),
    [
        pytest.param("", ALL, id="unset"),
        pytest.param("9.0;12.0f", ("9.0", "12.0f"), id="semicolons"),
        pytest.param("12.0, 9.0", ("9.0", "12.0f"), id="commas-and-order"),
        pytest.param("8.0 8.6", ("8.0", "8.6"), id="blanks"),
        pytest.param("12.1 10.3a", ("10.0f", "12.0f"), id="members-of-families"),
        pytest.param("9.0a 9.0", ("9.0",), id="suffix-and-twice"),
        pytest.param("7.5;9.0", ("9.0",), id="one-left-out"),
        pytest.param("10.1 12.9 9.0", ("9.0",), id="no-member-of-a-family"),
    ],
)
def test_architectures_are_those_asked_for_that_there_are(
    monkeypatch: pytest.MonkeyPatch, request_: str, archs: tuple[str, ...]
) -> None:
    monkeypatch.setenv(ARCHS, request_)
    assert chosen_archs(REPOSITORY) == archs


def test_architecture_that_is_left_out_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ARCHS, "7.5 9.0")
    chosen_archs(REPOSITORY)
    assert "vfork: CUDA architecture 7.5 is left out" in capfd.readouterr().err


@pytest.mark.parametrize("request_", ["7.5", "sm_90", "9.0+PTX", "9", "9.0 all"])
def test_unknown_or_empty_choice_names_found_and_expected(
    monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    monkeypatch.setenv(ARCHS, request_)
    with pytest.raises(VforkError) as caught:
        chosen_archs(REPOSITORY)
    assert caught.value.code == "VF513"
    text = " ".join(str(caught.value).split())
    assert repr(request_) in text
    assert "expected some of: 8.0;8.6;8.9;9.0;10.0f;12.0f" in text


def test_cpu_wheel_and_checkout_without_kernels_compile_nothing(
    seeded: Path, base: GetBase, log: Path
) -> None:
    assert extension_for(seeded, base("cpu")) is None
    shutil.rmtree(seeded / "csrc")
    assert extension_for(seeded, base("cuda")) is None
    assert not log.exists()


def test_missing_nvcc_is_told_in_one_line(
    kernels: Path,
    base: GetBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    without_tools(monkeypatch, tmp_path / "bin")
    assert extension_for(kernels, base("cuda")) is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("vfork: no compiled extension, as there is no nvcc 12.9 or ")
    assert line.endswith("Triton kernels do its work")


def test_missing_tool_is_an_error_where_the_extension_is_demanded(
    kernels: Path, base: GetBase, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (log.parent / "bin" / "ninja").unlink()
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(VforkError, match="there is no ninja\\n") as caught:
        extension_for(kernels, base("cuda"))
    assert caught.value.code == "VF512"


def test_older_cmake_does_not_count(
    kernels: Path, base: GetBase, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(log.parent, {"bin/cmake": "#!/bin/sh\necho cmake version 3.9.6\n"})
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(VforkError, match=r"there is no CMake 3\.24 or newer\n"):
        extension_for(kernels, base("cuda"))


def test_older_nvcc_does_not_count(
    kernels: Path, base: GetBase, log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(log.parent, {"bin/nvcc": "#!/bin/sh\necho release 12.4, V12.4.131\n"})
    assert extension_for(kernels, base("cuda")) is None
    assert "there is no nvcc 12.9 or newer;" in capfd.readouterr().err
    assert build_requirements(kernels) == []


def test_flags_of_the_environment_do_not_reach_the_build(
    kernels: Path, base: GetBase, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cmake = log.parent / "bin/cmake"
    said = '"$VLLM_GLM_DSA_CUDA_ARCHS"'
    text = cmake.read_text().replace(f"echo {said}", f'echo {said} "$CUDAFLAGS"')
    write(log.parent, {"bin/cmake": text})
    monkeypatch.setenv("CUDAFLAGS", "--debug-of-the-shell")
    assert extension_for(kernels, base("cuda")) is not None
    assert log.read_text().split() == [*ALL]


def test_extension_can_be_switched_off(
    kernels: Path,
    base: GetBase,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert extension_for(kernels, base("cuda")) is None
    assert f"as {SWITCH} is 0;" in capfd.readouterr().err
    assert not log.exists()


def test_unknown_switch_is_refused(
    kernels: Path, base: GetBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(VforkError, match="'yes', not 0 or 1") as caught:
        extension_for(kernels, base("cuda"))
    assert caught.value.code == "VF511"


def test_same_content_is_compiled_once(
    kernels: Path, base: GetBase, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = extension_for(kernels, base("cuda"))
    assert first == extension_for(kernels, base("cuda"))
    torch = importlib.metadata.version("torch")
    assert first == Extension(
        b"code\n", ALL, f"nvcc 13.0.88, g++ 12.2.0, headers of torch {torch}"
    )
    assert log.read_text() == "8.0 8.6 8.9 9.0 10.0f 12.0f\n"
    monkeypatch.setenv(ARCHS, "9.0")
    extension_for(kernels, base("cuda"))
    write(kernels, {"csrc/kernel.cu": "other code\n"})
    changed = extension_for(kernels, base("cuda"))
    assert changed and changed.data == b"other code\n"
    write(log.parent, {"bin/g++": "#!/bin/sh\necho 13.0.0\n"})
    extension_for(kernels, base("cuda"))
    assert log.read_text().splitlines()[1:] == ["9.0"] * 3


def test_failed_build_shows_the_last_lines_and_keeps_nothing(
    kernels: Path, base: GetBase, log: Path, cache: Path
) -> None:
    write(kernels, {"csrc/kernel.cu": "BROKEN\n"})
    for _ in range(2):
        with pytest.raises(VforkError) as caught:
            extension_for(kernels, base("cuda"))
        assert caught.value.code == "VF514"
        assert caught.value.excerpt == "no such type"
    assert [p.suffix for p in (cache / "extension").iterdir()] == [".lock"]


def test_build_requirements_are_for_the_cuda_wheel_alone(
    kernels: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kernels)
    for device, wanted in {"cpu": [], "cuda": ["torch==2.0.0"]}.items():
        monkeypatch.setenv("VLLM_TARGET_DEVICE", device)
        assert backend.get_requires_for_build_wheel() == wanted
    for name in ("cmake", "ninja"):
        (log.parent / "bin" / name).unlink()
    assert build_requirements(kernels) == ["torch==2.0.0", "cmake>=3.24", "ninja"]
    (log.parent / "bin" / "nvcc").unlink()
    assert build_requirements(kernels) == []
    monkeypatch.setenv(SWITCH, "1")
    assert build_requirements(kernels) != []
    monkeypatch.setenv(SWITCH, "0")
    assert build_requirements(kernels) == []


def test_pip_hook_puts_the_extension_into_the_wheel(
    kernels: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kernels)
    # git is needed to count commits, and not among the tools.
    (log.parent / "bin" / "git").symlink_to(shutil.which("git", path="/usr/bin") or "")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    name = backend.build_wheel(str(tmp_path / "dist"))
    with Release(tmp_path / "dist" / name) as built:
        assert built.read(MEMBER) == b"code\n"


def test_wheel_and_tree_hold_the_extension_and_the_manifest_names_it(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    wheel = build_wheel(seeded, base("cuda"), tmp_path / "dist", extension=EXTENSION)
    with Release(wheel) as built:
        assert built.read(MEMBER) == EXTENSION.data
        assert built.info(MEMBER).external_attr >> 16 & 0o777 == 0o755
        assert built.record_of(MEMBER) == record_entry(EXTENSION.data)
        manifest = json.loads(built.read("vllm/glm_dsa_manifest.json"))
    assert manifest["extension"] == {
        "file": "vllm/_glm_dsa_C.abi3.so",
        "sha256": hashlib.sha256(EXTENSION.data).hexdigest(),
        "archs": ["9.0", "12.0f"],
        "compiler": "nvcc 13.0.88",
    }
    assemble(seeded, base("cuda"), tmp_path / "tree", extension=EXTENSION)
    assert (tmp_path / "tree" / MEMBER).read_bytes() == EXTENSION.data


def test_wheel_without_the_extension_says_so_in_its_manifest(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    with Release(build_wheel(seeded, base("cuda"), tmp_path / "dist")) as built:
        assert MEMBER not in built
        assert json.loads(built.read("vllm/glm_dsa_manifest.json"))["extension"] is None


def test_sync_brings_replaces_and_removes_the_extension(
    kernels: Path,
    base: GetBase,
    log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = tmp_path / "site"
    (log.parent / "bin" / "git").symlink_to(shutil.which("git", path="/usr/bin") or "")
    with zipfile.ZipFile(
        build_wheel(kernels, base("cuda"), tmp_path / "dist")
    ) as built:
        built.extractall(site)
    assert MEMBER in sync(kernels, site).written
    assert (site / MEMBER).read_bytes() == b"code\n"
    assert sync(kernels, site).written == ()
    # A machine without the tools keeps what was installed, and its entry.
    (log.parent / "bin/nvcc").rename(log.parent / "nvcc")
    assert sync(kernels, site).removed == sync(kernels, site).written == ()
    assert (site / MEMBER).read_bytes() == b"code\n"
    (log.parent / "nvcc").rename(log.parent / "bin/nvcc")
    monkeypatch.setenv(SWITCH, "0")
    assert sync(kernels, site).removed == (MEMBER,)
    assert not (site / MEMBER).exists()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's build files with one small kernel in the sources' place."""
    if nvcc() is None:
        pytest.skip("needs nvcc")
    root = tmp_path_factory.mktemp("real")
    shutil.copytree(REPOSITORY / "cmake", root / "cmake")
    text = (REPOSITORY / "CMakeLists.txt").read_text("utf-8")
    sources = re.compile(r"set\(SOURCES\n[^)]*\)")
    assert sources.search(text)
    text = sources.sub("set(SOURCES csrc/bindings.cpp csrc/half.cu)", text)
    write(root, {"CMakeLists.txt": text, "csrc/bindings.cpp": BINDINGS})
    write(root, {"csrc/half.cu": KERNEL, "upstream.toml": ""})
    return root


@pytest.fixture(scope="module")
def library(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real extension for two architectures, written by the command."""
    path = real / "_glm_dsa_C.abi3.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VFORK_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv(ARCHS, "9.0 12.0f")
        assert main(["-C", str(real), "extension", "--out", str(path)]) == 0
        built = build_extension(real)  # from the cache
    assert built.data == path.read_bytes()
    return path


def test_real_build_passes_its_checks(
    real: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARCHS, "12.0 9.0")
    report = check_file(real, library)
    assert report.errors == ()
    assert report.cubins == {"sm_90": 1, "sm_120": 1}
    assert {"GLIBC", "GLIBCXX"} <= set(report.newest)
    assert report.operators == ("vllm_glm_dsa::half_of",)
    assert str(REPOSITORY).encode() not in library.read_bytes()


def test_check_of_a_real_build_finds_a_missing_architecture(
    real: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(ARCHS, "8.9 9.0 12.0f")
    assert main(["-C", str(real), "extension", "--json", "--check", str(library)]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["code"] == "VF515"
    assert "not for sm_120, sm_89, sm_90" in finding["message"]


def test_real_build_loads_and_registers_beside_a_cpu_torch(library: Path) -> None:
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); import _glm_dsa_C\n"
        "print(torch.ops.vllm_glm_dsa.half_of.default._schema)\n"
        "try: torch.ops.vllm_glm_dsa.half_of(torch.ones(2))\n"
        "except NotImplementedError as error: print('CUDA' in str(error))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(library.parent)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.stdout.splitlines() == [
        "vllm_glm_dsa::half_of(Tensor x) -> Tensor",
        "True",
    ], ran.stderr


def test_check_of_a_wheel_compares_its_manifest(
    real: Path,
    library: Path,
    seeded: Path,
    base: GetBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ARCHS, "9.0 12.0f")
    for archs, faults in {("9.0", "12.0f"): 0, ("9.0",): 1}.items():
        extension = Extension(library.read_bytes(), archs, "nvcc")
        wheel = build_wheel(seeded, base("cuda"), tmp_path, extension=extension)
        report = check_file(real, wheel)
        assert len(report.errors) == faults
        assert all("was built for 9.0, not" in str(error) for error in report.errors)


def test_check_of_a_wheel_without_extension_fails(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    wheel = build_wheel(seeded, base("cuda"), tmp_path)
    with pytest.raises(VforkError, match="holds no extension") as caught:
        check_file(REPOSITORY, wheel)
    assert caught.value.code == "VF515"


BINDINGS = """\
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

torch::stable::Tensor half_of(const torch::stable::Tensor& x);

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_glm_dsa, m) { m.def("half_of(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(vllm_glm_dsa, CUDA, m) {
  m.impl("half_of", TORCH_BOX(&half_of));
}

PyMODINIT_FUNC PyInit__glm_dsa_C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_glm_dsa_C"};
  return PyModule_Create(&module);
}
"""
KERNEL = """\
#include <cuda_runtime.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

__global__ void half_of_kernel(const float* x, float* out, int count) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) out[at] = x[at] / 2;
}

torch::stable::Tensor half_of(const torch::stable::Tensor& x) {
  auto out = torch::stable::empty_like(x);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  const auto* in = static_cast<const float*>(x.data_ptr());
  const int count = x.numel();
  half_of_kernel<<<(count + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      in, static_cast<float*>(out.data_ptr()), count);
  STD_TORCH_CHECK(cudaGetLastError() == cudaSuccess, "half_of did not start");
  return out;
}
"""
