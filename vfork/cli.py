# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The command line. Exit status 0: fine, 1: findings, 2: wrong usage."""

import argparse
import dataclasses
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vfork import lock
from vfork.assemble import assemble
from vfork.backend import target_device
from vfork.edits import load_edits
from vfork.errors import VforkError
from vfork.export import command as upstream
from vfork.extension import build_extension, extension_for
from vfork.extension_check import check_file
from vfork.fetch import fetch
from vfork.overlap import overlaps
from vfork.pin import Base, load_pins, pinned
from vfork.project import (
    BaseResult,
    check,
    find_root,
    new_lock,
    resolve_all,
    unified_diff,
)
from vfork.rebase import commands as releases
from vfork.report import (
    REGISTER,
    Outcome,
    anchor_text,
    findings,
    register,
    to_json,
)
from vfork.spec import BASES
from vfork.sync import sync
from vfork.wheel import build_wheel

Command = Callable[[argparse.Namespace, Path], Outcome]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    command: Command = args.run
    try:
        outcome = command(args, find_root(args.root))
    except VforkError as err:
        outcome = Outcome("", {}, [err])
    try:
        _print(args, outcome)
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if outcome.errors else 0


def _print(args: argparse.Namespace, outcome: Outcome) -> None:
    if args.json:
        content = {"command": args.command, "ok": not outcome.errors, **outcome.data}
        content["findings"] = [error.to_dict() for error in outcome.errors]
        print(to_json(content))
    elif outcome.text:
        print(outcome.text.rstrip("\n"))
    sys.stdout.flush()
    if outcome.errors and not args.json and not outcome.told:
        print(findings(outcome.errors), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vfork", description="Builds the fork from a pinned release."
    )
    parser.add_argument(
        "-C",
        dest="root",
        type=Path,
        default=Path(),
        metavar="ROOT",
        help="work in this checkout instead of the current directory",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(
        name: str, run: Command, text: str, *, base: str | None, writes: bool
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="report as JSON")
        if writes:
            sub.add_argument("--dry-run", action="store_true", help="write nothing")
        if base == "all":
            sub.add_argument("--base", choices=(*BASES, "all"), default="all")
        elif base == "one":
            sub.add_argument(
                "--base", choices=BASES, help="default: VLLM_TARGET_DEVICE, or detected"
            )
        return sub

    add("fetch", _fetch, "download the releases", base="all", writes=True)
    add("check", _check, "verify edits, overlay and budgets", base="all", writes=False)
    add("overlap", _overlap, "find release code here", base="all", writes=False)
    sub = add("diff", _diff, "show the rendered edits", base="all", writes=False)
    sub.add_argument("--no-notice", action="store_true", help="as for an upstream PR")
    sub = add("assemble", _assemble, "write the tree", base="one", writes=True)
    sub.add_argument("out", type=Path)
    sub = add("wheel", _wheel, "build the fork wheel", base="one", writes=True)
    sub.add_argument("--out", type=Path, default=Path("dist"), help="default: dist")
    sub = add("extension", _extension, "compile kernels", base=None, writes=False)
    sub.add_argument("--out", type=Path, metavar="FILE", help="write the library there")
    sub.add_argument(
        "--check", type=Path, metavar="FILE", help="check this library or wheel instead"
    )
    sub = add("export", _export, "write upstream patches", base=None, writes=True)
    upstream.add_arguments(sub)
    add("lock", _lock, f"write {lock.LOCK_FILE}", base="all", writes=True)
    sub = add("status", _status, "list the edits", base=None, writes=True)
    sub.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help=f"write the register there; {REGISTER} is the checked place",
    )
    sub = add("sync", _sync, "update an installed fork", base=None, writes=True)
    sub.add_argument(
        "site_packages",
        type=Path,
        nargs="?",
        default=Path(sysconfig.get_path("purelib")),
        help="default: that of the running Python",
    )
    sub = add("rebase", _rebase, "report on a release", base="all", writes=False)
    releases.add_rebase_arguments(sub)
    sub = add("accept", _accept, "record a review", base="all", writes=True)
    releases.add_accept_arguments(sub)
    return parser


def _bases(args: argparse.Namespace, root: Path) -> list[Base]:
    if args.base == "all":
        return [*load_pins(root).values()]
    return [_base(args, root)]


def _base(args: argparse.Namespace, root: Path) -> Base:
    return pinned(root, args.base or target_device())


def _fetch(args: argparse.Namespace, root: Path) -> Outcome:
    paths = {
        base.name: str(fetch(base, dry_run=args.dry_run)) for base in _bases(args, root)
    }
    text = "\n".join(f"{name}: {path}" for name, path in paths.items())
    return Outcome(text, {"wheels": paths})


def _check(args: argparse.Namespace, root: Path) -> Outcome:
    result = check(root, _bases(args, root))
    lines = [
        f"{r.base.name} {r.base.version}: {sum(len(p.edits) for p in r.plans.values())}"
        f" edits in {len(r.plans)} files, {r.inserted} lines"
        for r in result.results
    ]
    lines += [
        f"{s.base}: {s.id}: {s.state}" for s in result.states if s.state != "same"
    ]
    lines.append(f"{len(result.errors)} findings" if result.errors else "all good")
    data = {
        "bases": [_base_data(r) for r in result.results],
        "states": [dataclasses.asdict(state) for state in result.states],
    }
    return Outcome("\n".join(lines), data, result.errors)


def _base_data(result: BaseResult) -> dict[str, Any]:
    return {
        "name": result.base.name,
        "version": result.base.version,
        "inserted_lines": result.inserted,
        "edits": [
            {"file": target, **dataclasses.asdict(span)}
            for target, rendered in result.rendered.items()
            for span in rendered.spans
        ],
    }


