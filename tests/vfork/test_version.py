# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The build number: clones with and without tags, and source distributions."""

import sys
from pathlib import Path

import pytest

from tests.vfork.conftest import git, write
from vfork.errors import VforkError
from vfork.version import build_number, number_from_git


def commits(root: Path, count: int) -> None:
    for number in range(count):
        git(root, "commit", "-q", "--allow-empty", "-m", str(number))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    root.mkdir()
    git(root, "init", "-q")
    return root


def test_new_repository_has_number_zero(clone: Path) -> None:
    assert build_number(clone) == number_from_git(clone) == 0


def test_without_a_tag_all_commits_count(clone: Path) -> None:
    commits(clone, 4)
    assert build_number(clone) == number_from_git(clone) == 4


@pytest.mark.parametrize("tag", ["v1.0", "0.33.0+glmdsa.4", "base-0.33.0"])
def test_commits_since_the_last_tag_count(clone: Path, tag: str) -> None:
    commits(clone, 2)
    git(clone, "tag", tag)
    assert build_number(clone) == number_from_git(clone) == 0
    commits(clone, 3)
    assert build_number(clone) == number_from_git(clone) == 3


def test_local_changes_do_not_count(clone: Path) -> None:
    commits(clone, 2)
    write(clone, {"new.py": "", "staged.py": ""})
    git(clone, "add", "staged.py")
    assert build_number(clone) == number_from_git(clone) == 2


def test_without_setuptools_scm_git_gives_the_same(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits(clone, 5)
    monkeypatch.setitem(sys.modules, "setuptools_scm", None)
    assert build_number(clone) == 5


@pytest.mark.parametrize("scm", [True, False], ids=["setuptools-scm", "git"])
@pytest.mark.filterwarnings("ignore:.*is shallow")
def test_shallow_clone_gives_a_warning(
    clone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scm: bool,
) -> None:
    if not scm:
        monkeypatch.setitem(sys.modules, "setuptools_scm", None)
    commits(clone, 5)
    assert build_number(clone) == 5
    assert capsys.readouterr().err == ""
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth=2", clone.as_uri(), str(shallow))
    assert build_number(shallow) == build_number(shallow) == 2
    message = capsys.readouterr().err
    assert message.count(f"warning: {shallow} is a shallow clone") == 1
    git(shallow, *message.partition("`git ")[2].partition("`")[0].split())
    assert build_number(shallow) == 5


def test_source_distribution_knows_its_number(tmp_path: Path) -> None:
    text = "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+glmdsa.12.cpu\n"
    write(tmp_path, {"PKG-INFO": text})
    assert build_number(tmp_path) == 12


@pytest.mark.parametrize("metadata", ["", "Name: vllm\nVersion: 0.33.0\n"])
def test_other_directory_has_no_number(tmp_path: Path, metadata: str) -> None:
    write(tmp_path, {"PKG-INFO": metadata})
    with pytest.raises(VforkError, match="neither a git clone nor") as caught:
        build_number(tmp_path)
    assert caught.value.code == "VF505"


@pytest.mark.parametrize("scm", [True, False], ids=["setuptools-scm", "git"])
def test_damaged_clone_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scm: bool
) -> None:
    write(tmp_path, {".git": "gitdir: /nowhere\n"})
    if not scm:
        monkeypatch.setitem(sys.modules, "setuptools_scm", None)
    with pytest.raises(VforkError) as caught:
        build_number(tmp_path)
    assert caught.value.code == "VF505"
