# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Builds the source distribution: the files git tracks, and PKG-INFO."""

import gzip
import io
import os
import subprocess
import tarfile
from pathlib import Path

from vfork.distinfo import NAME
from vfork.errors import VforkError
from vfork.wheel import source_date

_METADATA = "PKG-INFO"


def build_sdist(root: Path, version: str, out_dir: Path) -> Path:
    """Writes `vllm-<version>.tar.gz` to `out_dir` and returns its path.

    Makes `out_dir` if need be. Works in a clone and in an unpacked source
    distribution, and gives the same bytes for the same files. Raises VforkError VF510
    if the files cannot be listed.
    """
    names = source_files(root)
    top = f"{NAME}-{version}"
    target = out_dir / f"{top}.tar.gz"
    unfinished = target.with_name(target.name + ".part")
    out_dir.mkdir(parents=True, exist_ok=True)
    with (
        unfinished.open("wb") as file,
        gzip.GzipFile("", "wb", mtime=source_date(), fileobj=file) as stream,
        tarfile.open(mode="w", fileobj=stream, format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            _add(archive, f"{top}/{name}", root / name)
        metadata = _pkg_info(version)
        info = _normal(tarfile.TarInfo(f"{top}/{_METADATA}"), executable=False)
        info.size = len(metadata)
        archive.addfile(info, io.BytesIO(metadata))
    os.replace(unfinished, target)
    return target


def source_files(root: Path) -> list[str]:
    """Files of the checkout, relative to its root: those that git tracks.

    In an unpacked source distribution, all of it. Raises VforkError VF510.
    """
    return _tracked(root) if (root / ".git").exists() else _present(root)


def _tracked(root: Path) -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        stderr = getattr(error, "stderr", None) or b""
        raise VforkError(
            "VF510",
            f"git cannot list the files of {root}: {error}",
            excerpt=stderr.decode(errors="replace").strip(),
            hint="install git, and make the clone belong to the user who builds",
        ) from error
    names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    return sorted(name for name in names if (root / name).is_file())


def _present(root: Path) -> list[str]:
    """All files of an unpacked source distribution, less what running it leaves."""
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(
        path.as_posix()
        for path in paths
        if path.suffix != ".pyc"
        and path.as_posix() != _METADATA
        and path.parts[0] not in ("build", "dist")
    )


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    executable = bool(path.stat().st_mode & 0o100)
    info = _normal(tarfile.TarInfo(name), executable=executable)
    info.size = path.stat().st_size
    with path.open("rb") as file:
        archive.addfile(info, file)


def _normal(info: tarfile.TarInfo, *, executable: bool) -> tarfile.TarInfo:
    info.mode = 0o755 if executable else 0o644
    info.mtime = source_date()
    return info


def _pkg_info(version: str) -> bytes:
    return (
        "Metadata-Version: 2.4\n"
        f"Name: {NAME}\n"
        f"Version: {version}\n"
        "Summary: Fork of vLLM that serves GLM-5 (glm-dsa) GGUF files\n"
        "Requires-Python: >=3.11\n"
        "Dynamic: Requires-Dist\n"
        "Dynamic: Provides-Extra\n"
    ).encode()
