# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Mistakes that a loader of GLM-DSA files can make, for `HfReference(change=...)`.

Each edits a correct configuration and correct weights into what the mistake gives, so
that a test can show that its bound on agreement is small enough to catch it.
"""

from __future__ import annotations

import torch
from transformers import GlmMoeDsaConfig

from tests.helpers.hf_reference import Change, State


def half_split_indexer_rope(config: GlmMoeDsaConfig, state: State) -> None:
    """Rotate the indexer's dimensions i and i + rope/2 together, as DeepSeek-V3.2 does.

    Done by reordering the rows that produce them: the key's norm and the dot product
    do not depend on the order.
    """
    rope = config.qk_rope_head_dim
    order = torch.arange(config.index_head_dim)
    order[:rope] = torch.arange(rope).view(2, rope // 2).T.reshape(-1)
    _reorder_indexer(config, state, order)


def indexer_rope_on_last_dims(config: GlmMoeDsaConfig, state: State) -> None:
    """Rotate the last dimensions of the indexer's heads, as in the main attention."""
    order = torch.arange(config.index_head_dim).roll(config.qk_rope_head_dim)
    _reorder_indexer(config, state, order)


def _reorder_indexer(
    config: GlmMoeDsaConfig, state: State, order: torch.Tensor
) -> None:
    for name, values in state.items():
        if name.endswith((".indexer.wk.weight", ".k_norm.weight", ".k_norm.bias")):
            state[name] = values[order]
        elif name.endswith(".indexer.wq_b.weight"):
            heads = values.view(config.index_n_heads, config.index_head_dim, -1)
            state[name] = heads[:, order].reshape(values.shape)


def kv_b_all_keys_first(config: GlmMoeDsaConfig, state: State) -> None:
    """Put the k parts of all heads before the v parts instead of head by head."""
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    for name, values in state.items():
        if name.endswith(".kv_b_proj.weight"):
            heads = values.view(config.num_attention_heads, nope + value, -1)
            parts = (heads[:, :nope].flatten(0, 1), heads[:, nope:].flatten(0, 1))
            state[name] = torch.cat(parts)


def values_before_keys(config: GlmMoeDsaConfig, state: State) -> None:
    """Put v before k within each head."""
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    for name, values in state.items():
        if name.endswith(".kv_b_proj.weight"):
            heads = values.view(config.num_attention_heads, nope + value, -1)
            swapped = torch.cat((heads[:, nope:], heads[:, :nope]), dim=1)
            state[name] = swapped.flatten(0, 1)


def routed_scale_one(config: GlmMoeDsaConfig, state: State) -> None:
    config.routed_scaling_factor = 1.0


def no_router_bias(config: GlmMoeDsaConfig, state: State) -> None:
    for name, values in state.items():
        if name.endswith(".e_score_correction_bias"):
            state[name] = torch.zeros_like(values)


def no_k_norm_bias(config: GlmMoeDsaConfig, state: State) -> None:
    for name, values in state.items():
        if name.endswith(".indexer.k_norm.bias"):
            state[name] = torch.zeros_like(values)


def glm_5_2_sharing(config: GlmMoeDsaConfig, state: State) -> None:
    """Share by GLM-5.2's table, F F F S S S F ..., whatever the file says.

    Needs a file with indexer tensors on all layers.
    """
    config.indexer_types = [
        "full" if layer < 2 or layer % 4 == 2 else "shared"
        for layer in range(config.num_hidden_layers)
    ]


def no_sharing(config: GlmMoeDsaConfig, state: State) -> None:
    """Give every layer its own indexer. Needs tensors on all layers."""
    config.indexer_types = ["full"] * config.num_hidden_layers


FAULTS: dict[str, Change] = {
    "half-split indexer rope": half_split_indexer_rope,
    "indexer rope on last dims": indexer_rope_on_last_dims,
    "kv_b all keys first": kv_b_all_keys_first,
    "kv_b values before keys": values_before_keys,
    "routed scale 1.0": routed_scale_one,
    "no router bias": no_router_bias,
    "no k_norm bias": no_k_norm_bias,
}
SHARING_FAULTS: dict[str, Change] = {
    "GLM-5.2 sharing table": glm_5_2_sharing,
    "no sharing": no_sharing,
}
