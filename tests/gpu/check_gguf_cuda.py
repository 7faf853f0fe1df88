#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Check products with GGUF blocks in CUDA C++ on this GPU; exit status 1 on failure.

    python -m vfork extension --out _glm_dsa_C.abi3.so
    python tests/gpu/check_gguf_cuda.py --extension _glm_dsa_C.abi3.so \\
        [--only NAME ...] [--types TYPE ...]

Without `--extension`, it is that of the installed fork. Needs torch, Triton and
gguf-py, with whose weights the products are compared, in float64. One line per group,
and the largest error of each kind of product. Operators are called first, in all their
ways, then the functions that choose among them.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import _standalone

    _standalone.use(packages=_standalone.GGUF)

from tests.gpu.gguf_cuda_inputs import (
    DEVICE,
    HIDDEN,
    INNER,
    NAN,
    Case,
    even_blocks,
    exact,
    other,
    placed,
    places,
    room_for,
    tokens_of,
)
from tests.helpers.gguf_random import random_bytes
from vllm.model_executor.layers.quantization.gguf import cuda_linear as dense
from vllm.model_executor.layers.quantization.gguf import cuda_moe as grouped
from vllm.model_executor.layers.quantization.gguf import triton_moe
from vllm.model_executor.layers.quantization.gguf.cuda_extension import (
    CUDA_TYPES,
    LARGE_TILE,
    SMALL_TILE,
    is_available,
)
from vllm.model_executor.layers.quantization.gguf.triton_decode import tables
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME, GGMLType

# Relative errors: of the result's rounding to bfloat16 alone, of weights and scales
# that are rounded to it too, and of two such products.
FEW, TILES, EXPERTS = 2.2e-3, 4e-3, 6e-3
# Rounding of a single value is up to 2**-8; of few values, most may be unlucky.
MANY_VALUES, UNLUCKY = 4096, 2**-8 - FEW
# Times these bounds, of single values, to their size and the root mean square of all.
OUTLIER = 16
ROW_WARPS = (1, 2, 4, 8)
STAGES = (2, 3)
BOTH_TILES = (SMALL_TILE, LARGE_TILE)
# Around every number at which something else is called.
TOKENS = (1, 8, 9, 16, 17, 64, 65, 200, 768)
FAR = (1 << 32) + (1 << 13)
FAR_GIB = 6
Problems = list[str]
# Those asked for.
kinds = [GGML_TYPES_BY_NAME[name] for name in sorted(CUDA_TYPES)]
worst: dict[str, float] = {}


def wrong(
    what: str, found: torch.Tensor, expected: torch.Tensor, bound: float
) -> Problems:
    """What is wrong with `found`, for the whole and for single values."""
    difference = (found.double() - expected).abs()
    scale = expected.pow(2).mean().sqrt()
    error = (difference.pow(2).mean().sqrt() / scale).item()
    difference /= scale + expected.abs()
    largest = difference.max().item()
    what_kind = what.split(",")[0]
    worst[what_kind] = max(worst.get(what_kind, 0.0), error)
    if found.numel() < MANY_VALUES:
        bound += UNLUCKY
    if not error <= bound:
        return [f"{what}: error {error:.2e} > {bound:.1e}"]
    if not largest <= OUTLIER * bound:
        place = divmod(difference.argmax().item(), difference.shape[-1])
        return [f"{what}: {place} is off by {largest:.2e} > {OUTLIER * bound:.1e}"]
    return []


def untouched(what: str, whole: torch.Tensor, out: torch.Tensor) -> Problems:
    out.fill_(NAN)
    return [] if whole.isnan().all() else [f"{what}: wrote beside the result"]


def room_for_stages(kind: GGMLType, stages: int) -> bool:
    """Three stages of Q6_K are more than some devices have."""
    has = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    return stages == 2 or kind.name != "Q6_K" or has > 105_000


