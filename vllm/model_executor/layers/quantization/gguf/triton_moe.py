# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Routed experts of GGUF blocks on a GPU, in Triton.

A *slot* is one of a token's top-k choices. With few tokens, a program computes some
rows of one slot's expert and keeps weights in float32. With many, slots are sorted by
expert on the device, and a program multiplies a tile of one expert's slots with rows
that it decodes in registers, for the tensor cores. The number of tiles is only known on
the device, so as many programs are launched as there can be; idle ones return at once.

Gate and up are one kernel, which stores silu(gate) * up, rounded once to the dtype of
x. Router weights are applied in float32 to the down projection of a slot; a token's
slots are summed in float32, in their order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from vllm.model_executor.layers.quantization.gguf.triton_decode import (
    alignment,
    tables,
)
from vllm.model_executor.layers.quantization.gguf.triton_linear import (
    Tile,
    vector_tile,
)
from vllm.model_executor.layers.quantization.gguf.triton_moe_kernels import (
    GROUP,
    slot_down_kernel,
    slot_gate_up_kernel,
    sum_slots_kernel,
    tile_down_kernel,
    tile_gate_up_kernel,
    tiles_kernel,
)
from vllm.transformers_utils.gguf.ggml_types import GGMLType
from vllm.triton_utils import triton

# Tokens up to which every slot reads its expert by itself: they choose mostly different
# experts, and this needs no sorting.
FEW_TOKENS = 8

# Bytes of the slots' down projections that exist at a time.
_DOWN_BYTES = 256 << 20
_SUM_COLUMNS = 512


