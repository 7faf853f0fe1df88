#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Check the index logits on this GPU against float64; exit status 1 on failure.

    python tests/gpu/check_dsa_indexer.py [--only NAME ...] [--capability 8.0]

Needs torch and Triton. With DeepGEMM, and nvcc for it, its logits are compared, too.
One line per group. With `--capability` the kernels are those of another device;
TRITON_OVERRIDE_ARCH implies it.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import _standalone

    _standalone.use()

from tests.gpu._standalone import asked_capability
from tests.overlay.dsa_indexer_triton.cases import (
    BOUND,
    FP8,
    FP8_MMA_BOUND,
    NAN_CODE,
    TOKEN_BYTES,
    Inputs,
    Paged,
    Prefill,
    check,
    make_paged,
    make_prefill,
    poisoned_results,
)
from vllm.v1.attention.ops.dsa_indexer.logits_tuning import has_fp8_mma
from vllm.v1.attention.ops.dsa_indexer.paged_logits import paged_mqa_logits
from vllm.v1.attention.ops.dsa_indexer.prefill_logits import mqa_logits

DEVICE = "cuda"
LENGTHS = (0, 1, 63, 64, 65, 2047, 2048, 2049)
LONG = (131_328, 262_144, 325_000, 1_048_576)
# The device whose kernels are checked; None for the one at hand.
capability: tuple[int, int] | None = None
Problems = list[str]


def computed(inputs: Inputs) -> torch.Tensor:
    properties = torch.cuda.get_device_properties(0)
    function = mqa_logits if "keys" in inputs.call else paged_mqa_logits
    with poisoned_results(capability, properties.multi_processor_count):
        return function(**inputs.call)


def bound(exact: bool) -> float:
    if exact:
        return 0.0
    return FP8_MMA_BOUND if has_fp8_mma(here()) else BOUND


def here() -> tuple[int, int]:
    return capability or torch.cuda.get_device_capability()


def tell(case: object, inputs: Inputs, limit: float) -> Problems:
    return [f"{case}: {what}" for what in check(computed(inputs), inputs, limit)]


def prefill() -> Problems:
    """Ranges of all lengths that start anywhere, few and many queries."""
    problems: Problems = []
    make = torch.Generator().manual_seed(0)
    for heads, queries, exact in itertools.product(
        (16, 32, 64), (1, 7, 64, 200), (True, False)
    ):
        lengths = [LENGTHS[i % len(LENGTHS)] for i in range(queries)]
        ranges = []
        for length in lengths:
            start = int(torch.randint(0, 3000 - length, (), generator=make))
            ranges.append((start, start + length))
        case = Prefill(tuple(ranges), heads, 3000, exact)
        problems += tell(
            (heads, queries, exact), make_prefill(case, DEVICE), bound(exact)
        )
    return problems


