# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the sparse MLA benchmarks share: workloads, timings, the machine's description.

Imported after `_standalone.use()`: vLLM need not be installed.
"""

import math
import os
import platform
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import JITFunction
from triton.testing import do_bench

from tests.overlay.sparse_mla.cases import (
    DS_MLA_BYTES,
    LATENT,
    Case,
    Errors,
    Inputs,
    attention,
    make,
)

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda"
ROWS = 262_144
ROPE = 64
# Calls of up to so many tokens run in a CUDA graph when served, so their graphs count.
GRAPH_TOKENS = 128
CHECKED_TOKENS = 4
Call = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """One shape: random rows of a cache larger than any L2, for every token.

    Attributes:
        index_sets: [T, K] int32 each; a graph goes through all of them, so that its
            rows come from memory even if one call's would stay in the L2 cache.
    """

    case: Case
    inputs: Inputs
    index_sets: list[torch.Tensor]

    @classmethod
    def create(
        cls,
        heads: int,
        tokens: int,
        topk: int,
        cache: str,
        dtype: torch.dtype = torch.bfloat16,
    ) -> "Workload":
        case = Case(heads, tokens, topk, cache, dtype, ROPE, ROWS, pattern="full")
        inputs, _ = make(case, DEVICE, poison=False)
        size = tokens * topk * row_bytes(cache)
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        count = 1 if tokens > GRAPH_TOKENS else min(64, math.ceil(2 * l2 / size))
        sets = [inputs.indices] + [
            torch.randint_like(inputs.indices, 0, ROWS) for _ in range(count - 1)
        ]
        return cls(case, inputs, sets)

    @property
    def flops(self) -> int:
        """Of both matrix products."""
        case = self.case
        return 2 * case.tokens * case.heads * case.topk * (2 * LATENT + ROPE)

    @property
    def gathered_bytes(self) -> int:
        return self.case.tokens * self.case.topk * row_bytes(self.case.cache)

    @cached_property
    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        return attention(self.inputs, slice(0, CHECKED_TOKENS))

    def error(self, out: torch.Tensor) -> float:
        """Relative error of the worst of the first tokens; infinity if it has NaN."""
        want, lse = self.reference
        errors = Errors()
        errors.add("", (out[: len(want)], lse), (want, lse), math.inf, math.inf)
        return math.inf if errors.problems else errors.out


def row_bytes(cache: str) -> int:
    width = LATENT + ROPE
    return {"model": 2 * width, "fp8": width, "fp8_ds_mla": DS_MLA_BYTES}[cache]


@dataclass(frozen=True)
class Timing:
    """Medians in microseconds: single calls after an L2 flush, and within a graph."""

    eager_us: float
    graph_us: float | None

    @property
    def us(self) -> float:
        """The one that counts: the graph's, if there is one."""
        return self.eager_us if self.graph_us is None else self.graph_us


def measure(call: Call, workload: Workload, rep_ms: int = 60) -> Timing:
    """Time `call(i)`, a call with index set `i`."""
    eager = do_bench(lambda: call(0), warmup=20, rep=rep_ms, return_mode="median")
    if workload.case.tokens > GRAPH_TOKENS:
        return Timing(eager * 1e3, None)
    return Timing(eager * 1e3, graph_us(call, len(workload.index_sets), rep_ms))


def graph_us(call: Call, sets: int, rep_ms: int = 60) -> float:
    """Median time of a call in a graph of many; launch overhead is not in it."""
    calls = sets * math.ceil(20 / sets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(sets):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % sets)
    graph.replay()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < rep_ms and len(times) < 100):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) / calls * 1e3


_launch = JITFunction.run
_compiled = threading.local()


def _run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `JITFunction.run`: within `compile_only`, compile instead."""
    if getattr(_compiled, "kernels", None) is None:
        return _launch(kernel, *args, **kwargs)
    result = _launch(kernel, *args, **(kwargs | {"warmup": True}))
    _compiled.kernels.append(result)
    return result


@contextmanager
def compile_only() -> Iterator[list[Any]]:
    """This thread's launches compile and do not run; yields the list of kernels."""
    JITFunction.run = _run
    _compiled.kernels = []
    try:
        yield _compiled.kernels
    finally:
        _compiled.kernels = None


def machine() -> dict[str, str]:
    """GPU, driver, versions and commit, for reports."""
    found = {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "code_generated_for": os.environ.get("TRITON_OVERRIDE_ARCH", "this GPU"),
    }
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    for name, command in (("driver", query), ("commit", describe)):
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=20)
            found[name] = run.stdout.strip().partition("\n")[0] or "unknown"
        except (OSError, subprocess.TimeoutExpired):
            found[name] = "unknown"
    return found
