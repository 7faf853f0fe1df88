# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the check of a compiled extension accepts and what it finds.

The libraries are compiled here, by the host's C compiler: they have the symbols of an
extension, and no code.
"""

import json
import re
import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from vfork import extension_check
from vfork.cli import main
from vfork.errors import VforkError
from vfork.extension_check import (
    CheckReport,
    check_cubins,
    check_dynamic,
    check_file,
    check_spilled,
    check_symbols,
    read_symbols,
    spilled_bytes,
    torch_symbols,
)

REPOSITORY = Path(__file__).parents[2]
ENTRY = "void *PyModule_Create2(); void *PyInit__glm_dsa_C(void) { %s return 0; }\n"
MODULE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_glm_dsa_C"};
PyMODINIT_FUNC PyInit__glm_dsa_C(void) { %s return PyModule_Create(&module); }
"""
LISTED = """\
ELF file    1: x.1.sm_90.cubin
ELF file    2: x.2.sm_120.cubin
ELF file    3: x.3.sm_90.cubin
ELF file    4: x.4.sm_120.cubin
"""


def compiled(folder: Path, source: str, *options: str) -> Path:
    path = folder / "library.so"
    (folder / "source.c").write_text(source)
    gcc = ["gcc", "-shared", "-fPIC", "-w", "-o", str(path), str(folder / "source.c")]
    subprocess.run([*gcc, *options], check=True)
    return path


def calling(folder: Path, *names: str, declared: str = "") -> Path:
    """A library like the extension that calls functions without versions."""
    calls = " ".join(f"{name}();" for name in ("PyModule_Create2", *names))
    functions = "".join(f"void {name}();\n" for name in names)
    return compiled(folder, declared + functions + ENTRY % calls)


def faults(library: Path) -> list[str]:
    found = [*check_symbols(read_symbols(library))]
    assert all(error.code == "VF515" for error in found)
    return [error.message for error in found]


def test_stable_torch_functions_and_python_are_accepted(tmp_path: Path) -> None:
    names = ["aoti_torch_get_data_ptr", "torch_library_impl", "torch_call_dispatcher"]
    assert faults(calling(tmp_path, *names)) == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("_ZN2at5emptyEv", id="aten"),
        pytest.param("_ZN3c1016throwNullDataPtrErrorEv", id="c10"),
        pytest.param("torch_tag_core", id="stable-since-2.12"),
        pytest.param("aoti_torch_cpu_mul_Tensor", id="aoti-only"),
        pytest.param("cudaMalloc", id="cuda-runtime"),
    ],
)
def test_function_outside_the_stable_abi_is_found(tmp_path: Path, name: str) -> None:
    (fault,) = faults(calling(tmp_path, name))
    assert fault.startswith(f"{name} is not in the stable ABI of torch 2.11")


def test_function_outside_the_stable_abi_is_found_if_weak_too(tmp_path: Path) -> None:
    weak = "#pragma weak _ZN2at5emptyEv\n"
    (fault,) = faults(calling(tmp_path, "_ZN2at5emptyEv", declared=weak))
    assert fault.startswith("_ZN2at5emptyEv is not in")


def test_function_of_cuda_builds_must_be_weak(tmp_path: Path) -> None:
    name = "aoti_torch_get_current_cuda_stream"
    (fault,) = faults(calling(tmp_path, name))
    assert fault == f"{name} is in CUDA builds of torch alone, and not weak here"
    header = REPOSITORY / "cmake" / "weak_cuda_symbols.h"
    assert faults(calling(tmp_path, name, declared=header.read_text())) == []


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("GLIBC_2.2.5", True),
        ("GLIBC_2.28", True),
        ("GLIBC_2.29", False),
        ("GLIBC_2.34", False),
        ("GLIBC_PRIVATE", False),
        ("GLIBCXX_3.4.25", True),
        ("GLIBCXX_3.4.26", False),
        ("CXXABI_1.3.11", True),
        ("CXXABI_1.3.12", False),
        ("GCC_7.0.0", True),
        ("GCC_14.0.0", False),
        ("libcudart.so.13", False),
    ],
)
def test_versions_are_those_of_manylinux_2_28(
    tmp_path: Path, version: str, accepted: bool
) -> None:
    (tmp_path / "map").write_text(f"{version} {{ global: versioned; }};")
    other = tmp_path / "other"
    other.mkdir()
    (other / "source.c").write_text("void versioned(void) {}\n")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-nostdlib", f"-Wl,--version-script={tmp_path}/map"]
        + ["-o", str(other / "libother.so"), str(other / "source.c")],
        check=True,
    )
    source = "void versioned();\n" + ENTRY % "versioned();"
    found = faults(compiled(tmp_path, source, str(other / "libother.so")))
    assert len(found) == (not accepted)
    assert all(f"versioned is asked for as {version};" in fault for fault in found)


def test_library_offers_its_entry_alone(tmp_path: Path) -> None:
    (fault,) = faults(compiled(tmp_path, "void helper() {}\n" + ENTRY % ""))
    assert fault == (
        "the library defines PyInit__glm_dsa_C, helper, not PyInit__glm_dsa_C alone"
    )
    (fault,) = faults(compiled(tmp_path, "static void nothing() {}\n"))
    assert fault == "the library defines nothing, not PyInit__glm_dsa_C alone"