def prefill_long() -> Problems:
    """Prompts up to 1M keys, of which some queries see all."""
    problems: Problems = []
    for keys in LONG:
        for queries in (3, 65):
            ends = [keys, keys - 1, keys // 2] + [100] * (queries - 3)
            case = Prefill(tuple((0, end) for end in ends), 32, keys)
            problems += tell((keys, queries), make_prefill(case, DEVICE), 0.0)
    return problems


def paged() -> Problems:
    problems: Problems = []
    for heads, next_n, page, exact in itertools.product(
        (16, 32, 64), range(1, 7), (32, 64), (True, False)
    ):
        case = Paged(LENGTHS, next_n, heads, page, shared=exact, exact=exact)
        problems += tell(case, make_paged(case, DEVICE), bound(exact))
    return problems


def paged_long() -> Problems:
    problems: Problems = []
    for length, next_n in zip(LONG, (1, 4, 2, 1), strict=True):
        case = Paged((length, 5, 0, length // 3), next_n)
        problems += tell(case, make_paged(case, DEVICE), 0.0)
    return problems


def far_pages() -> Problems:
    """Pages beyond 2^31 bytes."""
    inputs = make_paged(Paged((40,)), DEVICE)
    small = inputs.call["cache"][int(inputs.call["block_table"][0, 0])].flatten()
    stride = 2**30
    whole = torch.empty(3 * stride + len(small), dtype=torch.uint8, device=DEVICE)
    whole.fill_(NAN_CODE)
    whole[3 * stride :] = small
    inputs.call["cache"] = whole.as_strided(
        (4, 64, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1)
    )
    inputs.call["block_table"].fill_(3)
    return tell("far pages", inputs, 0.0)


def far_results() -> Problems:
    """Logits beyond 2^31 elements, 8.6 GB of them."""
    ranges = ((0, 100),) * 8191 + ((100, 262_244),)
    inputs = make_prefill(Prefill(ranges, 16, 262_244), DEVICE)
    got = computed(inputs)
    assert got.numel() > 2**31 - 2**20
    few = Inputs(dict(inputs.call), inputs.keys[-1:])
    few.call |= {"q": inputs.call["q"][-1:], "weights": inputs.call["weights"][-1:]}
    return [f"last row: {what}" for what in check(got[-1:], few)]


def graphs() -> Problems:
    """A captured call, replayed with other lengths and pages."""
    problems: Problems = []
    for next_n in (1, 2, 6):
        first = Paged((700, 3, 64, 1), next_n)
        fixed = make_paged(first, DEVICE)
        computed(fixed)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = computed(fixed)
        other = make_paged(Paged((65, 700, 0, 64), next_n), DEVICE)
        for name in ("q", "weights", "lengths", "block_table", "cache"):
            fixed.call[name].copy_(other.call[name])
        graph.replay()
        replayed = Inputs(fixed.call, other.keys)
        problems += [f"{next_n}: {what}" for what in check(captured, replayed)]
    return problems


def determinism() -> Problems:
    problems: Problems = []
    cases = (
        make_prefill(Prefill(((0, 3000),) * 100, 32, 3000, False), DEVICE),
        make_paged(Paged((3000, 100), 4, exact=False), DEVICE),
    )
    for inputs in cases:
        want = computed(inputs).nan_to_num(7.0)
        for _ in range(5):
            if not torch.equal(computed(inputs).nan_to_num(7.0), want):
                problems.append("runs differ")
    return problems


def deep_gemm() -> Problems:
    """Relative difference to DeepGEMM's logits."""
    try:
        import deep_gemm as peer
    except ImportError:
        try:
            from vllm.third_party import deep_gemm as peer
        except ImportError:
            print("  (DeepGEMM is not installed)")
            return []
    if torch.cuda.get_device_capability()[0] == 10:
        print("  (DeepGEMM takes other inputs here)")
        return []
    problems: Problems = []
    queries, keys = 300, 5000
    q = (torch.randn(queries, 32, 128, device=DEVICE) * 60).to(FP8)
    k = (torch.randn(keys, 128, device=DEVICE) * 60).to(FP8)
    scales = torch.rand(keys, device=DEVICE) * 1e-3
    weights = torch.randn(queries, 32, device=DEVICE)
    starts = torch.zeros(queries, dtype=torch.int32, device=DEVICE)
    starts[100:] = 700
    ends = torch.arange(keys - queries + 1, keys + 1, device=DEVICE).int()
    bounds = (weights, starts, ends)
    theirs = peer.fp8_fp4_mqa_logits((q, None), (k, scales), *bounds, keys)
    ours = mqa_logits(q, k, scales, *bounds, keys)
    for row in (0, 99, 100, 299):
        count = int(ends[row] - starts[row])
        off = (ours[row, :count] - theirs[row, :count]).norm()
        if not off <= FP8_MMA_BOUND * theirs[row, :count].norm():
            problems.append(f"prefill row {row} differs by {float(off):.2e}")
    for next_n in (1, 2, 4):
        inputs = make_paged(Paged((3000, 70, 1000), next_n, exact=False), DEVICE)
        call = inputs.call
        lengths, table = call["lengths"].contiguous(), call["block_table"]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        slots = sms // 2 if next_n == 4 and here()[0] == 9 else sms
        plan = peer.get_paged_mqa_logits_metadata(lengths, 64, slots)
        theirs = peer.fp8_fp4_paged_mqa_logits(
            (call["q"], None),
            call["cache"],
            call["weights"],
            lengths,
            table.clamp(max=len(call["cache"]) - 1),
            plan,
            call["width"],
        )
        ours = paged_mqa_logits(**call)
        for row, seen in enumerate(inputs.keys):
            off = (ours[row, : len(seen)] - theirs[row, : len(seen)]).norm()
            if not off <= FP8_MMA_BOUND * theirs[row, : len(seen)].norm():
                problems.append(f"paged {next_n} row {row} differs by {float(off):.2e}")
    return problems


GROUPS: dict[str, Callable[[], Problems]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        prefill,
        prefill_long,
        paged,
        paged_long,
        far_pages,
        far_results,
        graphs,
        determinism,
        deep_gemm,
    )
}


def run(names: list[str]) -> bool:
    """Run groups by name and print a line for each; whether all of them passed."""
    passed = True
    for name in names:
        begin = time.monotonic()
        try:
            problems = GROUPS[name]()
        except Exception as error:  # the other groups shall still run
            problems = [f"{type(error).__name__}: {error}"[:500]]
        took = time.monotonic() - begin
        print(
            f"{name}: {'ok' if not problems else 'FAILED'} ({took:.1f} s)", flush=True
        )
        for problem in problems[:10]:
            print(f"  {problem}", flush=True)
        passed &= not problems
    return passed


def main() -> int:
    global capability
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--capability")
    options = parser.parse_args()
    capability = asked_capability(options.capability)
    print(torch.cuda.get_device_name(), here(), torch.__version__)
    return 0 if run(options.only) else 1


if __name__ == "__main__":
    sys.exit(main())
