# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Bytes of parameters on a rank, from the load plan."""

import re
from dataclasses import dataclass, field

from vllm.transformers_utils.gguf.doctor.split import (
    Split,
    local_experts,
    padded_vocab,
)
from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig
from vllm.transformers_utils.gguf.plan import LoadPlan, PlannedWeight

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# How the last part of a module's name tells that its matrix is cut.
_BY_ROWS = frozenset({"q_b_proj", "kv_b_proj", "gate_proj", "up_proj"})
_BY_COLUMNS = frozenset({"o_proj", "down_proj"})
_VOCABULARY = frozenset({"embed_tokens", "lm_head"})
# Parameters that are float32 whatever the model's dtype.
_FLOAT32 = ("indexer.k_norm.weight", "indexer.k_norm.bias", "e_score_correction_bias")

EXPERTS, ATTENTION, FEED_FORWARD, VOCABULARY, MTP = (
    "routed experts",
    "attention and indexers",
    "other layers",
    "embedding and head",
    "MTP block",
)


@dataclass(frozen=True, slots=True)
class Storage:
    """How weights are kept: `keep_blocks` as in the file where the plan says so,
    everything else in a dtype of `dtype_bytes` bytes."""

    keep_blocks: bool
    dtype_bytes: int


@dataclass(slots=True)
class StageWeights:
    """Bytes of parameters on one rank of a pipeline stage, by part of the model."""

    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def stage_weights(
    plan: LoadPlan, split: Split, storage: Storage, *, drafts: bool
) -> tuple[StageWeights, ...]:
    """Parameters of each pipeline stage's largest rank.

    With `drafts` the MTP block is loaded too, on the last stage, where it shares
    embedding and head with the model. Raises GGUFError if a block would be cut.
    """
    stages = tuple(StageWeights() for _ in range(split.pipeline))
    groups = [(plan.main, False), (plan.mtp, True)] if drafts else [(plan.main, False)]
    for weights, draft in groups:
        for weight in weights:
            parts = stages[_stage(weight, split)].parts
            part = MTP if draft else _part(weight)
            parts[part] = parts.get(part, 0) + rank_bytes(
                weight, plan.config, split, storage
            )
    return stages


def rank_bytes(
    weight: PlannedWeight, config: GlmDsaConfig, split: Split, storage: Storage
) -> int:
    """Bytes that `weight` takes on the rank that has most of it."""
    count, rows, columns = _shape(weight)
    leaf = weight.module.rpartition(".")[2]
    if weight.kind == "experts" and split.experts:
        count = local_experts(config, split)
    elif leaf in _BY_ROWS:
        rows //= split.tensor
    elif leaf in _BY_COLUMNS:
        columns //= split.tensor
    elif leaf in _VOCABULARY:
        rows = padded_vocab(config) // split.tensor
    if weight.blocks and storage.keep_blocks:
        return count * rows * weight.sources[0].type.row_bytes(columns)
    single = weight.name.endswith(_FLOAT32)
    return count * rows * columns * (4 if single else storage.dtype_bytes)


def _shape(weight: PlannedWeight) -> tuple[int, int, int]:
    """Matrices, and rows and columns of each; a vector is one row."""
    shape = weight.sources[0].shape
    if weight.kind == "kv_b":
        heads, rank, nope = shape
        return 1, heads * (nope + weight.sources[1].shape[1]), rank
    if weight.kind == "experts":
        count, rows, columns = shape
        if weight.rows is not None:
            rows = weight.rows[1] - weight.rows[0]
        return count, rows, columns
    if len(shape) == 1:
        return 1, 1, shape[0]
    return 1, shape[0], shape[1]


def _stage(weight: PlannedWeight, split: Split) -> int:
    layer = _LAYER.match(weight.name)
    if layer is not None:
        return split.stage_of(int(layer[1]))
    return 0 if "embed_tokens" in weight.name else split.pipeline - 1


def _part(weight: PlannedWeight) -> str:
    if weight.kind == "experts":
        return EXPERTS
    if weight.module.rpartition(".")[2] in _VOCABULARY:
        return VOCABULARY
    return ATTENTION if ".self_attn." in weight.name else FEED_FORWARD
