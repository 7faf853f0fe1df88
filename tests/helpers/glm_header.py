# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The header of a GLM-5.3 GGUF at real size, with made-up tokens and no weights.

Key names, types and values, tensor names, dims and types are those of the public
UD-Q4_K_XL file. Data is a hole, so the 467 GB take no disk space.
"""

from pathlib import Path
from typing import Any

from tests.helpers.gguf_writer import Tensor, Typed, write_gguf, write_shards

TOKENS = 154_880
MERGES = 321_649
BLOCKS = 79
DENSE_BLOCKS = 3

_GENERAL: dict[str, Any] = {
    "general.architecture": "glm-dsa",
    "general.type": "model",
    "general.name": "Glm-5.3",
    "general.basename": "Glm-5.3",
    "general.size_label": "256x22B",
    "general.tags": ["text-generation"],
    "general.languages": ["en", "zh"],
    "general.sampling.top_p": 0.95,
    "general.sampling.temp": 1.0,
    "general.quantization_version": 2,
    "general.file_type": 15,
}
_MODEL: dict[str, Any] = {
    "block_count": BLOCKS,
    "nextn_predict_layers": 1,
    "context_length": 1_048_576,
    "embedding_length": 6144,
    "feed_forward_length": 12288,
    "vocab_size": TOKENS,
    "attention.head_count": 64,
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 256,
    "attention.value_length_mla": 256,
    "attention.q_lora_rank": 2048,
    "attention.kv_lora_rank": 512,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048,
    "rope.dimension_count": 64,
    "rope.freq_base": 8e6,
    "leading_dense_block_count": DENSE_BLOCKS,
    "expert_count": 256,
    "expert_used_count": 8,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 2048,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
_TOKENIZER: dict[str, Any] = {
    "model": "gpt2",
    "pre": "glm4",
    "eos_token_id": 154820,
    "padding_token_id": 154821,
    "bos_token_id": 154822,
    "eot_token_id": 154827,
    "eom_token_id": 154829,
    "unknown_token_id": 154820,
}

_EVERY_BLOCK: dict[str, tuple[tuple[int, ...], str]] = {
    "attn_norm.weight": ((6144,), "F32"),
    "attn_q_a.weight": ((6144, 2048), "Q8_0"),
    "attn_q_a_norm.weight": ((2048,), "F32"),
    "attn_q_b.weight": ((2048, 16384), "Q8_0"),
    "attn_kv_a_mqa.weight": ((6144, 576), "Q8_0"),
    "attn_kv_a_norm.weight": ((512,), "F32"),
    "attn_k_b.weight": ((192, 512, 64), "Q8_0"),
    "attn_v_b.weight": ((512, 256, 64), "Q8_0"),
    "attn_output.weight": ((16384, 6144), "Q8_0"),
    "ffn_norm.weight": ((6144,), "F32"),
    "indexer.k_norm.weight": ((128,), "F32"),
    "indexer.k_norm.bias": ((128,), "F32"),
    "indexer.proj.weight": ((6144, 32), "F32"),
    "indexer.attn_k.weight": ((6144, 128), "Q8_0"),
    "indexer.attn_q_b.weight": ((2048, 4096), "Q8_0"),
}
_DENSE: dict[str, tuple[tuple[int, ...], str]] = {
    "ffn_gate.weight": ((6144, 12288), "Q8_0"),
    "ffn_up.weight": ((6144, 12288), "Q8_0"),
    "ffn_down.weight": ((12288, 6144), "Q8_0"),
}
_MOE: dict[str, tuple[tuple[int, ...], str]] = {
    "ffn_gate_inp.weight": ((6144, 256), "F32"),
    "exp_probs_b.bias": ((256,), "F32"),
    "ffn_gate_exps.weight": ((6144, 2048, 256), "Q4_K"),
    "ffn_up_exps.weight": ((6144, 2048, 256), "Q4_K"),
    "ffn_down_exps.weight": ((2048, 6144, 256), "Q5_K"),
    "ffn_gate_shexp.weight": ((6144, 2048), "Q8_0"),
    "ffn_up_shexp.weight": ((6144, 2048), "Q8_0"),
    "ffn_down_shexp.weight": ((2048, 6144), "Q8_0"),
}
_MTP: dict[str, tuple[tuple[int, ...], str]] = {
    "nextn.eh_proj.weight": ((12288, 6144), "Q8_0"),
    "nextn.enorm.weight": ((6144,), "F32"),
    "nextn.hnorm.weight": ((6144,), "F32"),
    "nextn.shared_head_norm.weight": ((6144,), "F32"),
}
_GLOBAL: dict[str, tuple[tuple[int, ...], str]] = {
    "token_embd.weight": ((6144, TOKENS), "Q8_0"),
    "output.weight": ((6144, TOKENS), "Q8_0"),
    "output_norm.weight": ((6144,), "F32"),
}
_RAISED_TO_Q6_K = {
    "blk.78.ffn_gate_exps.weight",
    "blk.78.ffn_up_exps.weight",
    "blk.78.ffn_down_exps.weight",
    "blk.8.ffn_down_exps.weight",
}


def glm_tokens(count: int = TOKENS) -> list[str]:
    """`count` distinct tokens of the length that real ones have on average."""
    return [f"tok{i:x}" if i % 3 else f"Ġ令{i}" for i in range(count)]


def glm_merges(count: int = MERGES) -> list[str]:
    return [f"Ġm{i % 997:x} {i:x}" for i in range(count)]


def glm_metadata(tokens: int = TOKENS, merges: int = MERGES) -> dict[str, Any]:
    """All keys but split.*; fewer tokens and merges for a smaller file."""
    model = {f"glm-dsa.{key}": value for key, value in _MODEL.items()}
    tokenizer = {f"tokenizer.ggml.{key}": value for key, value in _TOKENIZER.items()}
    return (
        _GENERAL
        | model
        | tokenizer
        | {
            "tokenizer.ggml.tokens": Typed("[string]", glm_tokens(tokens)),
            "tokenizer.ggml.token_type": Typed("[i32]", [1] * tokens),
            "tokenizer.ggml.merges": Typed("[string]", glm_merges(merges)),
            "tokenizer.chat_template": "[gMASK]<sop>" + "{{ messages }}" * 600,
        }
    )


def glm_tensors() -> list[Tensor]:
    """The 1,809 tensors, without data."""
    table = dict(_GLOBAL)
    for block in range(BLOCKS):
        parts = _EVERY_BLOCK | (_DENSE if block < DENSE_BLOCKS else _MOE)
        if block == BLOCKS - 1:
            parts = parts | _MTP
        table |= {f"blk.{block}.{name}": spec for name, spec in parts.items()}
    return [
        Tensor(name, dims, "Q6_K" if name in _RAISED_TO_Q6_K else kind)
        for name, (dims, kind) in table.items()
    ]


def write_glm_shards(directory: Path, shards: int = 11) -> list[Path]:
    """The model in shards, of which the first holds the metadata only."""
    tensors = glm_tensors()
    step = -(-len(tensors) // (shards - 1))
    groups = [tensors[i : i + step] for i in range(0, len(tensors), step)]
    return write_shards(directory, "glm", glm_metadata(), [[], *groups])


def write_glm_single(path: Path) -> Path:
    """The model in one file."""
    return write_gguf(path, glm_metadata(), glm_tensors())
