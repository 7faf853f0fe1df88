# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the operations launch compiles for GPUs without fp8, in bfloat16 and float16."""

from typing import Any

import pytest
import torch

from tests.helpers.real_triton import compiling, stack_bytes, with_compiler
from tests.overlay.dsa_fused.cases import (
    NormRope,
    Query,
    norm_rope_inputs,
    query_inputs,
)

FP16 = torch.float16
# Shared memory that one block may have, in bytes.
LIMIT = {80: 166_912, 86: 101_376}
NORM_ROPE = [
    NormRope("auto", "interleaved"),
    NormRope("auto", "neox", outputs=False, dtype=FP16),
    NormRope("fp8", "interleaved"),
    NormRope("fp8", "neox", scale=0.5, own_index_slots=True),
    NormRope("fp8", "", scale=0.5, outputs=False, dtype=FP16),
    NormRope("fp8_ds_mla", "interleaved", outputs=False),
    NormRope("fp8_ds_mla", "neox", pages=False, dtype=FP16),
    NormRope("fp8_ds_mla", ""),
    NormRope("", "interleaved", pages=False),
    NormRope("", "neox", pages=False, q_dim=2048, topk=2176),
]
QUERY = [
    Query("interleaved"),
    Query("neox", dtype=FP16),
    Query("", heads=64),
    Query("interleaved", heads=11, index_heads=64),
]


def check(kernel: Any, capability: int) -> None:
    """For this device, with its shared memory, and without spilled registers."""
    assert f".target sm_{capability}" in kernel.asm["ptx"]
    assert "e4m3" not in kernel.asm["ptx"]
    assert kernel.metadata.shared <= LIMIT[capability]
    assert stack_bytes(kernel.asm["cubin"]) == 0


@with_compiler
@pytest.mark.parametrize("capability", LIMIT)
@pytest.mark.parametrize("case", NORM_ROPE, ids=str)
def test_norm_rope_compiles(case, capability):
    from vllm.v1.attention.ops.dsa_fused.norm_rope import fused_norm_rope

    with compiling(capability) as compiled:
        fused_norm_rope(**norm_rope_inputs(case))
    assert len(compiled) == 1
    check(compiled[0], capability)


@with_compiler
@pytest.mark.parametrize("capability", LIMIT)
@pytest.mark.parametrize("case", QUERY, ids=str)
def test_query_compiles(case, capability):
    from vllm.v1.attention.ops.dsa_fused.query import fused_q

    with compiling(capability) as compiled:
        fused_q(**query_inputs(case))
    assert len(compiled) == 1
    check(compiled[0], capability)
