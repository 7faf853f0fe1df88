# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Read access to a pristine release wheel; every member read is checked."""

import base64
import csv
import hashlib
import io
import zipfile
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import NamedTuple, Self

from vfork.errors import VforkError


class RecordEntry(NamedTuple):
    """What RECORD says of a file: `sha256=<urlsafe base64>` and size, as written."""

    digest: str
    size: str


def record_entry(data: bytes) -> RecordEntry:
    """The RECORD entry that fits some content."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return RecordEntry(f"sha256={digest.decode()}", str(len(data)))


def parse_record(data: bytes) -> dict[str, RecordEntry]:
    """RECORD as path -> entry, in its order. Raises ValueError if it is malformed."""
    rows = csv.reader(io.StringIO(data.decode("utf-8"), newline=""))
    return {
        path: RecordEntry(digest, size) for path, digest, size in filter(None, rows)
    }


def format_record(entries: Mapping[str, RecordEntry]) -> bytes:
    """RECORD text for path -> entry, in the mapping's order."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows((path, *entry) for path, entry in entries.items())
    return text.getvalue().encode()


class Release:
    """A release wheel, opened for reading. Use it as a context manager or close it.

    Raises VforkError VF405 if the file is no sound wheel.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise self._unreadable(str(error)) from error
        self._members = {info.filename: info for info in self.archive.infolist()}
        if len(self._members) != len(self.archive.infolist()):
            raise self._unreadable("it holds a file twice")
        found = {n.split("/")[0] for n in self._members if n.endswith("-info/RECORD")}
        if len(found) != 1:
            raise self._unreadable(f"it has {len(found)} dist-info directories, not 1")
        self.dist_info = found.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.archive.close()

    def names(self) -> tuple[str, ...]:
        """All member names, in the wheel's order."""
        return tuple(self._members)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    @cached_property
    def directories(self) -> frozenset[str]:
        """Every directory that the members imply, such as `vllm/v1`."""
        return frozenset(
            str(parent)
            for name in self._members
            for parent in PurePosixPath(name).parents
        )

    @cached_property
    def record(self) -> dict[str, RecordEntry]:
        """The wheel's own RECORD: path -> entry."""
        raw = self._inflate(f"{self.dist_info}/RECORD")
        try:
            return parse_record(raw)
        except ValueError as error:
            raise self._unreadable(f"its RECORD is malformed: {error}") from error

    def record_of(self, name: str) -> RecordEntry:
        """RECORD's entry of a member. Raises VforkError VF203 if it has no hash."""
        entry = self.record.get(name)
        if entry is None or not entry.digest.startswith("sha256="):
            raise VforkError(
                "VF203", f"RECORD of {self.path.name} has no sha256 of {name}"
            )
        return entry

    def info(self, name: str) -> zipfile.ZipInfo:
        """The archive's entry of a member. Raises VforkError VF201 if it lacks one."""
        if name not in self._members:
            raise VforkError("VF201", f"{name} is not in {self.path.name}")
        return self._members[name]

    def read(self, name: str) -> bytes:
        """A member's content.

        Raises VforkError VF201 if there is no such member, VF203 if it is not what
        RECORD says, VF405 if it cannot be inflated.
        """
        data = self._inflate(name)
        if name == f"{self.dist_info}/RECORD":
            return data
        found, wanted = record_entry(data), self.record_of(name)
        if found != wanted:
            raise VforkError(
                "VF203",
                f"{name} in {self.path.name} is {found.size} bytes of {found.digest}, "
                f"but RECORD says {wanted.size} bytes of {wanted.digest}",
                hint="fetch the release again; edits apply to pristine files only",
            )
        return data

    def _inflate(self, name: str) -> bytes:
        try:
            return self.archive.read(self.info(name))
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise self._unreadable(f"{name}: {error}") from error

    def _unreadable(self, why: str) -> VforkError:
        return VforkError(
            "VF405",
            f"{self.path} is not a sound wheel: {why}",
            hint=f"delete {self.path} and fetch again",
        )
