# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Writes the fork as an unpacked tree, to read, type-check, test or put on a path."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from vfork.errors import VforkError
from vfork.extension import Extension
from vfork.fetch import fetch
from vfork.image import Image, compose
from vfork.pin import Base
from vfork.release import Release, format_record
from vfork.version import build_number

MARKER = ".vfork-assembled"


@dataclass(frozen=True)
class AssembleReport:
    """What an assembled tree holds. Paths are relative to `out`."""

    base: str
    version: str
    out: str
    files: int
    edited: tuple[str, ...]
    overlay: tuple[str, ...]


def assemble(
    root: Path,
    base: Base,
    out: Path,
    *,
    extension: Extension | None = None,
    dry_run: bool = False,
) -> AssembleReport:
    """Writes release, edits, overlay and dist-info to `out`; an older tree there goes.

    Raises VforkError VF501 if `out` holds something that is not an assembled tree.
    """
    _check_out(out)
    version = base.fork_version(build_number(root))
    with Release(fetch(base)) as release:
        image = compose(root, base, release, version, extension)
        record = image.record(release)
        if not dry_run:
            _write(image, release, out)
            (out / image.record_path).write_bytes(format_record(record))
    return AssembleReport(
        base=base.name,
        version=version,
        out=str(out),
        files=len(record),
        edited=tuple(sorted(image.edited)),
        overlay=tuple(sorted(image.overlay)),
    )


def _check_out(out: Path) -> None:
    if out.is_dir():
        refused = any(out.iterdir()) and not (out / MARKER).is_file()
    else:
        refused = out.exists() or out.is_symlink()
    if refused:
        raise VforkError(
            "VF501",
            f"{out} exists and was not made by `vfork assemble`",
            hint="name a new or empty directory",
        )


def _write(image: Image, release: Release, out: Path) -> None:
    if out.is_dir():
        for entry in out.iterdir():
            if entry.name != MARKER:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    out.mkdir(parents=True, exist_ok=True)
    # Written first, so that a tree cut short can be assembled again.
    (out / MARKER).write_text(f"{image.version}\n", encoding="utf-8")
    made: set[Path] = set()
    for name in image.unchanged(release):
        target = _place(out, name, made)
        info = release.info(name)
        with release.archive.open(info) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        target.chmod(info.external_attr >> 16 & 0o777)
    for name, member in {**image.payload, **image.dist_info}.items():
        target = _place(out, name, made)
        target.write_bytes(member.data)
        target.chmod(member.mode)


def _place(out: Path, name: str, made: set[Path]) -> Path:
    target = out / name
    if target.parent not in made:
        target.parent.mkdir(parents=True, exist_ok=True)
        made.add(target.parent)
    return target