def test_needed_library_and_search_path_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "cudart"
    folder.mkdir()
    runtime = compiled(folder, "", "-Wl,-soname,libcudart.so.13")
    plain = compiled(tmp_path, ENTRY % "")
    dynamic = extension_check._readelf("--dynamic", plain)
    assert [*check_dynamic(dynamic)] == []
    options = [str(runtime), "-Wl,--no-as-needed", "-Wl,-rpath,/some/where"]
    dynamic = extension_check._readelf(
        "--dynamic", compiled(tmp_path, ENTRY % "", *options[1:], options[0])
    )
    assert {error.message for error in check_dynamic(dynamic)} == {
        "the library needs libcudart.so.13, which not all have",
        "the library has a search path, /some/where",
    }


def cubin_faults(listed: str, *archs: str, ptx: str = "no PTX file found") -> list[str]:
    return [error.message for error in check_cubins(listed, ptx, archs)]


def test_code_for_each_architecture_and_no_other_is_accepted() -> None:
    assert cubin_faults(LISTED, "9.0", "12.0f") == []


@pytest.mark.parametrize(
    ("archs", "fault"),
    [
        (("9.0",), "code for sm_120, sm_90, not for sm_90"),
        (("8.9", "9.0", "12.0f"), "not for sm_120, sm_89, sm_90"),
        (("9.0", "10.0f"), "not for sm_100, sm_90"),
    ],
    ids=["more", "fewer", "other"],
)
def test_other_architectures_are_found(archs: tuple[str, ...], fault: str) -> None:
    (found,) = cubin_faults(LISTED, *archs)
    assert found.endswith(fault)


def test_library_without_code_is_found() -> None:
    (found,) = cubin_faults("", "9.0")
    assert found == "the library has code for nothing, not for sm_90"


def test_source_that_lacks_an_architecture_is_found() -> None:
    (found,) = cubin_faults(LISTED.rpartition("ELF")[0], "9.0", "12.0f")
    assert found.endswith("for every architecture: sm_120: 1, sm_90: 2")


def test_ptx_is_found() -> None:
    (found,) = cubin_faults(
        LISTED, "9.0", "12.0f", ptx="PTX file    1: x.1.sm_90.ptx\n"
    )
    assert "holds PTX" in found


def test_library_that_does_not_load_or_registers_nothing_is_found(
    tmp_path: Path,
) -> None:
    headers = f"-I{sysconfig.get_path('include')}"
    for name, fault in {"undefined_one": "does not load", "": "no operator"}.items():
        library = compiled(tmp_path, MODULE % (name and f"{name}();"), headers)
        operators, (error,) = extension_check._load(library)
        assert operators == ()
        assert fault in error.message
        assert name in error.excerpt


def test_library_of_the_host_fails_for_lack_of_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = calling(tmp_path, "torch_library_impl")
    command = ["-C", str(REPOSITORY), "extension", "--json", "--check", str(library)]
    assert main(command) == 1
    report = json.loads(capsys.readouterr().out)
    assert {found["code"] for found in report["findings"]} == {"VF515"}
    assert "code for nothing" in report["findings"][0]["message"]
    assert report["cubins"] == {}


def test_missing_file_and_text_file_are_refused(tmp_path: Path) -> None:
    for name in ("missing.so", "text.so"):
        (tmp_path / "text.so").write_text("no library")
        with pytest.raises(VforkError, match=name) as caught:
            check_file(REPOSITORY, tmp_path / name)
        assert caught.value.code == "VF515"


def test_missing_cuobjdump_is_an_error_not_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension_check, "_cuobjdump", lambda: "cuobjdump-of-nobody")
    with pytest.raises(VforkError, match="there is no cuobjdump") as caught:
        check_file(REPOSITORY, calling(tmp_path))
    assert caught.value.code == "VF512"


def test_report_names_the_newest_versions(tmp_path: Path) -> None:
    source = "#include <stdlib.h>\n" + ENTRY % "free(malloc(1));"
    report: CheckReport = check_file(REPOSITORY, compiled(tmp_path, source))
    assert re.fullmatch(r"2\.\d+(\.\d+)?", report.newest["GLIBC"])


def test_names_of_the_stable_abi_are_in_the_installed_torch() -> None:
    spec = find_spec("torch")
    assert spec and spec.submodule_search_locations
    library = Path(spec.submodule_search_locations[0], "lib", "libtorch_cpu.so")
    exported = {s.name for s in read_symbols(library) if s.defined}
    stable, cuda_only = torch_symbols()
    assert stable - exported == set()
    assert "torch_library_impl" in stable and len(stable) > 150
    assert cuda_only & exported == set()


def test_header_makes_all_functions_of_cuda_builds_weak() -> None:
    header = (REPOSITORY / "cmake" / "weak_cuda_symbols.h").read_text()
    _, cuda_only = torch_symbols()
    assert set(re.findall(r"^#pragma weak (\w+)$", header, re.MULTILINE)) == cuda_only


USAGE = """\
Fatbin elf code:
================
arch = sm_90
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _Z1aPf:
  REG:96 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:640 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z1bPf:
  REG:96 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:640 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_120
 Function _Z1aPf:
  REG:255 STACK:0 SHARED:0 LOCAL:24 CONSTANT[0]:640 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_kernels_that_spill_are_named_and_many_bytes_refused() -> None:
    spilled = spilled_bytes(USAGE)
    assert spilled == {"_Z1bPf for sm_90": 16, "_Z1aPf for sm_120": 24}
    (fault,) = check_spilled(spilled)
    assert fault.code == "VF515"
    assert fault.message.startswith("_Z1aPf for sm_120 has 24 bytes of a thread in")
    assert (
        spilled_bytes(USAGE.replace("LOCAL:24", "LOCAL:0").replace(":16", ":0")) == {}
    )
