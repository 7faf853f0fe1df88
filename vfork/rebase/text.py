# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The rebase report as text and as JSON data."""

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

from vfork.rebase.audit import NOTE, SEVERITIES, Finding
from vfork.rebase.run import BaseReport, Rebase
from vfork.rebase.states import FINE, STATES, EditState
from vfork.rebase.trial import Step

_WIDTH = 300


def as_text(result: Rebase) -> str:
    """The report for people: totals, then edits, audit and trial, worst first."""
    lines = [*_heading(result), *_left_out(result)]
    for group in _edit_groups(result):
        lines += ["", *_edit_lines(result, group)]
    for severity in SEVERITIES:
        found = [f for f in result.findings if f.severity == severity]
        if found:
            lines += ["", f"== audit: {severity}: {len(found)}"]
        for finding in found:
            lines += _finding_lines(finding)
    if result.steps:
        lines += ["", "== trial"]
        lines += [line for step in result.steps for line in _step_lines(step)]
    times = ", ".join(f"{name} {value}" for name, value in result.seconds.items())
    lines += ["", f"seconds: {times}; CPU {result.cpu_seconds}"]
    count = len(result.errors())
    lines.append(f"{count} to act on" if count else "nothing to act on")
    return "\n".join(lines)


def _heading(result: Rebase) -> Iterator[str]:
    for report in result.bases:
        new = report.new.base
        label = f"{new.distribution} {new.version}"
        yield f"{report.name}: {report.old.tree.label} -> {label}"
        if report.stand_in:
            error = result.without_build[report.name]
            yield f"  no build: {error.message}; {error.hint}"
            yield f"  stand-in: the Python files of {report.new.tree.label}"
        else:
            yield f"  {new.wheel} sha256 {new.sha256}"
        counts = Counter(state.state for state in report.states)
        told = ", ".join(f"{counts[s]} {s}" for s in STATES if counts[s])
        yield f"  edits: {told or 'none'}"
        yield f"  uses of upstream: {report.uses}, {report.unknown} cannot be told"


def _left_out(result: Rebase) -> Iterator[str]:
    there = {report.name for report in result.bases}
    for name, error in result.without_build.items():
        if name not in there:
            yield f"{name}: left out: {error.message}; {error.hint}"


def _edit_groups(result: Rebase) -> list[list[tuple[BaseReport, EditState]]]:
    """States that are alike on several bases together, worst first, `same` left out."""
    groups: dict[tuple[str, ...], list[tuple[BaseReport, EditState]]] = {}
    for report in result.bases:
        for state in report.states:
            if state.state != "same":
                key = (state.code, state.edit.id, state.message, state.new)
                groups.setdefault(key, []).append((report, state))
    return [groups[key] for key in sorted(groups)]


def _edit_lines(
    result: Rebase, group: list[tuple[BaseReport, EditState]]
) -> Iterator[str]:
    report, state = group[0]
    bases = ", ".join(r.name for r, _ in group)
    accepted = ", accepted" if result.is_accepted(state) else ""
    yield f"{state.code} {state.state}{accepted}: {state.edit.id} ({bases})"
    yield f"  {state.file.target}: {state.message}"
    if accepted or state.state == "retired":
        return
    yield from textwrap.wrap(
        f"why: {' '.join(state.edit.why.split())}",
        88,
        initial_indent="  ",
        subsequent_indent="    ",
    )
    for title, side, text in (
        ("old", report.old, state.old),
        ("new", report.new, state.new),
    ):
        if text:
            yield f"  {title}, {side.tree.label}:"
            yield from (f"    {line}" for line in text.splitlines())
    if state.hint:
        yield f"  hint: {state.hint}"


def _finding_lines(finding: Finding) -> Iterator[str]:
    bases = f" ({', '.join(finding.bases)})" if finding.bases else ""
    yield f"{finding.code} {finding.target}{bases}: {finding.message}"
    if finding.places:
        more = len(finding.places) - 4
        shown = ", ".join(finding.places[:4])
        yield f"  used in {shown}{f' and {more} more' if more > 0 else ''}"
    if finding.severity != NOTE:
        old, new = _difference(finding.old, finding.new)
        if old:
            yield f"  - {old}"
        if new:
            yield f"  + {new}"
    if finding.hint:
        yield f"  hint: {finding.hint}"


def _difference(old: str, new: str) -> tuple[str, str]:
    """Two texts, long ones cut down to where they differ."""
    if max(len(old), len(new)) <= _WIDTH or not (old and new):
        return old[:_WIDTH], new[:_WIDTH]
    first = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
    start = max(0, first - 60)
    stop = start + _WIDTH

    def cut(text: str) -> str:
        before = "..." if start else ""
        after = "..." if len(text) > stop else ""
        return f"{before}{text[start:stop]}{after}"

    return cut(old), cut(new)


def _step_lines(step: Step) -> Iterator[str]:
    code = f"{step.code} " if step.code else ""
    yield (
        f"{code}{step.base}: {step.name} {step.state}: {step.detail} "
        f"({step.seconds:.1f} s)"
    )
    yield from (f"    {line}" for line in step.excerpt.splitlines())


def as_data(result: Rebase) -> dict[str, Any]:
    """The report for programs, every edit and finding in full."""
    return {
        "release": result.release,
        "bases": [_base_data(result, report) for report in result.bases],
        "left_out": [line.partition(":")[0] for line in _left_out(result)],
        "audit": [dataclasses.asdict(finding) for finding in result.findings],
        "trial": [dataclasses.asdict(step) for step in result.steps],
        "seconds": result.seconds,
        "cpu_seconds": result.cpu_seconds,
    }


def _base_data(result: Rebase, report: BaseReport) -> dict[str, Any]:
    new = report.new.base
    missing = result.without_build.get(report.name)
    return {
        "name": report.name,
        "distribution": new.distribution,
        "from": report.old.base.version,
        "to": new.version,
        "wheel": None if report.stand_in else new.wheel,
        "sha256": None if report.stand_in else new.sha256,
        "stand_in": report.stand_in or None,
        "missing": missing.to_dict() if missing else None,
        "uses": report.uses,
        "unknown": report.unknown,
        "mended": report.mended,
        "edits": [_edit_data(result, state) for state in report.states],
    }


def _edit_data(result: Rebase, state: EditState) -> dict[str, Any]:
    return {
        "id": state.edit.id,
        "file": state.file.target,
        "topic": state.file.file.topic,
        "code": state.code,
        "state": state.state,
        "fine": state.state in FINE or result.is_accepted(state),
        "accepted": result.is_accepted(state),
        "message": state.message,
        "why": state.edit.why,
        "drop_when": state.edit.drop_when,
        "forwarded": state.edit.forwarded,
        "old": state.old,
        "new": state.new,
        "candidates": [dataclasses.asdict(c) for c in state.candidates],
        "hint": state.hint,
    }
