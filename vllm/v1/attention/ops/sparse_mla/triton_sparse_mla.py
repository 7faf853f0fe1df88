# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Sparse MLA on NVIDIA GPUs from SM80 on, in Triton.

One program attends with a block of heads of one query to (a part of) the rows that the
query selects. Each step gathers a tile of rows, once, as keys and as values. With few
queries the rows are split over several programs, and a second kernel combines their
results. docs/design/sparse_mla.md has the data flow and the reasons.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.fp8_bytes import e4m3_to_float32
from vllm.v1.attention.ops.sparse_mla.tuning import (
    CacheFormat,
    Kernel,
    KernelConfig,
    choose_config,
)

LATENT_DIM = 512
ROPE_DIM = 64
# A row of fp8_ds_mla: 512 e4m3 values, a float32 scale for each 128 of them, and the
# rotated key part in bfloat16.
DS_MLA_ROW_BYTES = 656
MAX_HEADS = 128

_LATENT = tl.constexpr(LATENT_DIM)
_ROPE = tl.constexpr(ROPE_DIM)
_GROUPS = tl.constexpr(4)
_GROUP_DIM = tl.constexpr(128)
_DS_MLA_ROW = tl.constexpr(DS_MLA_ROW_BYTES)
_MODEL = tl.constexpr(0)
_FP8 = tl.constexpr(1)
_DS_MLA = tl.constexpr(2)
_FORMATS = {CacheFormat.MODEL: 0, CacheFormat.FP8: 1, CacheFormat.FP8_DS_MLA: 2}

# Scores of rows that do not count, and what the running maximum starts from: the second
# is so much larger that the first never raises it, and its exponential is zero.
_MASKED = tl.constexpr(-3.0e38)
_LOWEST = tl.constexpr(-1.0e30)
_LN2 = tl.constexpr(math.log(2.0))
_LOG2E = 1.0 / math.log(2.0)


@triton.jit
def _to_float(values, NATIVE_FP8: tl.constexpr):
    """float32 of e4m3 values: of the type itself, or of bytes where there is none."""
    return values.to(tl.float32) if NATIVE_FP8 else e4m3_to_float32(values)


