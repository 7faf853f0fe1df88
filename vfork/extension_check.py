# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Whether a compiled extension loads and runs wherever the wheel claims to.

It must ask for no newer system library than manylinux_2_28 promises, for nothing of
torch but the stable C ABI of 2.11, and hold machine code of every chosen architecture.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from vfork.errors import VforkError
from vfork.extension import MEMBER, chosen_archs, cuda_tool
from vfork.image import MANIFEST

# The newest versions of symbols in glibc 2.28 and GCC 8, which the oldest systems of
# that glibc have (Debian 10, RHEL 8).
NEWEST = {
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 25),
    "CXXABI": (1, 3, 11),
    "GCC": (7, 0, 0),
}
# Libraries that the process has, once torch is imported.
LIBRARIES = frozenset(
    (
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
        "libc.so.6",
        "libdl.so.2",
        "libgcc_s.so.1",
        "libm.so.6",
        "libpthread.so.0",
        "librt.so.1",
        "libstdc++.so.6",
        "libtorch.so",
        "libtorch_cpu.so",
    )
)
ENTRY = "PyInit__glm_dsa_C"
# What compilers ask for weakly in every library.
OPTIONAL = frozenset(
    (
        "_ITM_deregisterTMCloneTable",
        "_ITM_registerTMCloneTable",
        "__cxa_finalize",
        "__gmon_start__",
    )
)

# Imports the library after torch and prints the operators that came with it.
_LOAD = """
import sys, importlib.util, torch
spec = importlib.util.spec_from_file_location("_glm_dsa_C", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
names = torch._C._dispatch_get_all_op_names()
print("OPERATORS", *sorted(n for n in names if n.startswith("vllm_glm_dsa::")))
"""
_TORCH = Path(__file__).with_name("torch_2_11_symbols.txt")
_SYMBOL = re.compile(
    r"^ *\d+: +\S+ +\S+ +\S+ +(?P<binding>\S+) +\S+ +(?P<section>\S+)"
    r" +(?P<name>[^\s@]+)(?:@+(?P<version>\S+))?",
    re.MULTILINE,
)
_DYNAMIC = re.compile(
    r"\((NEEDED|RPATH|RUNPATH)\)\s+[^\[]*\[(?P<value>.*)\]", re.MULTILINE
)
_RESOURCES = re.compile(
    r"^ *arch = (?P<arch>sm_\d+)|^ *Function (?P<kernel>\S+):$"
    r"|\bSTACK:(?P<stack>\d+) .*\bLOCAL:(?P<local>\d+)",
    re.MULTILINE,
)
# Bytes of a thread that a kernel may have in local memory: a few spilled registers.
MOST_SPILLED = 16
_CUBIN = re.compile(r"\.(sm_\d+[af]?)\.cubin$", re.MULTILINE)


@dataclass(frozen=True)
class Symbol:
    """An entry of the dynamic symbol table. `version` is "" or such as GLIBC_2.14."""

    name: str
    version: str
    weak: bool
    defined: bool


@dataclass(frozen=True)
class CheckReport:
    """What a library holds, and what speaks against it.

    `cubins` counts machine code by architecture, `newest` names the newest version of
    each system library that is asked for; `operators` are those it registers. `spilled`
    has bytes of local memory by kernel and architecture, for kernels that use any.
    """

    path: str
    archs: tuple[str, ...]
    cubins: dict[str, int]
    newest: dict[str, str]
    operators: tuple[str, ...]
    spilled: dict[str, int]
    errors: tuple[VforkError, ...]


def check_file(root: Path, path: Path) -> CheckReport:
    """Checks a library, or the one in a wheel, against the chosen architectures.

    Loads it beside the torch of this Python. Raises VforkError VF512 without that,
    readelf or cuobjdump, VF513 for a bad choice, and VF515 for a file that holds no
    extension.
    """
    archs = chosen_archs(root)
    errors: list[VforkError] = []
    with tempfile.TemporaryDirectory() as scratch:
        library = path
        if path.suffix == ".whl":
            library = Path(scratch, Path(MEMBER).name)
            errors += _unpack(path, library, archs)
        elif not path.is_file():
            raise _fault(f"there is no file {path}")
        symbols = read_symbols(library)
        errors += check_symbols(symbols)
        errors += check_dynamic(_readelf("--dynamic", library))
        listed = _run("cuobjdump", [_cuobjdump(), "--list-elf", str(library)])
        ptx = _run("cuobjdump", [_cuobjdump(), "--list-ptx", str(library)])
        dump = [_cuobjdump(), "--dump-resource-usage", str(library)]
        usage = _run("cuobjdump", dump)
        spilled = spilled_bytes(usage)
        if _CUBIN.search(listed) and not _RESOURCES.search(usage):
            errors.append(_fault("cuobjdump tells no resources of any kernel"))
        operators, failed = _load(library)
    errors += check_cubins(listed, ptx, archs)
    errors += check_spilled(spilled)
    errors += failed
    return CheckReport(
        path=str(path),
        archs=archs,
        cubins=dict(Counter(_CUBIN.findall(listed))),
        newest=_newest(symbols),
        operators=operators,
        spilled=spilled,
        errors=tuple(errors),
    )


