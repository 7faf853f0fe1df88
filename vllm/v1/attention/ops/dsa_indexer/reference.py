# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The DSA indexer as its definition says, in float64."""

import torch


def index_logits_reference(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """How much each query [T, heads, dim] wants each key [S, dim]: [T, S], float64.

    The dot products of the heads are clipped at zero, then summed with the weights
    [T, heads] of the query; scaling factors belong into the weights.
    """
    dots = torch.einsum("thd,sd->ths", q.double(), keys.double())
    return torch.einsum("th,ths->ts", weights.double(), dots.relu())


def select_positions_reference(
    logits: torch.Tensor, query_positions: torch.Tensor, topk: int
) -> torch.Tensor:
    """The `topk` best positions of each query, ascending, padded with -1: [T, topk].

    A query sees the positions up to its own. Equal logits: the lower position wins,
    so that the result does not depend on the sort. NaN logits are never selected.
    """
    selected = torch.full((len(logits), topk), -1, dtype=torch.int64)
    for t, position in enumerate(query_positions.tolist()):
        visible = logits[t, : position + 1].tolist()
        usable = [s for s, logit in enumerate(visible) if logit == logit]
        best = sorted(usable, key=lambda s: (-visible[s], s))[:topk]
        selected[t, : len(best)] = torch.tensor(sorted(best), dtype=torch.int64)
    return selected
