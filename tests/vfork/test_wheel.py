# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The fork wheel: raw copies, modes, RECORD, manifest, same bytes, installable."""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vfork.conftest import (
    CPU_WHEEL,
    CUDA_WHEEL,
    METADATA,
    File,
    git,
    pin_text,
    release_files,
    write,
    write_wheel,
)
from vfork.errors import VforkError
from vfork.pin import Base, load_pins
from vfork.release import Release, parse_record, record_entry
from vfork.wheel import build_wheel

GetBase = Callable[[str], Base]
CPU_VERSION = "1.2.0+glmdsa.3.cpu"


def deflated(path: Path, name: str) -> bytes:
    """The compressed bytes of a member, found through its local header."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(name)
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
        assert header[:4] == b"PK\x03\x04"
        lengths = struct.unpack("<HH", header[26:30])
        assert struct.unpack("<I", header[18:22]) == (info.compress_size,)
        file.seek(sum(lengths), os.SEEK_CUR)
        return file.read(info.compress_size)


@pytest.fixture
def cpu_wheel(seeded: Path, base: GetBase, tmp_path: Path) -> Path:
    return build_wheel(seeded, base("cpu"), tmp_path / "dist")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cuda", "vllm-1.3.0+glmdsa.3-cp38-abi3-manylinux_2_28_x86_64.whl"),
        ("cpu", f"vllm-{CPU_VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl"),
    ],
    ids=["cuda", "cpu"],
)
def test_file_name_dist_info_and_tags_agree(
    seeded: Path, base: GetBase, tmp_path: Path, name: str, file: str
) -> None:
    wheel = build_wheel(seeded, base(name), tmp_path / "dist")
    assert wheel == tmp_path / "dist" / file
    assert [path.name for path in wheel.parent.iterdir()] == [file]
    with Release(wheel) as built:
        assert built.dist_info == f"vllm-{file.split('-')[1]}.dist-info"
        assert built.read(f"{built.dist_info}/WHEEL").decode().splitlines() == [
            "Wheel-Version: 1.0",
            "Generator: vfork",
            "Root-Is-Purelib: false",
            "Tag: cp38-abi3-manylinux_2_28_x86_64",
        ]


def test_every_member_is_what_record_says(cpu_wheel: Path) -> None:
    with Release(cpu_wheel) as built:
        assert built.archive.testzip() is None
        record_name = f"{built.dist_info}/RECORD"
        assert set(built.record) == set(built.names())
        assert built.record[record_name] == ("", "")
        for name in built.names():
            data = built.archive.read(name)
            assert name == record_name or built.record[name] == record_entry(data)


def test_unchanged_members_are_raw_copies_with_their_attributes(
    cpu_wheel: Path, index: Path
) -> None:
    with Release(index / CPU_WHEEL) as release, Release(cpu_wheel) as built:
        changed = {"vllm/engine.py", "vllm/_version.py"}
        names = {n for n in release.names() if n.startswith("vllm/")} - changed
        assert len(names) == 7
        for name in names:
            ours, theirs = built.info(name), release.info(name)
            assert deflated(cpu_wheel, name) == deflated(release.path, name)
            assert ours.external_attr == theirs.external_attr
            assert ours.date_time == theirs.date_time
            assert ours.CRC == theirs.CRC


def test_unchanged_members_are_not_inflated(
    seeded: Path, base: GetBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inflated: list[str] = []
    read = zipfile.ZipFile.read

    def noted(self: zipfile.ZipFile, name: zipfile.ZipInfo) -> bytes:
        inflated.append(name.filename)
        return read(self, name)

    monkeypatch.setattr(zipfile.ZipFile, "read", noted)
    build_wheel(seeded, base("cpu"), tmp_path / "dist")
    payload = [name for name in inflated if name.startswith("vllm/")]
    assert payload == ["vllm/engine.py"]


def test_executable_bits_survive_the_build(cpu_wheel: Path) -> None:
    with zipfile.ZipFile(cpu_wheel) as archive:
        executable = {
            info.filename
            for info in archive.infolist()
            if info.external_attr >> 16 & 0o111
        }
    assert executable == {"vllm/_C.abi3.so", "vllm/tools/vllm-tool"}


def test_members_are_in_order_with_dist_info_and_record_last(cpu_wheel: Path) -> None:
    with Release(cpu_wheel) as built:
        names = built.names()
        payload = [name for name in names if name.startswith("vllm/")]
        rest = [*names[len(payload) :]]
    assert payload == sorted(payload) == [*names[: len(payload)]]
    assert rest[-1].endswith("/RECORD")
    assert rest[:-1] == sorted(rest[:-1])


def test_second_build_gives_the_same_bytes(
    seeded: Path, base: GetBase, cpu_wheel: Path, tmp_path: Path
) -> None:
    first = cpu_wheel.read_bytes()
    for path in (seeded / "vllm").rglob("*.py"):
        os.utime(path, (1_900_000_000, 1_900_000_000))
    again = build_wheel(seeded, base("cpu"), tmp_path / "again")
    assert again.read_bytes() == first


def test_build_from_a_copy_elsewhere_gives_the_same_bytes(
    seeded: Path, base: GetBase, cpu_wheel: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(seeded), str(clone))
    built = build_wheel(clone, load_pins(clone)["cpu"], tmp_path / "again")
    assert built.read_bytes() == cpu_wheel.read_bytes()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (1980, 1, 1, 0, 0, 0)),
        ("0", (1980, 1, 1, 0, 0, 0)),
        ("1790000000", (2026, 9, 21, 14, 13, 20)),
    ],
    ids=["unset", "before-1980", "set"],
)
def test_times_of_new_members_are_fixed(
    seeded: Path,
    base: GetBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    expected: tuple[int, ...],
) -> None:
    if text is not None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    with Release(build_wheel(seeded, base("cpu"), tmp_path / "dist")) as built:
        for name in ("vllm/engine.py", "vllm/extra/hook.py", built.names()[-1]):
            assert built.info(name).date_time == expected


@pytest.mark.parametrize("text", ["soon", "-1", "99999999999"])
def test_bad_source_date_is_refused(
    seeded: Path,
    base: GetBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    with pytest.raises(VforkError, match=text) as caught:
        build_wheel(seeded, base("cpu"), tmp_path / "dist")
    assert caught.value.code == "VF509"


def test_requirements_licenses_and_entry_points(cpu_wheel: Path) -> None:
    with Release(cpu_wheel) as built:
        info = built.dist_info
        metadata = built.read(f"{info}/METADATA").decode()
        assert [
            line.removeprefix("Requires-Dist: ")
            for line in metadata.splitlines()
            if line.startswith("Requires-Dist: ")
        ] == ["regex", "torch==2.0.0", 'torchaudio; extra == "audio"', "gguf>=0.19"]
        assert metadata.startswith("Metadata-Version: 2.4\nName: vllm\n")
        assert metadata.endswith(METADATA[METADATA.index("\n\n") :])
        assert built.read(f"{info}/licenses/LICENSE") == b"the release's license\n"
        for name, text in {
            "LICENSE": b"our license\n",
            "NOTICE": b"our notice\n",
        }.items():
            assert f"License-File: vllm-glm-dsa/{name}\n" in metadata
            assert built.read(f"{info}/licenses/vllm-glm-dsa/{name}") == text
        assert b"vllm.engine:start" in built.read(f"{info}/entry_points.txt")
        assert built.read(f"{info}/top_level.txt") == b"vllm\n"


def test_manifest_names_base_edits_and_overlay(
    cpu_wheel: Path, seeded: Path, base: GetBase
) -> None:
    with Release(cpu_wheel) as built:
        manifest = json.loads(built.read("vllm/glm_dsa_manifest.json"))
        hashes = {
            name: bytes.fromhex(entry["sha256"])
            for entry in manifest["overlay"]
            for name in [entry["file"]]
        }
        assert manifest["version"] == CPU_VERSION
        assert manifest["base"]["sha256"] == base("cpu").sha256
        assert manifest["base"]["version"] == "1.2.0"
        assert [(e["id"], e["file"]) for e in manifest["edits"]] == [
            ("engine-start", "vllm/engine.py")
        ]
        assert manifest["edits"][0]["why"].startswith("The release has no hook")
        assert sorted(hashes) == [
            "vllm/extra/__init__.py",
            "vllm/extra/hook.py",
            "vllm/v1/sparse.py",
        ]


def test_edited_file_that_is_not_pristine_stops_the_build(
    seeded: Path, index: Path, cache: Path, tmp_path: Path
) -> None:
    other = record_entry(b"something else")
    wheel = write_wheel(
        cache / CUDA_WHEEL,
        release_files("vllm", "1.3.0"),
        record={"vllm/engine.py": other},
    )
    write(seeded, {"upstream.toml": pin_text("cuda", wheel)})
    with pytest.raises(VforkError, match="vllm/engine.py") as caught:
        build_wheel(seeded, load_pins(seeded)["cuda"], tmp_path / "dist")
    assert caught.value.code == "VF203"
    assert not (tmp_path / "dist").exists()


def test_members_with_a_data_descriptor_are_copied_soundly(
    seeded: Path, cache: Path, tmp_path: Path
) -> None:
    """Writers to a pipe put sizes behind the data; the copy has them in front."""
    files = release_files("vllm", "1.3.0")
    plain = write_wheel(tmp_path / CUDA_WHEEL, files)
    pipe = Pipe()
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(pipe, "w") as archive:
        for info in source.infolist():
            archive.writestr(info, source.read(info))
    (cache / CUDA_WHEEL).write_bytes(pipe.getvalue())
    with zipfile.ZipFile(cache / CUDA_WHEEL) as archive:
        assert archive.getinfo("vllm/_C.abi3.so").flag_bits & 8
    write(seeded, {"upstream.toml": pin_text("cuda", cache / CUDA_WHEEL)})
    built = build_wheel(seeded, load_pins(seeded)["cuda"], tmp_path / "dist")
    name = "vllm/_C.abi3.so"
    assert deflated(built, name) == deflated(plain, name)
    with zipfile.ZipFile(built) as archive:
        assert archive.testzip() is None
        assert not archive.getinfo(name).flag_bits & 8


class Pipe(io.BytesIO):
    """A stream without positions, so that zipfile cannot go back to a header."""

    def tell(self) -> int:
        raise OSError("a pipe has no position")


def test_dry_run_checks_all_and_writes_nothing(
    seeded: Path, base: GetBase, tmp_path: Path
) -> None:
    planned = build_wheel(seeded, base("cpu"), tmp_path / "dist", dry_run=True)
    assert planned.name.startswith(f"vllm-{CPU_VERSION}-")
    assert not (tmp_path / "dist").exists()
    write(seeded, {"vllm/engine.py": ""})
    with pytest.raises(VforkError):
        build_wheel(seeded, base("cpu"), tmp_path / "dist", dry_run=True)


def test_pip_installs_the_wheel_and_its_command_runs(
    cpu_wheel: Path, tmp_path: Path
) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target"]
    subprocess.run([*pip, str(target), str(cpu_wheel)], check=True, capture_output=True)
    assert os.access(target / "vllm/tools/vllm-tool", os.X_OK)
    ran = subprocess.run(
        [target / "bin/vllm"],
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "hooked\n"
    record = parse_record(
        (target / f"vllm-{CPU_VERSION}.dist-info/RECORD").read_bytes()
    )
    assert record["vllm/extra/hook.py"] == record_entry(
        (target / "vllm/extra/hook.py").read_bytes()
    )


def test_release_with_other_modes_and_no_license_of_ours(
    seeded: Path, cache: Path, tmp_path: Path
) -> None:
    files = release_files("vllm", "1.3.0")
    files["vllm/engine.py"] = File(files["vllm/engine.py"].data, 0o755)
    wheel = write_wheel(cache / CUDA_WHEEL, files)
    write(seeded, {"upstream.toml": pin_text("cuda", wheel)})
    for name in ("LICENSE", "NOTICE"):
        (seeded / name).unlink()
    shutil.rmtree(seeded / "vllm")
    built = build_wheel(seeded, load_pins(seeded)["cuda"], tmp_path / "dist")
    with Release(built) as release:
        assert release.info("vllm/engine.py").external_attr >> 16 & 0o777 == 0o755
        assert not any("vllm-glm-dsa" in name for name in release.names())
        assert json.loads(release.read("vllm/glm_dsa_manifest.json"))["overlay"] == []
