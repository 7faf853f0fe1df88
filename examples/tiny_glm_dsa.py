# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Write a tiny GLM-DSA model with random weights as a GGUF file.

The head sizes, metadata keys, tensor names, layouts and type rules are those of real
GLM-5 files; the hidden size, the numbers of layers, heads and experts, the vocabulary
and the top-k are small. A weight depends on the seed and on its own name only, so files
that differ in type, shards, shared indexers or MTP block hold the same weights.

    python examples/tiny_glm_dsa.py tiny.gguf --type Q8_0
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

import ggml_quantize
from tiny_types import WEIGHT_TYPES, tensor_type
from tiny_vocab import TinyVocabulary, tiny_vocabulary

ARCH = "glm-dsa"
# How a file says which layers have their own indexer ("full") and which reuse the
# selection of the layer before ("shared").
INDEXER_STYLES = (
    "none",  # every layer is full, no key
    "key",  # key of booleans, tensors on full layers only
    "key-int",
    "key-str",
    "key-surplus",  # key of booleans, copies of the tensors on shared layers
    "absent",  # no key, tensors on full layers only
    "duplicates",  # no key, copies of the tensors on shared layers
)


@dataclass(frozen=True)
class TinySpec:
    """What to write. `indexer_pattern` has F or S per layer; None stands for all F, or
    for F F S S F S repeated when `shared_indexers` is not "none"."""

    weight_type: str = "F32"
    layers: int | None = None
    seed: int = 0
    shards: int = 1
    tensorless_first_shard: bool = False
    shared_indexers: str = "none"
    indexer_pattern: str | None = None
    mtp: bool = False
    legacy_kv_b: bool = False
    tied: bool = False
    gating_func: bool = True
    top_k: int = 64
    vocab_size: int = 512
    context: int = 2048
    hidden: int = 256
    heads: int = 8
    q_lora: int = 256
    kv_lora: int = 512
    nope: int = 192
    rope: int = 64
    value: int = 256
    dense_ff: int = 512
    dense_layers: int = 1
    experts: int = 8
    experts_used: int = 2
    expert_ff: int = 256
    expert_scale: float = 2.5
    # Fewer heads make exact ties: a key that no head likes scores 0, once in 2**heads.
    index_heads: int = 32
    index_dim: int = 128
    rope_theta: float = 1e6
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.shared_indexers not in INDEXER_STYLES:
            raise ValueError(
                f"shared_indexers is {self.shared_indexers!r}; use one of "
                f"{', '.join(INDEXER_STYLES)}"
            )
        if self.weight_type not in WEIGHT_TYPES:
            raise ValueError(
                f"weight_type is {self.weight_type!r}; use one of "
                f"{', '.join(WEIGHT_TYPES)}"
            )
        pattern = self.pattern
        if len(pattern) != self.layer_count or set(pattern) - {"F", "S"}:
            raise ValueError(
                f"indexer_pattern is {pattern!r}; expected {self.layer_count} of F or S"
            )
        if pattern[0] != "F":
            raise ValueError("indexer_pattern must begin with F: layer 0 cannot share")
        if self.shared_indexers == "none" and "S" in pattern:
            raise ValueError("indexer_pattern has S: choose a style in shared_indexers")

    @property
    def layer_count(self) -> int:
        """Layers without the MTP block."""
        if self.layers is not None:
            return self.layers
        return 4 if self.shared_indexers == "none" else 6

    @property
    def pattern(self) -> str:
        if self.indexer_pattern is not None:
            return self.indexer_pattern
        if self.shared_indexers == "none":
            return "F" * self.layer_count
        return ("FFSSFS" * self.layer_count)[: self.layer_count]

    @property
    def blocks(self) -> int:
        return self.layer_count + int(self.mtp)


def write_tiny_glm_dsa(path: str | Path, spec: TinySpec) -> list[Path]:
    """Write the model and return its files, in order of shards.

    More than one shard gives `<stem>-00001-of-0000N.gguf` and so on beside `path`.

    Raises:
        ValueError: the tensors cannot be spread over that many shards.
    """
    return write_glm_dsa(path, spec, dict(tiny_tensors(spec)))


def write_glm_dsa(
    path: str | Path,
    spec: TinySpec,
    tensors: dict[str, np.ndarray],
    vocabulary: TinyVocabulary | None = None,
    name: str = "Tiny GLM DSA",
) -> list[Path]:
    """Write given float32 `tensors`, named and laid out as `tiny_tensors` does.

    Raises:
        ValueError: as `write_tiny_glm_dsa`.
    """
    holders = spec.shards - int(spec.tensorless_first_shard)
    per_shard = math.ceil(len(tensors) / holders) if holders > 0 else 0
    if holders < 1 or math.ceil(len(tensors) / max(per_shard, 1)) != holders:
        raise ValueError(
            f"{len(tensors)} tensors cannot fill {holders} shards evenly; choose "
            "another number of shards"
        )
    writer = GGUFWriter(
        path,
        ARCH,
        split_max_tensors=per_shard if spec.shards > 1 else 0,
        small_first_shard=spec.tensorless_first_shard,
    )
    vocabulary = vocabulary or tiny_vocabulary(spec.vocab_size)
    _add_metadata(writer, spec, vocabulary, name)
    for tensor, values in tensors.items():
        kind = tensor_type(tensor, values.shape, spec.weight_type)
        packed = ggml_quantize.quantize(kind, values.reshape(-1, values.shape[-1]))
        packed = packed.reshape(*values.shape[:-1], packed.shape[-1])
        writer.add_tensor(tensor, packed, raw_dtype=GGMLQuantizationType[kind])
    files = writer.format_shard_names(Path(path))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return files