def _unpack(wheel: Path, library: Path, archs: Sequence[str]) -> Iterator[VforkError]:
    """Writes the wheel's extension to `library`; yields the faults of its manifest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(MEMBER)
            entry = json.loads(archive.read(MANIFEST))["extension"]
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise _fault(
            f"{wheel} holds no extension: {error}",
            hint="build it with VLLM_GLM_DSA_EXTENSION=1, which says what is missing",
        ) from error
    library.write_bytes(data)
    if entry["sha256"] != hashlib.sha256(data).hexdigest():
        yield _fault(f"the manifest of {wheel.name} has another sha256 for {MEMBER}")
    if entry["archs"] != [*archs]:
        yield _fault(
            f"{wheel.name} was built for {', '.join(entry['archs'])}, "
            f"not for {', '.join(archs)}",
            hint="give VLLM_GLM_DSA_CUDA_ARCHS the same value as for the build",
        )


def read_symbols(library: Path) -> list[Symbol]:
    """The dynamic symbols of a library. Raises VforkError VF512 or VF515."""
    return [
        Symbol(
            name=match["name"],
            version=match["version"] or "",
            weak=match["binding"] == "WEAK",
            defined=match["section"] != "UND",
        )
        for match in _SYMBOL.finditer(_readelf("--dyn-syms", library))
    ]


def check_symbols(symbols: Iterable[Symbol]) -> Iterator[VforkError]:
    """VF515 for each symbol that some system, torch or Python would not have, and for
    what the library offers besides its entry."""
    stable, cuda_only = torch_symbols()
    defined: set[str] = set()
    for symbol in symbols:
        name = symbol.name
        if symbol.defined:
            defined.add(name)
        elif symbol.version:
            yield from _check_version(symbol)
        elif name in cuda_only and not symbol.weak:
            yield _fault(
                f"{name} is in CUDA builds of torch alone, and not weak here",
                hint="compile with cmake/weak_cuda_symbols.h",
            )
        elif name not in stable | cuda_only | OPTIONAL and not name.startswith("Py"):
            yield _fault(
                f"{name} is not in the stable ABI of torch 2.11, nor of Python",
                hint="use what torch/csrc/stable and torch/headeronly offer there",
            )
    if defined != {ENTRY}:
        yield _fault(
            f"the library defines {', '.join(sorted(defined)) or 'nothing'}, "
            f"not {ENTRY} alone",
            hint="csrc/bindings.cpp defines it, cmake/exports.map hides all else",
        )


def _check_version(symbol: Symbol) -> Iterator[VforkError]:
    library, _, version = symbol.version.partition("_")
    numbers = tuple(map(int, re.findall(r"\d+", version)))
    newest = NEWEST.get(library)
    if newest is None or not numbers or numbers > newest:
        limit = f"{library}_{'.'.join(map(str, newest))}" if newest else "nothing of it"
        yield _fault(
            f"{symbol.name} is asked for as {symbol.version}; {limit} is the newest "
            "that manylinux_2_28 has",
            hint="add it to cmake/old_glibc.cmake or cmake/old_libraries.cpp, or "
            "compile with GCC 12 or older",
        )


def check_dynamic(listed: str) -> Iterator[VforkError]:
    """VF515 for libraries that a process with torch may lack, and for search paths."""
    for match in _DYNAMIC.finditer(listed):
        if match[1] != "NEEDED":
            yield _fault(f"the library has a search path, {match['value']}")
        elif match["value"] not in LIBRARIES:
            yield _fault(f"the library needs {match['value']}, which not all have")


def check_cubins(listed: str, ptx: str, archs: Sequence[str]) -> Iterator[VforkError]:
    """VF515 unless there is machine code for `archs` and no other, and no PTX.

    `listed` and `ptx` are cuobjdump's lists.
    """
    found = Counter(_CUBIN.findall(listed))
    # cuobjdump leaves the `f` of a family out.
    wanted = {f"sm_{arch.replace('.', '').removesuffix('f')}" for arch in archs}
    if set(found) != wanted:
        yield _fault(
            f"the library has code for {', '.join(sorted(found)) or 'nothing'}, "
            f"not for {', '.join(sorted(wanted))}"
        )
    elif len(set(found.values())) > 1:
        counts = ", ".join(f"{arch}: {count}" for arch, count in sorted(found.items()))
        yield _fault(f"not every source has code for every architecture: {counts}")
    if ".ptx" in ptx:
        yield _fault("the library holds PTX, of which the driver would compile kernels")


def spilled_bytes(usage: str) -> dict[str, int]:
    """Bytes of a thread's stack and local memory in kernels that use any.

    By "<mangled name> for sm_<n>"; `usage` is cuobjdump's of resources.
    """
    arch = kernel = ""
    found = {}
    for match in _RESOURCES.finditer(usage):
        arch, kernel = match["arch"] or arch, match["kernel"] or kernel
        if match["stack"] and (size := int(match["stack"]) + int(match["local"])):
            found[f"{kernel} for {arch}"] = size
    return found


def check_spilled(spilled: Mapping[str, int]) -> Iterator[VforkError]:
    """VF515 for kernels with more than `MOST_SPILLED` bytes in local memory."""
    for kernel, size in spilled.items():
        if size > MOST_SPILLED:
            yield _fault(
                f"{kernel} has {size} bytes of a thread in local memory, more than "
                f"{MOST_SPILLED}",
                hint="it spills registers or indexes an array at run time: look at "
                "nvcc -Xptxas -v",
            )


def _load(library: Path) -> tuple[tuple[str, ...], list[VforkError]]:
    """The operators that the library registers, and why it does not load."""
    if find_spec("torch") is None:
        raise VforkError(
            "VF512",
            f"there is no torch in {sys.executable}, to load the extension beside it",
            hint="run vfork with a Python that has torch 2.11 or newer",
        )
    command = [sys.executable, "-c", _LOAD, str(library)]
    ran = subprocess.run(command, capture_output=True, text=True)
    _, found, names = ran.stdout.partition("OPERATORS")
    if not found:
        message = f"the library does not load: Python's status is {ran.returncode}"
        return (), [_fault(message, excerpt=ran.stderr.strip())]
    if not names.split():
        return (), [_fault("the library registers no operator of vllm_glm_dsa")]
    return tuple(names.split()), []


def torch_symbols() -> tuple[frozenset[str], frozenset[str]]:
    """Functions of torch 2.11's stable C ABI: of all builds, of CUDA builds alone."""
    lines = _TORCH.read_text("utf-8").splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    at = names.index("cuda:")
    return frozenset(names[:at]), frozenset(names[at + 1 :])


