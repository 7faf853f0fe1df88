# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Run tests on the fork over the CUDA release, where there is no GPU.

The decorated tests run in a process that has the Python files of that fork before the
installed one on its path. Not there: compiled extensions, FlashInfer, a device. Empty
modules stand for the extensions that are imported for their side effects, and the
platform tells the compute capability that a test sets. Triton kernels are interpreted.
Only plain asserts and picklable exceptions come back.
"""

import functools
import importlib
import multiprocessing
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from vfork.fetch import fetch
from vfork.image import compose
from vfork.pin import load_pins
from vfork.release import Release

ROOT = Path(__file__).parents[2]
Test = Callable[..., None]

EXTENSIONS = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C")
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def in_cuda_tree(test: Test) -> Test:
    """Run the test where `vllm` is the fork over the CUDA release."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        job = (test.__module__, test.__qualname__, args, kwargs)
        _pool(test.__module__).submit(_run, *job).result()

    return run


@contextmanager
def device(capability: tuple[int, int]) -> Iterator[None]:
    """In such a test: what the platform tells of the device. Unknown otherwise."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    platform: Any = type(current_platform)
    platform.capability = DeviceCapability(*capability)
    try:
        yield
    finally:
        platform.capability = None


def write_tree(out: Path) -> None:
    """Put Python and data files of the fork over the CUDA release into `out`."""
    base = load_pins(ROOT)["cuda"]
    with Release(fetch(base)) as release:
        image = compose(ROOT, base, release, base.fork_version(0))
        members = {**image.payload, **image.dist_info}
        files = {path: member.data for path, member in members.items()}
        for name in image.unchanged(release):
            if name.endswith((".py", ".json")):
                files[name] = release.read(name)
    for name, data in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)


def _run(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name)
    while hasattr(test, "__wrapped__"):
        test = test.__wrapped__
    test(*args, **kwargs)


@functools.cache
def _tree() -> tempfile.TemporaryDirectory[str]:
    """Goes when the tests end."""
    tree = tempfile.TemporaryDirectory(prefix="cuda-tree-")
    write_tree(Path(tree.name))
    return tree


@functools.lru_cache(maxsize=1)
def _pool(module: str) -> ProcessPoolExecutor:
    """One process for the tests of a module, started afresh.

    The tree is found and Triton set up at import, and vLLM caches what it finds out.
    """
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with mock.patch.dict(os.environ, ENVIRONMENT):
        pool.submit(_start, _tree().name).result()
    return pool


def _start(tree: str) -> None:
    """Make the fork importable, and give it a device without asking a driver."""
    sys.path.insert(0, tree)
    for name in EXTENSIONS:
        sys.modules[name] = types.ModuleType(name)
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase

    class Device(CudaPlatformBase):
        capability: Any = None

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return cls.capability

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 100

    platforms: Any = vllm.platforms
    platforms._current_platform = Device()