def tiny_tensors(spec: TinySpec) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 values of every tensor, last dimension contiguous in the file.

    The scales keep activations near 1, so that every part of the model moves the
    logits. Attention must stay soft: rounding swaps two keys of nearly equal index
    score now and then, and with sharp attention one swap would change all that follows.
    """
    draw = _Draw(spec.seed)
    # As the head of a tied model the same matrix must give logits near 1.
    gain = 1.0 if spec.tied else math.sqrt(spec.hidden)
    yield draw.matrix("token_embd.weight", spec.vocab_size, spec.hidden, gain=gain)
    yield draw.norm("output_norm.weight", spec.hidden)
    if not spec.tied:
        yield draw.matrix("output.weight", spec.vocab_size, spec.hidden)
    indexer: dict[str, np.ndarray] = {}
    for block in range(spec.blocks):
        prefix = f"blk.{block}."
        yield from _attention(draw, spec, prefix)
        full = block >= spec.layer_count or spec.pattern[block] == "F"
        if full:
            indexer = dict(_indexer(draw, spec, prefix))
        if full or spec.shared_indexers in ("key-surplus", "duplicates"):
            for name, values in indexer.items():
                yield prefix + name, values
        if block < spec.dense_layers:
            yield from _dense(draw, spec, prefix)
        else:
            yield from _experts(draw, spec, prefix)
        if block >= spec.layer_count:
            yield from _nextn(draw, spec, prefix)


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def normal(self, name: str, *shape: int) -> np.ndarray:
        return self._rng(name).standard_normal(shape, dtype=np.float32)

    def matrix(
        self, name: str, *shape: int, gain: float = 1.0
    ) -> tuple[str, np.ndarray]:
        """Inputs of variance 1 give outputs of standard deviation `gain`."""
        scale = np.float32(gain / math.sqrt(shape[-1]))
        return name, self.normal(name, *shape) * scale

    def norm(self, name: str, size: int) -> tuple[str, np.ndarray]:
        values = self._rng(name).uniform(0.8, 1.2, size)
        return name, values.astype(np.float32)


def _attention(
    draw: _Draw, spec: TinySpec, prefix: str
) -> Iterator[tuple[str, np.ndarray]]:
    hidden, heads, latent = spec.hidden, spec.heads, spec.kv_lora
    yield draw.norm(prefix + "attn_norm.weight", hidden)
    yield draw.matrix(prefix + "attn_q_a.weight", spec.q_lora, hidden)
    yield draw.norm(prefix + "attn_q_a_norm.weight", spec.q_lora)
    query_rows = heads * (spec.nope + spec.rope)
    yield draw.matrix(prefix + "attn_q_b.weight", query_rows, spec.q_lora)
    yield draw.matrix(prefix + "attn_kv_a_mqa.weight", latent + spec.rope, hidden)
    yield draw.norm(prefix + "attn_kv_a_norm.weight", latent)
    head_rows = spec.nope + spec.value
    name, kv_b = draw.matrix(prefix + "attn_kv_b.weight", heads * head_rows, latent)
    if spec.legacy_kv_b:
        yield name, kv_b
    else:
        kv_b = kv_b.reshape(heads, head_rows, latent)
        yield prefix + "attn_k_b.weight", kv_b[:, : spec.nope].transpose(0, 2, 1)
        yield prefix + "attn_v_b.weight", kv_b[:, spec.nope :]
    yield draw.matrix(prefix + "attn_output.weight", hidden, heads * spec.value)
    yield draw.norm(prefix + "ffn_norm.weight", hidden)


def _indexer(
    draw: _Draw, spec: TinySpec, prefix: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of one full layer, their names without the block."""
    rows = spec.index_heads * spec.index_dim
    bias = prefix + "indexer.k_norm.bias"
    for name, values in (
        draw.norm(prefix + "indexer.k_norm.weight", spec.index_dim),
        (bias, draw.normal(bias, spec.index_dim) * np.float32(0.2)),
        draw.matrix(prefix + "indexer.proj.weight", spec.index_heads, spec.hidden),
        draw.matrix(prefix + "indexer.attn_k.weight", spec.index_dim, spec.hidden),
        draw.matrix(prefix + "indexer.attn_q_b.weight", rows, spec.q_lora),
    ):
        yield name.removeprefix(prefix), values


