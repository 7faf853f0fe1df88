# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Finds the wheel of another release: in the cache, or by pip on the package index."""

import dataclasses
import re
import tempfile
from pathlib import Path

from vfork.errors import VforkError
from vfork.fetch import (
    cache_dir,
    keep,
    locked,
    noted_sha256,
    pip_download,
    pip_lines,
)
from vfork.pin import Base, wheel_parts
from vfork.spec import release_tuple

_FOUND = re.compile(r"\(from versions: ([^)]*)\)")
_SHOWN = 8


def find(base: Base, version: str) -> Base:
    """The base as it would be pinned at another release, its wheel in the cache.

    pip checks the index's hash while it downloads. A wheel that lies in the cache is
    taken as it is. `torch` and `triton` stay those of `base`.

    Raises VforkError VF641 if the index has no such release, VF403 if there is no index
    or no download, VF407 if the cache cannot be used.
    """
    if version == base.version:
        return base
    wheel = _cached(base, version) or _download(base, version)
    return dataclasses.replace(
        base, version=version, wheel=wheel.name, sha256=noted_sha256(wheel)
    )


def _cached(base: Base, version: str) -> Path | None:
    for path in sorted(cache_dir().glob("*.whl")):
        parts = wheel_parts(path.name)
        if parts and parts[:2] == (base.distribution.replace("-", "_"), version):
            return path
    return None


def _download(base: Base, version: str) -> Path:
    # One lock for each release: the file's name is not known before.
    label = cache_dir() / f"{base.distribution}-{version}"
    with (
        locked(label),
        tempfile.TemporaryDirectory(dir=cache_dir(), prefix="fetch-") as scratch,
    ):
        there = _cached(base, version)
        if there:
            return there
        pip = pip_download(base, version, scratch)
        got = sorted(Path(scratch).glob("*.whl"))
        if pip.returncode or len(got) != 1:
            raise _failure(base, version, pip.stderr)
        return keep(got[0])


def _failure(base: Base, version: str, stderr: str) -> VforkError:
    wanted = f"{base.distribution} {version}"
    match = _FOUND.search(stderr)
    found = re.split(r",\s*", match[1].strip()) if match else []
    versions = sorted({v for v in found if v and v != "none"}, key=_sort_key)
    if versions:
        newest = ", ".join(reversed(versions[-_SHOWN:]))
        return VforkError(
            "VF641",
            f"the package index has no {wanted} for {base.tag}",
            hint=f"the newest releases it has are {newest}",
        )
    if match and "connection broken" not in stderr:
        return VforkError(
            "VF641",
            f"pip found no release of {base.distribution} at all for {base.tag}",
            excerpt=pip_lines(stderr),
            hint="check the network and pip's index settings",
        )
    return VforkError(
        "VF403",
        f"{wanted} could not be downloaded",
        excerpt=pip_lines(stderr),
        hint=f"check the network, or put the wheel into {cache_dir()} by hand",
    )


def _sort_key(version: str) -> tuple[tuple[int, ...], bool, str]:
    final = re.fullmatch(r"[0-9.]+(\.post\d+)?", version) is not None
    try:
        return release_tuple(version), final, version
    except ValueError:
        return (), final, version
