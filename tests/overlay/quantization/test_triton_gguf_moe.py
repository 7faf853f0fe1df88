# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Routed experts of GGUF blocks, interpreted, against each token alone in float64."""

from unittest import mock

import pytest
import torch

from tests.helpers.real_triton import in_interpreter
from tests.overlay.quantization.triton_gguf_cases import (
    FLOAT16,
    FLOAT32,
    MoE,
    check,
    routing,
    values,
)

TYPES = [
    ("Q4_K", "Q8_0", "Q6_K"),
    ("IQ2_XXS", "IQ2_XXS", "IQ4_XS"),
    ("MXFP4", "MXFP4", "MXFP4"),
    ("F16", "Q5_K", "F32"),
]
# With one token, slots are sorted only if asked for.
WAYS = {"slots": 1000, "tiles": 0}


def experts(
    moe: MoE, x, router, ids, way: str, chosen_from: int | None = None, stacks=None
):
    """The sum of experts, in large tiles for the interpreter's sake.

    With `chosen_from`, in those that it leads to.
    """
    from vllm.model_executor.layers.quantization.gguf import triton_moe

    tile = triton_moe.Tile(256, 16, 256, warps=4, stages=1)
    changes = {"vector_tile": lambda columns: tile}
    if chosen_from is None:
        changes["moe_tile"] = lambda slots_per_expert: tile
    stacks = stacks or moe.stacks(chosen_from)
    with mock.patch.multiple(triton_moe, **changes):
        return triton_moe.triton_experts(x, stacks, router, ids, WAYS[way])


@in_interpreter
def test_slots_in_their_own_tiles():
    from vllm.model_executor.layers.quantization.gguf.triton_moe import triton_experts

    moe, x = MoE(("Q8_0", "Q4_K", "Q8_0"), 2, 32, 512), values(1, 512)
    router, ids = routing(1, 2, [0, 1])
    out = triton_experts(x, moe.stacks(), router, ids)
    check(out, moe.reference(x, router, ids), FLOAT32)


@in_interpreter
@pytest.mark.parametrize("way", WAYS)
def test_a_slot_that_is_left_out_may_have_any_weight(way):
    moe, x = MoE(("Q8_0", "Q4_K", "Q8_0"), 2, 32, 256), values(5, 256)
    router, ids = routing(5, 2, [0, -1, 1])
    router[ids < 0] = float("nan")
    assert (ids < 0).any()
    out = experts(moe, x, router, ids, way)
    check(out, moe.reference(x, router.nan_to_num(), ids), FLOAT32)


@in_interpreter
def test_any_number_of_tokens_is_within_the_grid():
    """Only the first dimension of a grid goes beyond 65,535."""
    from vllm.model_executor.layers.quantization.gguf import triton_moe

    grids = []

    class Launch:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    moe, x = MoE(("Q8_0", "Q8_0", "Q8_0"), 2, 32, 256), values(9, 256)
    with mock.patch.object(triton_moe, "sum_slots_kernel", Launch()):
        experts(moe, x, *routing(9, 2, [0, 1]), "tiles")
    assert [grid[0] for grid in grids] == [9]


@in_interpreter
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_gate_up_and_down_may_differ_in_type(types, tokens, way):
    """Of four experts one is chosen by nobody, and one is of another rank."""
    moe, x = MoE(types, 4, 256, 256), values(tokens, 256)
    router, ids = routing(tokens, 2, [0, -1, 3])
    out = experts(moe, x, router, ids, way)
    check(out, moe.reference(x, router, ids), FLOAT32)
    assert torch.equal(experts(moe, x, router, ids, way), out)


@in_interpreter
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (2, 1), (5, 3), (8, 8)])
def test_numbers_of_experts(count, top_k, way):
    moe, x = MoE(("Q8_0", "Q8_0", "Q8_0"), count, 96, 160), values(9, 160)
    router, ids = routing(9, top_k, list(range(count)))
    check(experts(moe, x, router, ids, way), moe.reference(x, router, ids), FLOAT32)


@in_interpreter
@pytest.mark.parametrize("chosen_from", [1000, 3, 1.5, 0.5])
def test_every_size_of_tile(chosen_from):
    from vllm.model_executor.layers.quantization.gguf import triton_moe

    moe, x = MoE(("Q8_0", "MXFP4", "Q8_0"), 3, 96, 64), values(40, 64)
    router, ids = routing(40, 2, [0, 1, 2, -1])
    tile = triton_moe.moe_tile(80 / chosen_from)
    assert tile.tokens == {1000: 16, 3: 32, 1.5: 64, 0.5: 128}[chosen_from]
    out = experts(moe, x, router, ids, "tiles", chosen_from)
    check(out, moe.reference(x, router, ids), FLOAT32)


@in_interpreter
@pytest.mark.parametrize("way", WAYS)
def test_float16_rounds_hidden_values_and_sums_slots_in_float32(way):
    moe = MoE(("Q8_0", "Q4_K", "Q8_0"), 4, 256, 256)
    x = values(9, 256, dtype=torch.float16)
    router, ids = routing(9, 4, [0, 1, 2, 3])
    out = experts(moe, x, router, ids, way)
    assert out.dtype == torch.float16
    check(out, moe.reference(x, router, ids), FLOAT16)


