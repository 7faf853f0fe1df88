# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Run code of the GGUF package in a fresh process, without torch, and measure it."""

import importlib.util
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.limits import HANG_SECONDS

# Packages of these names with the real paths, so that `vllm/__init__.py`, which
# imports torch, does not run. The rest measures memory in MiB.
_PREAMBLE = """
import sys, types
for name in ("vllm", "vllm.transformers_utils"):
    package = types.ModuleType(name)
    package.__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
    sys.modules[name] = package

def status(key):
    with open("/proc/self/status") as file:
        return next(int(x.split()[1]) for x in file if x.startswith(key)) / 1024

def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
"""


def run_light(code: str, *args: str) -> str:
    """Standard output of `code`, which gets `args` as `sys.argv[2:]`.

    `code` may call `status("VmRSS")`, `status("VmHWM")` (MiB) and `reset_peak()`.
    """
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    root = str(Path(next(iter(spec.submodule_search_locations))).parent)
    run = subprocess.run(
        [sys.executable, "-c", _PREAMBLE + code, root, *args],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    return run.stdout


@contextmanager
def memory_limit(extra_mib: int) -> Iterator[None]:
    """MemoryError for whatever takes `extra_mib` MiB more than the process has now.

    Read-only file maps do not count.
    """
    with open("/proc/self/status") as file:
        used = next(int(x.split()[1]) for x in file if x.startswith("VmData")) << 10
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + (extra_mib << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
