# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Norms, key rotation and cache writes of a DSA layer, in one launch.

A row of the MLA cache holds the latent values and behind them the rotated key part, in
the cache's dtype. A row of `fp8_ds_mla` has 656 bytes:

    [0, 512)    e4m3 codes of the latent values, in four groups
    [512, 528)  float32 scales of the groups, powers of two
    [528, 656)  64 bfloat16 values, the rotated key part

A page of the index key cache holds the e4m3 codes of all its keys, and behind them
their float32 scales, powers of two.
"""

from typing import Any

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.dsa_fused.common import (
    check_power_of_two,
    check_rows,
    index_pairs,
    load_cos_sin,
    rotate,
    rows_arguments,
    vector_argument,
)
from vllm.v1.attention.ops.fp8_bytes import float32_to_e4m3, power_of_two_scale

DS_MLA_LATENT, DS_MLA_ROPE, DS_MLA_BYTES = 512, 64, 656
INDEX_SCALE_BYTES = 4
FORMATS = {
    "auto": "model",
    "bfloat16": "model",
    "float16": "model",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_ds_mla": "fp8_ds_mla",
}


@triton.jit
def _rms_norm(x_ptr, weight_ptr, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / DIM + eps) * weight


@triton.jit
def _layer_norm_at(x_ptr, weight_ptr, bias_ptr, at, mean, rstd):
    x = tl.load(x_ptr + at).to(tl.float32)
    weight = tl.load(weight_ptr + at).to(tl.float32)
    return (x - mean) * rstd * weight + tl.load(bias_ptr + at).to(tl.float32)


@triton.jit
def _normed_index_key(
    x_ptr, weight_ptr, bias_ptr, eps, first, second, DIM: tl.constexpr
):
    """The elements at `first`, those at `second`, and all of them in their order."""
    at = tl.arange(0, DIM)
    x = tl.load(x_ptr + at).to(tl.float32)
    mean = tl.sum(x, axis=0) / DIM
    variance = tl.sum((x - mean) * (x - mean), axis=0) / DIM
    rstd = tl.rsqrt(variance + eps)
    x = _layer_norm_at(x_ptr, weight_ptr, bias_ptr, first, mean, rstd)
    y = _layer_norm_at(x_ptr, weight_ptr, bias_ptr, second, mean, rstd)
    every = _layer_norm_at(x_ptr, weight_ptr, bias_ptr, at, mean, rstd)
    return x, y, every


@triton.jit
def _store_latent_row(
    row_ptr,
    latent,
    rope,
    scale_ptr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    at = tl.arange(0, DIM)
    rope_at = tl.arange(0, ROPE)
    if FORMAT == "fp8_ds_mla":
        groups = tl.reshape(latent, (DIM // 128, 128))
        largest = tl.max(tl.abs(groups), axis=1, keep_dims=True)
        scales = power_of_two_scale(largest, 1e-4)
        scaled = tl.div_rn(groups, tl.broadcast_to(scales, groups.shape))
        tl.store(row_ptr + at, tl.reshape(float32_to_e4m3(scaled), (DIM,)))
        scales_ptr = (row_ptr + DIM).to(tl.pointer_type(tl.float32))
        group = tl.arange(0, DIM // 128)
        tl.store(scales_ptr + group, tl.reshape(scales, (DIM // 128,)))
        rope_ptr = (row_ptr + DIM + DIM // 32).to(tl.pointer_type(tl.bfloat16))
        tl.store(rope_ptr + rope_at, rope.to(tl.bfloat16))
    elif FORMAT == "fp8":
        # The inexact division, so that the codes are those of the release.
        if scale_ptr is not None:
            scale = tl.load(scale_ptr)
            latent = latent / scale
            rope = rope / scale
        tl.store(row_ptr + at, float32_to_e4m3(latent))
        tl.store(row_ptr + DIM + rope_at, float32_to_e4m3(rope))
    else:
        tl.store(row_ptr + at, latent.to(row_ptr.dtype.element_ty))
        tl.store(row_ptr + DIM + rope_at, rope.to(row_ptr.dtype.element_ty))


@triton.jit
def _store_index_key(
    page_ptr,
    place,
    first,
    second,
    x,
    y,
    every,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    at = tl.arange(0, DIM)
    unrotated = at >= ROTATED
    largest = tl.max(tl.where(unrotated, tl.abs(every), 0.0), axis=0)
    largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(x), tl.abs(y)), axis=0))
    scale = power_of_two_scale(largest, 1e-4 / 448)
    codes_ptr = page_ptr + place * DIM
    tl.store(codes_ptr + first, float32_to_e4m3(tl.div_rn(x, scale)))
    tl.store(codes_ptr + second, float32_to_e4m3(tl.div_rn(y, scale)))
    codes = float32_to_e4m3(tl.div_rn(every, scale))
    tl.store(codes_ptr + at, codes, mask=unrotated)
    scales_ptr = (page_ptr + PAGE_SIZE * DIM).to(tl.pointer_type(tl.float32))
    tl.store(scales_ptr + place, scale)


@triton.jit
def dsa_norm_rope_kernel(
    positions_ptr,
    slots_ptr,
    q_c_ptr,
    q_c_stride,
    q_weight_ptr,
    q_eps,
    q_c_out_ptr,
    q_c_out_stride,
    kv_c_ptr,
    kv_c_stride,
    kv_weight_ptr,
    kv_eps,
    kv_c_out_ptr,
    kv_c_out_stride,
    k_pe_ptr,
    k_pe_stride,
    k_table_ptr,
    k_table_stride,
    k_pe_out_ptr,
    k_pe_out_stride,
    rows_ptr,
    rows_block_stride,
    rows_stride,
    rows_scale_ptr,
    index_k_ptr,
    index_k_stride,
    index_weight_ptr,
    index_bias_ptr,
    index_eps,
    index_table_ptr,
    index_table_stride,
    index_k_out_ptr,
    index_k_out_stride,
    index_slots_ptr,
    pages_ptr,
    page_stride,
    topk_ptr,
    topk_stride,
    Q_DIM: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_DIM: tl.constexpr,
    K_HALF: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    ROWS_FORMAT: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    INDEX_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
):
    """Programs (token, part): query norm, latent row, index key, top-k row.

    The last two exist in layers with an indexer only. Strides are in elements; what is
    not there is None. A token whose slot is negative is padding or belongs to another
    rank: it gets no cache row and no index key, but a normed query, for which every
    rank has heads, and the latent and rotated values that the caller asked for.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.full((), -1, tl.int64)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + token).to(tl.int64)

    if part == 0:
        q = _rms_norm(q_c_ptr + token * q_c_stride, q_weight_ptr, q_eps, Q_DIM, Q_BLOCK)
        at = tl.arange(0, Q_BLOCK)
        q = q.to(q_c_out_ptr.dtype.element_ty)
        tl.store(q_c_out_ptr + token * q_c_out_stride + at, q, mask=at < Q_DIM)
    elif part == 1:
        latent = _rms_norm(
            kv_c_ptr + token * kv_c_stride, kv_weight_ptr, kv_eps, KV_DIM, KV_DIM
        )
        position = tl.load(positions_ptr + token)
        cos, sin = load_cos_sin(k_table_ptr, k_table_stride, position, K_HALF)
        rope_at = tl.arange(0, 2 * K_HALF)
        rope = tl.load(k_pe_ptr + token * k_pe_stride + rope_at).to(tl.float32)
        x, y = tl.split(tl.reshape(rope, (K_HALF, 2)))
        x, y = rotate(x, y, cos, sin)
        rope = tl.interleave(x, y)
        if kv_c_out_ptr is not None:
            out_ptr = kv_c_out_ptr + token * kv_c_out_stride + tl.arange(0, KV_DIM)
            tl.store(out_ptr, latent.to(kv_c_out_ptr.dtype.element_ty))
        if k_pe_out_ptr is not None:
            out_ptr = k_pe_out_ptr + token * k_pe_out_stride + rope_at
            tl.store(out_ptr, rope.to(k_pe_out_ptr.dtype.element_ty))
        if rows_ptr is not None:  # noqa: SIM102 - `and` would compile what follows
            if slot >= 0:
                row = slot // ROWS_BLOCK * rows_block_stride
                row += slot % ROWS_BLOCK * rows_stride
                _store_latent_row(
                    rows_ptr + row,
                    latent,
                    rope,
                    rows_scale_ptr,
                    KV_DIM,
                    2 * K_HALF,
                    ROWS_FORMAT,
                )

    if index_k_ptr is not None:
        if part == 2:
            if (slot >= 0) | (slots_ptr is None):
                first, second = index_pairs(INDEX_HALF, INTERLEAVED)
                x, y, every = _normed_index_key(
                    index_k_ptr + token * index_k_stride,
                    index_weight_ptr,
                    index_bias_ptr,
                    index_eps,
                    first,
                    second,
                    INDEX_DIM,
                )
                position = tl.load(positions_ptr + token)
                cos, sin = load_cos_sin(
                    index_table_ptr, index_table_stride, position, INDEX_HALF
                )
                x, y = rotate(x, y, cos, sin)
                if index_k_out_ptr is not None:
                    at = tl.arange(0, INDEX_DIM)
                    dtype: tl.constexpr = index_k_out_ptr.dtype.element_ty
                    out_ptr = index_k_out_ptr + token * index_k_out_stride
                    tl.store(out_ptr + first, x.to(dtype))
                    tl.store(out_ptr + second, y.to(dtype))
                    tl.store(out_ptr + at, every.to(dtype), mask=at >= 2 * INDEX_HALF)
                if pages_ptr is not None:
                    index_slot = tl.load(index_slots_ptr + token).to(tl.int64)
                    if index_slot >= 0:
                        _store_index_key(
                            pages_ptr + index_slot // PAGE_SIZE * page_stride,
                            index_slot % PAGE_SIZE,
                            first,
                            second,
                            x,
                            y,
                            every,
                            INDEX_DIM,
                            2 * INDEX_HALF,
                            PAGE_SIZE,
                        )
        elif part == 3:
            for start in range(0, TOPK, TOPK_BLOCK):
                at = start + tl.arange(0, TOPK_BLOCK)
                tl.store(topk_ptr + token * topk_stride + at, -1, mask=at < TOPK)