def weights() -> Problems:
    """Every column by itself, of any bits: products with one value that is not zero."""
    ops, columns = torch.ops.vllm_glm_dsa, 512
    problems: Problems = []
    x = torch.eye(columns, device=DEVICE).bfloat16()
    for kind in kinds:
        blocks = random_bytes(kind, 24, columns, seed=3, device=DEVICE)
        if kind.name == "MXFP4":
            # Others go beyond float32, or below what it holds with an exponent.
            blocks[:, :: kind.block_bytes] = 8 + blocks[:, :: kind.block_bytes] % 232
        want = exact(kind, blocks).t()
        # Of groups of 16 weights, as less is rounded with those than with one.
        size = want.unflatten(0, (-1, 16)).abs().amax(1).repeat_interleave(16, 0)
        args = (blocks, tables(kind, x.device), kind.id)

        def one_by_one(out: torch.Tensor, args: tuple = args) -> None:
            for i in range(columns):
                ops.gguf_skinny_linear(out[i : i + 1], x[i : i + 1], *args)

        ways: dict[str, tuple[Callable[[torch.Tensor], None], float]] = {
            "one token": (one_by_one, 2**-8),
            "tokens": (lambda out, a=args: ops.gguf_skinny_linear(out, x, *a), 2**-8),
        }
        for tile in BOTH_TILES:
            call = lambda out, a=args, t=tile: ops.gguf_tiles_linear(out, x, *a, t)  # noqa: E731
            ways[f"tiles of {tile}"] = (call, 2**-6)
        for name, (call, bound) in ways.items():
            out = torch.full(want.shape, NAN, device=DEVICE).bfloat16()
            call(out)
            off = ~((out.double() - want).abs() <= bound * size)
            if off.any():
                column, row = off.nonzero()[0].tolist()
                problems.append(
                    f"{kind.name}, {name}: {int(off.sum())} weights are wrong, first "
                    f"column {column} of row {row}: {out[column, row].item():.6g}, not "
                    f"{want[column, row].item():.6g}"
                )
    return problems


def linear_operators() -> Problems:
    """Few tokens, with all warps and stages, and tiles, at every place of rows."""
    ops = torch.ops.vllm_glm_dsa
    problems: Problems = []
    shapes = ((301, 1024), (37, 256))
    for kind, (rows, columns) in ((k, shape) for k in kinds for shape in shapes):
        even = even_blocks(kind, rows, columns)
        full, table = exact(kind, even), tables(kind, torch.device(DEVICE, 0))
        settings = [(0, 0)] + [(w, s) for w in ROW_WARPS for s in STAGES]
        calls = [
            (f"few {w} x {s}", FEW, (1, 2, 8, 9, 17), ops.gguf_skinny_linear, (w, s))
            for w, s in settings
            if room_for_stages(kind, s)
        ]
        calls += [
            (f"tile {tile}", TILES, (1, 31, 33, 200), ops.gguf_tiles_linear, (tile,))
            for tile in BOTH_TILES
        ]
        for at, apart in places(kind):
            blocks = placed(even, at, apart)
            for name, bound, counts, op, last in calls:
                for count in counts:
                    x = tokens_of(count, columns)
                    whole, out = room_for(count, rows, 8 if at == 0 else 3)
                    op(out, x, blocks, table, kind.id, *last)
                    what = f"{name.split()[0]}, {kind.name}, {name}, {rows} x "
                    what += f"{columns} at {at} + {apart}, {count} tokens"
                    problems += wrong(what, out, x.double() @ full.t(), bound)
                    problems += untouched(what, whole, out)
    return problems


def expert_operators() -> Problems:
    """Few slots, with all warps and stages, and tiles of sorted slots."""
    problems: Problems = []
    for kind in kinds:
        case = Case(kind, other(kind), 6, 6)
        for tokens in (1, 3, 8):
            problems += few_slots(case, tokens)
        for tokens, tile in ((t, s) for t in (3, 150) for s in BOTH_TILES):
            problems += sorted_slots(case, tokens, tile)
    return problems


