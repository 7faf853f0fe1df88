# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Run tests of Triton kernels where there is no GPU.

Without a GPU, vLLM replaces Triton by a placeholder for the whole process. Decorated
tests run in processes of their own, where `vllm` is the folder of this checkout, or the
fork over the CUDA release, and Triton is the real one.
"""

import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from unittest import mock

from tests.helpers import cuda_tree

ROOT = Path(__file__).parents[2]
Test = Callable[..., None]


def in_interpreter(test: Test) -> Test:
    """Run the test where kernels are interpreted, on CPU tensors.

    bfloat16 is wrong there: dot products and sums give garbage, and conversions need
    `exact_conversions`.
    """
    return _elsewhere(test, _interpreter)


def with_compiler(test: Test) -> Test:
    """Run the test where kernels can be compiled, for any device, with `compiling`."""
    return _elsewhere(test, _compiler)


def with_compiler_in_cuda_tree(test: Test) -> Test:
    """The same with the fork over the CUDA release; see `cuda_tree`."""
    return _elsewhere(test, _compiler_in_cuda_tree)


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """Compile for sm_<capability> what is launched, and do not run it.

    Yields:
        The list to which each launch adds its compiled kernel.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    target = GPUTarget("cuda", capability, 32)
    # Triton keeps compiled kernels by device number.
    device = types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
    )
    compiled: list[Any] = []
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **kwargs: Any) -> None:
        compiled.append(launch(kernel, *args, **(kwargs | {"warmup": True})))

    driver.set_active(device)
    with mock.patch.object(JITFunction, "run", compile_only):
        yield compiled


@contextmanager
def exact_conversions() -> Iterator[None]:
    """Let interpreted kernels round float32 to bfloat16 and e4m3 as a GPU does.

    The interpreter truncates to bfloat16. To e4m3 it rounds ties up, truncates
    subnormal values and loses the carry of a mantissa.
    """
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def exact(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in (tl.bfloat16, tl.float8e4nv):
            return convert(data, source, target, rounding)
        values = torch.from_numpy(data)
        if target == tl.bfloat16:
            return values.bfloat16().view(torch.int16).numpy()
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    with mock.patch.object(interpreter, "_convert_float", exact):
        yield


def stack_bytes(cubin: bytes) -> int:
    """Of a thread, spilled registers above all, in all kernels of `cubin`."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.check_output(command, text=True)
    return sum(int(stack) for stack in re.findall(r"STACK:(\d+)", usage))


def _elsewhere(test: Test, pool: Callable[[], ProcessPoolExecutor]) -> Test:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        job = (test.__module__, test.__qualname__, args, kwargs)
        pool().submit(_run, *job).result()

    return run


def _run(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name)
    while hasattr(test, "__wrapped__"):
        test = test.__wrapped__
    test(*args, **kwargs)


@functools.cache
def _interpreter() -> ProcessPoolExecutor:
    return _process("1", _import_triton, str(ROOT))


@functools.cache
def _compiler() -> ProcessPoolExecutor:
    return _process("0", _import_triton, str(ROOT))


@functools.cache
def _compiler_in_cuda_tree() -> ProcessPoolExecutor:
    tree = tempfile.TemporaryDirectory(prefix="cuda-tree-")
    cuda_tree.write_tree(Path(tree.name))
    pool = _process("0", cuda_tree._start, tree.name)
    # Goes with the pool, when the tests end.
    pool.tree = tree  # type: ignore[attr-defined]
    return pool


def _process(
    interpret: str, start: Callable[[str], None], root: str
) -> ProcessPoolExecutor:
    """One process, started afresh: Triton reads the environment when it is imported."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    environment = {"TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": ""}
    with mock.patch.dict(os.environ, environment):
        pool.submit(start, root).result()
    return pool


def _import_triton(root: str) -> None:
    sys.path.insert(0, root)
    for name in ("vllm", "vllm.triton_utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(Path(root, *name.split(".")))]
        sys.modules[name] = module
    utils: Any = sys.modules["vllm.triton_utils"]
    utils.triton = importlib.import_module("triton")
    utils.tl = importlib.import_module("triton.language")
