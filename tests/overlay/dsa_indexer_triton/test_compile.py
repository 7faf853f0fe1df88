# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The index logits compile for all devices, without spills and within their memory."""

import re
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.real_triton import compiling, stack_bytes, with_compiler
from tests.overlay.dsa_indexer_triton.cases import FP8, OPS, TOKEN_BYTES

# Shared memory that one block may have, in bytes.
LIMIT = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
    121: 101_376,
}
# Some of these use warps of one tile, others tensor memory or groups of warps.
FP8_MMA = {
    89: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    90: "wgmma.mma_async.sync.aligned.m64",
    100: "tcgen05.mma.cta_group::1.kind::f8f6f4",
    120: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    121: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
}
WIDENED_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
TABLE_WIDTH = 100


def check(kernel: Any, capability: int, multiplies: bool = True) -> None:
    """For this device, with its arithmetic and memory, without spilled registers."""
    ptx = kernel.asm["ptx"]
    assert re.search(rf"\.target sm_{capability}", ptx)
    if multiplies:
        assert FP8_MMA.get(capability, WIDENED_MMA) in ptx
    assert ("e4m3" in ptx) <= (capability >= 89)
    assert kernel.metadata.shared <= LIMIT[capability]
    assert stack_bytes(kernel.asm["cubin"]) == 0


def on_device(module: str, capability: int) -> Any:
    known = (divmod(capability, 10), 100)
    return mock.patch(f"{OPS}.{module}.device_of", lambda device: known)


@with_compiler
@pytest.mark.parametrize(("heads", "queries"), [(32, 8), (32, 64), (64, 8)])
@pytest.mark.parametrize("capability", LIMIT)
def test_prefill_compiles(capability, heads, queries):
    from vllm.v1.attention.ops.dsa_indexer.prefill_logits import mqa_logits

    bounds = torch.zeros(queries, dtype=torch.int32)
    with on_device("prefill_logits", capability), compiling(capability) as compiled:
        mqa_logits(
            torch.empty(queries, heads, 128, dtype=FP8),
            torch.empty(8192, 128, dtype=FP8),
            torch.empty(8192),
            torch.empty(queries, heads),
            bounds,
            bounds,
            8192,
        )
    *widening, logits = compiled
    assert len(widening) == (capability < 89 and queries >= 64)
    check(logits, capability)
    for kernel in widening:
        check(kernel, capability, multiplies=False)


@with_compiler
@pytest.mark.parametrize(
    ("heads", "next_n", "page"),
    [(32, 1, 64), (32, 6, 64), (64, 4, 64), (32, 1, 32)],
)
@pytest.mark.parametrize("capability", LIMIT)
def test_paged_compiles(capability, heads, next_n, page):
    from vllm.v1.attention.ops.dsa_indexer.paged_logits import paged_mqa_logits

    with on_device("paged_logits", capability), compiling(capability) as compiled:
        paged_mqa_logits(
            torch.empty(3, next_n, heads, 128, dtype=FP8),
            torch.empty(8, page, 1, TOKEN_BYTES, dtype=torch.uint8),
            torch.empty(3 * next_n, heads),
            torch.zeros(3, next_n, dtype=torch.int32),
            torch.zeros(3, TABLE_WIDTH, dtype=torch.int32),
            TABLE_WIDTH * page,
        )
    (logits,) = compiled
    check(logits, capability, multiplies=page == 64)
