# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Gets release wheels into the cache with pip, and verifies the pinned ones."""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vfork.errors import VforkError
from vfork.pin import Base

_PIP_LINES_SHOWN = 8


def cache_dir() -> Path:
    """`$VFORK_CACHE`, or `~/.cache/vfork`."""
    return Path(os.environ.get("VFORK_CACHE") or "~/.cache/vfork").expanduser()


def fetch(base: Base, *, dry_run: bool = False) -> Path:
    """The pinned wheel in the cache, downloaded if it is not there yet.

    The sha256 is computed once per file; after that a note of size and modification
    time answers. A dry run returns the path without looking.
    Raises VforkError VF403 (no download), VF404 (wrong hash) or VF407 (cache unusable).
    """
    wheel = cache_dir() / base.wheel
    if dry_run or _noted(wheel, base):
        return wheel
    with locked(wheel):
        if not wheel.exists():
            _download(base, wheel)
        elif not _noted(wheel, base):
            _verify(wheel, base, wheel)
    return wheel


@contextmanager
def locked(wheel: Path) -> Iterator[None]:
    """Keeps other processes from downloading the same wheel. Raises VF407."""
    try:
        wheel.parent.mkdir(parents=True, exist_ok=True)
        lock = open(wheel.with_name(wheel.name + ".lock"), "w")  # noqa: SIM115
    except OSError as error:
        raise _unusable(wheel.parent, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(base: Base, wheel: Path) -> None:
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix="fetch-") as scratch:
        pip = pip_download(base, base.version, scratch)
        got = Path(scratch, base.wheel)
        if pip.returncode or not got.is_file():
            came = ", ".join(sorted(os.listdir(scratch))) or "nothing"
            raise VforkError(
                "VF403",
                f"pip did not bring {base.wheel}: exit status {pip.returncode}, "
                f"{came} downloaded",
                excerpt=pip_lines(pip.stderr),
                hint="check the network and pip's index settings, or put the wheel "
                f"into {wheel.parent} by hand",
            )
        _verify(got, base, wheel)
        os.replace(got, wheel)


def pip_download(
    base: Base, version: str, directory: str
) -> subprocess.CompletedProcess[str]:
    """Runs pip for a release of the base's distribution, for the pinned platform.

    pip's progress goes to our stderr: stdout belongs to --json reports.
    """
    command = _pip_command(base, version, directory)
    return subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)


def pip_lines(stderr: str) -> str:
    """The last lines of what pip complained about."""
    return "\n".join(stderr.strip().splitlines()[-_PIP_LINES_SHOWN:])


def _pip_command(base: Base, version: str, directory: str) -> list[str]:
    """Asks for one release, whatever Python and platform run this."""
    _, abi, platforms = base.tag.split("-")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--dest", directory, "--implementation", "cp", "--abi", abi]
    command += ["--python-version", base.python]
    for platform in platforms.split("."):
        command += ["--platform", platform]
    # `==` would also take a build with a local label, such as 0.33.0+cu129.
    return [*command, f"{base.distribution}==={version}"]


def _verify(path: Path, base: Base, final: Path) -> None:
    """Checks the sha256 of `path` and notes the result for `final`."""
    found = _sha256(path)
    if found != base.sha256:
        raise VforkError(
            "VF404",
            f"{path.name} has sha256 {found}, but upstream.toml pins {base.sha256}",
            hint=f"delete {final} and fetch again"
            if path == final
            else "the index serves another file than the pinned one; nothing was kept",
        )
    _note_path(final).write_text(_note(path, found), encoding="utf-8")


def keep(got: Path) -> Path:
    """Moves a wheel that no pin names from a scratch directory into the cache."""
    wheel = cache_dir() / got.name
    _note_path(wheel).write_text(_note(got, _sha256(got)), encoding="utf-8")
    os.replace(got, wheel)
    return wheel


def noted_sha256(wheel: Path) -> str:
    """The sha256 of a wheel in the cache, computed once per file. Raises VF407."""
    try:
        noted = _note_path(wheel).read_text(encoding="utf-8")
        sha256 = noted.split(" ", 1)[0]
        if noted == _note(wheel, sha256):
            return sha256
    except OSError:
        pass
    try:
        sha256 = _sha256(wheel)
        _note_path(wheel).write_text(_note(wheel, sha256), encoding="utf-8")
    except OSError as error:
        raise _unusable(wheel.parent, error) from error
    return sha256


def _unusable(cache: Path, error: OSError) -> VforkError:
    return VforkError(
        "VF407",
        f"the cache {cache} cannot be used: {error}",
        hint="set VFORK_CACHE to a directory you can write to",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _noted(wheel: Path, base: Base) -> bool:
    try:
        noted = _note_path(wheel).read_text(encoding="utf-8")
        return noted == _note(wheel, base.sha256)
    except OSError:
        return False


def _note_path(wheel: Path) -> Path:
    return wheel.with_name(wheel.name + ".verified")


def _note(wheel: Path, sha256: str) -> str:
    status = wheel.stat()
    return f"{sha256} {status.st_size} {status.st_mtime_ns}\n"
