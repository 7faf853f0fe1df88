# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Run tests of CUDA code where there is no GPU, or as on another one.

The decorated tests run in a process of their own. There the platform is CUDA without a
driver, with the compute capability that a test sets, and Triton kernels are
interpreted. Empty modules stand for extensions that cannot be imported. Only plain
asserts and picklable exceptions come back.
"""

import functools
import importlib
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

Test = Callable[..., None]

EXTENSIONS = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C")
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def in_cuda_tree(test: Test) -> Test:
    """Run the test in that process."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        job = (test.__module__, test.__qualname__, args, kwargs)
        _pool().submit(_run, *job).result()

    return run


@contextmanager
def device(capability: tuple[int, int]) -> Iterator[None]:
    """In such a test: what the platform tells of the device. Unknown otherwise."""
    platforms: Any = importlib.import_module("vllm.platforms")
    interface: Any = importlib.import_module("vllm.platforms.interface")
    platform: Any = type(platforms.current_platform)
    platform.capability = interface.DeviceCapability(*capability)
    try:
        yield
    finally:
        platform.capability = None


def write_tree(out: Path) -> None:
    """Nothing to write: the installed vLLM is the one under test."""


def _run(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name)
    while hasattr(test, "__wrapped__"):
        test = test.__wrapped__
    test(*args, **kwargs)


@functools.cache
def _pool() -> ProcessPoolExecutor:
    """One process, started afresh: Triton reads the environment when it is imported."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with mock.patch.dict(os.environ, ENVIRONMENT):
        pool.submit(_start).result()
    return pool


def _is_built(extension: str) -> bool:
    """Told by the file: importing the package of a missing one leaves traces."""
    *packages, name = extension.split(".")
    return any(
        any(Path(entry, *packages).glob(f"{name}.*so")) for entry in sys.path if entry
    )


def _start(tree: str = "") -> None:
    for name in EXTENSIONS:
        if not _is_built(name):
            sys.modules[name] = types.ModuleType(name)
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda: Any = importlib.import_module("vllm.platforms.cuda")

    def capability_of(cls: Any, device_id: int = 0) -> Any:
        return cls.capability

    platforms._current_platform = type(
        "Device",
        (cuda.CudaPlatformBase,),
        {
            "capability": None,
            "get_device_capability": classmethod(capability_of),
            "is_pin_memory_available": classmethod(lambda cls: False),
            "num_compute_units": classmethod(lambda cls, device_id=0: 100),
        },
    )()
