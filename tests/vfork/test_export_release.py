# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The patches of this checkout on the pinned release.

The tree is made from the wheel: its Python files are those of the source distribution.
What only the latter has is checked if VFORK_UPSTREAM_TREE names an unpacked one:
upstream's own ruff configuration, and that no test of ours has the path of one of
upstream's.
"""

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vfork.conftest import git
from vfork.export.command import DEFAULT_OUT, ExportReport, export
from vfork.export.topics import VLLM, load_topics
from vfork.fetch import fetch
from vfork.pin import load_pins
from vfork.release import Release

ROOT = Path(__file__).parents[2]
BASE = load_pins(ROOT)["cuda"]
TOPICS = [t.name for t in load_topics(ROOT).topics if t.repository == VLLM]
# The rules that vLLM 0.33.0 selects and ignores.
RULES = [
    "--select=D,E,F,UP,B,ISC,SIM,I,G",
    "--ignore=D100,D101,D102,D103,D104,D105,D106,D107,D203,D205,D209,D213,D301,D400",
    "--extend-ignore=D401,D404,D415,E731,B905,B007,UP032,UP042,F403,F405",
]
# Of them, what some modules here do not keep yet: D417 wants a description of every
# argument where there is one of any, D403 a capital even in "vLLM's".
PENDING = "--extend-ignore=D417,D403"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git tree of the Python files of the release."""
    tree = tmp_path_factory.mktemp("release")
    with Release(fetch(BASE)) as wheel:
        for name in wheel.names():
            if name.startswith("vllm/") and name.endswith(".py"):
                path = tree / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(wheel.read(name))
    git(tree, "init", "-q")
    git(tree, "add", "-f", ".")
    git(tree, "commit", "-qm", "release")
    return tree


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExportReport, Path]:
    out = tmp_path_factory.mktemp("series") / "out"
    return sound(export(ROOT, BASE, out)), out


@pytest.fixture(scope="module")
def applied(release: Path, series: tuple[ExportReport, Path]) -> list[Path]:
    """The files of the tree that the series changed."""
    apply(release, *series)
    names = git(release, "diff", "--name-only", "HEAD~" + str(len(TOPICS))).split()
    return [release / name for name in names]


def sound(report: ExportReport) -> ExportReport:
    assert not report.errors, "\n".join(map(str, report.errors))
    return report


def apply(tree: Path, report: ExportReport, out: Path) -> None:
    patches = [str(out / p.path) for p in report.patches if p.repository == VLLM]
    git(tree, "am", "--quiet", "--keep-non-patch", *patches)


@pytest.mark.parametrize("topic", TOPICS)
def test_each_topic_applies_with_what_it_needs(
    release: Path, tmp_path: Path, topic: str
) -> None:
    start = git(release, "rev-list", "--max-parents=0", "HEAD").strip()
    git(release, "checkout", "-q", "-B", "alone", start)
    report = sound(export(ROOT, BASE, tmp_path / "out", topics=[topic]))
    apply(release, report, tmp_path / "out")
    for name in git(release, "diff", "--name-only", start).split():
        assert compileall.compile_file(release / name, quiet=1), name
    git(release, "checkout", "-q", "-B", "whole", start)


def test_the_series_compiles(applied: list[Path]) -> None:
    assert len(applied) > 50
    for path in applied:
        if path.suffix == ".py":
            assert compileall.compile_file(path, quiet=1), path


def test_the_series_contains_every_edit_of_the_base(
    series: tuple[ExportReport, Path],
) -> None:
    from vfork.edits import applies, load_edits

    wanted = {
        edit.id
        for file in load_edits(ROOT)
        for edit in file.file.edits
        if applies(edit, BASE.name, BASE.version)
    }
    exported = [edit for patch in series[0].patches for edit in patch.edits]
    kept = {*load_topics(ROOT).fork_only}
    assert sorted(exported) == sorted(wanted - kept)


def test_the_result_passes_the_rules_of_upstream(
    release: Path, applied: list[Path]
) -> None:
    python = [str(path) for path in applied if path.suffix == ".py"]
    rules = ["--isolated", "--target-version=py311", *RULES, PENDING]
    checked = ruff(release, "check", *rules, *python)
    assert checked.returncode == 0, checked.stdout
    formatted = ruff(release, "format", "--isolated", "--check", *python)
    assert formatted.returncode == 0, formatted.stdout


# `make lint` installs it beside the interpreter.
SEARCHED = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))


def ruff(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = shutil.which("ruff", path=os.pathsep.join(SEARCHED))
    if command is None:
        pytest.skip("ruff is not installed")
    return subprocess.run(
        [command, *arguments, "--no-cache"], cwd=tree, capture_output=True, text=True
    )


def test_two_exports_have_the_same_bytes(
    series: tuple[ExportReport, Path], tmp_path: Path
) -> None:
    report = sound(export(ROOT, BASE, tmp_path / "again"))
    assert report.patches == series[0].patches
    for patch in report.patches:
        again = (tmp_path / "again" / patch.path).read_bytes()
        assert again == (series[1] / patch.path).read_bytes()


def test_modules_for_the_plugin_import_without_the_fork(
    series: tuple[ExportReport, Path], tmp_path: Path
) -> None:
    """New files only, which find each other by their new names."""
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "empty")
    (patch,) = [p for p in series[0].patches if p.repository != VLLM]
    git(tmp_path, "am", "--quiet", str(series[1] / patch.path))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from vllm_gguf_plugin.glm_dsa import header, plan, reader, tokenizer\n"
        "assert reader.__file__.startswith(sys.argv[1])\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('vllm', 'torch')]\n"
    )
    subprocess.run(["python3", "-I", "-c", code, str(tmp_path)], check=True)


def test_patches_are_never_tracked() -> None:
    path = f"{DEFAULT_OUT}/vllm/0001-x.patch"
    assert git(ROOT, "check-ignore", path).strip() == path


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("VFORK_UPSTREAM_TREE")
    if not given:
        pytest.skip("VFORK_UPSTREAM_TREE names no unpacked source distribution")
    tree = tmp_path_factory.mktemp("source")
    for name in ("vllm", "tests", "pyproject.toml"):
        source = Path(given, name)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tree / name)
    git(tree, "init", "-q")
    git(tree, "add", "-f", ".")
    git(tree, "commit", "-qm", "source")
    return tree


def test_the_series_passes_on_the_source_distribution(
    source_tree: Path, series: tuple[ExportReport, Path]
) -> None:
    apply(source_tree, *series)
    count = "HEAD~" + str(len(TOPICS))
    names = git(source_tree, "diff", "--name-only", count).split()
    python = [name for name in names if name.endswith(".py")]
    checked = ruff(source_tree, "check", PENDING, *python)
    assert checked.returncode == 0, checked.stdout
    formatted = ruff(source_tree, "format", "--check", *python)
    assert formatted.returncode == 0, formatted.stdout
