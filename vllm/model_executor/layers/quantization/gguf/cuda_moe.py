# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Routed experts of GGUF blocks in CUDA C++.

A *slot* is one of a token's top-k choices. Few slots read their expert each by itself,
and nothing is rounded but silu(gate) * up and the results. More are sorted by expert,
as for Triton, and multiplied in tiles with weights rounded to bfloat16.
"""

import torch

from vllm.model_executor.layers.quantization.gguf.cuda_extension import (
    LARGE_TILE,
    SMALL_TILE,
    can_read,
    fits,
)
from vllm.model_executor.layers.quantization.gguf.triton_decode import tables
from vllm.model_executor.layers.quantization.gguf.triton_moe import (
    Experts,
    down_steps,
    sort_slots,
    sum_slots,
)

# Slots for each expert, if they are chosen evenly: up to here no two slots share a
# reading of their expert, and from there on large tiles are faster.
FEW_SLOTS = 0.75
MANY_SLOTS = 40
# As csrc/gguf/skinny.h has it.
MAX_TOP_K = 32


def takes_experts(x: torch.Tensor, experts: Experts, ids: torch.Tensor) -> bool:
    """Whether `cuda_experts` can compute them."""
    (tokens, columns), inner = x.shape, experts.intermediate
    w13, w2, gate = experts.w13, experts.w2, experts.gate
    up_offset = inner * gate.row_bytes(columns)
    return (
        tokens > 0
        and len(w13) > 0
        and 0 < ids.shape[1] <= MAX_TOP_K
        and gate == experts.up
        and can_read(x)
        and fits(x, gate, columns, w13.data_ptr(), w13.stride(0), up_offset)
        and fits(x, experts.down, inner, w2.data_ptr(), w2.stride(0))
    )


def cuda_experts(
    x: torch.Tensor, experts: Experts, router_weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The sum of each token's experts times their router weights, [tokens, hidden].

    Args:
        x: bfloat16 [tokens, hidden]; tokens may be apart.
        router_weights: float32 [tokens, top-k].
        ids: int64 [tokens, top-k], of local experts; -1 adds nothing.

    See `takes_experts`. The result depends on sizes, values and the device only.
    Nothing waits for the host.
    """
    ids, router_weights = ids.contiguous(), router_weights.contiguous()
    out = x.new_empty(x.shape)
    if ids.numel() <= FEW_SLOTS * experts.chosen_from:
        _few_slots(x, experts, router_weights, ids, out)
    else:
        _many_slots(x, experts, router_weights, ids, out)
    return out


def _few_slots(
    x: torch.Tensor,
    experts: Experts,
    router_weights: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
) -> None:
    torch.ops.vllm_glm_dsa.gguf_skinny_experts(
        out,
        x.new_empty(ids.numel(), experts.intermediate),
        x,
        experts.w13,
        experts.w2,
        router_weights,
        ids,
        tables(experts.gate, x.device),
        tables(experts.down, x.device),
        experts.gate.id,
        experts.down.id,
    )


def _many_slots(
    x: torch.Tensor,
    experts: Experts,
    router_weights: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
) -> None:
    width, inner, top_k = x.shape[1], experts.intermediate, ids.shape[1]
    slots = ids.numel()
    few = slots <= MANY_SLOTS * experts.chosen_from
    tile = SMALL_TILE if few else LARGE_TILE
    order, tiles, _ = sort_slots(ids, len(experts.w13), tile)
    multiply = torch.ops.vllm_glm_dsa.gguf_tiles_experts
    hidden = x.new_empty(slots, inner)
    table, row_bytes = tables(experts.gate, x.device), experts.gate.row_bytes(width)
    args = (table, experts.gate.id, row_bytes, top_k, tile)
    multiply(hidden, x, experts.w13, order, tiles, *args)

    table, row_bytes = tables(experts.down, x.device), experts.down.row_bytes(inner)
    args = (table, experts.down.id, row_bytes, 0, tile)
    for first, values in down_steps(x, slots, multiple=LARGE_TILE):
        w2 = experts.w2[:, first * row_bytes :]
        multiply(values, hidden, w2, order, tiles, *args)
        sum_slots(values, ids, router_weights, out[:, first:])
