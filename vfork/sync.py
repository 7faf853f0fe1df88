# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Brings an installed fork up to a checkout's files and kernels, for development.

Version, requirements and entry points stay as installed; those need a new install.
"""

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfork.errors import VforkError
from vfork.extension import Extension, extension_for, switched_off
from vfork.fetch import fetch
from vfork.image import MANIFEST, Image, compose
from vfork.overlay import PACKAGE, Member
from vfork.pin import Base, pinned
from vfork.release import Release, format_record, parse_record, record_entry


@dataclass(frozen=True)
class SyncReport:
    """What a sync changed. Paths are relative to `site_packages`."""

    base: str
    version: str
    site_packages: str
    written: tuple[str, ...]
    restored: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: int


def sync(root: Path, site_packages: Path, *, dry_run: bool = False) -> SyncReport:
    """Writes, restores and removes what differs from the checkout, and nothing else.

    Raises VforkError VF506 if no fork is installed there, VF507 if it stands on
    another release than the one pinned now.
    """
    manifest = _read_manifest(site_packages)
    record_path = _record_path(site_packages)
    base = _installed_base(root, manifest)
    extension = None if dry_run else extension_for(root, base)
    if extension is None and not switched_off():
        # What this machine cannot compile stays as it was installed.
        extension = _installed_extension(site_packages, manifest)
    with Release(fetch(base)) as release:
        image = compose(root, base, release, str(manifest["version"]), extension)
        wanted = _wanted(image)
        stale = {entry["file"] for entry in manifest["edits"]} - set(wanted)
        restored = {path: Member(release.read(path)) for path in sorted(stale)}
    written = {
        path: member
        for path, member in wanted.items()
        if _content(site_packages / path) != member.data
    }
    ours = [*manifest["overlay"], manifest.get("extension")]
    removed = sorted({entry["file"] for entry in ours if entry} - set(wanted))
    if not dry_run and (written or restored or removed):
        gone = _remove(site_packages, removed)
        gone |= _write(site_packages, {**restored, **written})
        _update_record(record_path, {**restored, **written}, gone)
    return SyncReport(
        base=base.name,
        version=image.version,
        site_packages=str(site_packages),
        written=tuple(sorted(written)),
        restored=tuple(restored),
        removed=tuple(removed),
        unchanged=len(wanted) - len(written),
    )


def _read_manifest(site_packages: Path) -> dict[str, Any]:
    try:
        text = (site_packages / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
    except (OSError, ValueError) as error:
        raise VforkError(
            "VF506",
            f"no fork is installed in {site_packages}: {error}",
            hint="install it there first, with `pip install .` in the checkout",
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != 1:
        raise VforkError(
            "VF506",
            f"{site_packages / MANIFEST} is not a manifest of format 1",
            hint="install the fork again, with `pip install .` in the checkout",
        )
    return manifest


def _installed_extension(
    site_packages: Path, manifest: dict[str, Any]
) -> Extension | None:
    entry = manifest.get("extension")
    data = _content(site_packages / entry["file"]) if entry else None
    if entry is None or data is None:
        return None
    return Extension(data, tuple(entry["archs"]), entry["compiler"])


def _record_path(site_packages: Path) -> Path:
    found = sorted(site_packages.glob("vllm-*.dist-info/RECORD"))
    if len(found) != 1:
        raise VforkError(
            "VF506",
            f"{site_packages} has {len(found)} RECORD files of vllm, not 1",
            hint="uninstall vllm there until pip finds none, and install the fork",
        )
    return found[0]


def _installed_base(root: Path, manifest: dict[str, Any]) -> Base:
    installed = manifest["base"]
    base = pinned(root, installed["name"])
    if installed["sha256"] != base.sha256:
        raise VforkError(
            "VF507",
            f"the installed fork stands on {installed['wheel']}, "
            f"but {base.wheel} is pinned now",
            hint="install the fork again, with `pip install .` in the checkout",
        )
    return base


def _wanted(image: Image) -> dict[str, Member]:
    """The files a sync looks after. The manifest is last, to be written last."""
    manifest = image.generated[MANIFEST]
    return {**image.edited, **image.overlay, **image.compiled, MANIFEST: manifest}


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(site_packages: Path, files: dict[str, Member]) -> set[str]:
    """Writes files and returns the paths of the caches that went with the old ones."""
    gone: set[str] = set()
    for path, member in files.items():
        target = site_packages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file in place of the old one: installers may share files by hard links.
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=".vfork-")
        with open(handle, "wb") as file:
            file.write(member.data)
        os.chmod(scratch, member.mode)
        os.replace(scratch, target)
        gone |= _drop_bytecode(site_packages, path)
    return gone


def _remove(site_packages: Path, paths: Iterable[str]) -> set[str]:
    """Removes files with their caches and the directories that end up empty."""
    gone: set[str] = set()
    for path in paths:
        target = site_packages / path
        target.unlink(missing_ok=True)
        gone |= {path} | _drop_bytecode(site_packages, path)
        for folder in (target.parent / "__pycache__", *target.parents):
            if folder == site_packages / PACKAGE:
                break
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    return gone


def _drop_bytecode(site_packages: Path, path: str) -> set[str]:
    """Removes a module's .pyc files: they are told apart by whole seconds only."""
    target = site_packages / path
    stale = sorted((target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"))
    for file in stale:
        file.unlink()
    return {file.relative_to(site_packages).as_posix() for file in stale}


def _update_record(path: Path, files: dict[str, Member], gone: set[str]) -> None:
    record = parse_record(path.read_bytes())
    for name in gone:
        record.pop(name, None)
    record |= {name: record_entry(member.data) for name, member in files.items()}
    path.write_bytes(format_record(record))
