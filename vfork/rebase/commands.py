# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vfork rebase` and `vfork accept`."""

import argparse
import dataclasses
from pathlib import Path

from vfork.pin import Base
from vfork.rebase.accept import accept
from vfork.rebase.run import Target, rebase
from vfork.rebase.text import as_data, as_text
from vfork.rebase.trial import TESTS, Environment
from vfork.report import Outcome


def add_rebase_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("release", help="such as 0.34.0")
    parser.add_argument("--from", dest="old", metavar="OLD", help="instead of the pins")
    parser.add_argument("--no-trial", action="store_true", help="only compare sources")
    parser.add_argument(
        "--python",
        type=Path,
        help="environment to import and test in; default: .venv/bin/python if there",
    )
    parser.add_argument(
        "--tests",
        nargs="*",
        metavar="PATH",
        default=[*TESTS],
        help=f"default: {' '.join(TESTS)}; none: only import",
    )


def add_accept_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("edits", nargs="+", metavar="EDIT")
    parser.add_argument("--release", help="default: the pinned releases")
    parser.add_argument("--note", default="", help="why it is still right")


def run_rebase(args: argparse.Namespace, root: Path, bases: list[Base]) -> Outcome:
    environment = None
    if not args.no_trial:
        python = args.python or root / ".venv/bin/python"
        there = args.python is not None or python.is_file()
        environment = Environment(
            python.absolute() if there else None, tuple(args.tests)
        )
    result = rebase(root, bases, Target(args.release, args.old), environment)
    return Outcome(as_text(result), as_data(result), result.errors(), told=True)


def run_accept(args: argparse.Namespace, root: Path, bases: list[Base]) -> Outcome:
    report = accept(
        root,
        bases,
        args.edits,
        release=args.release,
        note=args.note,
        dry_run=args.dry_run,
    )
    lines = [
        f"{edit_id}: accepted at {report.release} ({', '.join(found)})"
        for edit_id, found in report.accepted.items()
    ]
    lines += [f"{name}: no build of {report.release}" for name in report.without_build]
    if not report.changed:
        lines.append("the lock has it already")
    return Outcome("\n".join(lines), dataclasses.asdict(report))
