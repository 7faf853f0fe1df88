# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Finds code of this checkout that also stands in a pinned release.

The repository holds only what the fork adds. A run of lines that is the same in a
release, white space aside, was copied from it and must be called or rewritten.
"""

import re
from pathlib import Path
from typing import NamedTuple

from vfork.errors import VforkError
from vfork.fetch import fetch
from vfork.pin import Base
from vfork.release import Release
from vfork.sdist import source_files

RUN = 8
"""So many substantive lines in a row make an overlap."""

_MIN_CHARACTERS = 12
# What two independent programs share anyway: imports, decorators, keywords alone on
# a line, and the parameters of a method that overrides the release's.
_COMMON = re.compile(
    r"[#@]|import\b|from\b|\"\"\"|'''|(else|try|finally):|return( None)?$|pass$"
    r"|raise NotImplementedError|\)\s*(->.*)?:?$|def \w+\($|\*{0,2}\w+(:[^=]+)?(=.*)?,$"
)


class _Line(NamedTuple):
    number: int
    text: str


def overlaps(root: Path, base: Base) -> list[VforkError]:
    """One VF307 for each pair of a tracked Python file and a release file."""
    windows: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for name in source_files(root):
        if name.endswith(".py"):
            lines = _substantive((root / name).read_bytes())
            for start, window in _windows(lines):
                windows.setdefault(window, []).append((name, lines[start].number))
    known = {text for window in windows for text in window}
    errors: list[VforkError] = []
    with Release(fetch(base)) as release:
        for member in release.names():
            if member.endswith(".py"):
                lines = _substantive(release.read(member), known)
                found = {
                    place: lines[start].number
                    for start, window in _windows(lines)
                    for place in windows.get(window, ())
                }
                errors += _report(found, member)
    return errors


def _report(found: dict[tuple[str, int], int], member: str) -> list[VforkError]:
    """The first overlap of each file of the checkout with `member`."""
    first: dict[str, tuple[int, int]] = {}
    for (name, line), upstream in sorted(found.items()):
        first.setdefault(name, (line, upstream))
    return [
        VforkError(
            "VF307",
            f"{name}:{line} repeats {RUN} or more lines of {member}:{upstream}",
            hint="call the release's code, or write it your own way",
        )
        for name, (line, upstream) in first.items()
    ]


def _substantive(data: bytes, known: set[str] | None = None) -> list[_Line]:
    """The lines that count, without white space; `known` empties all others.

    An emptied line still separates its neighbors, and never matches.
    """
    kept: list[_Line] = []
    text = data.decode("utf-8", "replace")
    for number, raw in enumerate(text.splitlines(), start=1):
        line = "".join(raw.split())
        if len(line) >= _MIN_CHARACTERS and not _COMMON.match(raw.strip()):
            kept.append(_Line(number, line if known is None or line in known else ""))
    return kept


def _windows(lines: list[_Line]) -> list[tuple[int, tuple[str, ...]]]:
    texts = [line.text for line in lines]
    return [
        (start, tuple(texts[start : start + RUN]))
        for start in range(len(texts) - RUN + 1)
        if all(texts[start : start + RUN])
    ]
