#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Compare our fused DSA operations with the release's on this GPU; exit status 1 if
they differ.

    python tests/gpu/check_dsa_fused.py [--save FILE] [--time]
    python tests/gpu/check_dsa_fused.py --against FILE

Needs the CUDA release, and SM89 or later: the release's kernels compile for nothing
older. So `--save` keeps their results, and `--against` compares with these where code
is generated for SM80. One line per case, with the number of values that differ.

Rotations, quantized index queries, scales and bytes that nothing writes must be equal.
A norm is a sum, in an order that the compiler chooses. So normed values, and e4m3 codes
of them, may be neighbors instead.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import _standalone

    _standalone.use()

from tests.overlay.dsa_fused.cases import (
    INDEX_DIM,
    KV_DIM,
    PAGE,
    NormRope,
    Query,
    norm_rope_inputs,
    query_inputs,
)
from vllm.v1.attention.ops.dsa_fused.norm_rope import fused_norm_rope
from vllm.v1.attention.ops.dsa_fused.query import fused_q

DEVICE = "cuda"
FP16 = torch.float16
TOKENS = (1, 7, 300)
CACHES = [("", 0.0), ("auto", 0.0), ("fp8", 0.0), ("fp8", 0.031), ("fp8_ds_mla", 0.0)]
INDEXERS = ("", "neox", "interleaved")
Results = dict[str, torch.Tensor]

# Each case below is one more kernel to compile, for either side.
NORM_ROPE = [
    NormRope(cache, indexer, scale=scale, pages=bool(indexer))
    for (cache, scale), indexer in itertools.product(CACHES, INDEXERS)
] + [
    NormRope("auto", outputs=False),
    NormRope("auto", dtype=FP16),
    NormRope("fp8", scale=0.031, dtype=FP16),
    NormRope("fp8", outputs=False, pages=False),
    NormRope("fp8_ds_mla", "neox", outputs=False, dtype=FP16),
    NormRope("fp8_ds_mla", pages=False),
    NormRope("fp8_ds_mla", own_index_slots=True),
    NormRope("fp8_ds_mla", q_dim=2048, topk=2176),
    NormRope("fp8_ds_mla", q_dim=1000, topk=70),
]
QUERY = [
    Query(indexer, heads, index_heads)
    for indexer, (heads, index_heads) in itertools.product(
        INDEXERS, [(64, 32), (11, 37)]
    )
] + [Query(dtype=FP16), Query("neox", 1, 1), Query("neox", 128, 64)]


def cases() -> list[NormRope | Query]:
    return [
        replace(case, tokens=tokens) for case in NORM_ROPE + QUERY for tokens in TOKENS
    ] + [NormRope("fp8_ds_mla", tokens=5000), Query(tokens=5000)]


def run_norm_rope(operation: Callable[..., Any], case: NormRope) -> Results:
    """All that the call has written, with the gaps between the blocks of caches."""
    inputs = norm_rope_inputs(case, DEVICE)
    operation(**inputs)
    names = ["q_c_out", "kv_c_out", "k_pe_out", "index_k_out", "topk_indices_buffer"]
    results = {name: inputs[name] for name in names if name in inputs}
    for name in ("mla_kv_cache", "indexer_k_cache"):
        if name in inputs:
            results[name] = inputs[name]._base
    return results


def run_query(operation: Callable[..., Any], case: Query) -> Results:
    codes, weights, q_pe = operation(**query_inputs(case, DEVICE))
    if not case.indexer:
        return {"q_pe": q_pe}
    return {"codes": codes.view(torch.uint8), "weights": weights, "q_pe": q_pe}


def compare(case: NormRope | Query, ours: Results, theirs: Results) -> bool:
    """Print a line; whether the results are as equal as they must be."""
    assert ours.keys() == theirs.keys()
    differ, wrong = [], []
    for name, value in ours.items():
        other = theirs[name].to(value.device)
        for part, a, b, distance in _parts(case, name, value, other):
            steps = _steps(a, b)
            count = int((steps > 0).sum())
            if count:
                differ.append(f"{part} {count} of {a.numel()}")
            if count and int(steps.max()) > distance:
                wrong.append(f"{part} by {int(steps.max())} steps")
    verdict = "DIFFERS" if wrong else "ok"
    found = "; ".join(wrong or differ) or "equal"
    print(
        f"{verdict:8}{type(case).__name__} T{case.tokens} {case}: {found}", flush=True
    )
    return not wrong


