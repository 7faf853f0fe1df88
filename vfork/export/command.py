# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vfork export`: writes patches for upstream and a list of them."""

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vfork.errors import VforkError
from vfork.export.patch import Author, Message, format_patch, paragraph
from vfork.export.series import (
    Checkout,
    TopicChange,
    check_closure,
    make_series,
    remarks,
)
from vfork.export.topics import VLLM, load_topics
from vfork.fetch import fetch
from vfork.pin import Base
from vfork.release import Release
from vfork.report import anchor_text
from vfork.spec import BASES
from vfork.wheel import source_date

DEFAULT_OUT = Path("dist/upstream")
LISTING = "export.json"
NEUTRAL = Author("vllm-glm-dsa contributors", "contributors@vllm-glm-dsa.invalid")


@dataclass(frozen=True)
class Patch:
    """An exported patch. `path` is relative to the output directory."""

    topic: str
    repository: str
    path: str
    sha256: str
    needs: tuple[str, ...]
    issues: tuple[str, ...]
    edits: tuple[str, ...]
    files: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class ExportReport:
    """What was written, and why nothing was if there are errors."""

    base: str
    version: str
    out: str
    patches: tuple[Patch, ...]
    errors: tuple[VforkError, ...]


def export(
    root: Path,
    base: Base,
    out: Path,
    *,
    topics: Sequence[str] = (),
    author: Author = NEUTRAL,
    dry_run: bool = False,
) -> ExportReport:
    """Writes the patches of topics (none: of all) to `out`; an older export there goes.

    A topic comes with those that it needs. Patches of one repository apply in the order
    of their numbers. Raises VforkError VF501 if `out` holds something else.
    """
    _check_out(out)
    known = load_topics(root)
    selected = known.select(topics)
    checkout = Checkout(root, base, known)
    errors = [*checkout.errors]
    errors += checkout.uncovered() if not topics else []
    errors += check_closure(checkout, selected) if not errors else []
    if errors:
        return ExportReport(base.name, base.version, str(out), (), tuple(errors))
    date = source_date()
    made: dict[str, bytes] = {}
    patches: list[Patch] = []
    with Release(fetch(base)) as release:
        for repository in dict.fromkeys(topic.repository for topic in selected):
            part = [topic for topic in selected if topic.repository == repository]
            series = make_series(checkout, release, part)
            notes = remarks(series)
            for number, item in enumerate(series, start=1):
                data = format_patch(
                    _message(item, base),
                    item.changes,
                    author,
                    date=date,
                    number=number,
                    count=len(series),
                )
                path = f"{repository}/{number:04d}-{item.topic.name}.patch"
                made[path] = data
                patches.append(_patch(item, path, data, notes[item.topic.name]))
    report = ExportReport(base.name, base.version, str(out), tuple(patches), ())
    if not dry_run:
        _write(out, made, report)
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `vfork export`."""
    parser.add_argument(
        "--base", choices=BASES, default="cuda", help="default: cuda, the newest"
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help=f"default: {DEFAULT_OUT}"
    )
    parser.add_argument(
        "--topic",
        action="append",
        default=[],
        metavar="NAME",
        help="this topic and those that it needs; default: all",
    )
    parser.add_argument(
        "--author",
        type=parse_author,
        default=NEUTRAL,
        metavar="'NAME <MAIL>'",
        help=f"default: {NEUTRAL}",
    )


def summary(report: ExportReport) -> str:
    """The patches, and the lines in them that a person has to reword."""
    lines = []
    for patch in report.patches:
        about = f"{len(patch.files)} files, {len(patch.edits)} edits"
        lines.append(f"{report.out}/{patch.path}: {about}")
        lines += [f"  speaks of the fork: {remark}" for remark in patch.remarks]
    return "\n".join(lines)


def parse_author(text: str) -> Author:
    """`Name <mail>`. Raises argparse.ArgumentTypeError for anything else."""
    match = re.fullmatch(r"([^<>\"\r\n]*[^<>\"\s]) <([^<>\s]+@[^<>\s]+)>", text)
    if not match or not text.isascii():
        raise argparse.ArgumentTypeError(f"{text!r} is not `Name <mail>` in ASCII")
    return Author(match[1], match[2])


def _message(item: TopicChange, base: Base) -> Message:
    body = [paragraph(text) for text in item.topic.why.split("\n\n")]
    if item.edits:
        body.append("Changes to existing files:")
        body += [
            paragraph(f"- {target}, {anchor_text(edit.at)}: {edit.why}", "  ")
            for target, edit in item.edits
        ]
    if item.topic.issues:
        body.append(paragraph(f"Related: {', '.join(item.topic.issues)}"))
    made_for = (
        f"Made by `vfork export` for vllm {base.version}"
        if item.topic.repository == VLLM
        else "Made by `vfork export`"
    )
    return Message(
        item.topic.title,
        body,
        [f"{made_for}. A person reviews, signs off and submits.", ""],
    )


def _patch(item: TopicChange, path: str, data: bytes, notes: list[str]) -> Patch:
    return Patch(
        topic=item.topic.name,
        repository=item.topic.repository,
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        needs=item.topic.needs,
        issues=item.topic.issues,
        edits=tuple(edit.id for _, edit in item.edits),
        files=tuple(sorted(change.path for change in item.changes)),
        remarks=tuple(notes),
    )


def listing(report: ExportReport) -> dict[str, object]:
    """The report as data for JSON."""
    return {
        "base": report.base,
        "version": report.version,
        "patches": [vars(patch) for patch in report.patches],
    }


def _check_out(out: Path) -> None:
    if out.is_dir():
        refused = any(out.iterdir()) and not (out / LISTING).is_file()
    else:
        refused = out.exists() or out.is_symlink()
    if refused:
        raise VforkError(
            "VF501",
            f"{out} exists and was not made by `vfork export`",
            hint="name a new or empty directory",
        )


def _write(out: Path, made: dict[str, bytes], report: ExportReport) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*/*.patch"):
        old.unlink()
    for folder in [path for path in out.iterdir() if path.is_dir()]:
        if not any(folder.iterdir()):
            folder.rmdir()
    # Written first, so that an export cut short can be made again.
    text = json.dumps(listing(report), indent=1, ensure_ascii=False) + "\n"
    (out / LISTING).write_text(text, "utf-8")
    for path, data in made.items():
        (out / path).parent.mkdir(exist_ok=True)
        (out / path).write_bytes(data)
