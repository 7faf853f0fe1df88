# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Logits of the DSA indexer for prompts: keys are gathered, one after the other."""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.dsa_indexer.logits_tuning import (
    PrefillConfig,
    choose_prefill,
    has_fp8_mma,
    keys_per_program,
)
from vllm.v1.attention.ops.dsa_indexer.tiles import (
    KEY_DIM,
    check_query,
    device_of,
    empty_logits,
    head_columns,
    load_query,
    tile_logits,
)
from vllm.v1.attention.ops.fp8_bytes import e4m3_to_float16

# Keys that are widened at a time, into 64 MiB.
WIDENED_KEYS = 262_144
# Queries for which widening keys once is cheaper than in each program.
_MANY_QUERIES = 64
_WIDEN_BLOCK = 4096

_DIM = tl.constexpr(KEY_DIM)
_NATIVE = tl.constexpr(0)
_BYTES = tl.constexpr(1)
_WIDENED = tl.constexpr(2)
_LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def _widen_kernel(in_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(in_ptr + at, mask=at < count, other=0)
    tl.store(out_ptr + at, e4m3_to_float16(codes), mask=at < count)


@triton.jit(do_not_specialize=["queries", "first", "last", "width", "share"])
def _prefill_kernel(
    q_ptr,
    keys_ptr,
    scales_ptr,
    weights_ptr,
    starts_ptr,
    ends_ptr,
    out_ptr,
    queries,
    first,
    last,
    width,
    share,
    out_stride,
    HEADS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (blocks of queries, shares of the keys [first, last)).

    `keys_ptr` points to key `first`, `scales_ptr` to the scale of key 0.
    """
    row = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    start = tl.load(starts_ptr + row, mask=row < queries, other=0)
    end = tl.load(ends_ptr + row, mask=row < queries, other=0)
    begin = tl.maximum(start, first + tl.program_id(1) * share)
    stop = tl.minimum(first + (tl.program_id(1) + 1) * share, last)
    # A row without keys must not widen the range of the others.
    stop = tl.minimum(tl.minimum(end, start + width), stop)
    has_keys = begin < stop
    low = tl.min(tl.where(has_keys, begin, _LARGEST), axis=0)
    high = tl.max(tl.where(has_keys, stop, 0), axis=0)
    if low < high:
        query, head = head_columns(BLOCK_Q, HEADS)
        at = (tl.program_id(0) * BLOCK_Q + query).to(tl.int64)
        columns, half_weights = load_query(
            q_ptr, weights_ptr, at, head, at < queries, HEADS, FORMAT != _NATIVE
        )
        # Row i of the output begins with the logit of key start[i].
        out_rows = out_ptr + row.to(tl.int64) * out_stride - start
        in_tile = tl.arange(0, BLOCK_K)
        dim = tl.arange(0, _DIM)
        for tile in tl.range(low, high, BLOCK_K, num_stages=STAGES):
            key = tile + in_tile
            inside = key < high
            keys = tl.load(
                keys_ptr
                + (tile - first).to(tl.int64) * _DIM
                + in_tile[:, None] * _DIM
                + dim[None, :],
                mask=inside[:, None],
                other=0.0,
            )
            if FORMAT == _BYTES:
                keys = e4m3_to_float16(keys)
            scales = tl.load(scales_ptr + key, mask=inside, other=0.0)
            logits = tile_logits(
                keys, scales, columns, half_weights, BLOCK_K, BLOCK_Q, HEADS
            )
            keep = (key[:, None] >= begin[None, :]) & (key[:, None] < stop[None, :])
            tl.store(out_rows[None, :] + key[:, None], logits, mask=keep)


def mqa_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    width: int,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """How much each query wants each key of its own range.

    Args:
        q: [M, heads, 128] float8_e4m3fn; 16, 32 or 64 heads.
        keys: [N, 128] float8_e4m3fn, contiguous.
        scales: [N] float32, contiguous: a key is its values times its scale.
        weights: [M, heads] float32, with all scales of the query in them.
        starts: [M] int32, number of the first key of each query.
        ends: [M] int32, one behind its last key; not above `starts`: no key.
        width: columns of the result; keys of a range that do not fit are left out.

    Returns:
        [M, width] float32: column c of row i is the logit of key `starts[i] + c`.
        Columns behind the range are not initialized. Rows are 1 KiB aligned.

    Raises:
        ValueError: a shape or dtype is not one of the above.
    """
    check_query(q, weights)
    _check_keys(keys, scales)
    queries, heads, _ = q.shape
    count = keys.shape[0]
    out = empty_logits(queries, width, q.device)
    if queries == 0 or count == 0 or width == 0:
        return out
    capability, num_sms = device_of(q.device)
    native = has_fp8_mma(capability)
    widened = not native and queries >= _MANY_QUERIES
    config = config or choose_prefill(capability, heads, widened=widened)
    code_type = torch.float8_e4m3fn if native else torch.uint8
    key_format = _NATIVE if native else _WIDENED if widened else _BYTES
    blocks = triton.cdiv(queries, config.block_queries)
    q, weights = q.contiguous().view(code_type), weights.contiguous()
    starts, ends = starts.contiguous(), ends.contiguous()
    step = WIDENED_KEYS if widened else count
    for first in range(0, count, step):
        last = min(first + step, count)
        part = keys[first:last].view(code_type)
        share = keys_per_program(blocks, last - first, num_sms)
        _prefill_kernel[(blocks, triton.cdiv(last - first, share))](
            q,
            _widen(part) if widened else part,
            scales,
            weights,
            starts,
            ends,
            out,
            queries,
            first,
            last,
            width,
            share,
            out.stride(0),
            HEADS=heads,
            FORMAT=key_format.value,
            BLOCK_Q=config.block_queries,
            BLOCK_K=config.block_keys,
            STAGES=config.num_stages,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def _widen(codes: torch.Tensor) -> torch.Tensor:
    """float16 values of e4m3 codes, uint8."""
    values = torch.empty(codes.shape, dtype=torch.float16, device=codes.device)
    count = codes.numel()
    _widen_kernel[(triton.cdiv(count, _WIDEN_BLOCK),)](
        codes, values, count, BLOCK=_WIDEN_BLOCK
    )
    return values


def _check_keys(keys: torch.Tensor, scales: torch.Tensor) -> None:
    if (
        keys.dtype != torch.float8_e4m3fn
        or keys.dim() != 2
        or keys.shape[1] != KEY_DIM
        or not keys.is_contiguous()
    ):
        raise ValueError(
            f"keys are {keys.dtype} {list(keys.shape)}; expected contiguous"
            f" float8_e4m3fn [N, {KEY_DIM}]"
        )
    if (
        scales.dtype != torch.float32
        or scales.shape != keys.shape[:1]
        or not scales.is_contiguous()
    ):
        raise ValueError(
            f"scales are {scales.dtype} {list(scales.shape)}; expected contiguous"
            f" float32 [{keys.shape[0]}]"
        )