def few_slots(case: Case, tokens: int) -> Problems:
    experts, device = case.experts, torch.device(DEVICE, 0)
    kind, down = experts.gate, experts.down
    x, router, ids = case.inputs(tokens, 4)
    expected = case.reference(x, router, ids)
    both = (tables(kind, device), tables(down, device), kind.id, down.id)
    problems: Problems = []
    for warps, stages in [(0, 0)] + [(w, s) for w in ROW_WARPS for s in STAGES]:
        if not (room_for_stages(kind, stages) and room_for_stages(down, stages)):
            continue
        what = f"few slots, {kind.name}, {down.name}, {tokens} tokens, "
        what += f"{warps} x {stages}"
        hidden = torch.full((ids.numel(), INNER), NAN, device=DEVICE).bfloat16()
        whole, out = room_for(tokens, HIDDEN, 3)
        args = (out, hidden, x, experts.w13, experts.w2, router, ids, *both)
        torch.ops.vllm_glm_dsa.gguf_skinny_experts(*args, warps, stages)
        problems += wrong(what, out, expected, EXPERTS)
        problems += untouched(what, whole, out)
        if not hidden[ids.flatten() < 0].isnan().all():
            problems.append(f"{what}: computed slots without an expert")
    return problems


def sorted_slots(case: Case, tokens: int, tile: int) -> Problems:
    experts, device, top_k = case.experts, torch.device(DEVICE, 0), 4
    kind, down = experts.gate, experts.down
    x, _, ids = case.inputs(tokens, top_k)
    order, tiles, _ = triton_moe.sort_slots(ids, case.count, tile)
    multiply = torch.ops.vllm_glm_dsa.gguf_tiles_experts
    what = f"tiles of slots, {kind.name}, {down.name}, {tokens} tokens, tile {tile}"
    of_slot, there = ids.flatten()[order], ids.flatten()[order] >= 0
    chosen = of_slot[there]

    whole, hidden = room_for(ids.numel(), INNER, 8)
    args = (order, tiles, tables(kind, device), kind.id, kind.row_bytes(HIDDEN))
    multiply(hidden, x, experts.w13, *args, top_k, tile)
    values = x.double()[(order // top_k)[there]]
    both = torch.einsum("sk,srk->sr", values, case.gate_up[chosen])
    gate, up = both.chunk(2, 1)
    problems = wrong(what, hidden[there], F.silu(gate) * up, EXPERTS)
    if not hidden[~there].isnan().all():
        problems.append(f"{what}: computed slots without an expert")

    # Of its own, as the other's slots have NaN.
    x = tokens_of(ids.numel(), INNER)
    problems += untouched(what, whole, hidden)
    whole, out = room_for(ids.numel(), HIDDEN, 3)
    args = (order, tiles, tables(down, device), down.id, down.row_bytes(INNER))
    multiply(out, x, experts.w2, *args, 0, tile)
    want = torch.einsum("sk,srk->sr", x.double()[there], case.down[chosen])
    problems += wrong(what, out[order[there]], want, TILES)
    if not out[order[~there]].isnan().all():
        problems.append(f"{what}: wrote slots without an expert")
    return problems + untouched(what, whole, out)


def linear() -> Problems:
    """What `cuda_linear` chooses, for all numbers of tokens, and what it leaves."""
    problems: Problems = []
    for kind in kinds:
        blocks = even_blocks(kind, 203, 512)
        full = exact(kind, blocks)
        for count in TOKENS:
            x = tokens_of(count, 512)
            whole, out = room_for(count, 203, 5)
            what = f"cuda_linear, {kind.name}, {count} tokens"
            if not dense.takes_linear(x, blocks, kind):
                problems.append(f"{what}: left to Triton")
                continue
            dense.cuda_linear(x, blocks, kind, out)
            bound = FEW if count <= dense.FEW_TOKENS else TILES
            problems += wrong(what, out, x.double() @ full.t(), bound)
            problems += untouched(what, whole, out)
        x = tokens_of(dense.MANY_TOKENS + 1, 512)
        for rest in (x, x[:0], x[:3].half(), x[:3, 1:257]):
            if dense.takes_linear(rest, blocks, kind):
                problems.append(f"{kind.name}: takes {rest.shape} {rest.dtype}")
    return problems


def experts() -> Problems:
    """What `cuda_experts` chooses, of few and many experts, and of other ranks'."""
    problems: Problems = []
    for kind in kinds:
        for count, chosen_from, top_k in ((8, 8, 2), (8, 64, 6), (256, 256, 8)):
            case = Case(kind, other(kind), count, 13)
            stacks = replace(case.experts, chosen_from=chosen_from)
            for tokens in TOKENS:
                x, router, ids = case.inputs(tokens, top_k)
                what = f"cuda_experts, {kind.name}, {count} of {chosen_from} experts, "
                what += f"{tokens} tokens"
                if not grouped.takes_experts(x, stacks, ids):
                    problems.append(f"{what}: left to Triton")
                    continue
                poison(tokens * top_k)
                out = grouped.cuda_experts(x, stacks, router, ids)
                problems += wrong(what, out, case.reference(x, router, ids), EXPERTS)
                if tokens > 1 and out[-1].any():
                    problems.append(f"{what}: no expert does not give zeros")
                with mock.patch.object(triton_moe, "_DOWN_BYTES", 1):
                    again = grouped.cuda_experts(x, stacks, router, ids)
                if not torch.equal(out, again):
                    problems.append(f"{what}: other bits in steps of the down rows")
    return problems


def poison(slots: int) -> None:
    """Leave NaN in memory that the next results get."""
    for width in (HIDDEN, INNER):
        for rows in (slots, slots // 2 + 1, slots // 6 + 1):
            torch.full((rows, width), NAN, device=DEVICE).bfloat16()


def far() -> Problems:
    """Experts and rows of a matrix beyond 2**32 bytes."""
    problems: Problems = []
    if torch.cuda.mem_get_info()[0] < FAR_GIB << 30:
        print(f"  far: skipped, needs {FAR_GIB} GiB of device memory")
        return problems
    room = torch.empty(FAR + (1 << 28), dtype=torch.uint8, device=DEVICE)
    for kind in kinds:
        case = Case(kind, other(kind), 2, 2)
        stacks, begin, apart = case.experts, 0, []
        for stack in (stacks.w13, stacks.w2):
            view = room[begin:].as_strided(stack.shape, (FAR, 1))
            apart.append(view.copy_(stack))
            begin += 1 << 27
        stacks = replace(stacks, w13=apart[0], w2=apart[1], chosen_from=6)
        for tokens in (1, 9, 130):
            x, router, ids = case.inputs(tokens, 2)
            out = grouped.cuda_experts(x, stacks, router, ids)
            what = f"far experts, {kind.name}, {tokens} tokens"
            problems += wrong(what, out, case.reference(x, router, ids), EXPERTS)
        even = even_blocks(kind, 33, 512)
        blocks = room.as_strided(even.shape, (FAR // 32, 1)).copy_(even)
        for count in (1, 9, 32, 100):
            x = tokens_of(count, 512)
            out = torch.full((count, 33), NAN, device=DEVICE).bfloat16()
            dense.cuda_linear(x, blocks, kind, out)
            what = f"far rows, {kind.name}, {count} tokens"
            problems += wrong(what, out, x.double() @ exact(kind, even).t(), TILES)
    return problems


def graphs() -> Problems:
    """Replays of a captured call give the bits of calls outside of it."""
    problems: Problems = []
    for kind in kinds:
        blocks, case = even_blocks(kind, 203, 512), Case(kind, other(kind), 8, 8)
        for count in (1, 8, 32, 200):
            x, (inputs, router, ids) = tokens_of(count, 512), case.inputs(count, 2)
            out = torch.full((count, 203), NAN, device=DEVICE).bfloat16()

            def call(x=x, inputs=inputs, router=router, ids=ids, out=out, case=case):
                dense.cuda_linear(x, blocks, kind, out)  # noqa: B023
                return grouped.cuda_experts(inputs, case.experts, router, ids)

            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total = call()
            for replay in (1, 2):
                x.copy_(torch.randn_like(x))
                inputs.copy_(torch.randn_like(inputs).mul_(case.scale))
                ids.copy_(ids.flip(0))
                router.copy_(router.flip(0))
                out.fill_(NAN)
                total.fill_(NAN)
                graph.replay()
                inside = (out.clone(), total.clone())
                out.fill_(NAN)
                eager = call()
                what = f"{kind.name}, {count} tokens, replay {replay}"
                for name, a, b in zip(
                    ("linear", "experts"), inside, (out, eager), strict=True
                ):
                    if not torch.equal(a, b):
                        problems.append(f"{what}: {name} has other bits")
    return problems


def refusals() -> Problems:
    """What would read or write elsewhere is an error."""
    ops, problems = torch.ops.vllm_glm_dsa, []
    kind = GGML_TYPES_BY_NAME["Q4_K"]
    blocks, table = even_blocks(kind, 16, 512), tables(kind, torch.device(DEVICE, 0))
    x, out = tokens_of(4, 512), torch.zeros(4, 16, device=DEVICE).bfloat16()
    odd = placed(blocks, 4, 0)
    cases: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = {
        "multiples of 16 bytes": (out, x, odd, kind.id),
        "x must begin": (out, tokens_of(4, 520)[:, 4:516], blocks, kind.id),
        "columns must be": (out, x[:, :128], blocks, kind.id),
        "no kernel for blocks": (out, x, blocks, 34),
        "another dtype": (out.half(), x, blocks, kind.id),
        "out must be": (out[:, :15], x, blocks, kind.id),
    }
    for text, (to, values, matrix, number) in cases.items():
        for op, last in ((ops.gguf_skinny_linear, ()), (ops.gguf_tiles_linear, (32,))):
            try:
                op(to, values, matrix, table, number, *last)
                problems.append(f"{text}: not refused")
            except RuntimeError as error:
                if text not in str(error):
                    problems.append(f"{text}: {error}"[:200])
    return problems


GROUPS: dict[str, Callable[[], Problems]] = {
    function.__name__: function
    for function in (
        weights,
        linear_operators,
        expert_operators,
        linear,
        experts,
        far,
        graphs,
        refusals,
    )
}


def run(names: list[str]) -> bool:
    """Run groups by name and print a line for each; whether all of them passed."""
    passed = True
    for name in names:
        begin = time.monotonic()
        torch.manual_seed(1)
        try:
            problems = GROUPS[name]()
        except Exception as error:  # the other groups shall still run
            problems = [f"{type(error).__name__}: {error}"[:500]]
        took = time.monotonic() - begin
        result = f"FAILED, {len(problems)} problems" if problems else "ok"
        print(f"{name}: {result} ({took:.1f} s)", flush=True)
        for problem in problems[:30]:
            print(f"  {problem}", flush=True)
        passed &= not problems
    return passed


def main() -> int:
    global kinds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--extension", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--types", nargs="+", choices=sorted(CUDA_TYPES))
    options = parser.parse_args()
    if options.types:
        kinds = [GGML_TYPES_BY_NAME[name] for name in options.types]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    _standalone.load_extension(options.extension)
    if not is_available(torch.device(DEVICE, 0)):
        return 1
    passed = run(options.only)
    for what, error in sorted(worst.items()):
        print(f"{what}: largest error {error:.1e}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