def _dense(
    draw: _Draw, spec: TinySpec, prefix: str
) -> Iterator[tuple[str, np.ndarray]]:
    hidden, inner = spec.hidden, spec.dense_ff
    yield draw.matrix(prefix + "ffn_gate.weight", inner, hidden)
    yield draw.matrix(prefix + "ffn_up.weight", inner, hidden)
    yield draw.matrix(prefix + "ffn_down.weight", hidden, inner, gain=1.5)


def _experts(
    draw: _Draw, spec: TinySpec, prefix: str
) -> Iterator[tuple[str, np.ndarray]]:
    hidden, inner, experts = spec.hidden, spec.expert_ff, spec.experts
    yield draw.matrix(prefix + "ffn_gate_inp.weight", experts, hidden)
    bias = prefix + "exp_probs_b.bias"
    yield bias, draw.normal(bias, experts) * np.float32(0.2)
    yield draw.matrix(prefix + "ffn_gate_exps.weight", experts, inner, hidden)
    yield draw.matrix(prefix + "ffn_up_exps.weight", experts, inner, hidden)
    yield draw.matrix(prefix + "ffn_down_exps.weight", experts, hidden, inner)
    yield draw.matrix(prefix + "ffn_gate_shexp.weight", inner, hidden)
    yield draw.matrix(prefix + "ffn_up_shexp.weight", inner, hidden)
    yield draw.matrix(prefix + "ffn_down_shexp.weight", hidden, inner)


def _nextn(
    draw: _Draw, spec: TinySpec, prefix: str
) -> Iterator[tuple[str, np.ndarray]]:
    hidden = spec.hidden
    yield draw.matrix(prefix + "nextn.eh_proj.weight", hidden, 2 * hidden)
    yield draw.norm(prefix + "nextn.enorm.weight", hidden)
    yield draw.norm(prefix + "nextn.hnorm.weight", hidden)
    yield draw.norm(prefix + "nextn.shared_head_norm.weight", hidden)


def _add_metadata(
    writer: GGUFWriter, spec: TinySpec, vocabulary: TinyVocabulary, name: str
) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_size_label(f"{spec.experts}x1M")
    writer.add_quantization_version(2)
    for key, count in _counts(spec).items():
        writer.add_uint32(f"{ARCH}.{key}", count)
    writer.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", spec.eps)
    writer.add_float32(f"{ARCH}.rope.freq_base", spec.rope_theta)
    writer.add_float32(f"{ARCH}.expert_weights_scale", spec.expert_scale)
    writer.add_bool(f"{ARCH}.expert_weights_norm", True)
    full = [letter == "F" for letter in spec.pattern]
    types: dict[str, list[bool] | list[int] | list[str]] = {
        "key": full,
        "key-surplus": full,
        "key-int": [int(flag) for flag in full],
        "key-str": ["full" if flag else "shared" for flag in full],
    }
    if spec.shared_indexers in types:
        key = f"{ARCH}.attention.indexer.types"
        writer.add_array(key, types[spec.shared_indexers])
    for key, value in vocabulary.metadata().items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _counts(spec: TinySpec) -> dict[str, int]:
    counts = {
        "block_count": spec.blocks,
        "context_length": spec.context,
        "embedding_length": spec.hidden,
        "feed_forward_length": spec.dense_ff,
        "vocab_size": spec.vocab_size,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": spec.kv_lora + spec.rope,
        "attention.value_length": spec.kv_lora,
        "attention.key_length_mla": spec.nope + spec.rope,
        "attention.value_length_mla": spec.value,
        "attention.q_lora_rank": spec.q_lora,
        "attention.kv_lora_rank": spec.kv_lora,
        "rope.dimension_count": spec.rope,
        "leading_dense_block_count": spec.dense_layers,
        "expert_count": spec.experts,
        "expert_used_count": spec.experts_used,
        "expert_shared_count": 1,
        "expert_feed_forward_length": spec.expert_ff,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "attention.indexer.head_count": spec.index_heads,
        "attention.indexer.key_length": spec.index_dim,
        "attention.indexer.top_k": spec.top_k,
    }
    if spec.mtp:
        counts["nextn_predict_layers"] = 1
    if spec.gating_func:
        counts["expert_gating_func"] = 2
    return counts


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path, help="file to write, OUT.gguf")
    parser.add_argument("--type", choices=WEIGHT_TYPES, default="Q8_0")
    parser.add_argument("--layers", type=int, help="default 4, or 6 if indexers shared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--tensorless-first-shard", action="store_true")
    parser.add_argument("--shared-indexers", choices=INDEXER_STYLES, default="none")
    parser.add_argument("--indexer-pattern", help="F or S per layer")
    parser.add_argument("--mtp", action="store_true", help="add an MTP block")
    parser.add_argument("--legacy-kv-b", action="store_true", help="unsplit attn_kv_b")
    parser.add_argument("--tied", action="store_true", help="no output.weight")
    parser.add_argument("--no-gating-func", dest="gating_func", action="store_false")
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--context", type=int, default=2048)
    return parser.parse_args()


def main() -> None:
    options = vars(_arguments())
    out = options.pop("out")
    options["weight_type"] = options.pop("type")
    for path in write_tiny_glm_dsa(out, TinySpec(**options)):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
