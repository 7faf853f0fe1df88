# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Sparse MLA as its definition says, one query and one head at a time, in float64."""

import torch


def sparse_mla_reference(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `q` [T, heads, width] over selected `rows` [R, width].

    Args:
        indices: [T, K] row numbers; negative entries select nothing.

    Returns:
        Output [T, heads, kv_lora_rank] and the natural logarithm of the softmax
        denominator [T, heads], float64. Without any row: zeros and -inf.
    """
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, kv_lora_rank, dtype=torch.float64)
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float64)
    for t in range(tokens):
        chosen = rows[indices[t][indices[t] >= 0].long()].double()
        if len(chosen) == 0:
            continue
        for h in range(heads):
            scores = chosen @ q[t, h].double() * scale
            out[t, h] = scores.softmax(0) @ chosen[:, :kv_lora_rank]
            lse[t, h] = scores.logsumexp(0)
    return out, lse
