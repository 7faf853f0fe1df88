# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Fetching through pip from a local directory: cache, hash checks, no network."""

import hashlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.vfork.conftest import CPU_WHEEL, CUDA_WHEEL, release_files, write_wheel
from vfork import fetch as fetching
from vfork.errors import VforkError
from vfork.fetch import cache_dir, fetch
from vfork.pin import Base

GetBase = Callable[[str], Base]


@pytest.mark.parametrize(
    ("name", "wheel"), [("cuda", CUDA_WHEEL), ("cpu", CPU_WHEEL)], ids=["cuda", "cpu"]
)
def test_fetch_brings_the_pinned_wheel_into_the_cache(
    base: GetBase, index: Path, cache: Path, name: str, wheel: str
) -> None:
    assert fetch(base(name)) == cache / wheel
    assert (cache / wheel).read_bytes() == (index / wheel).read_bytes()


def test_fetched_wheel_is_neither_downloaded_nor_hashed_again(
    base: GetBase, index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(base("cpu"))
    shutil.rmtree(index)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert fetch(base("cpu")) == cache / CPU_WHEEL


def test_wheel_put_into_the_cache_by_hand_is_verified_once(
    base: GetBase, index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    shutil.move(index / CPU_WHEEL, cache)
    assert fetch(base("cpu")) == cache / CPU_WHEEL
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert fetch(base("cpu")) == cache / CPU_WHEEL


def test_build_of_the_same_version_with_a_local_label_is_not_taken(
    base: GetBase, index: Path, cache: Path
) -> None:
    labeled = CUDA_WHEEL.replace("1.3.0", "1.3.0+cu129")
    write_wheel(index / labeled, release_files("vllm", "1.3.0+cu129"))
    assert fetch(base("cuda")) == cache / CUDA_WHEEL


def test_index_that_serves_another_file_is_refused_and_nothing_kept(
    base: GetBase, index: Path, cache: Path
) -> None:
    files = release_files("vllm", "1.3.0")
    del files["vllm/v1/worker.py"]
    write_wheel(index / CUDA_WHEEL, files)
    with pytest.raises(VforkError, match="upstream.toml pins") as caught:
        fetch(base("cuda"))
    assert caught.value.code == "VF404"
    assert [path.name for path in cache.iterdir()] == [f"{CUDA_WHEEL}.lock"]


def test_cached_wheel_that_changed_is_refused_with_its_path(
    base: GetBase, cache: Path
) -> None:
    wheel = fetch(base("cuda"))
    damaged = bytearray(wheel.read_bytes())
    damaged[100] ^= 1
    wheel.write_bytes(damaged)
    os.utime(wheel, ns=(1, 1))
    with pytest.raises(VforkError) as caught:
        fetch(base("cuda"))
    assert caught.value.code == "VF404"
    assert f"delete {wheel}" in caught.value.hint


def test_moved_pin_makes_the_note_of_the_old_hash_void(
    base: GetBase, cache: Path
) -> None:
    fetch(base("cuda"))
    with pytest.raises(VforkError) as caught:
        fetch(replace(base("cuda"), sha256="0" * 64))
    assert caught.value.code == "VF404"


def test_without_network_the_error_shows_what_pip_said(
    base: GetBase, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(VforkError, match="pip did not bring") as caught:
        fetch(base("cuda"))
    assert caught.value.code == "VF403"
    assert "No matching distribution" in caught.value.excerpt
    assert "network" in caught.value.hint
    assert not (cache / CUDA_WHEEL).exists()


def test_two_fetches_at_once_download_once(
    base: GetBase, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[str] = []
    download = fetching._download

    def counted(pin: Base, wheel: Path) -> None:
        downloads.append(pin.name)
        download(pin, wheel)

    monkeypatch.setattr(fetching, "_download", counted)
    pin = base("cpu")
    with ThreadPoolExecutor(2) as pool:
        paths = [*pool.map(fetch, [pin, pin])]
    assert paths == [cache / CPU_WHEEL] * 2
    assert downloads == ["cpu"]


def test_dry_run_leaves_the_cache_alone(base: GetBase, cache: Path) -> None:
    assert fetch(base("cuda"), dry_run=True) == cache / CUDA_WHEEL
    assert not cache.exists()


def test_cache_that_cannot_be_made_is_reported(
    base: GetBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VFORK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(VforkError) as caught:
        fetch(base("cuda"))
    assert caught.value.code == "VF407"
    assert "VFORK_CACHE" in caught.value.hint


def test_cache_is_in_the_home_directory_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VFORK_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/vfork")
