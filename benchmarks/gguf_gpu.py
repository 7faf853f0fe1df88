#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Time products with GGUF blocks at GLM-5 shapes beside bf16 ones, on one GPU.

    python benchmarks/gguf_gpu.py --types Q4_K,IQ2_XXS --tokens 1,8,64,4096
    python benchmarks/gguf_gpu.py --work moe --experts 256 --json gguf.json
    python benchmarks/gguf_gpu.py --extension FILE --who ours,cuda,triton

Dense: 16384 x 6144. MoE: 6144 wide, experts of 2048, top-8, random routing; gate, up
and down of one type. Weights are random bits with finite scales. Times are medians
after a flush of the L2 cache; up to 128 tokens of a CUDA graph, without launches.
TB/s are bytes of the weights that are read, of all experts that were chosen; TFLOP/s
count two operations for a weight and token. `error` is the relative error of the first
token against float64. `ours` is what the fork chooses for that size; `cuda` and
`triton` are its kernels, also where it would choose others. The peers are cuBLAS and
torch._grouped_mm on bf16 weights. torch, triton and gguf-py are enough, and for `cuda`
the compiled extension: the installed one, or FILE of `python -m vfork extension --out
FILE`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
    import _standalone

    _standalone.use(packages=_standalone.GGUF)

from tests.overlay.quantization.triton_gguf_cases import kind_of, random_blocks
from vllm.model_executor.layers.quantization.gguf import cuda_extension
from vllm.model_executor.layers.quantization.gguf import cuda_linear as cuda_dense
from vllm.model_executor.layers.quantization.gguf import cuda_moe as cuda_grouped
from vllm.model_executor.layers.quantization.gguf import triton_linear as dense
from vllm.model_executor.layers.quantization.gguf import triton_moe as grouped
from vllm.model_executor.layers.quantization.gguf.triton_dequantize import (
    triton_dequantize,
)

HIDDEN, INNER, TOP_K, ROWS = 6144, 2048, 8, 16384
GRAPH_TOKENS = 128
CHUNK_WEIGHTS = 1 << 24
OURS = ("ours", "cuda", "triton")
Call = Callable[[], torch.Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default="Q4_K,Q8_0,Q6_K,IQ2_XXS")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,512,4096")
    parser.add_argument("--work", default="linear,moe")
    parser.add_argument("--experts", type=int, default=64, help="GLM-5 has 256")
    parser.add_argument("--many-tokens", type=int, help="in place of Triton's")
    parser.add_argument("--vector-tokens", type=int, help="in place of Triton's")
    parser.add_argument("--few-tokens", type=int, help="in place of Triton's for MoE")
    parser.add_argument("--tile", help="of Triton's: rows,tokens,columns,warps,stages")
    parser.add_argument("--extension", type=Path, metavar="FILE")
    parser.add_argument("--who", default="ours", help="of ours, cuda and triton")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def microseconds(call: Call, tokens: int) -> float:
    """Median of a call after a flush of the L2 cache; of few tokens in a graph."""
    call()
    torch.cuda.synchronize()
    if tokens <= GRAPH_TOKENS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        run: Callable[[], Any] = graph.replay
    else:
        run = call
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(20):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


