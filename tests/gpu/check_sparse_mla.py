#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Check the sparse MLA kernels on this GPU against float64; exit status 1 on failure.

    python tests/gpu/check_sparse_mla.py [--only NAME ...] [--capability 8.9]

Needs torch and Triton; vLLM is used only if it is installed. One line per group. With
`--capability` the configurations are those of another device; TRITON_OVERRIDE_ARCH
implies it. `test_sparse_mla_gpu.py` runs the same groups under pytest.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import _standalone

    _standalone.use()

from tests.gpu._standalone import asked_capability, pretend
from tests.overlay.sparse_mla.cases import (
    LATENT,
    LSE_BOUND,
    UNQUANTIZED_BOUND,
    Case,
    Errors,
    Inputs,
    attention,
    make,
    out_bound,
    poison_unselected,
)
from vllm.v1.attention.ops.sparse_mla import triton_sparse_mla as kernels
from vllm.v1.attention.ops.sparse_mla.tuning import (
    CacheFormat,
    KernelConfig,
    choose_config,
)

DEVICE = "cuda"
HEADS = (1, 4, 8, 11, 16, 32, 64, 128)
TOKENS = (1, 2, 7, 63, 64, 65, 128, 1000)
TOPK = (64, 512, 2048, 2176)
FORMATS = [
    (cache, dtype)
    for cache in ("model", "fp8", "fp8_ds_mla")
    for dtype in (torch.bfloat16, torch.float16)
]
SPLITS = (1, 2, 3, 8, 32)
Call = tuple[Case, KernelConfig | None]


def config_of(case: Case) -> KernelConfig:
    """The configuration that the table gives for `case`."""
    capability, num_sms = kernels._device(torch.device(DEVICE, 0))
    cache = CacheFormat(case.cache)
    return choose_config(capability, case.heads, case.tokens, case.topk, cache, num_sms)


def attend(inputs: Inputs, config: KernelConfig | None = None):
    """The kernel's output; by itself it chooses the configuration, as in serving."""
    return kernels.triton_sparse_mla(**inputs.call(), config=config)


def poison_free_memory() -> None:
    """Fill what the caching allocator hands out next, small and large, with NaN."""
    blocks = [torch.empty(2**29, dtype=torch.uint8, device=DEVICE)]
    blocks += [torch.empty(2**23, dtype=torch.uint8, device=DEVICE) for _ in range(16)]
    blocks += [torch.empty(2**18, dtype=torch.uint8, device=DEVICE) for _ in range(64)]
    for block in blocks:
        block.fill_(0xFF)


def compare(calls: list[Call]) -> Errors:
    """Make the calls one after another, on poisoned memory."""
    errors = Errors()
    for case, config in calls:
        inputs, _ = make(case, DEVICE)
        poison_free_memory()
        got = attend(inputs, config)
        name = str(case) if config is None else f"{case} {config}"
        errors.compare(name, got, inputs)
    return errors


def matrix(cache: str, dtype: torch.dtype) -> list[Call]:
    calls: list[Call] = []
    shapes = itertools.product(HEADS, TOKENS, TOPK)
    for number, (heads, tokens, topk) in enumerate(shapes):
        # Half of the calls without counts; in float16, fewer kernels to compile, none.
        counts = dtype == torch.float16 or number % 2 == 1
        # A single token has each of the patterns in turn.
        seed = number // 2
        case = Case(heads, tokens, topk, cache, dtype, counts=counts, seed=seed)
        calls.append((case, None))
    return calls


def without_rope() -> list[Call]:
    shapes = itertools.product(FORMATS, (1, 8, 11, 64), (1, 65, 300), (64, 2048))
    return [
        (Case(heads, tokens, topk, cache, dtype, rope=0, counts=True, seed=seed), None)
        for seed, ((cache, dtype), heads, tokens, topk) in enumerate(shapes)
    ]


def odd_topk() -> list[Call]:
    widths = (1, 15, 17, 127, 200, 1000, 2049)
    shapes = itertools.product(FORMATS[::2], (8, 64), (1, 7, 150), widths)
    return [
        (Case(heads, tokens, topk, cache, dtype, counts=True, seed=seed), None)
        for seed, ((cache, dtype), heads, tokens, topk) in enumerate(shapes)
    ]


def splits() -> list[Call]:
    """Any number of splits, more than there are tiles too, gives the result."""
    calls: list[Call] = []
    shapes = itertools.product(FORMATS[::2], (8, 64), (1, 7), (17, 512, 2176))
    for seed, ((cache, dtype), heads, tokens, topk) in enumerate(shapes):
        case = Case(heads, tokens, topk, cache, dtype, counts=True, seed=seed)
        config = config_of(case)
        calls += [(case, dataclasses.replace(config, splits=n)) for n in SPLITS]
    return calls


