# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The load plan of a glm-dsa file: which tensors make which weight.

Made from the header alone. Everything that makes a file unusable is found here,
before any weight is read: tensors missing, unknown, of the wrong shape, or of a
type that nothing can dequantize.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.ggml_types import GGMLType
from vllm.transformers_utils.gguf.glm_dsa import (
    ARCHITECTURE,
    INDEXER_TENSORS,
    GlmDsaConfig,
    read_config,
)
from vllm.transformers_utils.gguf.reader import GGUFFile, TensorInfo

_FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
# Projections that vLLM computes in one matrix: all keep their blocks, or none.
_FUSED = {
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
# Legal in a file, never read: they repeat what other tensors say.
_UNUSED = ("rope_freqs.weight",)

Kind = Literal["plain", "experts", "kv_b"]


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """One parameter of the model, and the tensors it is read from.

    `name` is the Hugging Face parameter, for kind "experts" with a `{}` where the
    expert's number goes. `rows` is the range of rows to take from each matrix of
    the source, or None for all. Kind "kv_b" reassembles `kv_b_proj` from the two
    sources k_b and v_b. `blocks` tells that the weight may stay quantized on a
    device that computes on blocks.
    """

    name: str
    kind: Kind
    sources: tuple[TensorInfo, ...]
    rows: tuple[int, int] | None = None
    blocks: bool = False

    @property
    def module(self) -> str:
        """The module that owns the parameter; that of all experts for experts."""
        return self.name.rpartition(".")[0].replace(".experts.{}.", ".experts.")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a glm-dsa file holds: configuration, main weights, MTP weights.

    Weights are in file order, so that reading them in turn reads the shards from
    front to back.
    """

    config: GlmDsaConfig
    main: tuple[PlannedWeight, ...]
    mtp: tuple[PlannedWeight, ...]

    def block_types(self) -> dict[str, GGMLType]:
        """Module name to storage type, of the modules that keep their blocks."""
        return {
            weight.module: weight.sources[0].type
            for weight in (*self.main, *self.mtp)
            if weight.blocks
        }


def make_plan(file: GGUFFile) -> LoadPlan:
    """Plan the loading of `file`.

    Raises GGUFError that names the tensor or key at fault.
    """
    config = read_config(file)
    builder = _Builder(file, config)
    main = [*builder.globals()]
    mtp: list[PlannedWeight] = []
    for layer in range(config.num_layers):
        target = main if layer < config.num_hidden_layers else mtp
        target.extend(builder.layer(layer))
    for layer in range(config.num_hidden_layers, config.num_layers):
        mtp.extend(builder.mtp_head(layer))
    builder.check_all_known()
    planned = _mark_blocks([*main, *mtp])
    key = _file_position
    return LoadPlan(
        config,
        tuple(sorted(planned[: len(main)], key=key)),
        tuple(sorted(planned[len(main) :], key=key)),
    )


def _file_position(weight: PlannedWeight) -> tuple[int, int]:
    return weight.sources[0].shard, weight.sources[0].offset


def _mark_blocks(weights: list[PlannedWeight]) -> list[PlannedWeight]:
    """Keep blocks where at least one matrix of a fused group is quantized."""
    groups: dict[str, list[bool]] = {}
    for weight in weights:
        if weight.blocks:
            quantized = weight.sources[0].type.name not in _FLOAT_TYPES
            groups.setdefault(_group(weight), []).append(quantized)
    return [
        replace(weight, blocks=weight.blocks and any(groups[_group(weight)]))
        for weight in weights
    ]


def _group(weight: PlannedWeight) -> str:
    parent, _, leaf = weight.module.rpartition(".")
    if weight.kind == "experts":
        return parent
    return f"{parent}.{_FUSED.get(leaf, leaf)}"


class _Builder:
    """Takes tensors from the file, checks them and remembers what was taken."""

    def __init__(self, file: GGUFFile, config: GlmDsaConfig) -> None:
        self._file = file
        self._config = config
        self._known: set[str] = set(_UNUSED)

    def globals(self) -> Iterator[PlannedWeight]:
        config = self._config
        matrix = (config.hidden_size, config.vocab_size)
        yield self._plain("token_embd.weight", "model.embed_tokens", matrix, True)
        yield self._plain("output_norm.weight", "model.norm", (config.hidden_size,))
        head = "output.weight"
        if head not in self._file.tensors:
            head = "token_embd.weight"
        yield self._plain(head, "lm_head", matrix, True)

    def layer(self, layer: int) -> Iterator[PlannedWeight]:
        """Attention, indexer and feed-forward of one block."""
        config, hidden = self._config, self._config.hidden_size
        blk, module = f"blk.{layer}.", f"model.layers.{layer}."
        attention = f"{module}self_attn."
        heads = config.num_attention_heads
        qk_head = config.qk_nope_head_dim + config.qk_rope_head_dim
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
        rows: tuple[tuple[str, str, tuple[int, ...], bool], ...] = (
            ("attn_norm", f"{module}input_layernorm", (hidden,), False),
            ("attn_q_a", f"{attention}q_a_proj", (hidden, q_rank), True),
            ("attn_q_a_norm", f"{attention}q_a_layernorm", (q_rank,), False),
            ("attn_q_b", f"{attention}q_b_proj", (q_rank, heads * qk_head), True),
            ("attn_kv_a_mqa", f"{attention}kv_a_proj_with_mqa", (hidden, latent), True),
            ("attn_kv_a_norm", f"{attention}kv_a_layernorm", (kv_rank,), False),
            (
                "attn_output",
                f"{attention}o_proj",
                (heads * config.v_head_dim, hidden),
                True,
            ),
            ("ffn_norm", f"{module}post_attention_layernorm", (hidden,), False),
        )
        for tensor, target, dims, blocks in rows:
            yield self._plain(f"{blk}{tensor}.weight", target, dims, blocks)
        yield self._kv_b(blk, attention)
        yield from self._indexer(layer, blk, f"{attention}indexer.")
        if config.is_dense(layer):
            size = config.intermediate_size
            yield from self._mlp(blk, "ffn_{}", f"{module}mlp.", size)
        else:
            yield from self._moe(blk, f"{module}mlp.")

    def _kv_b(self, blk: str, attention: str) -> PlannedWeight:
        config = self._config
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        nope, value = config.qk_nope_head_dim, config.v_head_dim
        name = f"{attention}kv_b_proj"
        if f"{blk}attn_kv_b.weight" in self._file.tensors:
            dims = (rank, heads * (nope + value))
            return self._plain(f"{blk}attn_kv_b.weight", name, dims)
        sources = (
            self._take(f"{blk}attn_k_b.weight", (nope, rank, heads)),
            self._take(f"{blk}attn_v_b.weight", (rank, value, heads)),
        )
        return PlannedWeight(f"{name}.weight", "kv_b", sources)

    def _indexer(self, layer: int, blk: str, module: str) -> Iterator[PlannedWeight]:
        config = self._config
        if not config.has_indexer(layer):
            self._known.update(f"{blk}{part}" for part in INDEXER_TENSORS)
            return
        heads, dim = config.index_n_heads, config.index_head_dim
        hidden, rank = config.hidden_size, config.q_lora_rank
        blk += "indexer."
        yield self._plain(f"{blk}k_norm.weight", f"{module}k_norm", (dim,))
        yield PlannedWeight(
            f"{module}k_norm.bias", "plain", (self._take(f"{blk}k_norm.bias", (dim,)),)
        )
        yield self._plain(f"{blk}proj.weight", f"{module}weights_proj", (hidden, heads))
        yield self._plain(f"{blk}attn_k.weight", f"{module}wk", (hidden, dim))
        q_dims = (rank, heads * dim)
        yield self._plain(f"{blk}attn_q_b.weight", f"{module}wq_b", q_dims, True)

    def _mlp(
        self, blk: str, pattern: str, module: str, size: int
    ) -> Iterator[PlannedWeight]:
        hidden = self._config.hidden_size
        for part, dims in (
            ("gate", (hidden, size)),
            ("up", (hidden, size)),
            ("down", (size, hidden)),
        ):
            tensor = f"{blk}{pattern.format(part)}.weight"
            yield self._plain(tensor, f"{module}{part}_proj", dims, True)

    def _moe(self, blk: str, module: str) -> Iterator[PlannedWeight]:
        config = self._config
        hidden, experts = config.hidden_size, config.n_routed_experts
        size = config.moe_intermediate_size
        router = (hidden, experts)
        yield self._plain(f"{blk}ffn_gate_inp.weight", f"{module}gate", router)
        bias = self._take(f"{blk}exp_probs_b.bias", (experts,))
        yield PlannedWeight(f"{module}gate.e_score_correction_bias", "plain", (bias,))
        fused = f"{blk}ffn_gate_up_exps.weight"
        if fused in self._file.tensors:
            source = self._take(fused, (hidden, 2 * size, experts))
            yield self._experts(module, "gate", source, (0, size))
            yield self._experts(module, "up", source, (size, 2 * size))
        else:
            for part in ("gate", "up"):
                dims = (hidden, size, experts)
                source = self._take(f"{blk}ffn_{part}_exps.weight", dims)
                yield self._experts(module, part, source)
        down = self._take(f"{blk}ffn_down_exps.weight", (size, hidden, experts))
        yield self._experts(module, "down", down)
        shared = size * config.n_shared_experts
        yield from self._mlp(blk, "ffn_{}_shexp", f"{module}shared_experts.", shared)

    def mtp_head(self, layer: int) -> Iterator[PlannedWeight]:
        """The tensors that only an MTP block has."""
        hidden = self._config.hidden_size
        blk, module = f"blk.{layer}.nextn.", f"model.layers.{layer}."
        yield self._plain(
            f"{blk}eh_proj.weight", f"{module}eh_proj", (2 * hidden, hidden)
        )
        for tensor, target in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("shared_head_norm", "shared_head.norm"),
        ):
            yield self._plain(f"{blk}{tensor}.weight", f"{module}{target}", (hidden,))
        # Copies of the main model's embedding and head; vLLM shares those.
        self._known.update(
            f"{blk}{tensor}.weight" for tensor in ("embed_tokens", "shared_head_head")
        )

    def check_all_known(self) -> None:
        """Raise if the file has tensors that the model would silently ignore."""
        unknown = [name for name in self._file.tensors if name not in self._known]
        if unknown:
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise GGUFError(
                f"{self._file.paths[0]}: {', '.join(unknown[:5])}{more}: not tensors "
                f"of {ARCHITECTURE} with {self._config.num_layers} blocks; leaving "
                "them out would change the model's answers"
            )

    def _plain(
        self, tensor: str, module: str, dims: tuple[int, ...], blocks: bool = False
    ) -> PlannedWeight:
        source = self._take(tensor, dims)
        return PlannedWeight(f"{module}.weight", "plain", (source,), blocks=blocks)

    def _experts(
        self,
        module: str,
        part: str,
        source: TensorInfo,
        rows: tuple[int, int] | None = None,
    ) -> PlannedWeight:
        name = f"{module}experts.{{}}.{part}_proj.weight"
        return PlannedWeight(name, "experts", (source,), rows, blocks=True)

    def _take(self, name: str, dims: tuple[int, ...]) -> TensorInfo:
        """The tensor `name`, of exactly these ggml dims and a loadable type."""
        tensor = self._file.tensors.get(name)
        where = self._file.paths[0]
        if tensor is None:
            shards = len(self._file.paths)
            place = f"any of the {shards} shards" if shards > 1 else "the file"
            raise GGUFError(
                f"{where}: tensor {name} is missing, expected {list(dims)} in {place}; "
                "the conversion or the download is incomplete"
            )
        if tensor.dims != dims:
            raise GGUFError(
                f"{where}: tensor {name} has dims {list(tensor.dims)}, expected "
                f"{list(dims)} from the {ARCHITECTURE}.* keys; the file does not "
                "follow llama.cpp's layout of this model"
            )
        if not tensor.type.loadable:
            raise GGUFError(
                f"{where}: tensor {name} has type {tensor.type.name}, which is not a "
                "weight format that can be dequantized; quantize the model again"
            )
        self._known.add(name)
        return tensor
