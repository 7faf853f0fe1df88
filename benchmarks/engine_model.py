# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Models of GLM-5's layer shapes, few layers deep, for timing the engine.

`write_file` writes a GGUF file of random blocks at the speed of the disk, and
`write_config` the configuration of the same model for weights that the engine makes up
itself. Matrices keep the size of what they multiply, so that activations and logits
stay near 1 and the router spreads tokens over all experts.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import string
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import gguf.quants
import numpy as np
from gguf import GGMLQuantizationType

from benchmarks.engine_settings import EMBEDDING_SPREAD
from tests.helpers.gguf_writer import Tensor, Typed, encode_header, write_gguf
from tests.helpers.glm_header import glm_metadata
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME
from vllm.transformers_utils.gguf.glm_dsa import hf_config, read_config
from vllm.transformers_utils.gguf.reader import open_gguf

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import tiny_vocab  # noqa: E402

ALIGNMENT = 32
NAMED_ROWS = 60
"""At the end of GLM's vocabulary: tokens with a name and unused rows."""
BIAS_SPREAD = 0.01
"""Small, so that all experts get tokens."""
BLOCK_BUFFER_BYTES = 64 << 20

# What the low-bit files of GLM-5.2 and 5.3 give to all tensors but the experts.
_AROUND_EXPERTS = {
    "token_embd": "Q4_K",
    "output": "Q6_K",
    "attn_q_a": "Q5_K",
    "attn_q_b": "Q8_0",
    "attn_kv_a_mqa": "Q8_0",
    "attn_k_b": "Q8_0",
    "attn_v_b": "Q8_0",
    "attn_output": "Q5_K",
    "indexer.attn_k": "Q8_0",
    "indexer.attn_q_b": "Q8_0",
    "ffn_gate": "Q5_K",
    "ffn_up": "Q5_K",
    "ffn_down": "Q6_K",
    "ffn_gate_shexp": "Q5_K",
    "ffn_up_shexp": "Q5_K",
    "ffn_down_shexp": "Q6_K",
    "nextn.eh_proj": "Q8_0",
}
_ALL_Q8_0 = dict.fromkeys(_AROUND_EXPERTS, "Q8_0")


def _experts(gate_up: str, down: str) -> dict[str, str]:
    return {
        "ffn_gate_exps": gate_up,
        "ffn_up_exps": gate_up,
        "ffn_down_exps": down,
    }


MIXES: dict[str, dict[str, str]] = {
    "mixed": _AROUND_EXPERTS | _experts("Q4_K", "Q5_K"),
    "q4_k_xl": _ALL_Q8_0 | _experts("Q4_K", "Q5_K"),
    "q2_k": _AROUND_EXPERTS | _experts("Q2_K", "Q3_K"),
    "iq4": _AROUND_EXPERTS | _experts("IQ3_S", "IQ4_XS"),
    "iq2": _AROUND_EXPERTS | _experts("IQ2_XXS", "IQ3_XXS"),
    "iq1": _AROUND_EXPERTS | _experts("IQ1_S", "IQ3_XXS"),
    "q8_0": _ALL_Q8_0 | _experts("Q8_0", "Q8_0"),
}
"""Type of each matrix by the name it has within a block; what is not named is F32."""

