# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Routed experts in CUDA C++: what is computed around the extension's operators.

These are computed on the host here, and what sorts and sums slots is interpreted.
"""

import logging
import sys
import types
from unittest import mock

import pytest
import torch

from tests.helpers.real_triton import in_interpreter
from tests.overlay.quantization.triton_gguf_cases import (
    FLOAT32,
    MoE,
    check,
    routing,
    values,
)

TYPES = [("Q4_K", "Q4_K", "Q8_0"), ("MXFP4", "MXFP4", "IQ4_NL")]
# From how many experts is chosen, the operator that follows, and its tile.
SIZES = {
    "few": (1000, "skinny_experts", None),
    "small": (4, "tiles_experts", 32),
    "large": (0.1, "tiles_experts", 128),
}


def cuda_experts(moe, x, router, ids, chosen_from, steps=None):
    """The sum of experts, and the operators, which know their calls."""
    logger = types.SimpleNamespace(init_logger=logging.getLogger)
    sys.modules.setdefault("vllm.logger", logger)
    from tests.overlay.quantization.cuda_gguf_fakes import FakeOps
    from vllm.model_executor.layers.quantization.gguf import cuda_moe, triton_moe

    ops = FakeOps().install(lambda on, name, op, raising: setattr(on, name, op))
    size = steps or triton_moe._DOWN_BYTES
    with mock.patch.object(triton_moe, "_DOWN_BYTES", size):
        out = cuda_moe.cuda_experts(x, moe.stacks(chosen_from), router, ids)
    return out, ops


@in_interpreter
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("types_of", TYPES, ids="-".join)
def test_sum_of_experts_with_some_of_other_ranks(types_of, size):
    moe, x = MoE(types_of, 4, 256, 256), values(9, 256)
    router, ids = routing(9, 2, [0, -1, 3])
    ids[4] = -1
    weights = torch.where(ids < 0, float("nan"), router)
    chosen_from, name, tile = SIZES[size]
    out, ops = cuda_experts(moe, x, weights, ids, chosen_from)
    assert ops.sizes() == [(name, tile)] * (2 if tile else 1)
    check(out, moe.reference(x, router, ids), FLOAT32)
    assert not out[4].any()


@in_interpreter
def test_ids_and_router_weights_may_be_apart():
    moe, x = MoE(TYPES[0], 4, 256, 256), values(3, 256)
    router, ids = routing(3, 2, [0, 1, 3])
    ids, router = ids.t().contiguous().t(), router.t().contiguous().t()
    assert not ids.is_contiguous()
    for chosen_from, _, _ in SIZES.values():
        out, _ = cuda_experts(moe, x, router, ids, chosen_from)
        check(out, moe.reference(x, router, ids), FLOAT32)


@in_interpreter
def test_down_projections_exist_in_parts_of_whole_tiles():
    moe, x = MoE(("Q4_K", "Q4_K", "Q8_0"), 3, 256, 512), values(9, 512)
    router, ids = routing(9, 2, [0, 1, -1])
    whole, _ = cuda_experts(moe, x, router, ids, 3)
    # Of 18 slots, 4 bytes each: less than a tile, and between two and three.
    for room, steps in ((1, [128] * 4), (18 * 4 * 300, [256] * 2)):
        out, ops = cuda_experts(moe, x, router, ids, 3, steps=room)
        assert [args["out"].shape[1] for _, args in ops.calls[1:]] == steps
        assert torch.equal(out, whole)
