# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The cache and what else takes memory on a rank, as vLLM allocates them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm.transformers_utils.gguf.doctor.machine import GIB, Kind, Machine
from vllm.transformers_utils.gguf.doctor.split import Split
from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig

# Tokens in a block of the cache, unless --block-size tells another number.
BLOCK_TOKENS: Mapping[Kind, int] = {"cuda": 64, "cpu": 128}

# Values of --kv-cache-dtype and what the cache then holds: values of the model's dtype
# or another of 16 bits, bytes, or DeepSeek's rows.
CACHE_DTYPES = {
    "auto": "model",
    "bfloat16": "model",
    "float16": "model",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_ds_mla": "fp8_ds_mla",
}

_FP8_DS_MLA_BYTES = 656
_SCALED_VALUES = 128  # of the index cache, to one float32 scale
_LOGITS_BYTES = 512 << 20  # VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
_DOWN_BYTES = 256 << 20  # of slots' down projections at a time, as triton_moe.py has it
_TOPK_WORKSPACE_BYTES = 1 << 20
# Up to this length vLLM makes the workspace of prompts 5 times as long, beyond it 2.
LONG_CONTEXT = 256 * 1024
_FLASHMLA_HEADS = 64  # of a query, or a multiple


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """Bytes of one token in one layer: in the cache of attention, and of the indexer.

    `name` is "model" (values of the model's dtype), "fp8" or "fp8_ds_mla".
    """

    name: str
    attention_bytes: int
    index_bytes: int


def cache_format(
    config: GlmDsaConfig, kind: Kind, cache_dtype: str, dtype_bytes: int
) -> CacheFormat:
    """The format behind vLLM's resolved cache dtype; KeyError for an unknown one."""
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    name = CACHE_DTYPES[cache_dtype]
    wide = dtype_bytes if cache_dtype == "auto" else 2
    attention = {
        "model": latent * wide,
        "fp8": latent,
        "fp8_ds_mla": _FP8_DS_MLA_BYTES,
    }[name]
    dim = config.index_head_dim
    index = dim + dim // _SCALED_VALUES * 4 if kind == "cuda" else dim * dtype_bytes
    return CacheFormat(name, attention, index)


def token_bytes(
    config: GlmDsaConfig, split: Split, cache: CacheFormat, *, drafts: bool
) -> tuple[int, ...]:
    """Bytes of one token's cache on each pipeline stage, the same on all its ranks."""
    stages = [0] * split.pipeline
    last = config.num_layers if drafts else config.num_hidden_layers
    for layer in range(last):
        index = cache.index_bytes if config.has_indexer(layer) else 0
        stages[split.stage_of(layer)] += cache.attention_bytes + index
    return tuple(stages)


def count_blocks(
    available: Sequence[int], per_token: Sequence[int], block_tokens: int
) -> int:
    """Blocks of the cache: equal on all stages, so the fullest one decides."""
    return min(
        max(memory, 0) // (size * block_tokens)
        for memory, size in zip(available, per_token, strict=True)
    )


def longest_request(blocks: int, block_tokens: int) -> int:
    """Tokens of the longest request: one block is never handed out."""
    return max(blocks - 1, 0) * block_tokens


def capacity(blocks: int, block_tokens: int, length: int) -> int:
    """The tokens that vLLM's log tells: how many requests of `length` tokens fit,
    each in whole blocks, times `length`."""
    return int(blocks / -(-length // block_tokens) * length)


def default_batched_tokens(machine: Machine) -> int:
    """--max-num-batched-tokens of `vllm serve`, where it is left open."""
    small = machine.kind == "cpu" or machine.capability in ((8, 0), (12, 1))
    if machine.kind == "cuda" and machine.memory >= 160 * GIB:
        return 16384
    return 2048 if small or machine.memory < 70 * GIB else 8192


def workspace_factor(length: int) -> int:
    """sparse_mla_prefill_workspace_factor of vLLM's attention config, by default."""
    return 5 if length <= LONG_CONTEXT else 2


@dataclass(frozen=True, slots=True)
class Load:
    """What the size of the buffers depends on.

    `length` is --max-model-len, `batched_tokens` --max-num-batched-tokens, `backend`
    the name of the attention backend, `cache` the format of its cache.
    `expert_blocks` tells that routed experts are GGUF blocks.
    """

    length: int
    batched_tokens: int
    dtype_bytes: int
    backend: str | None
    cache: CacheFormat
    expert_blocks: bool


def buffers(
    config: GlmDsaConfig, kind: Kind, split: Split, load: Load, *, drafts: bool
) -> dict[str, int]:
    """Bytes on every rank that are neither weights nor cache, as far as computed."""
    rope = config.max_position_embeddings * config.qk_rope_head_dim * load.dtype_bytes
    topk = load.batched_tokens * config.index_topk * 4 * (2 if drafts else 1)
    found = {"rotary table": rope, "top-k buffer": topk}
    if kind == "cpu":
        return found
    # Keys that a step's prompts may gather: as many as fit in the space of
    # factor x length rows of 576 16-bit values.
    rows = workspace_factor(load.length) * load.length
    keys = rows * (576 * 2 // 132) * load.cache.index_bytes + _TOPK_WORKSPACE_BYTES
    workspace = keys
    if load.backend == "FLASHMLA_SPARSE":
        workspace = max(workspace, _flashmla_workspace(config, split, load))
    # One after the other, in each layer.
    passing = max(_LOGITS_BYTES, _expert_slots(config, split, load))
    return found | {"logits or expert slots": passing, "workspace": workspace}


def _expert_slots(config: GlmDsaConfig, split: Split, load: Load) -> int:
    """What a layer's experts hold between their kernels: a hidden row for each of the
    tokens' choices, also of other ranks' experts, and some down projections of each."""
    if not load.expert_blocks:
        return 0
    inner = config.moe_intermediate_size // (1 if split.experts else split.tensor)
    column = load.batched_tokens * config.num_experts_per_tok * load.dtype_bytes
    return column * inner + min(column * config.hidden_size, _DOWN_BYTES)


def _flashmla_workspace(config: GlmDsaConfig, split: Split, load: Load) -> int:
    """Queries, and for fp8_ds_mla the gathered keys and padded inputs and outputs."""
    heads = config.num_attention_heads // split.tensor
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    padded = -(-heads // _FLASHMLA_HEADS) * _FLASHMLA_HEADS
    if load.cache.name == "model":
        return load.batched_tokens * padded * latent * 2
    rows = workspace_factor(load.length) * load.length
    per_token = (heads + padded) * latent + (padded + heads) * config.kv_lora_rank
    return (load.batched_tokens * per_token + rows * latent) * 2
