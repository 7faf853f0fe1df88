# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The build number in the fork's version: commits since the last tag, or in all."""

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from vfork.errors import VforkError
from vfork.pin import LABEL


def build_number(root: Path) -> int:
    """The build number of a clone (local changes do not count) or an unpacked sdist.

    A shallow clone gives a warning on stderr, as it can lack commits that count.
    Raises VforkError VF505 if the directory is neither.
    """
    if (root / ".git").exists():
        _warn_if_shallow(root)
        return _from_clone(root)
    try:
        metadata = (root / "PKG-INFO").read_text(encoding="utf-8")
    except OSError:
        metadata = ""
    found = re.search(rf"^Version: \S+\+{LABEL}\.(\d+)", metadata, re.MULTILINE)
    if not found:
        raise VforkError(
            "VF505",
            f"{root} is neither a git clone nor an unpacked source distribution",
            hint="build from a clone, or from an archive made by `python -m build -s`",
        )
    return int(found[1])


def _from_clone(root: Path) -> int:
    """setuptools-scm's distance; where it is not installed, the same from git."""
    try:
        from setuptools_scm import get_version
    except ImportError:
        return number_from_git(root)
    try:
        version = get_version(root=str(root), version_scheme=_distance)
    except LookupError as error:
        raise _unreadable(root, str(error)) from error
    return int(version.partition("+")[0])


@functools.cache  # a build asks for its number more than once
def _warn_if_shallow(root: Path) -> None:
    shallow = _git(root, "rev-parse", "--is-shallow-repository")
    if shallow.stdout.strip() == "true":
        print(
            f"warning: {root} is a shallow clone: its build number is too small "
            "unless it has the last tag, so newer builds can look older; "
            "`git fetch --unshallow --tags` mends it",
            file=sys.stderr,
        )


def _distance(version: Any) -> str:
    return str(version.distance or 0)


def number_from_git(root: Path) -> int:
    """The build number as `git` tells it."""
    described = _git(root, "describe", "--tags", "--long", "--match", "*[0-9]*")
    if described.returncode == 0:
        return int(described.stdout.rsplit("-", 2)[1])
    counted = _git(root, "rev-list", "--count", "--all")
    if counted.returncode:
        raise _unreadable(root, counted.stderr.strip())
    head = _git(root, "rev-list", "--count", "HEAD")
    return int(head.stdout) if head.returncode == 0 else 0


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True
        )
    except OSError as error:
        raise _unreadable(root, str(error)) from error


def _unreadable(root: Path, why: str) -> VforkError:
    return VforkError(
        "VF505",
        f"git cannot read the history of {root}: {why}",
        hint="install git, and make the clone belong to the user who builds",
    )