def layouts() -> Errors:
    """Every memory layout of the query gives the same bits; so do wider index rows."""
    errors = Errors()
    names = ("tuple", "views", "strided", "heads-first")
    for cache, dtype in FORMATS[::2]:
        for heads, tokens, rope in (
            (8, 5, 64),
            (11, 64, 64),
            (64, 200, 64),
            (16, 9, 0),
        ):
            case = Case(heads, tokens, 512, cache, dtype, rope=rope)
            config = config_of(case)
            inputs, _ = make(case, DEVICE)
            want = attend(inputs, config)
            errors.compare(str(case), want, inputs)
            for name in names:
                other, _ = make(dataclasses.replace(case, layout=name), DEVICE)
                got = attend(other, config)
                errors.expect(f"{case}: q {name} gives other bits", equal(got, want))
            wide = torch.full((tokens, 777), 1, dtype=torch.int32, device=DEVICE)
            wide[:, 100:612] = inputs.indices
            sliced = dataclasses.replace(inputs, indices=wide[:, 100:612])
            got = attend(sliced, config)
            errors.expect(f"{case}: strided indices give other bits", equal(got, want))
            if cache == "fp8":
                codes = inputs.rows.view(torch.float8_e4m3fn)
                got = attend(dataclasses.replace(inputs, rows=codes), config)
                errors.expect(f"{case}: float8 rows give other bits", equal(got, want))
    return errors


def equal(got, want) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def unquantized() -> Errors:
    """Quantized caches against the rows before quantization.

    At least 512 rows: a single one differs by 2.4 % from its e4m3 codes, and only an
    average over many of them keeps the bound.
    """
    errors = Errors()
    shapes = itertools.product(FORMATS[2:], HEADS, (1, 65), TOPK[1:])
    for seed, ((cache, dtype), heads, tokens, topk) in enumerate(shapes):
        case = Case(heads, tokens, topk, cache, dtype, pattern="full", seed=seed)
        inputs, values = make(case, DEVICE)
        want = attention(inputs, values=values)
        errors.add(str(case), attend(inputs), want, UNQUANTIZED_BOUND, lse_bound=0.1)
    return errors


def infinite_rows() -> Errors:
    """Infinities in rows that nobody selects, row 0 among them, stay there."""
    errors = Errors()
    for cache, dtype in FORMATS:
        for tokens in (1, 9, 200):
            case = Case(16, tokens, 200, cache, dtype, seed=1)
            inputs, _ = make(case, DEVICE)
            # Bytes 0x7F are the largest values or NaN; as 16 bit numbers, NaN.
            poison_unselected(inputs, 0x7F)
            if cache == "model":
                unused = inputs.rows.isnan().any(1)
                inputs.rows[unused] = float("inf")
            errors.compare(str(case), attend(inputs), inputs)
    return errors


def large_scores() -> Errors:
    """Scores around a thousand neither overflow nor lose those near the top.

    The 16 bit rounding of quantized rows moves scores by their 2^-9th part, so that
    theirs are smaller and their bounds wider.
    """
    errors = Errors()
    for (cache, dtype), (heads, tokens) in itertools.product(
        FORMATS, ((8, 3), (64, 70))
    ):
        case = Case(heads, tokens, 512, cache, dtype, pattern="gaps")
        inputs, _ = make(case, DEVICE)
        factor, bound, rounding = (
            (300, 2e-2, 4e-6) if cache == "model" else (20, 0.1, 2e-3)
        )
        inputs = dataclasses.replace(inputs, scale=inputs.scale * factor)
        want = attention(inputs)
        far = LSE_BOUND + float(want[1].abs().max()) * rounding
        errors.add(str(case), attend(inputs), want, bound, far)
    return errors


def far_rows() -> Errors:
    """Rows beyond 2^31 elements and bytes are reached, up to the last one."""
    errors = Errors()
    for cache, dtype in FORMATS[::2]:
        for heads, tokens in ((8, 1), (64, 3), (64, 300)):
            case = Case(heads, tokens, 256, cache, dtype, counts=True, seed=5)
            near, _ = make(case, DEVICE)
            count, width = near.rows.shape
            total = 2**31 // width + 300_000
            far = near.rows.new_empty((total, width))
            far.view(torch.uint8).fill_(0xFF)
            where = torch.arange(count, device=DEVICE) * (total - 1) // (count - 1)
            far[where] = near.rows
            indices, known = near.indices.clone(), near.chosen
            indices[known] = where[near.indices[known].long()].int()
            moved = dataclasses.replace(near, rows=far, indices=indices)
            errors.compare(f"{case} far", attend(moved), near)
            del far, moved
    return errors