def fused_norm_rope(
    positions: torch.Tensor,
    q_c: torch.Tensor,
    q_rms_norm_w: torch.Tensor,
    q_rms_eps: float,
    kv_c: torch.Tensor,
    kv_rms_norm_w: torch.Tensor,
    kv_rms_eps: float,
    k_pe: torch.Tensor,
    k_rope_cos_sin_cache: torch.Tensor,
    index_k: torch.Tensor | None,
    index_k_layer_norm_w: torch.Tensor | None,
    index_k_layer_norm_bias: torch.Tensor | None,
    index_k_layer_norm_eps: float,
    index_k_rope_cos_sin_cache: torch.Tensor | None,
    topk_indices_buffer: torch.Tensor,
    slot_mapping: torch.Tensor | None = None,
    indexer_slot_mapping: torch.Tensor | None = None,
    indexer_k_cache: torch.Tensor | None = None,
    indexer_cache_shuffled: bool = False,
    mla_kv_cache: torch.Tensor | None = None,
    mla_kv_cache_dtype: str = "auto",
    mla_k_scale: torch.Tensor | None = None,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    q_c_out: torch.Tensor | None = None,
    kv_c_out: torch.Tensor | None = None,
    k_pe_out: torch.Tensor | None = None,
    index_k_out: torch.Tensor | None = None,
    skip_scale: bool = False,
) -> torch.Tensor:
    """Norm the queries, write the layer's caches, and clear the top-k buffer.

    Args:
        positions: [T], integers: rows of the tables.
        q_c, kv_c, k_pe: [T, q], [T, latent], [T, rope], any row stride. `k_pe` is
            rotated by interleaved pairs.
        k_rope_cos_sin_cache, index_k_rope_cos_sin_cache: tables of [positions, n];
            the cosines of n // 2 pairs, then the sines.
        index_k: [T, dim]. After its layer norm the first n elements are rotated, by
            interleaved pairs if `index_rope_interleave`.
        topk_indices_buffer: [T or more, top-k] int32, of which T rows become -1.
        slot_mapping, indexer_slot_mapping: [T or more], integers: cache slots, negative
            for none. The second one is the first one by default.
        indexer_k_cache: [pages, page size, dim + 4], bytes.
        mla_kv_cache: [blocks, block size, latent + rope] values, or bytes for "fp8",
            or 656 bytes in the last dimension for "fp8_ds_mla".
        mla_k_scale: one float32 by which "fp8" rows are divided unless `skip_scale`.
        has_indexer: False if there are no index keys; the top-k buffer is left alone.
        q_c_out, kv_c_out, k_pe_out, index_k_out: where results go. Without the first
            a new tensor is made; without the others the results go to caches only.

    Returns:
        The normed `q_c`.

    Raises:
        ValueError: for shapes, strides and cache formats that are not supported.
    """
    if q_c_out is None:
        q_c_out = torch.empty_like(q_c, memory_format=torch.contiguous_format)
    if not has_indexer:
        index_k = indexer_k_cache = None
    elif index_k is None:
        raise ValueError("index_k is missing, and has_indexer is True.")
    if mla_kv_cache is None and indexer_k_cache is None:
        slot_mapping = None
    elif slot_mapping is None:
        raise ValueError("slot_mapping is missing, without which no cache is written.")
    if indexer_slot_mapping is None:
        indexer_slot_mapping = slot_mapping
    if indexer_cache_shuffled:
        raise ValueError("Shuffled index key caches are for ROCm devices only.")

    tokens, q_dim = q_c.shape
    kv_dim, k_dim = kv_c.shape[-1], k_pe.shape[-1]
    check_power_of_two("The size of a kv_c row", kv_dim)
    check_power_of_two("The size of a k_pe row", k_dim)
    arguments = (
        vector_argument("positions", positions, tokens)
        | vector_argument("slots", slot_mapping, None)
        | rows_arguments("q_c", q_c, tokens, q_dim)
        | rows_arguments("q_c_out", q_c_out, tokens, q_dim)
        | vector_argument("q_weight", q_rms_norm_w, q_dim)
        | rows_arguments("kv_c", kv_c, tokens, kv_dim)
        | rows_arguments("kv_c_out", kv_c_out, tokens, kv_dim)
        | vector_argument("kv_weight", kv_rms_norm_w, kv_dim)
        | rows_arguments("k_pe", k_pe, tokens, k_dim)
        | rows_arguments("k_pe_out", k_pe_out, tokens, k_dim)
        | rows_arguments("k_table", k_rope_cos_sin_cache, None, k_dim)
        | _cache_arguments(mla_kv_cache, mla_kv_cache_dtype, kv_dim, k_dim)
        | _index_arguments(
            tokens,
            index_k,
            index_k_layer_norm_w,
            index_k_layer_norm_bias,
            index_k_rope_cos_sin_cache,
            index_k_out,
        )
        | vector_argument("index_slots", indexer_slot_mapping, None)
        | _page_arguments(indexer_k_cache, index_k)
        | rows_arguments("topk", topk_indices_buffer, None, None)
    )
    topk = topk_indices_buffer.shape[1]
    dsa_norm_rope_kernel[(tokens, 2 if index_k is None else 4)](
        **arguments,
        q_eps=q_rms_eps,
        kv_eps=kv_rms_eps,
        index_eps=index_k_layer_norm_eps,
        rows_scale_ptr=None if skip_scale else mla_k_scale,
        Q_DIM=q_dim,
        Q_BLOCK=triton.next_power_of_2(q_dim),
        KV_DIM=kv_dim,
        K_HALF=k_dim // 2,
        INTERLEAVED=index_rope_interleave,
        TOPK=topk,
        TOPK_BLOCK=min(1024, triton.next_power_of_2(topk)),
        num_warps=4,
    )
    return q_c_out


