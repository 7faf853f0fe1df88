# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Inputs of the fused DSA operations, for the interpreter and for a GPU.

As in the model, inputs are columns of wider tensors. Outputs and caches are full of
bytes that nothing computes, and the blocks of caches have gaps between them.
"""

from dataclasses import dataclass
from typing import Any

import torch

KV_DIM, ROPE, INDEX_DIM, DS_MLA_BYTES, PAGE = 512, 64, 128, 656, 64
MAX_POSITION = 1000
POISON = 0xA5


@dataclass(frozen=True)
class NormRope:
    """A call of `fused_norm_rope`. `cache` is a dtype's name, "" is none at all."""

    cache: str = ""
    indexer: str = "interleaved"  # or "neox", or "" for none
    outputs: bool = True
    pages: bool = True
    scale: float = 0.0
    own_index_slots: bool = False
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 5
    q_dim: int = 1536
    topk: int = 2048

    def __str__(self) -> str:
        parts = [self.cache or "nocache", self.indexer or "noindexer"]
        parts += ["outputs"] * self.outputs + ["pages"] * self.pages
        parts += [f"scale{self.scale}"] * bool(self.scale)
        parts += ["ownslots"] * self.own_index_slots
        return "-".join([*parts, str(self.dtype).removeprefix("torch.")])


@dataclass(frozen=True)
class Query:
    """A call of `fused_q`."""

    indexer: str = "interleaved"
    heads: int = 8
    index_heads: int = 32
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 5

    def __str__(self) -> str:
        parts = [self.indexer or "noindexer", f"{self.heads}x{self.index_heads}"]
        return "-".join([*parts, str(self.dtype).removeprefix("torch.")])


def norm_rope_inputs(case: NormRope, device: str = "cpu") -> dict[str, Any]:
    """Arguments of `fused_norm_rope` by name. Every third token has no slot."""
    make = torch.Generator().manual_seed(0)
    tokens, dtype = case.tokens, case.dtype

    def random(*shape: int) -> torch.Tensor:
        # Rows of very different size, as scales and rounding depend on it.
        size = torch.exp2(torch.randint(-6, 7, (shape[0], 1), generator=make).float())
        return torch.randn(shape, generator=make) * size

    widths = [case.q_dim, KV_DIM, ROPE]
    q_c, kv_c, k_pe = random(tokens, sum(widths)).to(dtype).split(widths, -1)
    blocks = tokens // PAGE + 3
    slots = torch.randperm(blocks * PAGE, generator=make)[:tokens]
    slots[::3] = -1
    inputs: dict[str, Any] = {
        "positions": torch.randint(MAX_POSITION, (tokens,), generator=make),
        "q_c": q_c,
        "q_rms_norm_w": torch.rand(case.q_dim, generator=make).to(dtype),
        "q_rms_eps": 1e-5,
        "kv_c": kv_c,
        "kv_rms_norm_w": torch.rand(KV_DIM, generator=make).to(dtype),
        "kv_rms_eps": 1e-5,
        "k_pe": k_pe,
        "k_rope_cos_sin_cache": _table(make, dtype),
        "index_k": random(tokens, INDEX_DIM + 32).to(dtype)[:, :INDEX_DIM],
        "index_k_layer_norm_w": torch.rand(INDEX_DIM, generator=make),
        "index_k_layer_norm_bias": torch.randn(INDEX_DIM, generator=make),
        "index_k_layer_norm_eps": 1e-6,
        "index_k_rope_cos_sin_cache": _table(make, dtype),
        "topk_indices_buffer": torch.full((tokens + 2, case.topk), 7).int(),
        "slot_mapping": slots,
        "has_indexer": bool(case.indexer),
        "index_rope_interleave": case.indexer == "interleaved",
    }
    if not case.indexer:
        for name in [name for name in inputs if name.startswith("index_k")]:
            inputs[name] = 1e-6 if name.endswith("eps") else None
    if case.own_index_slots:
        other = torch.randperm(blocks * PAGE, generator=make)[:tokens]
        inputs["indexer_slot_mapping"] = torch.where(slots < 0, -1, other)
    inputs["q_c_out"] = _poisoned((tokens, case.q_dim), dtype)
    if case.outputs:
        inputs["kv_c_out"] = _poisoned((tokens, KV_DIM), dtype)
        inputs["k_pe_out"] = _poisoned((tokens, ROPE), dtype)
        if case.indexer:
            inputs["index_k_out"] = _poisoned((tokens, INDEX_DIM), dtype)
    if case.pages and case.indexer:
        inputs["indexer_k_cache"] = _blocks(blocks, INDEX_DIM + 4, torch.uint8)
    if case.cache:
        row_dtype = torch.uint8 if case.cache.startswith("fp8") else dtype
        width = DS_MLA_BYTES if case.cache == "fp8_ds_mla" else KV_DIM + ROPE
        inputs["mla_kv_cache"] = _blocks(blocks, width, row_dtype)
        inputs["mla_kv_cache_dtype"] = case.cache
        inputs["mla_k_scale"] = torch.tensor([case.scale or 1.0])
        inputs["skip_scale"] = not case.scale
    return _to(inputs, device)