def _parts(
    case: NormRope | Query, name: str, a: torch.Tensor, b: torch.Tensor
) -> list[tuple[str, torch.Tensor, torch.Tensor, int]]:
    """What to compare, and how many representable values apart it may be."""
    if name in ("q_c_out", "kv_c_out", "index_k_out"):
        return [(name, a, b, 1)]
    if name == "mla_kv_cache" and isinstance(case, NormRope):
        rows = [_rows(case, cache) for cache in (a, b)]
        gaps = [cache[:, rows[0].shape[1] * rows[0].shape[2] :] for cache in (a, b)]
        codes, rest = ([row[..., s] for row in rows] for s in _SPLIT)
        return [
            ("rows", *codes, 1),
            # Of fp8_ds_mla scales come first, then the rotated part of any format.
            ("scales and rotated parts", *rest, 0),
            ("gaps of the cache", *gaps, 0),
        ]
    if name == "indexer_k_cache":
        end = PAGE * INDEX_DIM
        keys, rest = [t[:, :end] for t in (a, b)], [t[:, end:] for t in (a, b)]
        return [("index keys", *keys, 1), ("index scales and gaps", *rest, 0)]
    return [(name, a, b, 0)]


_SPLIT = (slice(KV_DIM), slice(KV_DIM, None))


def _rows(case: NormRope, cache: torch.Tensor) -> torch.Tensor:
    width = 656 if case.cache == "fp8_ds_mla" else KV_DIM + 64
    return cache[:, : PAGE * width].unflatten(1, (PAGE, width))


def _steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many values, or e4m3 codes, lie between; two zeros are 1 apart."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    ordered = []
    for t in (a.contiguous(), b.contiguous()):
        bits = t.view(integer).long()
        if integer == torch.uint8:
            bits = torch.where(bits > 127, bits - 256, bits)
        # Sign and magnitude as one scale: -0 is -1.
        magnitude = bits & (2 ** (8 * a.element_size() - 1) - 1)
        ordered.append(torch.where(bits < 0, -1 - magnitude, bits))
    return (ordered[0] - ordered[1]).abs()


def measure(release: dict[str, Callable[..., Any]]) -> None:
    """Print medians in microseconds, as the CPU launches them."""
    from triton.testing import do_bench

    for tokens in (1, 32, 4096):
        case = NormRope("fp8_ds_mla", outputs=True, tokens=tokens, q_dim=2048)
        calls = {
            "fused_norm_rope": (fused_norm_rope, norm_rope_inputs(case, DEVICE)),
            "fused_q": (fused_q, query_inputs(Query(heads=64, tokens=tokens), DEVICE)),
        }
        for name, (ours, inputs) in calls.items():
            times = [
                do_bench(lambda f=f, i=inputs: f(**i), return_mode="median") * 1e3
                for f in (ours, release[name])
            ]
            print(
                f"{name} T{tokens}: ours {times[0]:.1f} us, the release's "
                f"{times[1]:.1f} us"
            )


def load_release() -> dict[str, Callable[..., Any]]:
    """The release's own operations, also where the fork has decorated them."""
    from vllm.models.deepseek_v32.common import kernels

    names = ("fused_norm_rope", "fused_q")
    found = {name: getattr(kernels, name) for name in names}
    return {name: getattr(f, "__wrapped__", f) for name, f in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--save", type=Path, help="keep the release's results")
    parser.add_argument("--against", type=Path, help="compare with kept results")
    parser.add_argument("--time", action="store_true", help="measure both, too")
    args = parser.parse_args()
    kept: dict[str, Results] = torch.load(args.against) if args.against else {}
    release = {} if args.against else load_release()
    good = True
    for case in cases():
        key = f"{case!r}"
        if isinstance(case, NormRope):
            run, name, operation = run_norm_rope, "fused_norm_rope", fused_norm_rope
        else:
            run, name, operation = run_query, "fused_q", fused_q
        if not args.against:
            kept[key] = run(release[name], case)
        good &= compare(case, run(operation, case), kept[key])
        if not args.save and not args.against:
            kept.clear()
    if args.save:
        kept = {key: {n: t.cpu() for n, t in r.items()} for key, r in kept.items()}
        torch.save(kept, args.save)
    if args.time:
        measure(release)
    print("as equal as they must be" if good else "DIFFERENT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
