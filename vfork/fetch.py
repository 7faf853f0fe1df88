# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Gets a pinned release wheel into the cache with pip, and verifies it."""

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
    with _locked(wheel):
        if not wheel.exists():
            _download(base, wheel)
        elif not _noted(wheel, base):
            _verify(wheel, base, wheel)
    return wheel


@contextmanager
def _locked(wheel: Path) -> Iterator[None]:
    """Keeps other processes from downloading the same wheel."""
    try:
        wheel.parent.mkdir(parents=True, exist_ok=True)
        lock = open(wheel.with_name(wheel.name + ".lock"), "w")  # noqa: SIM115
    except OSError as error:
        raise VforkError(
            "VF407",
            f"the cache {wheel.parent} cannot be used: {error}",
            hint="set VFORK_CACHE to a directory you can write to",
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(base: Base, wheel: Path) -> None:
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix="fetch-") as scratch:
        # pip's progress goes to our stderr: stdout belongs to --json reports.
        pip = subprocess.run(
            _pip_command(base, scratch), stdout=2, stderr=subprocess.PIPE, text=True
        )
        got = Path(scratch, base.wheel)
        if pip.returncode or not got.is_file():
            came = ", ".join(sorted(os.listdir(scratch))) or "nothing"
            lines = pip.stderr.strip().splitlines()[-_PIP_LINES_SHOWN:]
            raise VforkError(
                "VF403",
                f"pip did not bring {base.wheel}: exit status {pip.returncode}, "
                f"{came} downloaded",
                excerpt="\n".join(lines),
                hint="check the network and pip's index settings, or put the wheel "
                f"into {wheel.parent} by hand",
            )
        _verify(got, base, wheel)
        os.replace(got, wheel)


def _pip_command(base: Base, directory: str) -> list[str]:
    """Asks for the pinned file, whatever Python and platform run this."""
    _, abi, platforms = base.tag.split("-")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--dest", directory, "--implementation", "cp", "--abi", abi]
    command += ["--python-version", base.python]
    for platform in platforms.split("."):
        command += ["--platform", platform]
    # `==` would also take a build with a local label, such as 0.33.0+cu129.
    return [*command, f"{base.distribution}==={base.version}"]


def _verify(path: Path, base: Base, final: Path) -> None:
    """Checks the sha256 of `path` and notes the result for `final`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != base.sha256:
        raise VforkError(
            "VF404",
            f"{path.name} has sha256 {found}, but upstream.toml pins {base.sha256}",
            hint=f"delete {final} and fetch again"
            if path == final
            else "the index serves another file than the pinned one; nothing was kept",
        )
    _note_path(final).write_text(_note(path, base), encoding="utf-8")


def _noted(wheel: Path, base: Base) -> bool:
    try:
        return _note_path(wheel).read_text(encoding="utf-8") == _note(wheel, base)
    except OSError:
        return False


def _note_path(wheel: Path) -> Path:
    return wheel.with_name(wheel.name + ".verified")


def _note(wheel: Path, base: Base) -> str:
    status = wheel.stat()
    return f"{base.sha256} {status.st_size} {status.st_mtime_ns}\n"
