# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The DSA indexer over a paged key cache in plain PyTorch, in bounded memory."""

import torch

from vllm.v1.attention.ops.sparse_mla.paged import gather_rows, locate_rows

TILE_BYTES = 64 * 1024 * 1024
# Of one query and key: logit, its copy for top-k, cumulative count, three masks.
_SELECT_BYTES = 16
_MAX_QUERIES = 128
_MIN_KEYS = 64


def select_positions(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    first_position: int,
    topk: int,
    tile_bytes: int = TILE_BYTES,
) -> torch.Tensor:
    """The `topk` best positions of consecutive queries of one request.

    Args:
        q: [T, heads, dim], any float dtype; products are taken in float32.
        weights: [T, heads] float32, scaling factors included.
        cache: keys, [num_blocks, block_size, dim]; the keys of the queries' own
            positions must be in it.
        block_table: [max_blocks], the request's blocks.
        first_position: position of the first query.
        tile_bytes: bound of the temporary memory of scoring, and of selecting.

    Returns:
        [T, topk] int64, ascending, -1 behind where there are fewer. Equal logits: the
        lower position wins. NaN logits are never selected; they may leave -1 in front.
    """
    tokens = q.shape[0]
    out = torch.full((tokens, topk), -1, dtype=torch.int64)
    longest = first_position + tokens
    step = min(_MAX_QUERIES, max(1, tile_bytes // (_SELECT_BYTES * longest)))
    for start in range(0, tokens, step):
        stop = min(tokens, start + step)
        visible = first_position + stop
        positions = torch.arange(first_position + start, visible)
        if visible <= topk:
            chosen = torch.arange(visible).expand(stop - start, -1)
            future = chosen > positions.unsqueeze(1)
            out[start:stop, :visible] = chosen.masked_fill(future, -1)
            continue
        logits = _logits(
            q[start:stop].float(),
            weights[start:stop].float(),
            cache,
            block_table,
            visible,
            tile_bytes,
        )
        out[start:stop] = _topk_lowest_first(logits, positions, topk)
    return out


def _logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    num_keys: int,
    tile_bytes: int,
) -> torch.Tensor:
    tokens, heads, dim = q.shape
    logits = torch.empty(tokens, num_keys)
    flat_q = q.reshape(tokens * heads, dim)
    step = max(_MIN_KEYS, tile_bytes // (4 * (tokens * heads + 2 * dim)))
    for start in range(0, num_keys, step):
        stop = min(num_keys, start + step)
        slots = locate_rows(
            torch.arange(start, stop).unsqueeze(0),
            torch.zeros(1, dtype=torch.int64),
            block_table.unsqueeze(0),
            cache.shape[1],
        )
        keys = gather_rows(cache, slots.squeeze(0))
        dots = (flat_q @ keys.T).relu_().view(tokens, heads, -1)
        logits[:, start:stop] = torch.bmm(weights.unsqueeze(1), dots).squeeze(1)
    return logits


def _topk_lowest_first(
    logits: torch.Tensor, positions: torch.Tensor, topk: int
) -> torch.Tensor:
    """Like `select_positions_reference`, for more than `topk` keys; spends `logits`.

    `torch.topk` picks any of equal values, so it only finds the limit: all logits
    above it are in, and of those equal to it the first ones that still fit.
    """
    unusable = torch.arange(logits.shape[1]) > positions.unsqueeze(1)
    unusable |= logits.isnan()
    logits.masked_fill_(unusable, float("-inf"))
    limit = logits.topk(topk, dim=-1).values[:, -1:]
    keep = logits > limit
    equal = logits == limit
    room = topk - keep.sum(-1, keepdim=True)
    keep |= equal & (equal.cumsum(-1, dtype=torch.int32) <= room)
    chosen = keep.nonzero()[:, 1].view(len(logits), topk)
    chosen.masked_fill_(logits.gather(1, chosen) == float("-inf"), -1)
    return chosen
