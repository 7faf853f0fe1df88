# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Kernels of routed experts on GGUF blocks, in Triton; `triton_moe` launches them.

A *slot* is one of a token's top-k choices; slot s is choice s % top_k of token
s // top_k. What is beyond the last row or slot of a program repeats it, so that loads
need no mask, and is not stored. Numbers that vary with every batch are not specialized
on: a first prompt shall not wait for the compiler again and again.
"""

from vllm.model_executor.layers.quantization.gguf.triton_linear import (
    add_products,
    decode,
    load_tokens,
    load_vector,
    neighbors,
)
from vllm.triton_utils import tl, triton

# Tiles of slots that follow each other for the same rows of experts, to share them in
# the L2 cache.
GROUP = 8
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def slot_gate_up_kernel(
    x_ptr,
    x_stride,
    ids_ptr,
    w13_ptr,
    expert_stride,
    gate_row_stride,
    up_row_stride,
    up_offset,
    gate_tables_ptr,
    up_tables_ptr,
    out_ptr,
    top_k,
    rows,
    columns,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Program (i, slot): hidden values from i * ROWS on, [slots, rows]."""
    slot = tl.program_id(1)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    if expert < 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = tl.minimum(row, rows - 1).to(tl.int64)
    gate_ptr = w13_ptr + expert * expert_stride
    up_ptr = gate_ptr + up_offset
    gate_ptr += (known * gate_row_stride)[:, None]
    up_ptr += (known * up_row_stride)[:, None]
    x_ptr += (slot // top_k).to(tl.int64) * x_stride
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        x = load_vector(x_ptr, start, columns, ROWS, COLUMNS, EVEN)
        gate += x * decode(
            gate_ptr, start, columns, gate_tables_ptr, GATE, COLUMNS, EVEN
        )
        up += x * decode(up_ptr, start, columns, up_tables_ptr, UP, COLUMNS, EVEN)
    hidden = _silu(tl.sum(gate, 1)) * tl.sum(up, 1)
    tl.store(out_ptr + slot.to(tl.int64) * rows + row, hidden, mask=row < rows)


@triton.jit
def slot_down_kernel(
    hidden_ptr,
    ids_ptr,
    router_ptr,
    w2_ptr,
    expert_stride,
    row_stride,
    tables_ptr,
    out_ptr,
    top_k,
    rows,
    columns,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Program (i, token): outputs from i * ROWS on, over all slots of the token."""
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = tl.minimum(row, rows - 1).to(tl.int64)
    rows_ptr = w2_ptr + (known * row_stride)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for choice in range(top_k):
        slot = token * top_k + choice
        expert = tl.load(ids_ptr + slot).to(tl.int64)
        if expert >= 0:
            row_ptr = rows_ptr + expert * expert_stride
            value_ptr = hidden_ptr + slot * columns
            value = tl.zeros([ROWS, COLUMNS], tl.float32)
            for start in range(0, columns, COLUMNS):
                value += load_vector(
                    value_ptr, start, columns, ROWS, COLUMNS, EVEN
                ) * decode(row_ptr, start, columns, tables_ptr, TYPE, COLUMNS, EVEN)
            total += value * tl.load(router_ptr + slot)
    tl.store(out_ptr + token * rows + row, tl.sum(total, 1), mask=row < rows)


@triton.jit
def _count_smaller(sorted_ptr, values, slots):
    """How many of the sorted ids [slots] are smaller, for each of `values`."""
    low = tl.zeros_like(values)
    high = low + slots
    while tl.max(high - low, 0) > 0:
        searching = low < high
        middle = (low + high) // 2
        found = tl.load(sorted_ptr + middle, mask=searching, other=0)
        low = tl.where(searching & (found < values), middle + 1, low)
        high = tl.where(searching & (found >= values), middle, high)
    return low


@triton.jit(do_not_specialize=["slots", "max_tiles"])
def tiles_kernel(
    sorted_ptr,
    tiles_ptr,
    slots,
    experts,
    max_tiles,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One program: cut each expert's slots, neighbors among sorted ids, into tiles.

    tiles_ptr: int32 [3 * max_tiles + 1]. Written: the experts of tiles, their first
    slots, and the ends of their experts' slots; last, how many tiles there are.
    """
    expert = tl.arange(0, EXPERTS)
    start = _count_smaller(sorted_ptr, expert, slots)
    end = _count_smaller(sorted_ptr, expert + 1, slots)
    # Ids from `experts` on stand for experts of other ranks.
    tiles = tl.where(expert < experts, (end - start + TOKENS - 1) // TOKENS, 0)
    first = tl.cumsum(tiles, 0) - tiles
    for i in range(tl.max(tiles, 0)):
        mine = i < tiles
        target = tiles_ptr + first + i
        tl.store(target, expert, mask=mine)
        tl.store(target + max_tiles, start + i * TOKENS, mask=mine)
        tl.store(target + 2 * max_tiles, end, mask=mine)
    tl.store(tiles_ptr + 3 * max_tiles, tl.sum(tiles, 0))


@triton.jit
def _tile_and_block(rows, ROWS: tl.constexpr):
    """This program's tile and block of rows: a group of tiles goes block by block."""
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    tile = program // (_GROUP * blocks) * _GROUP + program % _GROUP
    return tile, program % (_GROUP * blocks) // _GROUP


@triton.jit(do_not_specialize=["max_tiles"])
def tile_gate_up_kernel(
    x_ptr,
    x_stride,
    order_ptr,
    tiles_ptr,
    max_tiles,
    w13_ptr,
    expert_stride,
    gate_row_stride,
    up_row_stride,
    up_offset,
    gate_tables_ptr,
    up_tables_ptr,
    out_ptr,
    top_k,
    rows,
    columns,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Hidden values of a tile of sorted slots, [sorted slots, rows]."""
    tile, block = _tile_and_block(rows, ROWS)
    if tile >= tl.load(tiles_ptr + 3 * max_tiles):
        return
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    slot = tl.load(tiles_ptr + max_tiles + tile) + tl.arange(0, TOKENS)
    end = tl.load(tiles_ptr + 2 * max_tiles + tile)
    token = tl.load(order_ptr + tl.minimum(slot, end - 1)) // top_k
    token_ptr = x_ptr + (token.to(tl.int64) * x_stride)[:, None]
    row = block * ROWS + tl.arange(0, ROWS)
    known = tl.minimum(row, rows - 1).to(tl.int64)
    expert_ptr = w13_ptr + expert * expert_stride
    gate_ptr = expert_ptr + (known * gate_row_stride)[:, None]
    up_ptr = expert_ptr + up_offset + (known * up_row_stride)[:, None]
    run = neighbors(x_ptr, ROWS, COLUMNS)
    gate = tl.zeros([TOKENS, ROWS], tl.float32)
    up = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, columns, COLUMNS):
        x = load_tokens(token_ptr, start, columns, COLUMNS, EVEN)
        weights = decode(gate_ptr, start, columns, gate_tables_ptr, GATE, COLUMNS, EVEN)
        gate = add_products(gate, x, weights, run)
        weights = decode(up_ptr, start, columns, up_tables_ptr, UP, COLUMNS, EVEN)
        up = add_products(up, x, weights, run)
    target = out_ptr + (slot.to(tl.int64) * rows)[:, None] + row[None, :]
    inside = (slot < end)[:, None] & (row < rows)[None, :]
    tl.store(target, _silu(gate) * up, mask=inside)


@triton.jit(do_not_specialize=["max_tiles"])
def tile_down_kernel(
    x_ptr,
    order_ptr,
    tiles_ptr,
    max_tiles,
    w2_ptr,
    expert_stride,
    row_stride,
    tables_ptr,
    out_ptr,
    rows,
    columns,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Outputs of a tile of sorted slots, without router weights, to [slots, rows]."""
    tile, block = _tile_and_block(rows, ROWS)
    if tile >= tl.load(tiles_ptr + 3 * max_tiles):
        return
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    slot = tl.load(tiles_ptr + max_tiles + tile) + tl.arange(0, TOKENS)
    end = tl.load(tiles_ptr + 2 * max_tiles + tile)
    known_slot = tl.minimum(slot, end - 1)
    slot_ptr = x_ptr + (known_slot.to(tl.int64) * columns)[:, None]
    row = block * ROWS + tl.arange(0, ROWS)
    known = tl.minimum(row, rows - 1).to(tl.int64)
    row_ptr = w2_ptr + expert * expert_stride + (known * row_stride)[:, None]
    run = neighbors(x_ptr, ROWS, COLUMNS)
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, columns, COLUMNS):
        x = load_tokens(slot_ptr, start, columns, COLUMNS, EVEN)
        weights = decode(row_ptr, start, columns, tables_ptr, TYPE, COLUMNS, EVEN)
        sums = add_products(sums, x, weights, run)
    place = tl.load(order_ptr + known_slot).to(tl.int64)
    target = out_ptr + (place * rows)[:, None] + row[None, :]
    inside = (slot < end)[:, None] & (row < rows)[None, :]
    tl.store(target, sums, mask=inside)


@triton.jit
def sum_slots_kernel(
    values_ptr,
    ids_ptr,
    router_ptr,
    out_ptr,
    out_stride,
    top_k,
    rows,
    COLUMNS: tl.constexpr,
):
    """Program (token, i): the token's slots, times router weights, added in order."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = row < rows
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in range(top_k):
        slot = token * top_k + choice
        here = tl.load(ids_ptr + slot) >= 0
        value = tl.load(values_ptr + slot * rows + row, mask=inside & here, other=0)
        # A slot that is left out may have any weight, NaN included.
        router = tl.load(router_ptr + slot, mask=here, other=0)
        total += value.to(tl.float32) * router
    tl.store(out_ptr + token * out_stride + row, total, mask=inside)