def _cache_arguments(
    cache: torch.Tensor | None, dtype: str, kv_dim: int, k_dim: int
) -> dict[str, Any]:
    """Kernel arguments that say where MLA rows go, and in which format."""
    if cache is None:
        none = {"rows_ptr": None, "rows_block_stride": 0, "rows_stride": 0}
        return none | {"ROWS_BLOCK": 1, "ROWS_FORMAT": "model"}
    if dtype not in FORMATS:
        raise ValueError(
            f"The cache dtype {dtype} is not supported on GPUs below SM89. Supported "
            f"for DSA models: {', '.join(FORMATS)}."
        )
    rows_format = FORMATS[dtype]
    width = kv_dim + k_dim
    if rows_format == "fp8_ds_mla":
        if (kv_dim, k_dim) != (DS_MLA_LATENT, DS_MLA_ROPE):
            raise ValueError(
                f"fp8_ds_mla rows hold {DS_MLA_LATENT} + {DS_MLA_ROPE} values; the "
                f"model has {kv_dim} + {k_dim}."
            )
        width = DS_MLA_BYTES
    if rows_format != "model":
        cache = cache.view(torch.uint8)
    elif cache.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"The cache is {cache.dtype}, which {dtype} does not mean.")
    check_rows("mla_kv_cache", cache, None, None, width)
    return {
        "rows_ptr": cache,
        "rows_block_stride": cache.stride(0),
        "rows_stride": cache.stride(1),
        "ROWS_BLOCK": cache.shape[1],
        "ROWS_FORMAT": rows_format,
    }