def _overlap(args: argparse.Namespace, root: Path) -> Outcome:
    found = {base.name: overlaps(root, base) for base in _bases(args, root)}
    errors = [error for errors in found.values() for error in errors]
    text = "" if errors else "no lines of the checkout stand in a release"
    return Outcome(text, {"bases": [*found]}, errors)


def _diff(args: argparse.Namespace, root: Path) -> Outcome:
    loaded = load_edits(root)
    diffs: dict[str, str] = {}
    errors: list[VforkError] = []
    for base in _bases(args, root):
        result = resolve_all(base, loaded)
        errors += result.errors
        if not result.errors:
            diffs[base.name] = unified_diff(result, notice=not args.no_notice)
    text = "".join(
        f"# {name}\n{diff}" if len(diffs) > 1 else diff for name, diff in diffs.items()
    )
    return Outcome(text, {"diffs": diffs}, errors)


def _assemble(args: argparse.Namespace, root: Path) -> Outcome:
    base = _base(args, root)
    extension = None if args.dry_run else extension_for(root, base)
    report = assemble(root, base, args.out, extension=extension, dry_run=args.dry_run)
    text = (
        f"{report.version} in {report.out}: {report.files} files, "
        f"{len(report.edited)} edited, {len(report.overlay)} new"
    )
    return Outcome(text, dataclasses.asdict(report))


def _wheel(args: argparse.Namespace, root: Path) -> Outcome:
    base = _base(args, root)
    extension = None if args.dry_run else extension_for(root, base)
    path = build_wheel(root, base, args.out, extension=extension, dry_run=args.dry_run)
    return Outcome(str(path), {"base": base.name, "wheel": str(path)})


def _extension(args: argparse.Namespace, root: Path) -> Outcome:
    if args.check:
        report = check_file(root, args.check)
        data = dataclasses.asdict(dataclasses.replace(report, errors=()))
        cubins = ", ".join(f"{n} x {name}" for name, n in report.cubins.items())
        newest = ", ".join(f"{name} {n}" for name, n in report.newest.items())
        text = f"{report.path}: {cubins}; {newest}; {', '.join(report.operators)}"
        for kernel, size in report.spilled.items():
            text += f"\n{size} bytes in local memory: {kernel}"
        return Outcome(text, data, [*report.errors])
    extension = build_extension(root)
    if args.out:
        args.out.write_bytes(extension.data)
    archs = " ".join(extension.archs)
    text = f"{len(extension.data)} bytes for {archs}, by {extension.compiler}"
    return Outcome(text, extension.entry())


def _export(args: argparse.Namespace, root: Path) -> Outcome:
    report = upstream.export(
        root,
        pinned(root, args.base),
        args.out,
        topics=args.topic,
        author=args.author,
        dry_run=args.dry_run,
    )
    return Outcome(upstream.summary(report), upstream.listing(report), report.errors)


def _lock(args: argparse.Namespace, root: Path) -> Outcome:
    loaded = load_edits(root)
    results = tuple(resolve_all(base, loaded) for base in _bases(args, root))
    errors = [error for result in results for error in result.errors]
    if errors:
        return Outcome("", {}, errors)
    old, text = new_lock(root, results)
    states = lock.compare(old, {r.base.name: r.lock_entries() for r in results})
    path = root / lock.LOCK_FILE
    changed = not path.exists() or path.read_text("utf-8") != text
    if changed and not args.dry_run:
        path.write_text(text, "utf-8")
    lines = [f"{s.base}: {s.id}: {s.state}" for s in states if s.state != "same"]
    lines.append(f"{path.name}: {'changed' if changed else 'unchanged'}")
    data = {
        "changed": changed,
        "states": [dataclasses.asdict(state) for state in states],
    }
    return Outcome("\n".join(lines), data)


def _rebase(args: argparse.Namespace, root: Path) -> Outcome:
    return releases.run_rebase(args, root, _bases(args, root))


def _accept(args: argparse.Namespace, root: Path) -> Outcome:
    return releases.run_accept(args, root, _bases(args, root))


def _status(args: argparse.Namespace, root: Path) -> Outcome:
    loaded = load_edits(root)
    if args.markdown and not args.dry_run:
        path = root / args.markdown
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(register(loaded), "utf-8")
    lines: list[str] = []
    data: list[dict[str, Any]] = []
    for file in loaded:
        for edit in file.file.edits:
            what = f"{type(edit.op).__name__} at {anchor_text(edit.at)}"
            lines += [
                f"{edit.id} [{file.file.topic}] {file.target}",
                f"  {what}",
                f"  until {edit.drop_when}; forwarded {edit.forwarded}",
            ]
            data.append(
                {
                    "id": edit.id,
                    "file": file.target,
                    "topic": file.file.topic,
                    "change": what,
                    "why": edit.why,
                    "drop_when": edit.drop_when,
                    "forwarded": edit.forwarded,
                    "test": edit.test,
                    "releases": edit.releases,
                    "bases": list(edit.bases),
                }
            )
    lines.append(f"{len(data)} edits in {len(loaded)} files")
    return Outcome("\n".join(lines), {"edits": data})


def _sync(args: argparse.Namespace, root: Path) -> Outcome:
    report = sync(root, args.site_packages, dry_run=args.dry_run)
    changes = {
        "written": report.written,
        "restored": report.restored,
        "removed": report.removed,
    }
    lines = [f"{word} {path}" for word, paths in changes.items() for path in paths]
    lines.append(f"{report.version}: {report.unchanged} files unchanged")
    return Outcome("\n".join(lines), dataclasses.asdict(report))