def _newest(symbols: Iterable[Symbol]) -> dict[str, str]:
    versions: dict[str, set[tuple[int, ...]]] = {}
    for symbol in symbols:
        library, _, version = symbol.version.partition("_")
        if version:
            numbers = tuple(map(int, re.findall(r"\d+", version)))
            versions.setdefault(library, set()).add(numbers)
    return {
        library: ".".join(map(str, max(found)))
        for library, found in sorted(versions.items())
    }


def _cuobjdump() -> str:
    """cuobjdump of the CUDA toolkit, or the one that Triton brings."""
    spec = find_spec("triton")
    folders = spec.submodule_search_locations or [] if spec else []
    brought = [Path(f, "backends", "nvidia", "bin", "cuobjdump") for f in folders]
    found = [str(path) for path in brought if path.is_file()]
    return cuda_tool("cuobjdump") or (found[0] if found else "cuobjdump")


def _readelf(option: str, library: Path) -> str:
    return _run("readelf", ["readelf", "--wide", option, str(library)])


def _run(tool: str, command: Sequence[str]) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise VforkError(
            "VF512",
            f"there is no {tool}: {error}",
            hint="readelf comes with binutils, cuobjdump with CUDA and with Triton",
        ) from error
    said = f"{ran.stdout}{ran.stderr}"
    # A library without any code of that kind is an error to cuobjdump.
    if ran.returncode and "does not contain" not in said:
        raise _fault(f"{tool} cannot read {command[-1]}", excerpt=said.strip())
    return ran.stdout


def _fault(message: str, *, excerpt: str = "", hint: str = "") -> VforkError:
    return VforkError("VF515", message, excerpt=excerpt, hint=hint)