def _index_arguments(
    tokens: int,
    index_k: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    out: torch.Tensor | None,
) -> dict[str, Any]:
    """Kernel arguments of the index keys; all None in layers without an indexer."""
    dim = rotated = None
    if index_k is None:
        weight = bias = table = out = None
    else:
        if weight is None or bias is None or table is None:
            raise ValueError("The norm or the table of the index keys is missing.")
        dim, rotated = index_k.shape[-1], table.shape[-1]
        check_power_of_two("The size of an index key", dim)
        check_power_of_two("The rotated size of an index key", rotated)
        if rotated > dim:
            raise ValueError(f"{rotated} of {dim} elements of index keys are rotated.")
    return (
        rows_arguments("index_k", index_k, tokens, dim)
        | vector_argument("index_weight", weight, dim)
        | vector_argument("index_bias", bias, dim)
        | rows_arguments("index_table", table, None, rotated)
        | rows_arguments("index_k_out", out, tokens, dim)
        | {"INDEX_DIM": dim or 1, "INDEX_HALF": (rotated or 2) // 2}
    )


def _page_arguments(
    cache: torch.Tensor | None, index_k: torch.Tensor | None
) -> dict[str, Any]:
    """Kernel arguments that say where index keys go."""
    if cache is None or index_k is None:
        return {"pages_ptr": None, "page_stride": 0, "PAGE_SIZE": 1}
    pages = cache.view(torch.uint8)
    width = index_k.shape[-1] + INDEX_SCALE_BYTES
    check_rows("indexer_k_cache", pages, None, None, width)
    if pages.stride(1) != width or pages.stride(0) % INDEX_SCALE_BYTES:
        raise ValueError(
            f"indexer_k_cache has strides {pages.stride()}; a page must be contiguous, "
            f"and its stride a multiple of {INDEX_SCALE_BYTES}."
        )
    return {
        "pages_ptr": pages,
        "page_stride": pages.stride(0),
        "PAGE_SIZE": pages.shape[1],
    }
