# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Tries the fork on a new release: compile all files, import, run the CPU tests."""

import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vfork.assemble import assemble
from vfork.errors import VforkError
from vfork.fetch import fetch
from vfork.image import compose
from vfork.rebase.side import Side
from vfork.rebase.tree import module_name
from vfork.release import Release
from vfork.source import compile_quietly

TESTS = ("tests/overlay",)
SMOKE_SECONDS = 600
TEST_SECONDS = 3600

_SHOWN = 15
# Run by the environment's Python, with the assembled tree first on its path.
_SMOKE = """
import importlib, importlib.metadata as metadata, json, sys
result = {"failed": {}, "unmet": []}
for line in metadata.requires("vllm") or ():
    name, mark, version = line.split(";")[0].partition("==")
    if mark and "extra ==" not in line:
        try:
            found = metadata.version(name.split("[")[0].strip()).split("+")[0]
        except metadata.PackageNotFoundError:
            found = "nothing"
        if found != version.strip().split("+")[0]:
            result["unmet"].append(f"{name.strip()} is {found}, not {version.strip()}")
for name in ["vllm", *json.loads(sys.argv[1])]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        result["failed"][name] = f"{type(error).__name__}: {error}"[:300]
print("SMOKE " + json.dumps(result), flush=True)
"""


@dataclass(frozen=True)
class Step:
    """One step of a trial. `state` is passed, failed or skipped."""

    name: str
    base: str
    state: str
    detail: str
    seconds: float
    code: str = ""
    excerpt: str = ""


@dataclass(frozen=True)
class Environment:
    """The Python that imports and tests, and what it runs; None leaves both out."""

    python: Path | None
    tests: tuple[str, ...] = TESTS


def try_release(root: Path, new: Side, environment: Environment) -> Iterator[Step]:
    """Yields the steps of one base; what a failure makes senseless is skipped."""
    base = new.base.name
    start = time.monotonic()
    try:
        version = new.base.fork_version(0)
        with Release(fetch(new.base)) as release:
            image = compose(root, new.base, release, version)
    except VforkError as err:
        seconds = time.monotonic() - start
        yield Step("compose", base, "skipped", f"{err.code}: {err.message}", seconds)
        return
    files = {path: blob.data for path, blob in new.tree.blobs.items()}
    files |= {p: m.data for p, m in image.payload.items() if p.endswith(".py")}
    yield _timed("compile", base, lambda: _compile(files))
    if base != "cpu":
        return
    modules = sorted(
        module_name(path)
        for path in {**image.edited, **image.overlay}
        if path.endswith(".py")
    )
    if environment.python is None:
        yield Step("import", base, "skipped", "no environment; see --python", 0.0)
        return
    with tempfile.TemporaryDirectory(prefix="vfork-rebase-") as scratch:
        tree = Path(scratch, "tree")
        python = environment.python
        yield _timed("assemble", base, lambda: _assemble(root, new, tree))
        yield _timed("import", base, lambda: _import(python, tree, modules))
        if environment.tests:
            tests = environment.tests
            yield _timed("tests", base, lambda: _test(root, python, tree, tests))


def _timed(name: str, base: str, run: Callable[[], Step]) -> Step:
    start = time.monotonic()
    step = run()
    return Step(
        name,
        base,
        step.state,
        step.detail,
        round(time.monotonic() - start, 1),
        step.code,
        step.excerpt,
    )


def _step(state: str, detail: str, code: str = "", excerpt: str = "") -> Step:
    return Step("", "", state, detail, 0.0, code, excerpt)


_files: Mapping[str, bytes] = {}


def _compile(files: Mapping[str, bytes]) -> Step:
    """Compiles in as many processes as there are cores; they inherit the sources."""
    global _files
    _files = files
    names = sorted(files)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        errors = [e for e in pool.imap_unordered(_compile_one, names, 50) if e]
    _files = {}
    if errors:
        detail = f"{len(errors)} of {len(names)} files do not compile"
        return _step("failed", detail, "VF642", "\n".join(sorted(errors)[:_SHOWN]))
    return _step("passed", f"{len(names)} files")


def _compile_one(name: str) -> str:
    try:
        compile_quietly(_files[name], name)
    except (SyntaxError, ValueError) as err:
        return f"{name}: {err}"
    return ""


def _assemble(root: Path, new: Side, tree: Path) -> Step:
    report = assemble(root, new.base, tree)
    return _step("passed", f"{report.files} files")


@contextmanager
def _path(tree: Path) -> Iterator[dict[str, str]]:
    """Environment variables in which the assembled tree comes first."""
    yield {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def _import(python: Path, tree: Path, modules: list[str]) -> Step:
    command = [str(python), "-c", _SMOKE, json.dumps(modules)]
    with _path(tree) as env:
        ran = _run(command, env, tree.parent, SMOKE_SECONDS)
    _, found, last = ran.rpartition("SMOKE ")
    if not found:
        return _step("failed", "the interpreter stopped", "VF643", _tail(ran))
    result = json.loads(last.splitlines()[0])
    unmet = f"; the environment differs: {', '.join(result['unmet'])}"
    detail = unmet if result["unmet"] else ""
    failed = [f"{name}: {why}" for name, why in result["failed"].items()]
    count = len(modules) + 1
    if failed:
        message = f"{len(failed)} of {count} modules cannot be imported{detail}"
        return _step("failed", message, "VF643", "\n".join(failed[:_SHOWN]))
    return _step("passed", f"{count} modules{detail}")


def _test(root: Path, python: Path, tree: Path, tests: tuple[str, ...]) -> Step:
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    with _path(tree) as env:
        ran = _run(command, env, root, TEST_SECONDS)
    last = ran.rstrip().rpartition("\n")[2].strip("= ")
    if " failed" in last or " error" in last or " passed" not in last:
        return _step("failed", last or "nothing ran", "VF644", _tail(ran))
    return _step("passed", last)


def _run(command: list[str], env: Mapping[str, str], cwd: Path, limit: int) -> str:
    try:
        ran = subprocess.run(
            command,
            env=env,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {limit} s"
    except OSError as error:
        return str(error)
    return ran.stdout


def _tail(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-_SHOWN:])