def dequantized(blocks: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    kind = kind_of(name)
    columns = blocks.shape[1] // kind.block_bytes * kind.block_size
    return triton_dequantize(blocks, kind, columns, dtype)


def linear_calls(
    x: torch.Tensor, blocks: torch.Tensor, name: str, out: torch.Tensor
) -> dict[str, Call]:
    """The product by each of the fork's ways that there is."""
    kind = kind_of(name)

    def triton() -> torch.Tensor:
        dense.triton_linear(x, blocks, kind, out, chunk_weights=CHUNK_WEIGHTS)
        return out

    def cuda() -> torch.Tensor:
        cuda_dense.cuda_linear(x, blocks, kind, out)
        return out

    # As `layout` chooses.
    calls = {"ours": triton, "triton": triton}
    places = (blocks.data_ptr(), blocks.stride(0))
    if cuda_dense.takes_linear(x, blocks, kind):
        calls["ours"] = cuda
    if cuda_extension.fits(x, kind, x.shape[1], *places):
        calls["cuda"] = cuda
    return calls


def linear_reports(
    name: str, tokens: list[int], who: list[str], peers: bool
) -> list[dict[str, Any]]:
    blocks = random_blocks(name, ROWS, HIDDEN, device="cuda")
    weights = dequantized(blocks, name, torch.bfloat16)
    reports = []
    for count in tokens:
        x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
        out = x.new_empty(count, ROWS)

        calls = linear_calls(x, blocks, name, out)

        def cublas(x: torch.Tensor = x) -> torch.Tensor:
            return F.linear(x, weights)

        expected = (
            x[:1].double() @ dequantized(blocks, name, torch.float32).double().t()
        )
        shape = ("linear", name, count, blocks.numel(), count * weights.numel())
        reports += [
            report(each, *shape, calls[each], expected) for each in who if each in calls
        ]
        if peers:
            reports.append(report("cuBLAS bf16", *shape, cublas, expected))
    return reports


def one_token(
    x: torch.Tensor, experts: grouped.Experts, router: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The experts of one token in float64: x [hidden], router and ids [top-k]."""
    middle = experts.intermediate * experts.gate.row_bytes(len(x))
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for weight, expert in zip(router.double(), ids.tolist(), strict=True):
        parts = (experts.w13[expert, :middle], experts.w13[expert, middle:])
        kinds = (experts.gate, experts.up)
        gate, up = (
            triton_dequantize(
                part.view(experts.intermediate, -1), kind, len(x), torch.float32
            ).double()
            @ x.double()
            for part, kind in zip(parts, kinds, strict=True)
        )
        down = triton_dequantize(
            experts.w2[expert].view(len(x), -1),
            experts.down,
            experts.intermediate,
            torch.float32,
        )
        total += weight * (down.double() @ (F.silu(gate) * up))
    return total.unsqueeze(0)


def moe_calls(
    x: torch.Tensor, experts: grouped.Experts, router: torch.Tensor, ids: torch.Tensor
) -> dict[str, Call]:
    """The sum of experts by each of the fork's ways that there is."""

    def triton() -> torch.Tensor:
        return grouped.triton_experts(x, experts, router, ids, grouped.FEW_TOKENS)

    def cuda() -> torch.Tensor:
        return cuda_grouped.cuda_experts(x, experts, router, ids)

    # As `moe` chooses.
    if cuda_grouped.takes_experts(x, experts, ids):
        return {"ours": cuda, "triton": triton, "cuda": cuda}
    return {"ours": triton, "triton": triton}


def moe_reports(
    name: str, tokens: list[int], count: int, who: list[str], peers: bool
) -> list[dict[str, Any]]:
    kind = kind_of(name)
    w13 = random_blocks(name, count * 2 * INNER, HIDDEN, 1, "cuda").view(count, -1)
    w2 = random_blocks(name, count * HIDDEN, INNER, 2, "cuda").view(count, -1)
    experts = grouped.Experts(w13, w2, kind, kind, kind, INNER, count)
    reports = []
    for number in tokens:
        x = torch.randn(number, HIDDEN, device="cuda").bfloat16()
        router = torch.rand(number, TOP_K, device="cuda")
        ids = (
            torch.rand(number, count, device="cuda").argsort(1)[:, :TOP_K].contiguous()
        )
        calls = moe_calls(x, experts, router, ids)
        chosen = len(ids.unique())
        size = chosen * (w13.shape[1] + w2.shape[1])
        products = number * TOP_K * 3 * HIDDEN * INNER
        shape = ("moe", name, number, size, products)
        expected = one_token(x[0], experts, router[0], ids[0])
        reports += [
            report(each, *shape, calls[each], expected) for each in who if each in calls
        ]
        if peers and hasattr(torch, "_grouped_mm"):
            reports += grouped_mm(experts, x, ids, products, shape)
    return reports


def grouped_mm(
    experts: grouped.Experts,
    x: torch.Tensor,
    ids: torch.Tensor,
    products: int,
    shape: tuple[Any, ...],
) -> list[dict[str, Any]]:
    """Both products of the same slots with bf16 weights, without sorting or sums."""
    count = len(experts.w13)
    try:
        w13 = torch.zeros(count, HIDDEN, 2 * INNER, device="cuda", dtype=x.dtype)
        w2 = torch.zeros(count, INNER, HIDDEN, device="cuda", dtype=x.dtype)
        ends = torch.bincount(ids.flatten(), minlength=count).cumsum(0).int()
        rows = x.repeat_interleave(TOP_K, 0)

        def run() -> torch.Tensor:
            both = torch._grouped_mm(rows, w13, offs=ends)
            gate, up = both.chunk(2, -1)
            return torch._grouped_mm(F.silu(gate) * up, w2, offs=ends)

        return [report("_grouped_mm bf16", *shape, run, None)]
    except Exception as error:  # a peer that lacks this shape, in its own words
        print(f"_grouped_mm: {type(error).__name__}: {error}"[:200], flush=True)
        return []


def report(
    who: str,
    work: str,
    name: str,
    tokens: int,
    size: int,
    products: int,
    call: Call,
    expected: torch.Tensor | None,
) -> dict[str, Any]:
    error = None if expected is None else error_of(call()[:1], expected)
    us = microseconds(call, tokens)
    found = {
        "who": who,
        "work": work,
        "type": name,
        "tokens": tokens,
        "us": us,
        "weight_tb_per_s": size / us / 1e6 if who in OURS else None,
        "tflops": 2 * products / us / 1e6,
        "error": error,
    }
    rate = f"{found['weight_tb_per_s']:6.2f} TB/s" if who in OURS else " " * 11
    said = "" if error is None else f"  error {error:.1e}"
    print(
        f"{work:6s} {name:8s} M={tokens:<5d} {who:16s} {us:10.1f} us {rate}"
        f" {found['tflops']:7.1f} TFLOP/s{said}",
        flush=True,
    )
    return found


def main() -> int:
    options = arguments()
    dense.MANY_TOKENS = options.many_tokens or dense.MANY_TOKENS
    dense.VECTOR_TOKENS = options.vector_tokens or dense.VECTOR_TOKENS
    if options.few_tokens is not None:
        grouped.FEW_TOKENS = options.few_tokens
    if options.tile:
        tile = dense.Tile(*map(int, options.tile.split(",")))
        dense.linear_tile = grouped.moe_tile = lambda size: tile
    tokens = [int(part) for part in options.tokens.split(",")]
    who, peers = options.who.split(","), not options.no_peers
    if unknown := set(who) - set(OURS):
        raise SystemExit(f"--who takes {', '.join(OURS)}, not {', '.join(unknown)}")
    if options.extension:
        _standalone.load_extension(options.extension)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    reports: list[dict[str, Any]] = []
    for name in options.types.split(","):
        if "linear" in options.work:
            reports += linear_reports(name, tokens, who, peers)
        if "moe" in options.work:
            reports += moe_reports(name, tokens, options.experts, who, peers)
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1) + "\n")
    wrong = [row for row in reports if row["error"] is not None and row["error"] > 8e-3]
    for row in wrong:
        print(f"WRONG: {row}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