@in_interpreter
@pytest.mark.parametrize("way", WAYS)
def test_router_weights_are_not_rounded_to_the_dtype_of_x(way):
    """The first slot's weight is 1 + 2**-12, the other is -1, of the same expert."""
    moe = MoE(("F32", "F32", "F32"), 1, 32, 32)
    x = values(9, 32, dtype=torch.float16)
    router = torch.tensor([[1 + 2**-12, -1.0]]).expand(9, 2).contiguous()
    ids = torch.zeros(9, 2, dtype=torch.int64)
    out = experts(moe, x * 8, router, ids, way)
    once = moe.reference(x * 8, router.new_ones(9, 1), ids[:, :1])
    check(out * 4096.0, once, 8e-2)


@in_interpreter
@pytest.mark.parametrize("way", WAYS)
def test_a_token_does_not_depend_on_the_others(way):
    moe, x = MoE(("Q8_0", "Q8_0", "Q8_0"), 4, 64, 96), values(12, 96)
    router, ids = routing(12, 2, [0, 1, 2, 3])
    out = experts(moe, x, router, ids, way)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    moved = experts(moe, x[order], router[order], ids[order], way)
    check(moved, out[order].double(), 1e-7)


@in_interpreter
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [0, 5])
def test_no_token_or_no_expert_of_this_rank(tokens, way):
    moe = MoE(("Q8_0", "Q8_0", "Q8_0"), 2, 64, 96)
    router, ids = routing(tokens, 2, [0, 1])
    out = experts(moe, values(tokens, 96), router, torch.full_like(ids, -1), way)
    assert torch.equal(out, torch.zeros(tokens, 96))


@in_interpreter
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_ids_of_both_sizes_and_values_apart(way, ids_dtype):
    moe, x = MoE(("Q8_0", "MXFP4", "Q8_0"), 2, 64, 96), values(9, 120)[:, 5:101]
    router, ids = routing(9, 2, [0, 1])
    out = experts(moe, x, router, ids.t().contiguous().t().to(ids_dtype), way)
    check(out, moe.reference(x, router, ids), FLOAT32)


@in_interpreter
def test_down_projections_exist_in_parts():
    from vllm.model_executor.layers.quantization.gguf import triton_moe

    moe, x = MoE(("Q8_0", "Q8_0", "Q8_0"), 3, 64, 608), values(9, 608)
    router, ids = routing(9, 2, [0, 1, -1])
    whole = experts(moe, x, router, ids, "tiles")
    with mock.patch.object(triton_moe, "_DOWN_BYTES", 18 * 4 * 260):
        assert torch.equal(experts(moe, x, router, ids, "tiles"), whole)


@in_interpreter
@pytest.mark.parametrize("tile", [16, 32, 128])
@pytest.mark.parametrize(
    ("tokens", "choices"),
    [(1, [0]), (7, [4]), (50, [0, 1, 2, 3, 4]), (50, [-1, 1, 3]), (40, [-1])],
)
def test_tiles_cover_every_slot_once(tokens, choices, tile):
    from vllm.model_executor.layers.quantization.gguf.triton_moe import sort_slots

    _, ids = routing(tokens, min(2, len(choices)), choices)
    order, table, most = sort_slots(ids, 5, tile)
    count = int(table[-1])
    assert count <= most
    covered = []
    for expert, start, end in table[:-1].view(3, -1)[:, :count].t().tolist():
        slots = order[start : min(start + tile, end)]
        assert len(slots) > 0 and (ids.flatten()[slots] == expert).all()
        covered += slots.tolist()
    assert sorted(covered) == torch.where(ids.flatten() >= 0)[0].tolist()


@in_interpreter
@pytest.mark.parametrize("way", WAYS)
def test_experts_beyond_two_and_four_gigabytes(way):
    """Only the pages of three experts are ever touched."""
    moe, x = MoE(("Q8_0", "Q8_0", "Q8_0"), 3, 64, 64), values(9, 64)
    router, ids = routing(9, 2, [0, 1, 2])
    stacks = moe.stacks()
    stride = (1 << 31) + 64
    apart = []
    for stack in (stacks.w13, stacks.w2):
        whole = torch.empty(2 * stride + stack.shape[1], dtype=torch.uint8)
        part = whole.as_strided(stack.shape, (stride, 1))
        apart.append(part.copy_(stack))
    far = type(stacks)(
        *apart,
        *[getattr(stacks, n) for n in ("gate", "up", "down")],
        stacks.intermediate,
        stacks.chosen_from,
    )
    out = experts(moe, x, router, ids, way, stacks=far)
    check(out, moe.reference(x, router, ids), FLOAT32)


@in_interpreter
def test_what_does_not_fit_is_refused():
    moe = MoE(("Q8_0", "Q8_0", "Q8_0"), 2, 64, 96)
    router, ids = routing(3, 2, [0, 1])
    with pytest.raises(ValueError, match="Experts of 64 by 64 weights, Q8_0"):
        experts(moe, values(3, 64), router, ids, "slots")
    with pytest.raises(ValueError, match="both be for 3 tokens"):
        experts(moe, values(3, 96), router[:2], ids, "slots")


@in_interpreter
def test_types_whose_rows_may_begin_at_odd_addresses():
    from vllm.model_executor.layers.quantization.gguf.triton_moe import is_aligned

    odd = MoE(("MXFP4", "Q8_0", "F32"), 2, 33, 32)
    assert not is_aligned(odd.stacks(), 32)
    assert is_aligned(MoE(("MXFP4", "Q8_0", "Q8_0"), 2, 32, 32).stacks(), 32)
    assert is_aligned(MoE(("MXFP4", "MXFP4", "MXFP4"), 2, 32, 32).stacks(), 32)
