# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Builds the compiled extension, with CMake and nvcc, once for the same content.

CMakeLists.txt says how it is compiled; here is when, with which tools, and where the
result is kept.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vfork.errors import VforkError
from vfork.fetch import cache_dir, locked
from vfork.pin import Base, load_pins

MEMBER = "vllm/_glm_dsa_C.abi3.so"
SWITCH = "VLLM_GLM_DSA_EXTENSION"
ARCHS = "VLLM_GLM_DSA_CUDA_ARCHS"
CMAKE = (3, 24)
NVCC = (12, 9)

_SOURCES = ("CMakeLists.txt", "cmake", "csrc")
_CHOSEN = re.compile(r"^-- CUDA architectures: (.+)$", re.MULTILINE)
_LINES_SHOWN = 30
# What else CMake and nvcc would take from the environment, and the key does not hold.
_FLAGS = (
    *("CFLAGS", "CPPFLAGS", "CXXFLAGS", "CUDAFLAGS", "CUDAHOSTCXX", "LDFLAGS"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"),
)


@dataclass(frozen=True)
class Extension:
    """A compiled extension. `archs` are as in CMakeLists.txt: ("9.0", "12.0f").

    `compiler` names what it was compiled with.
    """

    data: bytes
    archs: tuple[str, ...]
    compiler: str

    def entry(self) -> dict[str, object]:
        """What the manifest says of it."""
        return {
            "file": MEMBER,
            "sha256": hashlib.sha256(self.data).hexdigest(),
            "archs": list(self.archs),
            "compiler": self.compiler,
        }


def extension_for(root: Path, base: Base) -> Extension | None:
    """The extension for a wheel of this base, compiled if it is not in the cache.

    None for the CPU and for a checkout without kernels; also where
    VLLM_GLM_DSA_EXTENSION is 0, or unset and a tool is missing, which a line on stderr
    tells. Raises VforkError VF511 for another value, VF512 if it is 1 and a tool is
    missing, VF513 and VF514 if the build fails.
    """
    if base.name != "cuda" or not (root / "csrc").is_dir():
        return None
    demanded = _demanded()
    if switched_off():
        _note(f"{SWITCH} is 0")
        return None
    missing = missing_tools()
    if missing and demanded is None:
        _note(f"there is no {' and no '.join(missing)}")
        return None
    return build_extension(root)


def build_extension(root: Path) -> Extension:
    """The extension of a checkout, from the cache or compiled into it.

    Raises VforkError VF512, VF513 or VF514.
    """
    if missing := missing_tools():
        raise VforkError(
            "VF512",
            f"the extension cannot be compiled: there is no {' and no '.join(missing)}",
            hint=f"install what is missing, or set {SWITCH}=0 to do without",
        )
    archs = chosen_archs(root)
    compilers = _compilers()
    key = _key(root, archs, compilers)
    kept = cache_dir() / "extension" / key
    with locked(kept):
        if not kept.is_dir():
            _build(root, key, archs, kept)
    return Extension(
        data=(kept / Path(MEMBER).name).read_bytes(),
        archs=archs,
        compiler=f"nvcc {compilers['nvcc']}, g++ {compilers['g++']}, "
        f"headers of torch {compilers['torch']}",
    )


def build_requirements(root: Path) -> list[str]:
    """What pip must install to compile the extension: nothing where it is not wanted.

    The torch is that of the CPU base: its headers serve every release from 2.11 on.
    """
    demanded = _demanded()
    unwanted = demanded is False or (demanded is None and _new_nvcc() is None)
    if unwanted or not (root / "csrc").is_dir():
        return []
    tools = {"cmake>=3.24": _cmake(), "ninja": _program("ninja")}
    torch = f"torch=={load_pins(root)['cpu'].torch}"
    return [torch, *(name for name, found in tools.items() if not found)]


def chosen_archs(root: Path) -> tuple[str, ...]:
    """The architectures that VLLM_GLM_DSA_CUDA_ARCHS chooses; all if it is unset.

    Raises VforkError VF512 without CMake, VF513 for an unknown or empty choice.
    """
    cmake = _cmake()
    if cmake is None:
        raise VforkError(
            "VF512",
            "there is no CMake 3.24 or newer, which knows the architectures",
            hint="`pip install cmake`",
        )
    script = str(root / "cmake" / "cuda_archs.cmake")
    ran = subprocess.run([cmake, "-P", script], capture_output=True, text=True)
    chosen = _CHOSEN.search(ran.stdout)
    if ran.returncode or not chosen:
        raise VforkError(
            "VF513",
            f"{ARCHS} is {os.environ.get(ARCHS, '')!r}, which chooses no architectures",
            excerpt=ran.stderr.strip(),
            hint="unset it to compile for all",
        )
    left_out = [line for line in ran.stdout.splitlines() if "is left out" in line]
    for line in left_out:
        print(f"vfork: {line.removeprefix('-- ')}", file=sys.stderr)
    return tuple(chosen[1].split())


def missing_tools() -> list[str]:
    """What the build needs and this machine or Python lacks."""
    found = {
        f"nvcc {NVCC[0]}.{NVCC[1]} or newer": _new_nvcc(),
        f"CMake {CMAKE[0]}.{CMAKE[1]} or newer": _cmake(),
        "ninja": _program("ninja"),
        "g++": shutil.which("g++"),
        f"torch in {sys.executable}": _torch_version(),
    }
    return [name for name, where in found.items() if not where]


def nvcc() -> str | None:
    """CUDACXX, or nvcc on PATH, in CUDA_HOME or in /usr/local/cuda."""
    return os.environ.get("CUDACXX") or cuda_tool("nvcc")


def cuda_tool(name: str) -> str | None:
    """The path of a program of the CUDA toolkit."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which(name) or shutil.which(name, path=f"{home}/bin")


def switched_off() -> bool:
    """Whether VLLM_GLM_DSA_EXTENSION is 0. Raises VforkError VF511 for a bad value."""
    return _demanded() is False


def _demanded() -> bool | None:
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise VforkError(
            "VF511",
            f"{SWITCH} is {value!r}, not 0 or 1",
            hint="1 demands the extension, 0 leaves it out; unset, it is compiled "
            "where nvcc and what else it needs are found",
        )
    return None if value == "" else value == "1"


def _note(why: str) -> None:
    print(
        f"vfork: no compiled extension, as {why}; Triton kernels do its work",
        file=sys.stderr,
    )


def _cmake() -> str | None:
    """CMake, if it is new enough."""
    return _at_least(CMAKE, _program("cmake"), r"version (\d+)\.(\d+)")


def _new_nvcc() -> str | None:
    """nvcc, if it knows families of architectures."""
    return _at_least(NVCC, nvcc(), r"\bV(\d+)\.(\d+)")


def _at_least(oldest: tuple[int, int], program: str | None, said: str) -> str | None:
    """`program`, if the version that it says, by the pattern, is not older."""
    numbers = re.search(said, _output([program, "--version"]) if program else "")
    fits = numbers and (int(numbers[1]), int(numbers[2])) >= oldest
    return program if fits else None


def _program(name: str) -> str | None:
    """A program on PATH, or one that pip installed beside the running Python."""
    beside = Path(sys.executable).parent
    return shutil.which(name) or shutil.which(name, path=str(beside))


def _torch_version() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _compilers() -> dict[str, str]:
    """Versions of all that decides about the bytes."""
    release = re.search(r"\bV([\d.]+)", _output([nvcc() or "nvcc", "--version"]))
    return {
        "nvcc": release[1] if release else "of an unknown version",
        "g++": _output(["g++", "-dumpfullversion"]).strip(),
        "torch": _torch_version() or "",
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "cmake": _output([_cmake() or "cmake", "--version"]).split("\n")[0],
    }


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:
        return ""


def _key(root: Path, archs: tuple[str, ...], compilers: Mapping[str, str]) -> str:
    """A name for the result: the same for the same sources, choice and compilers."""
    sources = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in _source_files(root)
    }
    text = json.dumps([sources, archs, compilers], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _source_files(root: Path) -> Iterator[Path]:
    for name in _SOURCES:
        top = root / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            if path.is_file() and not hidden:
                yield path


def _build(root: Path, key: str, archs: tuple[str, ...], kept: Path) -> None:
    with _build_folder(key) as folder:
        for path in _source_files(root):
            copy = folder / "source" / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        environment = {k: v for k, v in os.environ.items() if k not in _FLAGS}
        environment |= {ARCHS: " ".join(archs), "CUDACXX": nvcc() or ""}
        environment |= {"CXX": "g++", "CC": "gcc"}
        cmake, out = _cmake() or "cmake", str(folder / "build")
        configure = [cmake, "-S", str(folder / "source"), "-B", out, "-G", "Ninja"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={_program('ninja')}"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}"]
        _run(configure, environment)
        _run([cmake, "--build", out], environment)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix="new-") as scratch:
            done = Path(scratch, "done")
            done.mkdir()
            shutil.copyfile(Path(out, Path(MEMBER).name), done / Path(MEMBER).name)
            os.replace(done, kept)


@contextmanager
def _build_folder(key: str) -> Iterator[Path]:
    """An empty folder whose path follows from the key.

    nvcc hashes the path of a source into names, so that another path gives other bytes.
    """
    folder = Path(tempfile.gettempdir(), f"vllm-glm-dsa-{key}")
    with locked(folder):
        if folder.is_dir() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder)  # left by a build that was cut short
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise VforkError(
                "VF514",
                f"the extension cannot be compiled in {folder}: {error}",
                hint="set TMPDIR to a directory that is yours",
            ) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    ran = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ran.returncode:
        raise VforkError(
            "VF514",
            f"`{' '.join(command)}` ended with status {ran.returncode}",
            excerpt="\n".join(ran.stdout.strip().splitlines()[-_LINES_SHOWN:]),
            hint=f"mend what the last lines say, or set {SWITCH}=0 to do without",
        )
