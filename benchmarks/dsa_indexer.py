#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Time the index logits beside DeepGEMM's, in one run.

    python benchmarks/dsa_indexer.py --json dsa_indexer.json
    python benchmarks/dsa_indexer.py --peer none --capability 8.0

32 index heads. Medians of single calls; decoding also inside a CUDA graph. Widening and
the allocation of the result are in our times. `floor` is the least time of the work at
the rates that the same run measures: an fp8 matrix product of 8192^3 for prompts, a
copy of 1 GiB for decoding. A ratio is our time over DeepGEMM's.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
    import _standalone

    _standalone.use()

from triton.testing import do_bench, do_bench_cudagraph

from tests.gpu._standalone import asked_capability
from vllm.v1.attention.ops.dsa_indexer import paged_logits, prefill_logits

DEVICE, HEADS, DIM, PAGE, TOKEN_BYTES = "cuda", 32, 128, 64, 132
FP8 = torch.float8_e4m3fn
PREFILL = ((1024, 8192), (4096, 32_768), (2048, 131_072))
PAGED = (
    (1, 8192, 1),
    (1, 131_072, 1),
    (32, 8192, 1),
    (32, 65_536, 1),
    (32, 8192, 2),
    (32, 8192, 4),
)
Call = Callable[[], torch.Tensor]


def prefill_calls(queries: int, keys: int, peer: Any) -> tuple[Call, Call | None]:
    """Ours and DeepGEMM's, for the last `queries` of a prompt of `keys`."""
    q = (torch.randn(queries, HEADS, DIM, device=DEVICE) * 60).to(FP8)
    k = (torch.randn(keys, DIM, device=DEVICE) * 60).to(FP8)
    scales = torch.rand(keys, device=DEVICE) * 1e-3
    weights = torch.randn(queries, HEADS, device=DEVICE)
    starts = torch.zeros(queries, dtype=torch.int32, device=DEVICE)
    ends = torch.arange(keys - queries + 1, keys + 1, device=DEVICE).int()
    bounds = (weights, starts, ends, keys)

    def ours() -> torch.Tensor:
        return prefill_logits.mqa_logits(q, k, scales, *bounds)

    def theirs() -> torch.Tensor:
        return peer.fp8_fp4_mqa_logits((q, None), (k, scales), *bounds)

    return ours, theirs if peer else None


def paged_calls(
    requests: int, keys: int, next_n: int, peer: Any
) -> tuple[Call, Call | None]:
    pages = keys // PAGE
    shape = (requests * pages, PAGE * TOKEN_BYTES)
    cache = torch.randint(0, 100, shape, device=DEVICE, dtype=torch.uint8)
    scales = torch.rand(shape[0], PAGE, device=DEVICE) * 1e-3
    cache[:, PAGE * DIM :] = scales.view(torch.uint8)
    cache = cache.view(-1, PAGE, 1, TOKEN_BYTES)
    table = torch.randperm(len(cache), device=DEVICE).int().view(requests, pages)
    q = (torch.randn(requests, next_n, HEADS, DIM, device=DEVICE) * 60).to(FP8)
    weights = torch.randn(requests * next_n, HEADS, device=DEVICE)
    lengths = keys - next_n + 1 + torch.arange(next_n, device=DEVICE)
    lengths = lengths.int().repeat(requests, 1)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    slots = (
        sms // 2 if next_n == 4 and torch.cuda.get_device_capability()[0] == 9 else sms
    )

    def ours() -> torch.Tensor:
        return paged_logits.paged_mqa_logits(q, cache, weights, lengths, table, keys)

    if peer is None:
        return ours, None
    plan = peer.get_paged_mqa_logits_metadata(lengths, PAGE, slots)

    def theirs() -> torch.Tensor:
        return peer.fp8_fp4_paged_mqa_logits(
            (q, None), cache, weights, lengths, table, plan, keys
        )

    return ours, theirs


def median_us(call: Call, graph: bool = False) -> float:
    if graph:
        with torch.cuda.stream(torch.cuda.Stream()):
            return 1e3 * do_bench_cudagraph(call, rep=60, return_mode="median")
    return 1e3 * do_bench(call, warmup=20, rep=60, return_mode="median")


def report(
    name: str, calls: tuple[Call, Call | None], floor: float, graph: bool
) -> Any:
    """Figures of one shape; prints them."""
    ours, theirs = calls
    got = {"name": name, "floor_us": floor, "us": median_us(ours)}
    if graph:
        got["graph_us"] = median_us(ours, graph=True)
    if theirs is not None:
        got["deep_gemm_us"] = median_us(theirs)
        got["ratio"] = got["us"] / got["deep_gemm_us"]
        if graph:
            got["deep_gemm_graph_us"] = median_us(theirs, graph=True)
            got["graph_ratio"] = got["graph_us"] / got["deep_gemm_graph_us"]
    figures = " ".join(f"{k}={v:.2f}" for k, v in got.items() if k != "name")
    print(f"{name}: {figures}", flush=True)
    return got


def rates() -> tuple[float, float]:
    """Operations and bytes per microsecond that this device reaches."""
    a, b = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
    operations = 2 * 8192**3
    if torch.cuda.get_device_capability() >= (8, 9):
        one = torch.ones((), device=DEVICE)
        x, y = a.to(FP8), b.to(FP8).t()
        product = median_us(
            lambda: torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16)
        )
    else:
        product = median_us(lambda: a @ b)
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return operations / product, 2 * 2**30 / median_us(lambda: target.copy_(source))


def deep_gemm() -> Any:
    try:
        import deep_gemm as peer
    except ImportError:
        from vllm.third_party import deep_gemm as peer
    return peer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=("deep_gemm", "none"), default="deep_gemm")
    parser.add_argument("--capability", help="our kernels for this one, as 8.0")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    peer = deep_gemm() if options.peer == "deep_gemm" else None
    if capability := asked_capability(options.capability):
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        for module in (prefill_logits, paged_logits):
            module.device_of = lambda device: (capability, sms)
    operations, copied = rates()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}:"
        f" {operations / 1e6:.0f} TFLOP/s, {copied / 1e3:.0f} GB/s"
    )
    results = []
    for queries, keys in PREFILL:
        floor = 2 * queries * keys * HEADS * DIM / operations
        calls = prefill_calls(queries, keys, peer)
        results.append(report(f"prefill {queries}x{keys}", calls, floor, graph=False))
    for requests, keys, next_n in PAGED:
        floor = requests * keys * (TOKEN_BYTES + 4 * next_n) / copied
        calls = paged_calls(requests, keys, next_n, peer)
        name = f"paged {requests}x{keys} next_n {next_n}"
        results.append(report(name, calls, floor, graph=True))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