@dataclass(frozen=True)
class Experts:
    """The matrices of a stack of experts, as raw blocks without padding: uint8.

    w13: [experts, bytes], gate [intermediate, hidden], then up. w2: [experts, bytes],
    down [hidden, intermediate]. chosen_from: number of experts on all ranks.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    gate: GGMLType
    up: GGMLType
    down: GGMLType
    intermediate: int
    chosen_from: int


def moe_tile(slots_per_expert: float) -> Tile:
    """The tile of the tensor cores, for evenly chosen experts."""
    if slots_per_expert <= 12:
        return Tile(32, 16, 128, warps=4, stages=3)
    if slots_per_expert <= 32:
        return Tile(64, 32, 64, warps=4, stages=3)
    if slots_per_expert <= 64:
        return Tile(64, 64, 64, warps=4, stages=3)
    return Tile(64, 128, 64, warps=8, stages=3)


def is_aligned(experts: Experts, hidden: int) -> bool:
    """Whether every row begins where its type's kernels can read it.

    It does not if rows of an odd number of bytes, which only MXFP4 has, are odd in
    number and another type follows.
    """
    stacks = ((experts.w13, experts.gate), (experts.w2, experts.down))
    places = [
        (place, kind)
        for stack, kind in stacks
        for place in (stack.data_ptr(), stack.stride(0))
    ]
    up_offset = experts.intermediate * experts.gate.row_bytes(hidden)
    places += [(experts.w13.data_ptr() + up_offset, experts.up)]
    places += [(experts.w13.stride(0), experts.up)]
    return all(place % alignment(kind) == 0 for place, kind in places)


def triton_experts(
    x: torch.Tensor,
    experts: Experts,
    router_weights: torch.Tensor,
    ids: torch.Tensor,
    few_tokens: int = FEW_TOKENS,
) -> torch.Tensor:
    """The sum of each token's experts times their router weights, [tokens, hidden].

    Args:
        x: [tokens, hidden], float32, float16 or bfloat16; also the result's dtype.
        router_weights: float32 [tokens, top-k].
        ids: int32 or int64 [tokens, top-k], of local experts, which must exist; -1
            adds nothing.
        few_tokens: up to how many tokens slots are not sorted.

    The result depends on sizes and values only. Nothing waits for the host. Raises
    ValueError if sizes do not fit.
    """
    _check(x, experts, router_weights, ids)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if 0 in x.shape or 0 in ids.shape or 0 in experts.w13.shape:
        return out.zero_()
    x, ids, router_weights = (
        x.contiguous(),
        ids.contiguous(),
        router_weights.contiguous(),
    )
    if len(x) <= few_tokens:
        _few_tokens(x, experts, router_weights, ids, out)
    else:
        _many_tokens(x, experts, router_weights, ids, out)
    return out


def _w13(experts: Experts, hidden: int, device: torch.device) -> tuple[object, ...]:
    """Where gate and up are, as both kernels take it."""
    gate_row, up_row = experts.gate.row_bytes(hidden), experts.up.row_bytes(hidden)
    return (
        experts.w13,
        experts.w13.stride(0),
        gate_row,
        up_row,
        experts.intermediate * gate_row,
        tables(experts.gate, device),
        tables(experts.up, device),
    )


def _few_tokens(
    x: torch.Tensor,
    experts: Experts,
    router_weights: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
) -> None:
    (tokens, width), top_k, inner = x.shape, ids.shape[1], experts.intermediate
    hidden = x.new_empty(ids.numel(), inner)
    tile = vector_tile(width)
    slot_gate_up_kernel[triton.cdiv(inner, tile.rows), ids.numel()](
        x,
        x.stride(0),
        ids,
        *_w13(experts, width, x.device),
        hidden,
        top_k,
        inner,
        width,
        GATE=experts.gate.id,
        UP=experts.up.id,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        EVEN=width % tile.columns == 0,
        num_warps=tile.warps,
    )
    tile = vector_tile(inner)
    slot_down_kernel[triton.cdiv(width, tile.rows), tokens](
        hidden,
        ids,
        router_weights,
        experts.w2,
        experts.w2.stride(0),
        experts.down.row_bytes(inner),
        tables(experts.down, x.device),
        out,
        top_k,
        width,
        inner,
        TYPE=experts.down.id,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        EVEN=inner % tile.columns == 0,
        num_warps=tile.warps,
    )


def sort_slots(
    ids: torch.Tensor, experts: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Slots in the order of their experts, cut into tiles, without asking the device.

    ids: [tokens, top-k]; those below 0 are left out. Returns the order, int64 [slots],
    what `tiles_kernel` writes, and the largest number of tiles there can be.
    """
    slots = ids.numel()
    keys = torch.where(ids < 0, experts, ids).flatten().to(torch.int32)
    keys, order = torch.sort(keys, stable=True)
    # Every expert may leave one tile with a single slot.
    max_tiles = min(slots, (slots + experts * (tile - 1)) // tile)
    tiles = torch.empty(3 * max_tiles + 1, dtype=torch.int32, device=ids.device)
    tiles_kernel[(1,)](
        keys,
        tiles,
        slots,
        experts,
        max_tiles,
        TOKENS=tile,
        EXPERTS=triton.next_power_of_2(experts),
    )
    return order, tiles, max_tiles


def _many_tokens(
    x: torch.Tensor,
    experts: Experts,
    router_weights: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
) -> None:
    width, top_k, inner = x.shape[1], ids.shape[1], experts.intermediate
    slots = ids.numel()
    tile = moe_tile(slots / experts.chosen_from)
    if "F32" in (experts.gate.name, experts.up.name):
        # Their tiles go through shared memory, where a third one has no room.
        tile = replace(tile, stages=min(tile.stages, 2))
    order, tiles, max_tiles = sort_slots(ids, len(experts.w13), tile.tokens)
    sorting = (order, tiles, max_tiles)
    hidden = x.new_empty(slots, inner)
    groups = triton.cdiv(max_tiles, GROUP) * GROUP
    tile_gate_up_kernel[(groups * triton.cdiv(inner, tile.rows),)](
        x,
        x.stride(0),
        *sorting,
        *_w13(experts, width, x.device),
        hidden,
        top_k,
        inner,
        width,
        GATE=experts.gate.id,
        UP=experts.up.id,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        EVEN=width % tile.columns == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    row = experts.down.row_bytes(inner)
    for first, values in down_steps(x, slots, multiple=tile.rows):
        rows = values.shape[1]
        tile_down_kernel[(groups * triton.cdiv(rows, tile.rows),)](
            hidden,
            *sorting,
            experts.w2[:, first * row :],
            experts.w2.stride(0),
            row,
            tables(experts.down, x.device),
            values,
            rows,
            inner,
            TYPE=experts.down.id,
            ROWS=tile.rows,
            TOKENS=tile.tokens,
            COLUMNS=tile.columns,
            EVEN=inner % tile.columns == 0,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        sum_slots(values, ids, router_weights, out[:, first:])


def down_steps(
    x: torch.Tensor, slots: int, multiple: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """The down projection's rows, in steps of which all slots' values have room.

    For each step its first row, and where the values go: [slots, rows], like `x`,
    [tokens, hidden]. Steps share their memory. Rows are a multiple of `multiple`.
    """
    width = x.shape[1]
    step = _DOWN_BYTES // (slots * x.element_size())
    step = min(width, max(multiple, step // multiple * multiple))
    scratch = x.new_empty(slots * step)
    for first in range(0, width, step):
        rows = min(step, width - first)
        yield first, scratch[: slots * rows].view(slots, rows)


def sum_slots(
    values: torch.Tensor,
    ids: torch.Tensor,
    router_weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write each token's values times router weights, added in order, into `out`.

    values: [slots, rows]. ids, router_weights: [tokens, top-k]; ids below 0 add
    nothing. out: [tokens, rows or more]; tokens may be apart.
    """
    rows = values.shape[1]
    sum_slots_kernel[len(ids), triton.cdiv(rows, _SUM_COLUMNS)](
        values,
        ids,
        router_weights,
        out,
        out.stride(0),
        ids.shape[1],
        rows,
        COLUMNS=_SUM_COLUMNS,
    )


def _check(
    x: torch.Tensor, experts: Experts, router_weights: torch.Tensor, ids: torch.Tensor
) -> None:
    width, inner = x.shape[1], experts.intermediate
    gate_up = experts.gate.row_bytes(width) + experts.up.row_bytes(width)
    sizes = (inner * gate_up, width * experts.down.row_bytes(inner))
    found = (experts.w13.shape[1], experts.w2.shape[1])
    if sizes != found or experts.w13.stride(1) != 1 or experts.w2.stride(1) != 1:
        raise ValueError(
            f"Experts of {inner} by {width} weights, {experts.gate.name}, "
            f"{experts.up.name} and {experts.down.name}, take {sizes} bytes, "
            f"contiguous; found {found}."
        )
    shape = (len(x), ids.shape[-1])
    if router_weights.shape != shape or ids.shape != shape:
        raise ValueError(
            f"Router weights {list(router_weights.shape)} and ids {list(ids.shape)} "
            f"must both be for {len(x)} tokens."
        )
