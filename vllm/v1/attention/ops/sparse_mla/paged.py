# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Rows of a paged cache `[num_blocks, block_size, width]`, addressed by position.

The cache may be a strided view: layers share one allocation, so blocks need not lie
next to each other. Indices are 64-bit; a negative one means "no row".
"""

import torch


def write_rows(
    cache: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor
) -> None:
    """Store `rows` [T, width] at the slots `block * block_size + offset` [T]."""
    slots = slot_mapping.flatten().long()
    used = slots >= 0
    if not used.all():
        slots, rows = slots[used], rows[used]
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = rows.to(cache.dtype)


def locate_rows(
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Turn positions within requests into slots.

    Args:
        positions: [T, K] integers; negative entries stay -1.
        request_ids: [T] int64, the row of `block_table` that belongs to each query.
        block_table: [requests, max_blocks]

    Returns:
        Slots [T, K], int64.
    """
    known = positions.long().clamp(min=0)
    blocks = block_table[request_ids.unsqueeze(1), known // block_size].long()
    slots = blocks * block_size + known % block_size
    return slots.masked_fill_(positions < 0, -1)


def gather_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Read the rows at `slots` [...] as float32 [..., width]; zeros where negative.

    Unused cache rows may hold anything, NaN included: no value of them gets out.
    """
    missing = slots < 0
    slots = slots.clamp(min=0)
    block_size = cache.shape[1]
    rows = cache[slots // block_size, slots % block_size].float()
    if missing.any():
        rows.masked_fill_(missing.unsqueeze(-1), 0.0)
    return rows
