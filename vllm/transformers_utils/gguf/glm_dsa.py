# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The `glm-dsa` architecture: GGUF metadata to model configuration.

GLM-5, 5.1, 5.2 and 5.3 share this architecture. What a file does not say (the
router's method, the rotation style of the indexer) is fixed by the model family
and set here.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.reader import GGUFFile

logger = logging.getLogger("vllm.transformers_utils.gguf")

ARCHITECTURE = "glm-dsa"
INDEXER_TENSORS = (
    "indexer.k_norm.weight",
    "indexer.k_norm.bias",
    "indexer.proj.weight",
    "indexer.attn_k.weight",
    "indexer.attn_q_b.weight",
)

_SCORING = {1: "softmax", 2: "sigmoid"}
# GLM-5.2 and 5.3 own an indexer on layers 0 to 2 and on every fourth from 6 on;
# no other member of the family reaches this context length.
_SHARED_CONTEXT = 1048576
_SHARED_LAYERS = 78


@dataclass(frozen=True, slots=True)
class GlmDsaConfig:
    """Hyperparameters of a glm-dsa file, named as transformers names them.

    `indexer_full[i]` tells whether layer i computes its own top-k (True) or
    reuses that of the nearest earlier layer that does. The layer at index
    `num_hidden_layers` and after are MTP layers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: str
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_full: tuple[bool, ...]
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None

    @property
    def num_layers(self) -> int:
        """All layers of the file: hidden layers, then MTP layers."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def has_indexer(self, layer: int) -> bool:
        """Whether `layer` computes its own top-k; MTP layers always do."""
        return layer >= self.num_hidden_layers or self.indexer_full[layer]

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_k_dense_replace


def read_config(file: GGUFFile) -> GlmDsaConfig:
    """Read and check the hyperparameters of `file`.

    Raises GGUFError if the file is of another architecture, lacks a key, or has
    values that contradict each other.
    """
    check_architecture(file)
    keys = _Keys(file)
    blocks = keys.count("block_count")
    mtp = keys.integer("nextn_predict_layers", 0)
    if not 0 <= mtp < blocks:
        raise keys.error(
            "nextn_predict_layers", mtp, f"less than the {blocks} blocks of the file"
        )
    hidden = blocks - mtp
    if mtp and not any(name.startswith(f"blk.{hidden}.") for name in file.tensors):
        logger.info("No MTP block in the file; serving without it")
        mtp = 0
    rope = keys.count("rope.dimension_count")
    qk_head = keys.count("attention.key_length_mla")
    if qk_head <= rope:
        raise keys.error(
            "attention.key_length_mla", qk_head, f"more than the {rope} rope dimensions"
        )
    _check_rope_scaling(keys)
    context = keys.count("context_length")
    return GlmDsaConfig(
        vocab_size=_vocab_size(file, keys),
        hidden_size=keys.count("embedding_length"),
        intermediate_size=keys.count("feed_forward_length"),
        moe_intermediate_size=keys.count("expert_feed_forward_length"),
        num_hidden_layers=hidden,
        num_nextn_predict_layers=mtp,
        first_k_dense_replace=_dense_layers(keys, hidden),
        num_attention_heads=keys.count("attention.head_count"),
        q_lora_rank=keys.count("attention.q_lora_rank"),
        kv_lora_rank=keys.count("attention.kv_lora_rank"),
        qk_nope_head_dim=qk_head - rope,
        qk_rope_head_dim=rope,
        v_head_dim=keys.count("attention.value_length_mla"),
        **_expert_fields(file, keys),
        index_n_heads=keys.count("attention.indexer.head_count"),
        index_head_dim=_index_head_dim(keys, rope),
        index_topk=keys.count("attention.indexer.top_k"),
        indexer_full=_indexer_table(file, keys, hidden, context),
        max_position_embeddings=context,
        rope_theta=keys.number("rope.freq_base"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        eos_token_ids=_end_tokens(file),
        bos_token_id=_token_id(file, "bos"),
        pad_token_id=_token_id(file, "padding"),
    )


def check_architecture(file: GGUFFile) -> None:
    """Raise GGUFError unless the file's architecture is glm-dsa."""
    found = file.metadata.get("general.architecture")
    if found == ARCHITECTURE:
        return
    where = file.paths[0]
    if found is None:
        raise GGUFError(
            f"{where}: key general.architecture is missing, expected "
            f"'{ARCHITECTURE}'; is this a complete model file?"
        )
    raise GGUFError(
        f"{where}: general.architecture is {found!r}; this build reads "
        f"'{ARCHITECTURE}' (GLM-5 family) itself and leaves other architectures to "
        "vllm-gguf-plugin: install it with `pip install vllm-gguf-plugin`"
    )


def hf_config(config: GlmDsaConfig) -> dict[str, Any]:
    """The contents of a Hugging Face `config.json` for vLLM's GLM-DSA model."""
    fields: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "hidden_act": "silu",
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_nextn_predict_layers": config.num_nextn_predict_layers,
        "first_k_dense_replace": config.first_k_dense_replace,
        "moe_layer_freq": 1,
        "num_attention_heads": config.num_attention_heads,
        # The file says 1 (MLA seen as multi-query attention); vLLM and
        # transformers count the heads of the uncompressed form.
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "head_dim": config.qk_rope_head_dim,
        "attention_bias": False,
        "n_routed_experts": config.n_routed_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "n_shared_experts": config.n_shared_experts,
        "n_group": config.n_group,
        "topk_group": config.topk_group,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "scoring_func": config.scoring_func,
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "index_n_heads": config.index_n_heads,
        "index_head_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "indexer_rope_interleave": True,
        "index_topk_freq": 1,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_interleave": True,
        # An absent output matrix is loaded as a copy of the embedding.
        "tie_word_embeddings": False,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    if not all(config.indexer_full):
        fields["index_topk_pattern"] = "".join(
            "F" if full else "S" for full in config.indexer_full
        )
        fields["index_share_for_mtp_iteration"] = True
    return fields


class _Keys:
    """Checked access to the `glm-dsa.*` keys of one file."""

    def __init__(self, file: GGUFFile) -> None:
        self.where = file.paths[0]
        self._file = file

    def error(self, key: str, found: object, expected: str) -> GGUFError:
        return GGUFError(
            f"{self.where}: key {ARCHITECTURE}.{key} is {found!r}, expected {expected}"
        )

    def get(self, key: str) -> Any:
        """The value as it is in the file, None if absent."""
        return self._file.metadata.get(f"{ARCHITECTURE}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        name = f"{ARCHITECTURE}.{key}"
        if default is None:
            return self._file.get(name, int)
        return self._file.get(name, int, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer that fits in 31 bits."""
        value = self.integer(key, default)
        if not 0 < value < 2**31:
            raise self.error(key, value, "a positive integer below 2^31")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        name = f"{ARCHITECTURE}.{key}"
        if default is None:
            value = self._file.get(name, float)
        else:
            value = self._file.get(name, float, default)
        if not 0 < value < float("inf"):
            raise self.error(key, value, "a positive, finite number")
        return value


def _expert_fields(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    gating = keys.integer("expert_gating_func", 2)
    if gating not in _SCORING:
        raise keys.error("expert_gating_func", gating, "1 (softmax) or 2 (sigmoid)")
    experts = keys.count("expert_count")
    used = keys.count("expert_used_count")
    if used > experts:
        raise keys.error("expert_used_count", used, f"at most the {experts} experts")
    norm = file.get(f"{ARCHITECTURE}.expert_weights_norm", bool)
    groups = keys.count("expert_group_count", 1)
    groups_used = keys.count("expert_group_used_count", 1)
    if experts % groups or groups_used > groups:
        raise keys.error(
            "expert_group_count", groups, f"a divisor of {experts}, >= {groups_used}"
        )
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": used,
        "n_shared_experts": keys.count("expert_shared_count", 1),
        "n_group": groups,
        "topk_group": groups_used,
        "norm_topk_prob": norm,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "scoring_func": _SCORING[gating],
    }


def _vocab_size(file: GGUFFile, keys: _Keys) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.dims) != 2:
        return keys.count("vocab_size")
    rows = embedding.dims[1]
    declared = keys.count("vocab_size", rows)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    counts = {"token_embd.weight rows": rows, f"{ARCHITECTURE}.vocab_size": declared}
    if tokens is not None:
        counts["tokenizer.ggml.tokens"] = len(tokens)
    if len(set(counts.values())) > 1:
        raise GGUFError(
            f"{keys.where}: the vocabulary has different sizes: "
            + ", ".join(f"{name} {size}" for name, size in counts.items())
            + "; embedding and tokens are not of one model"
        )
    return rows


def _dense_layers(keys: _Keys, hidden: int) -> int:
    dense = keys.integer("leading_dense_block_count", 0)
    if not 0 <= dense <= hidden:
        raise keys.error("leading_dense_block_count", dense, f"0 to {hidden}")
    return dense


def _index_head_dim(keys: _Keys, rope: int) -> int:
    dim = keys.count("attention.indexer.key_length")
    if dim < rope:
        raise keys.error(
            "attention.indexer.key_length", dim, f"at least the {rope} rope dimensions"
        )
    return dim


def _check_rope_scaling(keys: _Keys) -> None:
    scaling = keys.get("rope.scaling.type")
    if scaling not in (None, "none"):
        raise keys.error(
            "rope.scaling.type", scaling, "no scaling, as in every GLM-5 model"
        )


def _token_id(file: GGUFFile, name: str) -> int | None:
    return file.get(f"tokenizer.ggml.{name}_token_id", int, None)


def _end_tokens(file: GGUFFile) -> tuple[int, ...]:
    """End of text, turn and message: each of them ends a generation."""
    found = (_token_id(file, name) for name in ("eos", "eot", "eom"))
    ids = tuple(dict.fromkeys(token for token in found if token is not None))
    if not ids:
        raise GGUFError(
            f"{file.paths[0]}: none of tokenizer.ggml.eos_token_id, eot_token_id and "
            "eom_token_id is set, so that no generation would end"
        )
    return ids


def _indexer_table(
    file: GGUFFile, keys: _Keys, hidden: int, context: int
) -> tuple[bool, ...]:
    """Which layers own an indexer, by the first of four sources that tells."""
    declared = keys.get("attention.indexer.types")
    if declared is not None:
        table = _declared_table(keys, declared, hidden)
    else:
        table = _measured_table(file, hidden)
        if all(table) and context >= _SHARED_CONTEXT and hidden == _SHARED_LAYERS:
            table = tuple(i < 3 or i % 4 == 2 for i in range(hidden))
        logger.info("Layers with an indexer of their own: %s", _describe(table))
    if not table[0]:
        raise GGUFError(
            f"{keys.where}: layer 0 has no indexer of its own "
            "(blk.0.indexer.* or indexer.types), but no earlier layer to share from"
        )
    return table


def _describe(table: tuple[bool, ...]) -> str:
    return "all" if all(table) else str([i for i, full in enumerate(table) if full])


def _declared_table(keys: _Keys, declared: Any, hidden: int) -> tuple[bool, ...]:
    key = "attention.indexer.types"
    values: Sequence[Any] | None = None
    if isinstance(declared, list | tuple):
        values = declared
    elif hasattr(declared, "decode"):
        values = declared.decode()
    if values is None or len(values) < hidden:
        raise keys.error(key, declared, f"an array of at least {hidden} entries")
    meanings = {"full": True, "shared": False, 1: True, 0: False}
    try:
        return tuple(meanings[value] for value in values[:hidden])
    except (KeyError, TypeError):
        raise keys.error(
            key, list(values), "true/false, 1/0 or 'full'/'shared' for each layer"
        ) from None


def _measured_table(file: GGUFFile, hidden: int) -> tuple[bool, ...]:
    """Layers without indexer tensors share; so do copies of the previous ones."""
    table: list[bool] = []
    last: list[bytes] | None = None
    for layer in range(hidden):
        names = [f"blk.{layer}.{part}" for part in INDEXER_TENSORS]
        tensors = [file.tensors.get(name) for name in names]
        norm = [bytes(file.data(tensor)) for tensor in tensors[:2] if tensor]
        copied = norm == last and not all(map(_is_constant, norm))
        table.append(any(tensors) and not copied)
        if table[-1]:
            last = norm
    return tuple(table)


def _is_constant(data: bytes) -> bool:
    """Whether all float32 values are equal, as in an untrained norm."""
    return data == data[:4] * (len(data) // 4)
