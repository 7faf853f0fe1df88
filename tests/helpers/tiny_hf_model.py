# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Tiny GLM-5 models with random weights, as transformers saves them.

Head dimensions are the real ones; depth, width, experts and the indexer's top-k are
small, so that sparse attention sets in after 64 tokens.
"""

import json
from pathlib import Path

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

VOCAB_SIZE = 512
TOPK = 64
_GAIN = 1.0
_SHARING = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
# Keys that vLLM reads and that transformers does not save.
_VLLM_KEYS = {
    "indexer_rope_interleave": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def write_tiny_config(
    folder: Path, *, layers: int = 4, shared_indexers: bool = False
) -> Path:
    """Write config.json only and return `folder`; arguments as below."""
    sharing = _SHARING if shared_indexers else {}
    _config(layers, sharing).save_pretrained(folder)
    _complete_config(folder, sharing)
    return folder


def write_tiny_model(
    folder: Path, *, layers: int = 4, shared_indexers: bool = False, seed: int = 0
) -> Path:
    """Write config.json and model.safetensors (float32) and return `folder`.

    With `shared_indexers`, layers 3 to 5 use the top-k of layer 2 (IndexShare).
    """
    sharing = _SHARING if shared_indexers else {}
    torch.manual_seed(seed)
    model = GlmMoeDsaForCausalLM(_config(layers, sharing)).float()
    _spread_weights(model)
    model.save_pretrained(folder)
    _complete_config(folder, sharing)
    return folder


def _complete_config(folder: Path, sharing: dict[str, int]) -> None:
    path = folder / "config.json"
    saved = json.loads(path.read_text()) | _VLLM_KEYS | sharing
    saved["architectures"] = ["GlmMoeDsaForCausalLM"]
    path.write_text(json.dumps(saved, indent=2))


def _config(layers: int, sharing: dict[str, int]) -> GlmMoeDsaConfig:
    return GlmMoeDsaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        index_topk=TOPK,
        index_head_dim=128,
        # With few heads, keys that all heads clip to zero tie at the top-k boundary,
        # and which of them are selected is anybody's choice.
        index_n_heads=32,
        # The default of transformers' low-rank norms, which ignore the config.
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE - 1,
        **sharing,
    )


def _spread_weights(model: torch.nn.Module) -> None:
    """Make random weights that keep activations alive and attention uneven.

    With the default small initialization all logits are nearly equal, and a wrong
    selection of keys would go unnoticed.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.add_(0.2 * torch.randn_like(param))
            elif param.dim() >= 2:
                fan_in = param.shape[-1]
                param.normal_(0.0, _GAIN * fan_in**-0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)


def random_prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    """Prompts of random token ids without the end-of-sequence id."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, VOCAB_SIZE - 1, (n,), generator=generator).tolist()
        for n in lengths
    ]
