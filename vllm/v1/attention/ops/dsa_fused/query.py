# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Rotation of a DSA layer's queries, and quantization of its index queries."""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.dsa_fused.common import (
    check_power_of_two,
    index_pairs,
    load_cos_sin,
    rotate,
    rows_arguments,
    vector_argument,
)
from vllm.v1.attention.ops.fp8_bytes import float32_to_e4m3, power_of_two_scale

BLOCK_HEADS = 4


@triton.jit
def dsa_query_kernel(
    positions_ptr,
    q_pe_ptr,
    q_pe_stride,
    q_pe_head_stride,
    q_table_ptr,
    q_table_stride,
    q_pe_out_ptr,
    index_q_ptr,
    index_q_stride,
    index_q_head_stride,
    index_table_ptr,
    index_table_stride,
    codes_ptr,
    weights_ptr,
    weights_stride,
    weights_out_ptr,
    softmax_scale,
    head_scale,
    HEADS: tl.constexpr,
    ROPE_HALF: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    INDEX_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Programs (token, block of heads): first those of `q_pe`, then those of `index_q`.

    Strides are in elements; outputs are contiguous. Without an indexer the pointers of
    index queries are None.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS

    if block < blocks:
        head = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        inside = head < HEADS
        at = tl.arange(0, 2 * ROPE_HALF)[None, :]
        source = q_pe_ptr + token * q_pe_stride + head * q_pe_head_stride + at
        rope = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        x, y = tl.split(tl.reshape(rope, (BLOCK_HEADS, ROPE_HALF, 2)))
        cos, sin = load_cos_sin(q_table_ptr, q_table_stride, position, ROPE_HALF)
        x, y = rotate(x, y, cos[None, :], sin[None, :])
        rope = tl.interleave(x, y).to(q_pe_out_ptr.dtype.element_ty)
        row = (token * HEADS + head) * 2 * ROPE_HALF
        tl.store(q_pe_out_ptr + row + at, rope, mask=inside)

    if index_q_ptr is not None:  # noqa: SIM102 - `and` would compile what follows
        if block >= blocks:
            heads = (block - blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            inside = heads < INDEX_HEADS
            head = heads[:, None]
            row_ptr = index_q_ptr + token * index_q_stride + head * index_q_head_stride
            first, second = index_pairs(INDEX_HALF, INTERLEAVED)
            first, second = first[None, :], second[None, :]
            at = tl.arange(0, INDEX_DIM)[None, :]
            known = inside[:, None]
            unrotated = known & (at >= 2 * INDEX_HALF)
            x = tl.load(row_ptr + first, mask=known, other=0.0).to(tl.float32)
            y = tl.load(row_ptr + second, mask=known, other=0.0).to(tl.float32)
            rest = tl.load(row_ptr + at, mask=unrotated, other=0.0).to(tl.float32)
            cos, sin = load_cos_sin(
                index_table_ptr, index_table_stride, position, INDEX_HALF
            )
            x, y = rotate(x, y, cos[None, :], sin[None, :])
            largest = tl.max(tl.maximum(tl.abs(x), tl.abs(y)), axis=1)
            largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
            scale = power_of_two_scale(largest, 1e-4 / 448)
            divisor = scale[:, None]
            row_ptr = codes_ptr + (token * INDEX_HEADS + head) * INDEX_DIM
            x_codes = float32_to_e4m3(tl.div_rn(x, divisor))
            y_codes = float32_to_e4m3(tl.div_rn(y, divisor))
            rest_codes = float32_to_e4m3(tl.div_rn(rest, divisor))
            tl.store(row_ptr + first, x_codes, mask=known)
            tl.store(row_ptr + second, y_codes, mask=known)
            tl.store(row_ptr + at, rest_codes, mask=unrotated)
            weights_at = weights_ptr + token * weights_stride + heads
            weights = tl.load(weights_at, mask=inside, other=0.0).to(tl.float32)
            weights = weights * scale * softmax_scale * head_scale
            tl.store(
                weights_out_ptr + token * INDEX_HEADS + heads, weights, mask=inside
            )


def fused_q(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    q_pe_cos_sin_cache: torch.Tensor,
    index_q: torch.Tensor | None,
    index_q_cos_sin_cache: torch.Tensor | None,
    ql_nope: torch.Tensor,
    q_scale: torch.Tensor,
    index_weights: torch.Tensor | None,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate the queries; rotate and quantize the index queries.

    Args:
        positions: [T], integers: rows of the tables.
        q_pe: [T, heads, rope], any strides of tokens and heads; rotated by interleaved
            pairs.
        q_pe_cos_sin_cache, index_q_cos_sin_cache: tables of [positions, n]; the cosines
            of n // 2 pairs, then the sines.
        index_q: [T, index heads, dim]. The first n elements are rotated, by interleaved
            pairs if `index_rope_interleave`.
        ql_nope, q_scale: not used, as queries are not quantized.
        index_weights: [T, index heads], any row stride.
        has_indexer: False if there are no index queries.
        quantize_mqa: must be False. No attention backend of the GPUs below SM89 takes
            quantized queries.

    Returns:
        Quantized index queries [T, index heads, dim], float8_e4m3fn; the weights times
        both scales and the power-of-two scale of each head's query, float32; rotated
        queries, as `q_pe` and contiguous. Without an indexer the first two are empty.

    Raises:
        ValueError: for shapes and strides that are not supported, and `quantize_mqa`.
    """
    if quantize_mqa:
        raise ValueError(
            "Queries cannot be quantized to fp8 on GPUs below SM89. The attention "
            "backend must say so: supports_quant_query_input = False."
        )
    tokens, heads, rope = q_pe.shape
    check_power_of_two("The size of a q_pe row", rope)
    index_heads = index_dim = rotated = 1
    if not has_indexer:
        index_q = index_q_cos_sin_cache = index_weights = None
    elif index_q is None or index_q_cos_sin_cache is None or index_weights is None:
        raise ValueError("Index queries, their weights or their table are missing.")
    else:
        _, index_heads, index_dim = index_q.shape
        rotated = index_q_cos_sin_cache.shape[-1]
        check_power_of_two("The size of an index query", index_dim)
        check_power_of_two("The rotated size of an index query", rotated)
        if rotated > index_dim:
            raise ValueError(f"{rotated} of {index_dim} elements are to be rotated.")
    q_pe_out = q_pe.new_empty(q_pe.shape)
    index_shape = (tokens if has_indexer else 0, index_heads, index_dim)
    codes = q_pe.new_empty(index_shape, dtype=torch.uint8)
    weights_out = q_pe.new_empty(index_shape[:2], dtype=torch.float32)
    arguments = (
        vector_argument("positions", positions, tokens)
        | rows_arguments("q_pe", q_pe, tokens, heads, rope)
        | rows_arguments("q_table", q_pe_cos_sin_cache, None, rope)
        | rows_arguments("index_q", index_q, *index_shape)
        | rows_arguments("index_table", index_q_cos_sin_cache, None, rotated)
        | rows_arguments("weights", index_weights, *index_shape[:2])
    )
    blocks = triton.cdiv(heads, BLOCK_HEADS)
    if index_q is not None:
        blocks += triton.cdiv(index_heads, BLOCK_HEADS)
    dsa_query_kernel[(tokens, blocks)](
        **arguments,
        q_pe_head_stride=q_pe.stride(1),
        q_pe_out_ptr=q_pe_out,
        index_q_head_stride=0 if index_q is None else index_q.stride(1),
        codes_ptr=codes,
        weights_out_ptr=weights_out,
        softmax_scale=index_weights_softmax_scale,
        head_scale=index_weights_head_scale,
        HEADS=heads,
        ROPE_HALF=rope // 2,
        INDEX_HEADS=index_heads,
        INDEX_DIM=index_dim,
        INDEX_HALF=rotated // 2,
        INTERLEAVED=index_rope_interleave,
        BLOCK_HEADS=BLOCK_HEADS,
        num_warps=1,
    )
    return codes.view(torch.float8_e4m3fn), weights_out, q_pe_out