def far_queries() -> Errors:
    """Queries and outputs beyond 2^31 elements are reached."""
    errors = Errors()
    case = Case(128, 33_000, 64, rows=4096)
    inputs, _ = make(case, DEVICE)
    out, lse = attend(inputs)
    assert min(inputs.q.numel(), out.numel()) > 2**31
    for part in (slice(0, 64), slice(32_700, 33_000)):
        got = out[part], lse[part]
        want = attention(inputs, part)
        errors.add(str(case), got, want, out_bound(inputs), LSE_BOUND)
    return errors


def graphs() -> Errors:
    """A captured call, replayed with other inputs, gives the bits of a fresh call."""
    errors = Errors()
    shapes = itertools.product(FORMATS[::2], (8, 16, 64), (1, 4, 6, 32, 128, 600))
    for number, ((cache, dtype), heads, tokens) in enumerate(shapes):
        case = Case(heads, tokens, 512, cache, dtype, counts=number % 2 == 0)
        fixed, _ = make(case, DEVICE)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            attend(fixed)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend(fixed)
        for seed in (5, 6):
            other, _ = make(dataclasses.replace(case, seed=seed), DEVICE)
            for name in ("q", "rows", "indices", "counts"):
                if getattr(other, name) is not None:
                    getattr(fixed, name).copy_(getattr(other, name))
            for tensor in captured:
                tensor.fill_(float("nan"))
            graph.replay()
            want = attend(other)
            errors.expect(f"{case}: replay {seed} differs", equal(captured, want))
            errors.compare(str(case), captured, other)
    return errors


