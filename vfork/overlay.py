# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The new modules under `vllm/`, and the check that they do not meet upstream's."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vfork.errors import VforkError
from vfork.release import Release

PACKAGE = "vllm"


@dataclass(frozen=True)
class Member:
    """A file to install. `mode` holds its permission bits."""

    data: bytes
    mode: int = 0o644


def overlay_files(root: Path) -> dict[str, Member]:
    """Everything under `vllm/` of a checkout but caches and hidden files, by path.

    Raises VforkError VF503 for anything that is neither file nor directory.
    """
    files: dict[str, Member] = {}
    for path in sorted((root / PACKAGE).rglob("*")):
        relative = path.relative_to(root)
        if path.suffix == ".pyc" or any(_ignored(part) for part in relative.parts):
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise VforkError(
                "VF503",
                f"{relative} is neither a regular file nor a directory",
                hint="a wheel cannot hold links; put the file itself there",
            )
        if path.is_file():
            executable = path.stat().st_mode & 0o100
            mode = 0o755 if executable else 0o644
            files[relative.as_posix()] = Member(path.read_bytes(), mode)
    return files


def _ignored(part: str) -> bool:
    return part.startswith(".") or part == "__pycache__"


def check_overlay(paths: list[str], release: Release) -> None:
    """Refuses overlay paths that the release owns.

    Raises VforkError VF304 if a path, or the module it defines, exists upstream, and
    VF502 for an `__init__.py` in one of the release's directories.
    """
    for path in paths:
        _check_path(path, release)


def _check_path(path: str, release: Release) -> None:
    pure = PurePosixPath(path)
    owned = [path] if path in release else []
    if pure.suffix == ".py" and str(pure.with_suffix("")) in release.directories:
        owned.append(f"{pure.with_suffix('')}/")
    owned += [f"{parent}.py" for parent in pure.parents if f"{parent}.py" in release]
    if owned:
        raise VforkError(
            "VF304",
            f"overlay file {path} collides with {owned[0]} of {release.path.name}",
            hint="upstream may have caught up: drop our module, or give it another "
            "path; a change to an upstream file is an edit",
        )
    if pure.name == "__init__.py" and str(pure.parent) in release.directories:
        raise VforkError(
            "VF502",
            f"overlay file {path} would take over the directory {pure.parent} "
            f"of {release.path.name}",
            hint="only directories that the fork adds have an __init__.py of ours",
        )