# Where blocks have their float16 numbers: the scale, then the scale of the minimums.
_SCALES = {
    **dict.fromkeys(("Q8_0", "IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; those of GLM-5 but for the number of layers.

    `pattern` has F or S per layer: with an indexer of its own or sharing the one
    before; None stands for all F, as in GLM-5 and 5.1.
    """

    layers: int = 4
    dense_layers: int = 1
    mtp: bool = False
    pattern: str | None = None
    vocab: int = 154_880
    context: int = 202_752
    hidden: int = 6144
    dense_ff: int = 12_288
    heads: int = 64
    q_lora: int = 2048
    kv_lora: int = 512
    nope: int = 192
    rope: int = 64
    value: int = 256
    experts: int = 256
    experts_used: int = 8
    expert_ff: int = 2048
    index_heads: int = 32
    index_dim: int = 128
    index_topk: int = 2048

    def __post_init__(self) -> None:
        pattern = self.pattern
        if pattern is None:
            return
        if len(pattern) != self.layers or set(pattern) - set("FS") or pattern[0] != "F":
            raise ValueError(
                f"the pattern of indexers is {pattern!r}; expected {self.layers} of F "
                "(own) or S (shared), the first of them F"
            )

    def has_indexer(self, block: int) -> bool:
        return self.pattern is None or self.pattern[block : block + 1] != "S"


TINY = Shape(
    layers=2,
    vocab=1024,
    context=2048,
    hidden=256,
    dense_ff=512,
    heads=4,
    q_lora=256,
    experts=8,
    experts_used=2,
    expert_ff=256,
    index_topk=64,
)
"""Small enough for a CPU; heads and latents keep their sizes."""


def tensors(shape: Shape, mix: Mapping[str, str]) -> list[Tensor]:
    """All tensors of the file in the order of llama.cpp's, without data."""
    return [
        Tensor(name, dims, mix.get(_role(name), "F32")) for name, dims in _dims(shape)
    ]


def _role(name: str) -> str:
    """Without block number and suffix: "attn_q_a" of "blk.0.attn_q_a.weight"."""
    role = name.removesuffix(".weight")
    return role.split(".", 2)[2] if role.startswith("blk.") else role


def _dims(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and ggml dims of each tensor."""
    hidden = shape.hidden
    yield "token_embd.weight", (hidden, shape.vocab)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (hidden, shape.vocab)
    for block in range(shape.layers + shape.mtp):
        parts = _attention(shape)
        if shape.has_indexer(block):
            parts |= _indexer(shape)
        parts |= _dense(shape) if block < shape.dense_layers else _moe(shape)
        if block >= shape.layers:
            parts |= {"nextn.eh_proj": (2 * hidden, hidden)}
            parts |= dict.fromkeys(
                ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"), (hidden,)
            )
        for name, dims in parts.items():
            suffix = "" if name.endswith(".bias") else ".weight"
            yield f"blk.{block}.{name}{suffix}", dims


def _attention(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, latent, heads = shape.hidden, shape.kv_lora, shape.heads
    return {
        "attn_norm": (hidden,),
        "attn_q_a": (hidden, shape.q_lora),
        "attn_q_a_norm": (shape.q_lora,),
        "attn_q_b": (shape.q_lora, heads * (shape.nope + shape.rope)),
        "attn_kv_a_mqa": (hidden, latent + shape.rope),
        "attn_kv_a_norm": (latent,),
        "attn_k_b": (shape.nope, latent, heads),
        "attn_v_b": (latent, shape.value, heads),
        "attn_output": (heads * shape.value, hidden),
        "ffn_norm": (hidden,),
    }


def _indexer(shape: Shape) -> dict[str, tuple[int, ...]]:
    dim = shape.index_dim
    return {
        "indexer.k_norm": (dim,),
        "indexer.k_norm.bias": (dim,),
        "indexer.proj": (shape.hidden, shape.index_heads),
        "indexer.attn_k": (shape.hidden, dim),
        "indexer.attn_q_b": (shape.q_lora, shape.index_heads * dim),
    }


def _dense(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape.hidden, shape.dense_ff
    return {
        "ffn_gate": (hidden, inner),
        "ffn_up": (hidden, inner),
        "ffn_down": (inner, hidden),
    }


def _moe(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts = shape.hidden, shape.expert_ff, shape.experts
    return {
        "ffn_gate_inp": (hidden, experts),
        "exp_probs_b.bias": (experts,),
        "ffn_gate_exps": (hidden, inner, experts),
        "ffn_up_exps": (hidden, inner, experts),
        "ffn_down_exps": (inner, hidden, experts),
        "ffn_gate_shexp": (hidden, inner),
        "ffn_up_shexp": (hidden, inner),
        "ffn_down_shexp": (inner, hidden),
    }


def metadata(shape: Shape) -> dict[str, Any]:
    """All keys of the file."""
    counts = {
        "block_count": shape.layers + shape.mtp,
        "nextn_predict_layers": int(shape.mtp),
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.dense_ff,
        "vocab_size": shape.vocab,
        "attention.head_count": shape.heads,
        "attention.key_length": shape.kv_lora + shape.rope,
        "attention.value_length": shape.kv_lora,
        "attention.key_length_mla": shape.nope + shape.rope,
        "attention.value_length_mla": shape.value,
        "attention.q_lora_rank": shape.q_lora,
        "attention.kv_lora_rank": shape.kv_lora,
        "attention.indexer.head_count": shape.index_heads,
        "attention.indexer.key_length": shape.index_dim,
        "attention.indexer.top_k": shape.index_topk,
        "rope.dimension_count": shape.rope,
        "leading_dense_block_count": shape.dense_layers,
        "expert_count": shape.experts,
        "expert_used_count": shape.experts_used,
        "expert_feed_forward_length": shape.expert_ff,
    }
    keys = glm_metadata(tokens=0, merges=0) | vocabulary(shape.vocab).metadata()
    keys |= {f"glm-dsa.{key}": count for key, count in counts.items()}
    keys["general.name"] = f"Random weights of GLM-5's shapes, {shape.layers} layers"
    for key, kind in (
        ("tokens", "string"),
        ("token_type", "i32"),
        ("merges", "string"),
    ):
        name = f"tokenizer.ggml.{key}"
        keys[name] = Typed(f"[{kind}]", keys[name])
    return keys


def vocabulary(size: int) -> tiny_vocab.TinyVocabulary:
    """Bytes, words of two and four letters, and GLM's named tokens where GLM has them.

    Raises:
        ValueError: `size` is too small, or more than there are words of four letters.
    """
    alphabet = sorted(tiny_vocab.byte_alphabet())
    count = size - NAMED_ROWS - len(alphabet)
    pairs = [
        "".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)
    ]
    if not 0 <= count <= len(pairs) + len(pairs) ** 2:
        raise ValueError(
            f"{size} tokens; expected {NAMED_ROWS + len(alphabet)} to "
            f"{NAMED_ROWS + len(alphabet) + len(pairs) + len(pairs) ** 2}"
        )
    words = itertools.chain(
        (tuple(pair) for pair in pairs), itertools.product(pairs, repeat=2)
    )
    merges = list(itertools.islice(words, count))
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    types = [tiny_vocab.NORMAL] * len(tokens)
    ids = {}
    for names, kind in (
        (tiny_vocab.SPECIAL_TOKENS, tiny_vocab.CONTROL),
        (tiny_vocab.USER_DEFINED_TOKENS, tiny_vocab.USER_DEFINED),
    ):
        for name in names:
            ids[name] = len(tokens)
            tokens.append(name)
            types.append(kind)
    rest = range(len(tokens), size)
    return tiny_vocab.TinyVocabulary(
        (*tokens, *(f"[PAD{row}]" for row in rest)),
        (*types, *(tiny_vocab.UNUSED for _ in rest)),
        tuple(" ".join(pair) for pair in merges),
        ids,
        tiny_vocab.CHAT_TEMPLATE,
    )


def write_file(path: Path, shape: Shape, mix: Mapping[str, str]) -> int:
    """Write the model as one GGUF file and return its size in bytes.

    The blocks of a type come from one buffer of random ones, that goes round and
    round: its number of blocks is a prime, so that rows differ.
    """
    table = tensors(shape, mix)
    header, offsets = encode_header(metadata(shape), table, alignment=ALIGNMENT)
    start = _padded(len(header.out))
    blocks: dict[str, RandomBlocks] = {}
    with path.open("wb") as file:
        file.write(header.out)
        for tensor, offset in zip(table, offsets, strict=True):
            file.seek(start + offset)
            if tensor.type == "F32":
                file.write(
                    _float_values(str(tensor.name), tuple(tensor.dims)).tobytes()
                )
                continue
            kind = str(tensor.type)
            source = blocks.get(kind) or blocks.setdefault(
                kind, RandomBlocks(kind, BLOCK_BUFFER_BYTES)
            )
            source.set_spread(_spread(str(tensor.name), tensor.dims))
            source.write(file, tensor.nbytes, zlib.crc32(str(tensor.name).encode()))
        end = start + offsets[-1] + _padded(table[-1].nbytes)
        file.truncate(end)
    return end


def write_config(folder: Path, shape: Shape) -> Path:
    """Write the model's config.json, as the fork makes it of a GGUF file, to `folder`.

    Returns `folder`: a model directory without weights or tokenizer.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = write_gguf(
            Path(scratch) / "header.gguf",
            metadata(shape),
            tensors(shape, MIXES["q8_0"]),
        )
        with open_gguf(path) as file:
            config = hf_config(read_config(file))
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=1) + "\n"
    # Whole or not at all: processes that start together may write the same one.
    part = folder / f"config.{os.getpid()}"
    part.write_text(text, encoding="utf-8")
    part.replace(folder / "config.json")
    return folder


class RandomBlocks:
    """Random blocks of one ggml type, whose weights have a given spread.

    Raises:
        ValueError: it is not known where the type has its scales.
    """

    def __init__(self, kind: str, buffer_bytes: int) -> None:
        if kind not in _SCALES:
            raise ValueError(
                f"no random blocks of type {kind}; known are {', '.join(_SCALES)}"
            )
        size = GGML_TYPES_BY_NAME[kind].block_bytes
        rng = np.random.default_rng(zlib.crc32(kind.encode()))
        shape = (_prime_below(buffer_bytes // size), size)
        self.kind = kind
        self.blocks = rng.integers(0, 256, shape, dtype=np.uint8)
        self._minimum, self._unit = self._calibrate()

    def set_spread(self, spread: float) -> None:
        """Have weights of mean about 0 and standard deviation `spread`."""
        self._set_scales(self.blocks, spread / self._unit)

    def write(self, file: BinaryIO, size: int, seed: int) -> None:
        """Write `size` bytes of blocks, beginning at a place that `seed` chooses."""
        data = memoryview(self.blocks.reshape(-1))
        at = seed % len(self.blocks) * self.blocks.shape[1]
        while size:
            part = data[at : at + size]
            file.write(part)
            size -= len(part)
            at = 0

    def _calibrate(self) -> tuple[float, float]:
        """For a scale of 1: that of minimums which gives mean 0, and the deviation."""
        sample = self.blocks[:8192].copy()
        minimum = 0.0
        if len(_SCALES[self.kind]) == 2:
            self._minimum = 0.0
            without = self._values(sample).mean()
            self._minimum = 1.0
            minimum = without / (without - self._values(sample).mean())
        self._minimum = minimum
        return minimum, float(self._values(sample).std())

    def _values(self, sample: np.ndarray) -> np.ndarray:
        self._set_scales(sample, 1.0)
        kind = GGMLQuantizationType[self.kind]
        return gguf.quants.dequantize(sample, kind).astype(np.float64)

    def _set_scales(self, blocks: np.ndarray, scale: float) -> None:
        numbers = (scale, scale * self._minimum)
        for place, number in zip(_SCALES[self.kind], numbers, strict=False):
            raw = np.array([number], np.float16).view(np.uint8)
            blocks[:, place : place + 2] = raw


def _spread(name: str, dims: Sequence[int]) -> float:
    """Of a matrix whose outputs are as large as its inputs."""
    if name == "token_embd.weight":
        return EMBEDDING_SPREAD
    # The file has k_b transposed.
    return 1 / math.sqrt(dims[1] if _role(name) == "attn_k_b" else dims[0])


def _float_values(name: str, dims: tuple[int, ...]) -> np.ndarray:
    """float32 of a norm, bias or matrix that is not quantized."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if len(dims) > 1:
        values = rng.standard_normal(dims, np.float32)
        return values * np.float32(_spread(name, dims))
    if name.endswith(".bias"):
        return rng.standard_normal(dims, np.float32) * np.float32(BIAS_SPREAD)
    return rng.uniform(0.8, 1.2, dims).astype(np.float32)


@cache
def _prime_below(limit: int) -> int:
    """The largest prime that is at most `limit`, which is at least 2."""
    return next(
        n
        for n in range(limit, 1, -1)
        if all(n % d for d in range(2, math.isqrt(n) + 1))
    )


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