def determinism() -> Errors:
    """Runs repeat bit for bit, and a token's result does not depend on its batch."""
    errors = Errors()
    shapes = itertools.product(FORMATS[::2], (8, 64), (1, 17, 128, 1000))
    for seed, ((cache, dtype), heads, tokens) in enumerate(shapes):
        case = Case(heads, tokens, 512, cache, dtype, counts=True, seed=seed)
        inputs, _ = make(case, DEVICE)
        config = config_of(case)
        want = attend(inputs, config)
        for _ in range(10):
            poison_free_memory()
            got = attend(inputs, config)
            errors.expect(f"{case}: runs differ", equal(got, want))
        # Pointers to the counts stay aligned, or other kernels would be compiled.
        for start in {tokens // 8 * 4, (tokens - 1) // 4 * 4}:
            part = slice(start, tokens)
            fewer = dataclasses.replace(
                inputs,
                q=inputs.q[part],
                indices=inputs.indices[part],
                counts=inputs.counts[part],
            )
            got = attend(fewer, config)
            same = equal(got, tuple(tensor[part] for tensor in want))
            errors.expect(f"{case}: the batch from {start} gives other bits", same)
    return errors


def codes() -> Errors:
    """A row alone comes out as its values: all finite e4m3 codes, every scale."""
    errors = Errors()
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    for (cache, dtype), exact in itertools.product(FORMATS[2:], (False, True)):
        case = Case(16, len(finite), 5, cache, dtype, rows=512, pattern="one")
        inputs, _ = make(case, DEVICE)
        table = torch.tensor(finite, dtype=torch.uint8, device=DEVICE)
        place = torch.arange(case.rows, device=DEVICE).unsqueeze(1)
        place = place + torch.arange(LATENT, device=DEVICE)
        inputs.rows[:, :LATENT] = table[place % len(finite)]
        inputs.rows[:, LATENT:] = 0
        scales = torch.rand(case.rows, 4, device=DEVICE) + 0.01
        if exact:
            scales.fill_(1.0)
        if cache == "fp8_ds_mla":
            inputs.rows[:, LATENT : LATENT + 16] = scales.view(torch.uint8)
        else:
            inputs.kv_scale.copy_(scales[0, 0])
        out, _ = attend(inputs)
        want, _ = attention(inputs)
        # A code times its scale is rounded once or twice; times one, never.
        step = 0.0 if exact else torch.finfo(dtype).eps
        tiny = 0.0 if exact else 2.0**-24
        excess = (out.double() - want).abs() - want.abs() * step - tiny
        errors.expect(
            f"{case} exact={exact}: {float(excess.max()):.2e} beyond rounding",
            bool((excess <= 0).all()),
        )
        seen = inputs.rows[inputs.indices[inputs.chosen].long(), :LATENT].unique()
        errors.expect(f"{case}: not all codes were read", len(seen) == len(finite))
    return errors


def inputs_unchanged() -> Errors:
    errors = Errors()
    ends = (TOKENS[0], TOKENS[-1])
    for (cache, dtype), tokens in itertools.product(FORMATS[::2], ends):
        case = Case(11, tokens, TOPK[0], cache, dtype, counts=True, layout="strided")
        inputs, _ = make(case, DEVICE)
        tensors = (inputs.rows, inputs.indices, inputs.counts, inputs.q)
        before = [tensor.clone() for tensor in tensors]
        attend(inputs)
        for old, new in zip(before, tensors, strict=True):
            # Bytes, since NaN differs from itself.
            same = torch.equal(bytes_of(old), bytes_of(new))
            errors.expect(f"{case}: an input was written to", same)
    return errors


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _call_groups() -> dict[str, Callable[[], list[Call]]]:
    """Groups that only compare calls with float64; all of them compile in threads."""
    groups: dict[str, Callable[[], list[Call]]] = {}
    for cache, dtype in FORMATS:
        name = f"matrix-{cache}-{str(dtype).removeprefix('torch.')}"
        groups[name] = functools.partial(matrix, cache, dtype)
    return groups | _named(without_rope, odd_topk, splits)


def _named(*functions: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    return {f.__name__.replace("_", "-"): f for f in functions}


CALL_GROUPS = _call_groups()
GROUPS: dict[str, Callable[[], Errors]] = {
    name: lambda calls=calls: compare(calls()) for name, calls in CALL_GROUPS.items()
} | _named(
    layouts,
    unquantized,
    infinite_rows,
    large_scores,
    far_rows,
    far_queries,
    graphs,
    determinism,
    codes,
    inputs_unchanged,
)
# Free device memory that a group needs, in GiB.
NEEDED_GIB = {"far-rows": 12, "far-queries": 40}


def lacks_memory(name: str) -> str:
    """Why this device cannot run the group, or nothing."""
    free = torch.cuda.mem_get_info()[0] / 2**30
    needed = NEEDED_GIB.get(name, 4)
    return f"needs {needed} GiB of device memory" if free < needed else ""


def compile_in_threads(names: Iterable[str], workers: int) -> int:
    """Launch every kernel of these groups' calls once; the number of launches.

    No entry selects a row, so there is nothing to compute.
    """
    calls: dict[tuple[Any, ...], Call] = {}
    for case, config in itertools.chain(
        *(CALL_GROUPS[name]() for name in names if name in CALL_GROUPS)
    ):
        # Triton compiles apart what is 1, what 16 divides, and the rest.
        numbers = (case.heads, case.topk)
        special = tuple((number == 1, number % 16 == 0) for number in numbers)
        key = (case.cache, case.dtype, case.rope, case.counts, *special)
        empty = dataclasses.replace(case, rows=16, pattern="empty")
        calls.setdefault((config or config_of(case), *key), (empty, config))

    def launch(call: Call) -> None:
        case, config = call
        attend(make(case, DEVICE)[0], config)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(launch, calls.values()))
    torch.cuda.synchronize()
    return len(calls)


def run(names: list[str]) -> bool:
    """Run groups by name and print a line for each; whether all of them passed."""
    passed = True
    for name in names:
        if why := lacks_memory(name):
            print(f"skip {name}: {why}", flush=True)
            continue
        start = time.perf_counter()
        errors = GROUPS[name]()
        seconds = time.perf_counter() - start
        passed &= not errors.problems
        print(
            f"{'FAIL' if errors.problems else 'ok':4s} {name:28s} "
            f"{errors.compared:5d} compared, out {errors.out:.2e}, "
            f"lse {errors.lse:.2e}, {seconds:5.1f} s",
            flush=True,
        )
        for problem in errors.problems[:8]:
            print(f"     {problem}", flush=True)
        if len(errors.problems) > 8:
            print(f"     and {len(errors.problems) - 8} more", flush=True)
        torch.cuda.empty_cache()
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--capability", help="configurations of this one, like 8.9")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    options = parser.parse_args()
    capability = asked_capability(options.capability)
    pretend(capability)
    start = time.perf_counter()
    count = compile_in_threads(options.only, options.workers)
    print(
        f"{torch.cuda.get_device_name()}, configurations of "
        f"{capability or torch.cuda.get_device_capability()}: {count} launches "
        f"compiled in {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    passed = run(options.only)
    print(f"{'passed' if passed else 'FAILED'}, {time.perf_counter() - start:.1f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
