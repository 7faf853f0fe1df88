# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Writes a patch as `git format-patch` does, from contents alone.

The same input gives the same bytes: no git, no clock and no configuration take part.
Blob ids are full, so that `git am -3` can fall back on them.
"""

import difflib
import hashlib
import io
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import formatdate

from vfork.errors import VforkError

NO_COMMIT = "0" * 40
WIDTH = 72


@dataclass(frozen=True)
class Change:
    """A file before (None: it is new) and after. `mode` holds permission bits."""

    path: str
    before: bytes | None
    after: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class Author:
    name: str
    email: str

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>"


@dataclass(frozen=True)
class Message:
    """Of a commit: its title, the paragraphs of its body, and remarks for people that
    do not become part of the commit."""

    title: str
    body: Sequence[str]
    remarks: Sequence[str] = ()


def format_patch(
    message: Message,
    changes: Sequence[Change],
    author: Author,
    *,
    date: int,
    number: int,
    count: int,
) -> bytes:
    """One mail for `git am`; `date` is in seconds from 1970.

    Raises VforkError VF706 for a content that git would not get back from a mail.
    """
    lines = [
        # A fixed date marks the file as a patch of git.
        f"From {NO_COMMIT} Mon Sep 17 00:00:00 2001",
        f"From: {author}",
        f"Date: {formatdate(date)}".replace("-0000", "+0000"),
        f"Subject: [PATCH {number}/{count}] {message.title}",
        "MIME-Version: 1.0",
        "Content-Type: text/plain; charset=UTF-8",
        "Content-Transfer-Encoding: 8bit",
        "",
        "\n\n".join(message.body),
        "---",
        *message.remarks,
        *_summary(changes),
        "",
    ]
    head = "\n".join(lines) + "\n"
    diffs = [diff(change) for change in sorted(changes, key=lambda c: c.path)]
    return (head + "".join(diffs) + "-- \nvfork export\n\n").encode()


def paragraph(text: str, indent: str = "") -> str:
    """Text filled to the width of a commit message; later lines are indented.

    A line that git would take for the start of a diff gets a space in front.
    """
    lines = textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    marks = ("---", "diff -", "Index: ", "From ", ">From ", "index ")
    return "\n".join(f" {line}" if line.startswith(marks) else line for line in lines)


def _summary(changes: Sequence[Change]) -> Iterator[str]:
    added = removed = 0
    for change in sorted(changes, key=lambda c: c.path):
        plus, minus = _counts(change)
        added, removed = added + plus, removed + minus
        kind = " (new)" if change.before is None else ""
        yield f" {change.path} | +{plus} -{minus}{kind}"
    yield f" {len(changes)} files, {added} lines added, {removed} removed"


def _counts(change: Change) -> tuple[int, int]:
    before, after = _lines(change.before or b""), _lines(change.after)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    kept = sum(block.size for block in matcher.get_matching_blocks())
    return len(after) - kept, len(before) - kept


def diff(change: Change) -> str:
    """The change of one file in git's format. Raises VforkError VF706."""
    for data in (change.before or b"", change.after):
        _check_text(change.path, data)
    after = blob_id(change.after)
    lines = [f"diff --git a/{change.path} b/{change.path}"]
    mode = 0o100755 if change.mode & 0o100 else 0o100644
    if change.before is None:
        lines += [f"new file mode {mode:o}", f"index {NO_COMMIT}..{after}"]
    else:
        lines += [f"index {blob_id(change.before)}..{after} {mode:o}"]
    hunks = difflib.unified_diff(
        _lines(change.before or b""),
        _lines(change.after),
        "/dev/null" if change.before is None else f"a/{change.path}",
        f"b/{change.path}",
    )
    text = "\n".join(lines) + "\n"
    for line in hunks:
        text += line
        if not line.endswith("\n"):
            text += "\n\\ No newline at end of file\n"
    return text


def blob_id(data: bytes) -> str:
    """The id that git gives to a content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _lines(data: bytes) -> list[str]:
    return io.StringIO(data.decode("utf-8"), newline="\n").readlines()


def _check_text(path: str, data: bytes) -> None:
    try:
        sound = not {"\r", "\0"} & {*data.decode("utf-8")}
    except UnicodeDecodeError:
        sound = False
    if not sound:
        raise VforkError(
            "VF706",
            f"{path} is not UTF-8 text with line feeds; a mail would change it",
            hint="keep it out of the topic",
        )
