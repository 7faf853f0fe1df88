# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Logits of the DSA indexer for decoding: keys lie in the pages of the index cache."""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.dsa_indexer.logits_tuning import (
    PagedConfig,
    choose_paged,
    has_fp8_mma,
    programs_per_request,
)
from vllm.v1.attention.ops.dsa_indexer.tiles import (
    KEY_DIM,
    SCALE_BYTES,
    TOKEN_BYTES,
    check_query,
    device_of,
    empty_logits,
    head_columns,
    load_query,
    tile_logits,
)
from vllm.v1.attention.ops.fp8_bytes import e4m3_to_float16

PAGE_SIZES = (32, 64)

_DIM = tl.constexpr(KEY_DIM)
_SCALE = tl.constexpr(SCALE_BYTES)


@triton.jit(do_not_specialize=["next_n", "width", "table_width"])
def _paged_kernel(
    q_ptr,
    cache_ptr,
    scales_ptr,
    weights_ptr,
    lengths_ptr,
    table_ptr,
    out_ptr,
    next_n,
    width,
    table_width,
    page_stride,
    table_stride,
    out_stride,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    LENGTH_PER_QUERY: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (shares of the pages, requests, blocks of a request's queries).

    `cache_ptr` and `scales_ptr` are the same address. `page_stride` is in bytes.
    """
    request = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2) * BLOCK_Q
    token = block + tl.arange(0, BLOCK_Q)
    is_query = token < next_n
    if LENGTH_PER_QUERY:
        length = tl.load(lengths_ptr + request * next_n + token, mask=is_query, other=0)
    else:
        length = tl.load(lengths_ptr + request) - next_n + 1 + token
    length = tl.minimum(tl.where(is_query, length, 0), width)
    longest = tl.minimum(tl.max(length, axis=0), table_width * PAGE)
    pages = tl.cdiv(longest, PAGE)
    share = tl.cdiv(pages, tl.num_programs(0))
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, pages)
    if first < last:
        query, head = head_columns(BLOCK_Q, HEADS)
        columns, half_weights = load_query(
            q_ptr,
            weights_ptr,
            request * next_n + block + query,
            head,
            block + query < next_n,
            HEADS,
            WIDEN,
        )
        out_rows = out_ptr + (request * next_n + token) * out_stride
        table = table_ptr + request * table_stride
        in_page = tl.arange(0, PAGE)
        dim = tl.arange(0, _DIM)
        page = tl.load(table + first)
        for number in tl.range(first, last, num_stages=STAGES):
            at = page.to(tl.int64) * page_stride
            key = number * PAGE + in_page
            inside = key < longest
            keys = tl.load(
                cache_ptr + at + (in_page[:, None] * _DIM + dim[None, :]),
                mask=inside[:, None],
                other=0.0,
            )
            scales = tl.load(
                scales_ptr + at // _SCALE + (PAGE * _DIM // _SCALE) + in_page,
                mask=inside,
                other=0.0,
            )
            # Known one step ahead, so that the next page's loads need not wait.
            page = tl.load(table + tl.minimum(number + 1, last - 1))
            if WIDEN:
                keys = e4m3_to_float16(keys)
            logits = tile_logits(
                keys, scales, columns, half_weights, PAGE, BLOCK_Q, HEADS
            )
            tl.store(
                out_rows[None, :] + key[:, None],
                logits,
                mask=key[:, None] < tl.minimum(length, longest)[None, :],
            )


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    width: int,
    config: PagedConfig | None = None,
) -> torch.Tensor:
    """How much each query wants each cached key before it.

    The launch depends on shapes only: it can be captured in a CUDA graph, and replayed
    with other lengths and pages.

    Args:
        q: [B, next_n, heads, 128] float8_e4m3fn; 16, 32 or 64 heads, any `next_n`.
        cache: [pages, 32 or 64, ..., 132] uint8, each page dense: the e4m3 values of
            all its keys, then their float32 scales. Pages may lie apart.
        weights: [B * next_n, heads] float32, with all scales of the query in them.
        lengths: int32, keys that each query sees: [B, next_n], or [B] or [B, 1] for the
            last query of each request, one less for each query before it.
        block_table: [B, any] int32, numbers of the pages of each request.
        width: columns of the result; keys behind them are left out.

    Returns:
        [B * next_n, width] float32; columns behind a query's length are not
        initialized. Rows are 1 KiB aligned.

    Raises:
        ValueError: a shape, dtype or stride is not one of the above.
    """
    check_query(q, weights)
    page_size = _check_cache(cache)
    requests, next_n, heads, _ = q.shape
    _check_requests(requests, next_n, lengths, block_table)
    out = empty_logits(requests * next_n, width, q.device)
    if out.numel() == 0 or block_table.shape[1] == 0:
        return out
    capability, num_sms = device_of(q.device)
    native = has_fp8_mma(capability)
    config = config or choose_paged(capability, heads, next_n)
    blocks = triton.cdiv(next_n, config.block_queries)
    pages = min(triton.cdiv(width, page_size), block_table.shape[1])
    shares = programs_per_request(requests * blocks, pages, num_sms)
    code_type = torch.float8_e4m3fn if native else torch.uint8
    _paged_kernel[(shares, requests, blocks)](
        q.contiguous().view(code_type),
        cache.view(code_type),
        cache.view(torch.float32),
        weights.contiguous(),
        lengths.contiguous(),
        block_table,
        out,
        next_n,
        width,
        block_table.shape[1],
        cache.stride(0),
        block_table.stride(0),
        out.stride(0),
        HEADS=heads,
        PAGE=page_size,
        LENGTH_PER_QUERY=lengths.numel() == requests * next_n,
        WIDEN=not native,
        BLOCK_Q=config.block_queries,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _check_cache(cache: torch.Tensor) -> int:
    """The size of its pages."""
    page_size = cache.shape[1] if cache.dim() > 2 else 0
    if (
        cache.dtype != torch.uint8
        or page_size not in PAGE_SIZES
        or cache.shape[2:].numel() != TOKEN_BYTES
        or not cache[:1].reshape(1, -1).is_contiguous()
        or cache.stride(0) % SCALE_BYTES
        or cache.storage_offset() % SCALE_BYTES
    ):
        raise ValueError(
            f"cache is {cache.dtype} {list(cache.shape)} with strides {cache.stride()};"
            f" expected uint8 [pages, 32 or 64, {TOKEN_BYTES}] of dense pages, aligned"
            f" to {SCALE_BYTES} bytes"
        )
    return page_size


def _check_requests(
    requests: int, next_n: int, lengths: torch.Tensor, block_table: torch.Tensor
) -> None:
    if lengths.dtype != torch.int32 or lengths.numel() not in (
        requests,
        requests * next_n,
    ):
        raise ValueError(
            f"lengths are {lengths.dtype} {list(lengths.shape)}; expected int32"
            f" [{requests}, {next_n}] or [{requests}]"
        )
    if (
        block_table.dtype != torch.int32
        or block_table.dim() != 2
        or block_table.shape[0] < requests
        or (block_table.shape[1] > 1 and block_table.stride(1) != 1)
    ):
        raise ValueError(
            f"block_table is {block_table.dtype} {list(block_table.shape)} with strides"
            f" {block_table.stride()}; expected int32 [{requests}, any], rows dense"
        )
