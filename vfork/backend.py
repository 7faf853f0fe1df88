# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The PEP 517 build backend: `pip install .` builds and installs the fork wheel.

`VLLM_TARGET_DEVICE`, as in vLLM's own build, chooses the base: `cpu` or `cuda`.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vfork import sdist, wheel
from vfork.distinfo import dist_info_files, dist_info_name
from vfork.errors import VforkError
from vfork.extension import build_requirements, extension_for
from vfork.fetch import fetch
from vfork.pin import Base, pinned
from vfork.release import Release
from vfork.version import build_number

DEVICES = ("cpu", "cuda")
Settings = Mapping[str, str | list[str]] | None


def target_device() -> str:
    """`VLLM_TARGET_DEVICE`, or `cuda` where a CUDA device is seen, else `cpu`.

    Raises VforkError VF508 for another value.
    """
    device = os.environ.get("VLLM_TARGET_DEVICE", "")
    if not device:
        return "cuda" if cuda_device_seen() else "cpu"
    if device not in DEVICES:
        raise VforkError(
            "VF508",
            f"VLLM_TARGET_DEVICE is {device!r}, not one of: {', '.join(DEVICES)}",
            hint="unset it to take cuda where a CUDA device is seen, else cpu",
        )
    return device


def cuda_device_seen() -> bool:
    """Whether this is Linux with an NVIDIA driver or device."""
    if sys.platform != "linux":
        return False
    if any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/nvidia0"))):
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True)
    return listed.returncode == 0 and b"GPU" in listed.stdout


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What compiles the extension, for a CUDA wheel."""
    with _plain_errors():
        return build_requirements(Path.cwd()) if target_device() == "cuda" else []


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Writes the wheel's dist-info, without RECORD, and returns its name."""
    with _plain_errors():
        root, base, version = _project()
        with Release(fetch(base)) as release:
            files = dist_info_files(root, base, release, version)
        for path, data in files.items():
            target = Path(metadata_directory, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return dist_info_name(version)


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds the fork wheel and returns its file name."""
    with _plain_errors():
        root, base, _ = _project()
        extension = extension_for(root, base)
        out = Path(wheel_directory)
        return wheel.build_wheel(root, base, out, extension=extension).name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Builds the source distribution and returns its file name."""
    with _plain_errors():
        root, _, version = _project()
        return sdist.build_sdist(root, version, Path(sdist_directory)).name


def _project() -> tuple[Path, Base, str]:
    """The source tree (front ends start hooks there), the base, and the version."""
    root = Path.cwd()
    base = pinned(root, target_device())
    return root, base, base.fork_version(build_number(root))


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Ends the hook with the error's text alone: a traceback would bury it."""
    try:
        yield
    except VforkError as error:
        raise SystemExit(str(error)) from error
