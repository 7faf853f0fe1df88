# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The ggml type of each tensor of a GLM-DSA file, after llama-quantize's rules.

The "mixed" variant varies the types as real mixtures do and further: from layer to
layer, between gate and up, between q_a and kv_a, between embedding and output, and
with one quantized indexer.proj.
"""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

import ggml_quantize

MIXED = "mixed"
# gguf-py 0.19 cannot dequantize Q1_0, so no reference could read such a file.
WEIGHT_TYPES = (*(t for t in ggml_quantize.TYPES if t != "Q1_0"), MIXED)

# For rows that the type's blocks do not divide, such as k_b's of 192; all other I-types
# become IQ4_NL. These have blocks of 32.
_FALLBACK = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
}
_EMBEDDING = {
    "IQ1_S": "Q2_K",
    "IQ1_M": "Q2_K",
    "IQ2_XXS": "Q2_K",
    "IQ2_XS": "Q2_K",
    "IQ2_S": "IQ3_S",
    "IQ3_XXS": "IQ3_S",
    "TQ1_0": "Q4_K",
    "TQ2_0": "Q4_K",
    "MXFP4": "Q8_0",
    "NVFP4": "Q8_0",
}
_HEAD_Q5_K = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")
_HEAD_SAME = ("F32", "F16", "BF16", "Q8_0")
# Applied to 3-D tensors (experts, k_b and v_b); the rest is Q8_0.
_EXPERTS_ONLY = ("MXFP4", "NVFP4")

# Tensor of a block -> types of blocks 0, 1, 2, 3; further blocks repeat them.
_MIXED_BLOCK = {
    "attn_q_a": ("Q5_K", "Q4_K", "Q8_0", "BF16"),
    "attn_kv_a_mqa": ("Q8_0", "Q6_K", "F32", "Q5_0"),
    "attn_q_b": ("Q8_0", "Q5_K", "Q6_K", "Q4_1"),
    "attn_kv_b": ("Q8_0", "Q6_K", "BF16", "Q4_K"),
    "attn_k_b": ("Q8_0", "Q5_0", "BF16", "IQ4_NL"),
    "attn_v_b": ("Q6_K", "Q8_0", "F16", "IQ4_XS"),
    "attn_output": ("Q5_K", "Q8_0", "IQ4_XS", "Q6_K"),
    "ffn_gate": ("Q4_K", "Q4_K", "Q4_K", "Q4_K"),
    "ffn_up": ("Q5_1", "Q5_1", "Q5_1", "Q5_1"),
    "ffn_down": ("Q6_K", "Q6_K", "Q6_K", "Q6_K"),
    "ffn_gate_exps": ("Q5_K", "IQ3_XXS", "Q4_K", "MXFP4"),
    "ffn_up_exps": ("Q4_K", "Q3_K", "Q4_K", "Q8_0"),
    "ffn_down_exps": ("Q6_K", "IQ4_XS", "Q5_K", "Q2_K"),
    "ffn_gate_shexp": ("Q5_K", "Q8_0", "BF16", "Q4_K"),
    "ffn_up_shexp": ("Q5_K", "Q6_K", "Q8_0", "Q4_0"),
    "ffn_down_shexp": ("Q6_K", "Q8_0", "Q8_0", "IQ3_S"),
    "indexer.proj": ("F32", "Q8_0", "F32", "F32"),
    "indexer.attn_k": ("Q8_0", "BF16", "Q5_K", "Q6_K"),
    "indexer.attn_q_b": ("Q8_0", "Q6_K", "F32", "Q5_K"),
    "nextn.eh_proj": ("Q8_0", "Q8_0", "Q8_0", "Q8_0"),
}
_MIXED_GLOBAL = {"token_embd": "Q4_K", "output": "Q6_K"}


def tensor_type(name: str, shape: tuple[int, ...], weight_type: str) -> str:
    """The type of tensor `name`; `shape` has the length of its rows last."""
    return _row_type(_wanted_type(name, len(shape), weight_type), shape[-1])


def _wanted_type(name: str, dims: int, weight_type: str) -> str:
    if dims == 1 or name.endswith("ffn_gate_inp.weight"):
        return "F32"
    role = name.removesuffix(".weight")
    if weight_type == MIXED:
        if not role.startswith("blk."):
            return _MIXED_GLOBAL[role]
        _, block, part = role.split(".", 2)
        types = _MIXED_BLOCK[part]
        return types[int(block) % len(types)]
    if role.endswith("indexer.proj"):
        return "F32"
    if role == "token_embd":
        return _EMBEDDING.get(weight_type, weight_type)
    if role == "output":
        return _head_type(weight_type)
    if weight_type in _EXPERTS_ONLY:
        return weight_type if dims == 3 else "Q8_0"
    return weight_type


def _row_type(type_name: str, columns: int) -> str:
    """`type_name`, or what stands in for it where blocks do not divide rows."""
    if columns % _block(type_name) == 0:
        return type_name
    if type_name.startswith("IQ"):
        type_name = "IQ4_NL"
    type_name = _FALLBACK.get(type_name, type_name)
    return type_name if columns % _block(type_name) == 0 else "F16"


def _block(type_name: str) -> int:
    return GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][0]


def _head_type(weight_type: str) -> str:
    if weight_type in _HEAD_SAME:
        return weight_type
    if weight_type in _EXPERTS_ONLY:
        return "Q8_0"
    return "Q5_K" if weight_type in _HEAD_Q5_K else "Q6_K"
