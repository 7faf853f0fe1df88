# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Sparse MLA over a paged cache in plain PyTorch, in bounded memory.

Work is cut into tiles of queries and selected rows. A query whose rows do not fit
one tile carries its running maximum and sum from tile to tile (online softmax).
"""

import torch

from vllm.v1.attention.ops.sparse_mla.paged import gather_rows, locate_rows

TILE_BYTES = 64 * 1024 * 1024


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    request_ids: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    tile_bytes: int = TILE_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `q` [T, heads, width] over the selected rows of `cache`.

    Args:
        cache: [num_blocks, block_size, width], any float dtype; may be strided.
        positions: [T, K >= 1] positions within each query's request, in any order;
            negative entries, anywhere, select nothing.
        request_ids: [T] int64, the row of `block_table` of each query.
        block_table: [requests, max_blocks]
        tile_bytes: bound of the temporary memory, apart from outputs.

    Returns:
        Output [T, heads, kv_lora_rank] in the dtype of `q` and the natural logarithm
        of the softmax denominator [T, heads] in float32. Without any row: zeros and
        -inf.
    """
    tokens, heads, width = q.shape
    # Gathered row, its copy in the cache dtype, scores and weights, five indices.
    bytes_per_pair = (4 + cache.element_size()) * width + 8 * heads + 40
    pairs = max(1, tile_bytes // bytes_per_pair)
    out = torch.empty(tokens, heads, kv_lora_rank, dtype=q.dtype)
    lse = torch.empty(tokens, heads, dtype=torch.float32)
    step = max(1, pairs // positions.shape[1])
    for start in range(0, tokens, step):
        tile = slice(start, min(tokens, start + step))
        chosen = positions[tile]
        chosen = chosen[:, : _used_columns(chosen)]
        slots = locate_rows(chosen, request_ids[tile], block_table, cache.shape[1])
        out[tile], lse[tile] = _attend(
            q[tile].float(), cache, slots, scale, kv_lora_rank, pairs
        )
    return out, lse


def _used_columns(positions: torch.Tensor) -> int:
    used = (positions >= 0).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 1


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    kv_lora_rank: int,
    pairs: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = q.shape
    peak = torch.full((tokens, heads, 1), float("-inf"))
    total = torch.zeros(tokens, heads, 1)
    acc = torch.zeros(tokens, heads, kv_lora_rank)
    for part in slots.split(max(1, pairs // tokens), dim=1):
        rows = gather_rows(cache, part)
        scores = torch.bmm(q, rows.transpose(1, 2)).mul_(scale)
        scores.masked_fill_((part < 0).unsqueeze(1), float("-inf"))
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        # exp(-inf - -inf) would be NaN where nothing has been selected yet.
        base = new_peak.masked_fill(new_peak == float("-inf"), 0.0)
        shrink = (peak - base).exp_()
        weights = scores.sub_(base).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + torch.bmm(weights, rows[..., :kv_lora_rank])
        peak = new_peak
    empty = total == 0
    out = acc / total.masked_fill(empty, 1.0)
    return out, (peak + total.log()).squeeze(-1)