def query_inputs(case: Query, device: str = "cpu") -> dict[str, Any]:
    """Arguments of `fused_q` by name. Values are exact in float32, also if rotated."""
    make = torch.Generator().manual_seed(0)
    tokens, dtype = case.tokens, case.dtype

    def eighths(*shape: int) -> torch.Tensor:
        return torch.randint(-99, 100, shape, generator=make).to(dtype) / 8

    # No angles, but factors by which products and sums are exact.
    table = torch.randint(-8, 9, (MAX_POSITION, ROPE), generator=make).to(dtype) / 8
    inputs: dict[str, Any] = {
        "positions": torch.randint(MAX_POSITION, (tokens,), generator=make),
        "q_pe": eighths(tokens, case.heads, 192 + ROPE)[..., 192:],
        "q_pe_cos_sin_cache": table,
        "index_q": eighths(tokens, case.index_heads, INDEX_DIM),
        "index_q_cos_sin_cache": table.flip(0).contiguous(),
        "ql_nope": torch.zeros(tokens, case.heads, KV_DIM, dtype=dtype),
        "q_scale": torch.ones(1),
        "index_weights": eighths(tokens, INDEX_DIM + case.index_heads)[:, INDEX_DIM:],
        "index_weights_softmax_scale": INDEX_DIM**-0.5,
        "index_weights_head_scale": case.index_heads**-0.5,
        "has_indexer": bool(case.indexer),
        "index_rope_interleave": case.indexer == "interleaved",
        "quantize_mqa": False,
    }
    if case.indexer:
        # Zero rows and small rows: the scale has a lower limit.
        inputs["index_q"][:1, :2] = 0
        inputs["index_q"][-1:] *= 2.0**-12
    else:
        names = ("index_q", "index_q_cos_sin_cache", "index_weights")
        inputs |= dict.fromkeys(names)
    return _to(inputs, device)


def _table(make: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    angles = torch.rand(MAX_POSITION, ROPE // 2, generator=make) * 6.3
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    out.view(torch.uint8).fill_(POISON)
    return out


def _blocks(blocks: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[blocks, PAGE, width], with a gap of one row and more behind each block."""
    gap = width if width % 8 == 0 else width + 4
    storage = _poisoned((blocks, PAGE * width + gap), dtype)
    return storage[:, : PAGE * width].unflatten(1, (PAGE, width))


def _to(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """The inputs on the device, with their strides."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or device == "cpu":
            return value
        whole = value if value._base is None else value._base
        return whole.to(device).as_strided(
            value.shape, value.stride(), value.storage_offset()
        )

    return {name: move(value) for name, value in inputs.items()}