@triton.jit
def _load_tile(
    rows_ptr,
    scales_ptr,
    rope_ptr,
    slots,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Latents [N, 512] and rotated parts [N, 64] of the rows `slots` [N], as DTYPE.

    Zeros where a slot is negative. Without rope the second is a copy of the slots.
    """
    valid = slots >= 0
    slots = slots.to(tl.int64)
    dim = tl.arange(0, _LATENT)
    rope_dim = tl.arange(0, _ROPE)
    if FORMAT == _DS_MLA:
        group = tl.arange(0, _GROUPS)
        in_group = tl.arange(0, _GROUP_DIM)
        values = tl.load(
            rows_ptr
            + (slots * _DS_MLA_ROW)[:, None, None]
            + (group * _GROUP_DIM)[None, :, None]
            + in_group[None, None, :],
            mask=valid[:, None, None],
            other=0.0,
        )
        scales = tl.load(
            scales_ptr
            + (slots * (_DS_MLA_ROW // 4) + _LATENT // 4)[:, None]
            + group[None, :],
            mask=valid[:, None],
            other=0.0,
        )
        scaled = _to_float(values, NATIVE_FP8) * scales[:, :, None]
        latent = tl.reshape(scaled.to(DTYPE), [slots.shape[0], _LATENT])
        rope_at = slots * (_DS_MLA_ROW // 2) + (_DS_MLA_ROW // 2 - _ROPE)
    else:
        width: tl.constexpr = _LATENT + _ROPE if HAS_ROPE else _LATENT
        latent = tl.load(
            rows_ptr + (slots * width)[:, None] + dim[None, :],
            mask=valid[:, None],
            other=0.0,
        )
        rope_at = slots * width + _LATENT
        if FORMAT == _FP8:
            latent = _to_float(latent, NATIVE_FP8).to(DTYPE)
    if HAS_ROPE:
        rope = tl.load(
            rope_ptr + rope_at[:, None] + rope_dim[None, :],
            mask=valid[:, None],
            other=0.0,
        )
        if FORMAT == _FP8:
            rope = _to_float(rope, NATIVE_FP8)
        rope = rope.to(DTYPE)
    else:
        rope = slots
    return latent, rope


# One compilation for all batch sizes: what varies must not be specialized on.
@triton.jit(do_not_specialize=["heads", "topk", "splits"])
def _sparse_mla_kernel(
    q_ptr,
    q_rope_ptr,
    rows_ptr,
    scales_ptr,
    rope_ptr,
    kv_scale_ptr,
    indices_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    heads,
    topk,
    q_token_stride,
    q_head_stride,
    q_rope_token_stride,
    q_rope_head_stride,
    indices_stride,
    splits,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Grid: (tokens * blocks of heads, the blocks of a token side by side; splits).

    Outputs [token, split, head, ...]. If PARTIAL, lse is a logarithm to base 2.
    """
    blocks = tl.cdiv(heads, BLOCK_H)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    split = tl.program_id(1)
    head = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < heads
    dim = tl.arange(0, _LATENT)
    q = tl.load(
        q_ptr
        + token * q_token_stride
        + (head.to(tl.int64) * q_head_stride)[:, None]
        + dim[None, :],
        mask=is_head[:, None],
        other=0.0,
    )
    if HAS_ROPE:
        q_rope = tl.load(
            q_rope_ptr
            + token * q_rope_token_stride
            + (head.to(tl.int64) * q_rope_head_stride)[:, None]
            + tl.arange(0, _ROPE)[None, :],
            mask=is_head[:, None],
            other=0.0,
        )
    kv_scale = 1.0
    if FORMAT == _FP8:
        kv_scale = tl.load(kv_scale_ptr)
        scale_log2 = scale_log2 * kv_scale

    count = topk
    if HAS_COUNTS:
        count = tl.minimum(tl.load(counts_ptr + token), topk)
    tiles = tl.cdiv(tl.cdiv(count, BLOCK_N), splits)
    begin = split * tiles * BLOCK_N
    end = tl.minimum(begin + tiles * BLOCK_N, count)
    acc = tl.zeros([BLOCK_H, _LATENT], tl.float32)
    peak = tl.full([BLOCK_H], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_N)
        slots = tl.load(
            indices_ptr + token * indices_stride + column, mask=column < end, other=-1
        )
        latent, rope = _load_tile(
            rows_ptr,
            scales_ptr,
            rope_ptr,
            slots,
            q.dtype,
            FORMAT,
            HAS_ROPE,
            NATIVE_FP8,
        )
        scores = tl.dot(q, tl.trans(latent))
        if HAS_ROPE:
            scores = tl.dot(q_rope, tl.trans(rope), scores)
        scores = tl.where((slots >= 0)[None, :], scores * scale_log2, _MASKED)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), latent, acc * shrink[:, None])
        peak = new_peak

    # A sum of zero means that no row counted; NaN must stay NaN.
    out = acc * (kv_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    lse = tl.where(total == 0.0, -float("inf"), peak + tl.log2(total))
    if not PARTIAL:
        lse = lse * _LN2
    at = (token * splits + split) * heads + head
    tl.store(
        out_ptr + (at * _LATENT)[:, None] + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_head[:, None],
    )
    tl.store(lse_ptr + at, lse, mask=is_head)


@triton.jit(do_not_specialize=["heads", "splits"])
def _combine_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    heads,
    splits,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weigh parts [T, S, H, 512] by their lse (base 2).

    Grid: (T * H, 512 / BLOCK_D).
    """
    token = (tl.program_id(0) // heads).to(tl.int64)
    first = token * splits * heads + tl.program_id(0) % heads
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.arange(0, MAX_SPLITS)
    lses = tl.load(
        part_lse_ptr + first + split * heads, mask=split < splits, other=-float("inf")
    )
    peak = tl.maximum(tl.max(lses, 0), _LOWEST)
    total = tl.sum(tl.exp2(lses - peak), 0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, MAX_SPLITS, CHUNK):
        part = begin + tl.arange(0, CHUNK)
        part_lse = tl.load(
            part_lse_ptr + first + part * heads, mask=part < splits, other=-float("inf")
        )
        values = tl.load(
            part_ptr + ((first + part * heads) * _LATENT)[:, None] + dim[None, :],
            mask=(part < splits)[:, None],
            other=0.0,
        )
        acc += tl.sum(values * tl.exp2(part_lse - peak)[:, None], 0)
    at = tl.program_id(0).to(tl.int64)
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + at * _LATENT + dim, out.to(out_ptr.dtype.element_ty))
    if tl.program_id(1) == 0:
        lse = tl.where(total == 0.0, -float("inf"), peak + tl.log2(total))
        tl.store(lse_ptr + at, lse * _LN2)


def triton_sparse_mla(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    scale: float,
    kv_scale: torch.Tensor | None = None,
    config: KernelConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over its own selected rows of the cache.

    Args:
        q: [T, heads, 576], or [T, heads, 512] for models without rotated part, or the
            pair of [T, heads, 512] and [T, heads, 64 or 0]. bfloat16 or float16; any
            strides, but the last dimension contiguous. 1 to 128 heads.
        rows: the cache as flat rows, contiguous: [R, 576 or 512] in the dtype of `q`;
            the same as float8_e4m3fn, or as uint8 that holds it; or uint8 [R, 656] in
            the layout fp8_ds_mla (512 e4m3 values, four float32 scales, 64 bfloat16).
        indices: [T, K] int32 numbers of rows, in any order; negative ones, anywhere,
            select nothing. The last dimension contiguous.
        counts: [T] int32: only the first so many entries of a row are looked at.
        scale: multiplies the scores.
        kv_scale: one float32 by which the values of a plain fp8 cache are multiplied.
        config: by default chosen for the device from the table in tuning.py.

    Returns:
        Output [T, heads, 512] in the dtype of `q`, and the natural logarithm of the
        softmax denominator [T, heads] in float32. Without any row: zeros and -inf.

    Raises:
        ValueError: a shape or dtype is not one of the above.
    """
    q_latent, q_rope = _split_query(q)
    _check_inputs(q_latent, q_rope, indices, counts)
    cache = _cache_format(rows, q_latent.dtype, q_rope.shape[2])
    if cache is CacheFormat.FP8 and (kv_scale is None or kv_scale.numel() != 1):
        raise ValueError("an fp8 cache needs kv_scale, a tensor of one float32")
    tokens, heads, _ = q_latent.shape
    out = q_latent.new_empty(tokens, heads, LATENT_DIM)
    lse = q_latent.new_empty(tokens, heads, dtype=torch.float32)
    if tokens == 0:
        return out, lse
    capability, num_sms = _device(q_latent.device)
    if config is None:
        config = choose_config(
            capability, heads, tokens, indices.shape[1], cache, num_sms
        )
    gluon = config.kernel is Kernel.GLUON
    if gluon and not _gluon_can(rows, cache, q_latent.dtype):
        # 16 heads: more do not fit beside unscaled tiles in Triton's layouts.
        config = replace(config, kernel=Kernel.TRITON, block_heads=16, num_warps=4)
    part, part_lse = out, lse
    if config.splits > 1:
        shape = (tokens, config.splits, heads)
        part = lse.new_empty(*shape, LATENT_DIM)
        part_lse = lse.new_empty(*shape)
    # Gluon widens fp8 rows from bytes on every device.
    native_fp8 = capability >= (8, 9) and config.kernel is Kernel.TRITON
    values, scales, rope = _views(rows, cache, native_fp8)
    kernel, options = _sparse_mla_kernel, {}
    if config.kernel is Kernel.GLUON:
        kernel = _gluon_kernel()
    else:
        options = {
            "STAGES": config.num_stages,
            "NATIVE_FP8": native_fp8,
            "num_stages": config.num_stages,
        }
    grid = (tokens * triton.cdiv(heads, config.block_heads), config.splits)
    kernel[grid](
        q_latent,
        q_rope,
        values,
        scales,
        rope,
        kv_scale,
        indices,
        counts,
        part,
        part_lse,
        scale * _LOG2E,
        heads,
        indices.shape[1],
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        indices.stride(0),
        config.splits,
        BLOCK_H=config.block_heads,
        BLOCK_N=config.block_rows,
        FORMAT=_FORMATS[cache],
        HAS_ROPE=q_rope.shape[2] > 0,
        HAS_COUNTS=counts is not None,
        PARTIAL=config.splits > 1,
        num_warps=config.num_warps,
        **options,
    )
    if config.splits > 1:
        padded = triton.next_power_of_2(config.splits)
        _combine_kernel[(tokens * heads, 4)](
            part,
            part_lse,
            out,
            lse,
            heads,
            config.splits,
            MAX_SPLITS=padded,
            CHUNK=min(padded, 16),
            BLOCK_D=LATENT_DIM // 4,
            num_warps=4,
        )
    return out, lse


def _gluon_can(rows: torch.Tensor, cache: CacheFormat, dtype: torch.dtype) -> bool:
    """Whether the Gluon kernel takes these rows.

    It copies 16 aligned bytes at a time. And it multiplies the weights of rows by their
    fp8_ds_mla scales, which can be too small for float16.
    """
    tiny = cache is CacheFormat.FP8_DS_MLA and dtype == torch.float16
    return rows.data_ptr() % 16 == 0 and not tiny


def _gluon_kernel() -> Any:
    # Imported when a device takes it: without Triton there is no Gluon to import.
    from vllm.v1.attention.ops.sparse_mla.gluon_sparse_mla import (
        gluon_sparse_mla_kernel,
    )

    return gluon_sparse_mla_kernel


@functools.cache
def _device(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    if device.type == "cpu":
        # Triton's interpreter: no fp8 type, and one program at a time.
        return (0, 0), 1
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def _split_query(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(q, tuple):
        return q
    return q[..., :LATENT_DIM], q[..., LATENT_DIM:]


def _cache_format(rows: torch.Tensor, dtype: torch.dtype, rope_dim: int) -> CacheFormat:
    width = LATENT_DIM + rope_dim
    if not rows.is_contiguous() or rows.dim() != 2:
        raise ValueError(f"rows must be contiguous [R, width], not {tuple(rows.shape)}")
    if rows.dtype == torch.uint8 and rows.shape[1] == DS_MLA_ROW_BYTES:
        return CacheFormat.FP8_DS_MLA
    if rows.shape[1] == width and rows.dtype == dtype:
        return CacheFormat.MODEL
    if rows.shape[1] == width and rows.dtype in (torch.uint8, torch.float8_e4m3fn):
        return CacheFormat.FP8
    raise ValueError(
        f"rows are {rows.dtype} {tuple(rows.shape)}; expected [R, {width}] of {dtype}"
        f" or of e4m3 values, or uint8 [R, {DS_MLA_ROW_BYTES}] in the layout fp8_ds_mla"
    )


def _check_inputs(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:
    tokens, heads, width = q.shape
    if width != LATENT_DIM or q_rope.shape not in (
        (tokens, heads, 0),
        (tokens, heads, ROPE_DIM),
    ):
        raise ValueError(
            f"q has {width} + {q_rope.shape[-1]} values a head in shapes"
            f" {tuple(q.shape)} and {tuple(q_rope.shape)};"
            f" expected {LATENT_DIM} + 0 or {ROPE_DIM}"
        )
    dtypes = [torch.bfloat16, torch.float16]
    if q.device.type == "cpu":
        dtypes.append(torch.float32)
    if q.dtype not in dtypes or q_rope.dtype != q.dtype:
        raise ValueError(
            f"q is {q.dtype} and {q_rope.dtype}; expected bfloat16 or float16"
        )
    if q.stride(2) != 1 or (q_rope.shape[2] and q_rope.stride(2) != 1):
        raise ValueError("the last dimension of q must be contiguous")
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"{heads} heads; expected 1 to {MAX_HEADS}")
    if (
        indices.dtype != torch.int32
        or indices.dim() != 2
        or indices.shape[0] != tokens
        or indices.shape[1] < 1
        or indices.stride(1) != 1
    ):
        raise ValueError(
            f"indices are {indices.dtype} {tuple(indices.shape)};"
            f" expected int32 [{tokens}, 1 or more], the last dimension contiguous"
        )
    if counts is not None and (
        counts.dtype != torch.int32 or counts.shape != (tokens,)
    ):
        raise ValueError(
            f"counts are {counts.dtype} {tuple(counts.shape)};"
            f" expected int32 [{tokens}]"
        )


def _views(
    rows: torch.Tensor, cache: CacheFormat, native_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same memory, typed for its values, its scales and its rotated parts."""
    if cache is CacheFormat.MODEL:
        return rows, rows, rows
    values = rows.view(torch.float8_e4m3fn if native_fp8 else torch.uint8)
    if cache is CacheFormat.FP8:
        return values, values, values
    return values, rows.view(torch.float32), rows.view(torch.bfloat16)
