# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The pinned releases themselves, fetched if they are not cached yet."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vfork.fetch import fetch
from vfork.overlay import overlay_files
from vfork.pin import Base, load_pins
from vfork.release import Release, record_entry
from vfork.wheel import build_wheel

ROOT = Path(__file__).parents[2]
PINS = load_pins(ROOT)
# What `vllm --version` and the choice of the platform rest on.
PROBE = """
import sys
sys.path[:0] = [sys.argv[1]]
import importlib.metadata
import vllm.version
import vllm._version
print(importlib.metadata.version("vllm"), vllm._version.__version__)
print(vllm.version._prev_minor_version())
"""


@pytest.fixture(scope="module", params=sorted(PINS))
def base(request: pytest.FixtureRequest) -> Base:
    return PINS[request.param]


@pytest.fixture(scope="module")
def wheel(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, base, tmp_path_factory.mktemp(base.name))


def test_fork_wheel_is_sound_and_keeps_the_release(base: Base, wheel: Path) -> None:
    """Every hash in RECORD, and all but edited files as in the release."""
    with Release(fetch(base)) as release, Release(wheel) as built:
        assert set(built.record) == set(built.names())
        for name in built.names():
            if not name.endswith("-info/RECORD"):
                assert record_entry(built.archive.read(name)) == built.record[name]
        manifest = json.loads(built.read("vllm/glm_dsa_manifest.json"))
        edited = {entry["file"] for entry in manifest["edits"]}
        assert edited
        kept = [n for n in release.names() if not n.startswith(release.dist_info)]
        changed = {n for n in kept if built.record[n] != release.record[n]}
        assert changed == edited | {"vllm/_version.py"}
        modes = {n: release.info(n).external_attr for n in kept}
        assert {n: built.info(n).external_attr for n in modes} == modes
        added = set(built.names()) - set(kept)
        added = {n for n in added if not n.startswith(built.dist_info)}
        assert added == {*overlay_files(ROOT), "vllm/glm_dsa_manifest.json"}
        assert sum(bool(m >> 16 & stat.S_IXUSR) for m in modes.values()) >= 5


def test_requirements_are_the_pinned_ones(base: Base, wheel: Path) -> None:
    with Release(wheel) as built:
        metadata = built.read(f"{built.dist_info}/METADATA").decode()
    required = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.partition("\n\n")[0].splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    torch = [item for item in required if item.startswith("torch")]
    assert torch[0] == f"torch=={base.torch}"
    if base.name == "cpu":
        assert len(torch) == 1
    assert "gguf>=0.19,<0.20" in required
    assert len(required) > 60


def test_version_is_told_alike_by_package_and_metadata(
    base: Base, wheel: Path, tmp_path: Path
) -> None:
    with Release(wheel) as built:
        version = built.dist_info.removeprefix("vllm-").removesuffix(".dist-info")
        names = ["vllm/version.py", "vllm/_version.py", f"{built.dist_info}/METADATA"]
        built.archive.extractall(tmp_path, names)
    # The release's own package imports torch; its version modules need not.
    (tmp_path / "vllm/__init__.py").touch()
    ran = subprocess.run(
        [sys.executable, "-I", "-c", PROBE, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    minor = int(base.version.split(".")[1])
    assert ran.stdout.split() == [version, version, f"0.{minor - 1}"], ran.stderr
    assert ("cpu" in version) == (base.name == "cpu")
