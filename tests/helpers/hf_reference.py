# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""transformers as a reference: GlmMoeDsaForCausalLM on a GGUF file's weights.

Independent of the code under test: the file is read and dequantized by gguf-py, and
names, kv_b, experts and indexer sharing are worked out here again. Everything is
float32 and attention is eager.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

State = dict[str, torch.Tensor]
Change = Callable[[GlmMoeDsaConfig, State], None]

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
    "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
    "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}


class HfReference:
    """The model of one GGUF file, given by any one of its shards, MTP block left out.

    transformers gives the q_a and kv_a norms an epsilon of 1e-6 whatever the file says;
    here they get the file's, as in vLLM and llama.cpp, unless `own_eps` is true.
    `change` may edit the config and the weights, still under transformers' names.
    """

    def __init__(
        self, path: str | Path, *, own_eps: bool = False, change: Change | None = None
    ) -> None:
        keys, tensors = read_gguf(path)
        config = make_config(keys, tensors)
        state = make_state(config, tensors)
        if change is not None:
            change(config, state)
        for layer, kind in enumerate(config.indexer_types):
            if kind == "shared":
                for name in [n for n in state if f"layers.{layer}.self_attn.ind" in n]:
                    del state[name]
        self.config = config
        self.model = GlmMoeDsaForCausalLM(config).eval()
        self.model.load_state_dict(state, strict=True)
        if not own_eps:
            for layer in self.model.model.layers:
                layer.self_attn.q_a_layernorm.variance_epsilon = config.rms_norm_eps
                layer.self_attn.kv_a_layernorm.variance_epsilon = config.rms_norm_eps

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Log-probabilities of the token after each position: float64 [ids, vocab]"""
        logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.double().log_softmax(-1).numpy()

    def next_logprobs(self, prompts: list[list[int]]) -> np.ndarray:
        """Log-probabilities of the token after each prompt: float64 [prompts, vocab]"""
        return np.stack([self.logprobs(prompt)[-1] for prompt in prompts])

    def generate(
        self, prompt: list[int], count: int, guess: list[int] | None = None
    ) -> list[int]:
        """Greedy continuation by `count` tokens, past any eos; see `greedy`."""
        return greedy(self.model, prompt, count, guess)


@torch.inference_mode()
def greedy(
    model: GlmMoeDsaForCausalLM,
    prompt: list[int],
    count: int,
    guess: list[int] | None = None,
) -> list[int]:
    """The likeliest `count` tokens after `prompt`, one after the other, past any eos.

    `guess` only saves time: one pass over it finds how much of it is right, and what
    comes after that is generated with a cache.
    """
    right = _right_part(model, prompt, guess[:count]) if guess else []
    if len(right) == count:
        return right
    ids = torch.tensor([prompt + right])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count - len(right),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _right_part(
    model: GlmMoeDsaForCausalLM, prompt: list[int], guess: list[int]
) -> list[int]:
    """The first tokens of `guess`, as long as each is the likeliest after the others,
    and instead of the first wrong one the likeliest."""
    ids = torch.tensor([prompt + guess[:-1]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    best: list[int] = logits.argmax(-1).tolist()
    for place, (token, other) in enumerate(zip(best, guess, strict=True)):
        if token != other:
            return best[: place + 1]
    return best


def read_gguf(path: str | Path) -> tuple[dict[str, Any], State]:
    """Metadata and float32 tensors of a file, or of all shards of the shard `path`."""
    keys: dict[str, Any] = {}
    tensors: State = {}
    for shard in _shards(Path(path)):
        reader = gguf.GGUFReader(shard)
        for key, field in reader.fields.items():
            keys.setdefault(key, field.contents())
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            shape = [int(size) for size in reversed(tensor.shape)]
            values = np.array(values, dtype=np.float32).reshape(shape)
            tensors[tensor.name] = torch.from_numpy(values)
    return keys, tensors


def _shards(path: Path) -> list[Path]:
    base, of, count = path.stem.rpartition("-of-")
    if not of:
        return [path]
    base = base.rpartition("-")[0]
    total = int(count)
    return [
        path.with_name(f"{base}-{number:05d}-of-{total:05d}.gguf")
        for number in range(1, total + 1)
    ]


def make_config(keys: dict[str, Any], tensors: State) -> GlmMoeDsaConfig:
    """The configuration, from the metadata and from which indexers the file has."""

    def get(key: str) -> Any:
        return keys[f"glm-dsa.{key}"]

    rope = get("rope.dimension_count")
    heads = get("attention.head_count")
    layers = get("block_count") - keys.get("glm-dsa.nextn_predict_layers", 0)
    return GlmMoeDsaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        moe_intermediate_size=get("expert_feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_shared_experts=get("expert_shared_count"),
        n_routed_experts=get("expert_count"),
        num_experts_per_tok=get("expert_used_count"),
        routed_scaling_factor=get("expert_weights_scale"),
        norm_topk_prob=get("expert_weights_norm"),
        n_group=get("expert_group_count"),
        topk_group=get("expert_group_used_count"),
        first_k_dense_replace=get("leading_dense_block_count"),
        kv_lora_rank=get("attention.kv_lora_rank"),
        q_lora_rank=get("attention.q_lora_rank"),
        qk_rope_head_dim=rope,
        qk_nope_head_dim=get("attention.key_length_mla") - rope,
        v_head_dim=get("attention.value_length_mla"),
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": get("rope.freq_base")},
        index_topk=get("attention.indexer.top_k"),
        index_head_dim=get("attention.indexer.key_length"),
        index_n_heads=get("attention.indexer.head_count"),
        indexer_types=_indexer_types(keys, tensors, layers),
        tie_word_embeddings="output.weight" not in tensors,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype="float32",
    )


def _indexer_types(keys: dict[str, Any], tensors: State, layers: int) -> list[str]:
    written = keys.get("glm-dsa.attention.indexer.types")
    if written is not None:
        full = [str(entry) in ("full", "True", "1") for entry in written][:layers]
        return ["full" if flag else "shared" for flag in full]
    types: list[str] = []
    previous: torch.Tensor | None = None
    for layer in range(layers):
        weight = tensors.get(f"blk.{layer}.indexer.k_norm.weight")
        if weight is None or (previous is not None and torch.equal(weight, previous)):
            types.append("shared")
        else:
            types.append("full")
            previous = weight
    return types


def make_state(config: GlmMoeDsaConfig, tensors: State) -> State:
    """The weights under transformers' names, without the MTP block."""
    state = {new: tensors[old] for old, new in _GLOBAL_NAMES.items() if old in tensors}
    state.setdefault("lm_head.weight", tensors["token_embd.weight"])
    for layer in range(config.num_hidden_layers):
        prefix = f"blk.{layer}."
        block = {
            name.removeprefix(prefix): values
            for name, values in tensors.items()
            if name.startswith(prefix)
        }
        if "attn_k_b.weight" in block:
            # Per head: k_b [latent, nope] turned back, then v_b [value, latent].
            k_b = block.pop("attn_k_b.weight").transpose(1, 2)
            heads = torch.cat((k_b, block.pop("attn_v_b.weight")), dim=1)
            block["attn_kv_b.weight"] = heads.reshape(-1, config.kv_lora_rank)
        new = f"model.layers.{layer}."
        if "ffn_gate_exps.weight" in block:
            gate_up = [block.pop(f"ffn_{part}_exps.weight") for part in ("gate", "up")]
            state[new + "mlp.experts.gate_up_proj"] = torch.cat(gate_up, dim=1)
        for name, values in block.items():
            state[new + _BLOCK_NAMES[name]] = values
    return state
