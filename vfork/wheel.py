# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Builds the fork wheel: raw copies of the release's members, plus the fork's own.

Members are not inflated and deflated again, which would take most of a minute. The
same input gives the same bytes: fixed order, and times from SOURCE_DATE_EPOCH.
"""

import copy
import os
import stat
import struct
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO

from vfork.distinfo import NAME
from vfork.errors import VforkError
from vfork.extension import Extension
from vfork.fetch import fetch
from vfork.image import Image, compose
from vfork.overlay import Member
from vfork.pin import Base
from vfork.release import Release, format_record
from vfork.version import build_number

_LOCAL_HEADER_SIZE = 30
_DATA_DESCRIPTOR = 0x08
_CHUNK = 1 << 20
_ZIP_EPOCH = 315532800  # 1980-01-01, the first day a zip archive can hold
_ZIP_END = 4354819199  # 2107-12-31 23:59:59, the last


def build_wheel(
    root: Path,
    base: Base,
    out_dir: Path,
    *,
    extension: Extension | None = None,
    dry_run: bool = False,
) -> Path:
    """Builds the fork wheel of one base in `out_dir` and returns its path.

    An older wheel of that name is replaced. A dry run does all but write.
    """
    version = base.fork_version(build_number(root))
    target = out_dir / f"{NAME}-{version}-{base.tag}.whl"
    moment = time.gmtime(max(source_date(), _ZIP_EPOCH))[:6]
    with Release(fetch(base)) as release:
        image = compose(root, base, release, version, extension)
        if not dry_run:
            out_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=out_dir, prefix="wheel-") as scratch:
                unfinished = Path(scratch, target.name)
                _write(image, release, unfinished, moment)
                os.replace(unfinished, target)
    return target


def source_date() -> int:
    """SOURCE_DATE_EPOCH in seconds, else 1980-01-01. Raises VforkError VF509."""
    text = os.environ.get("SOURCE_DATE_EPOCH") or str(_ZIP_EPOCH)
    if not text.isdecimal() or int(text) > _ZIP_END:
        raise VforkError(
            "VF509",
            f"SOURCE_DATE_EPOCH is {text!r}, not seconds from 1970 up to 2107",
            hint="unset it, or set it to `git log -1 --format=%ct`",
        )
    return int(text)


def _write(
    image: Image,
    release: Release,
    target: Path,
    moment: tuple[int, ...],
) -> None:
    record = image.record(release)
    added = {**image.payload, **image.dist_info}
    added[image.record_path] = Member(format_record(record))
    with (
        release.path.open("rb") as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in record:
            if name in added:
                _add(archive, name, added[name], moment)
            else:
                _copy(archive, source, release.info(name))


def _add(
    archive: zipfile.ZipFile, name: str, member: Member, moment: tuple[int, ...]
) -> None:
    year, month, day, hour, minute, second = moment
    info = zipfile.ZipInfo(name, (year, month, day, hour, minute, second))
    info.create_system = 3  # Unix, so that the permission bits count
    info.external_attr = (stat.S_IFREG | member.mode) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, member.data)


def _copy(archive: zipfile.ZipFile, source: IO[bytes], info: zipfile.ZipInfo) -> None:
    """Appends a member of another archive without inflating it.

    `zipfile` has no call for this. A local header is written from the directory
    entry, and the deflated bytes follow; `zipfile` writes the directory in the end.
    """
    source.seek(info.header_offset)
    header = source.read(_LOCAL_HEADER_SIZE)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    source.seek(name_length + extra_length, os.SEEK_CUR)

    output = archive.fp
    assert output is not None, "the archive is open"
    output.seek(archive.start_dir)
    entry = copy.copy(info)
    entry.header_offset = output.tell()
    entry.flag_bits &= ~_DATA_DESCRIPTOR  # the local header holds the sizes
    output.write(entry.FileHeader())
    left = entry.compress_size
    while left:
        chunk = source.read(min(left, _CHUNK))
        if not chunk:
            raise VforkError("VF405", f"{info.filename} is cut short in the release")
        output.write(chunk)
        left -= len(chunk)
    archive.start_dir = output.tell()
    archive.filelist.append(entry)
    archive.NameToInfo[entry.filename] = entry
