# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Products with a matrix of GGUF blocks on a GPU, in Triton.

Three ways, by the number of tokens. Up to `VECTOR_TOKENS`, a program decodes some rows
in registers, keeps their weights in float32 and multiplies them with every token. Up to
`MANY_TOKENS`, it rounds the decoded weights to the activation's dtype and gives them to
the tensor cores. With more, some rows at a time are dequantized into a scratch buffer
for cuBLAS. The first two cut the columns into parts where there are few rows; the parts
are summed in a fixed order.
"""

import functools
import os
from dataclasses import dataclass

import torch

from vllm.model_executor.layers.quantization.gguf.triton_decode import (
    aligned,
    load_weights,
    tables,
)
from vllm.model_executor.layers.quantization.gguf.triton_dequantize import (
    triton_dequantize,
)
from vllm.transformers_utils.gguf.ggml_types import GGMLType
from vllm.triton_utils import tl, triton

# Tokens whose products are sums in float32, without tensor cores, 4 at most. The work
# grows with each; for the tensor cores, 16 tokens are as much work as one.
VECTOR_TOKENS = 2
# Tokens from which on a matrix is dequantized and given to cuBLAS. Below, reading the
# blocks once takes less time than writing and reading dequantized weights.
MANY_TOKENS = 64

# Programs for each multiprocessor below which columns are cut into parts.
_VECTOR_PROGRAMS = 8
_TILE_PROGRAMS = 4
_SUM_COLUMNS = 512
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@dataclass(frozen=True)
class Tile:
    """What a program computes in one step, and how it is compiled."""

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int


def vector_tile(columns: int) -> Tile:
    """The tile for up to `VECTOR_TOKENS` tokens: 16 weights for a thread."""
    wide = 512 if columns % 512 == 0 else 256
    return Tile(2048 // wide, VECTOR_TOKENS, wide, warps=4, stages=1)


def linear_tile(tokens: int) -> Tile:
    """The tile of the tensor cores for up to `MANY_TOKENS` tokens."""
    if tokens <= 16:
        return Tile(32, 16, 128, warps=4, stages=3)
    # Of tiles of this size, those with which no device spills registers.
    if tokens <= 32:
        return Tile(128, 32, 64, warps=8, stages=3)
    return Tile(64, 64, 128, warps=8, stages=2)


@triton.jit
def neighbors(x_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """For `in_runs`: any bytes [ROWS, COLUMNS], as if from the first token's values."""
    if _INTERPRETED:
        return tl.zeros([ROWS, COLUMNS], tl.uint8)
    else:
        column = tl.broadcast_to(tl.arange(0, COLUMNS)[None, :], [ROWS, COLUMNS])
        return tl.load(x_ptr.to(tl.pointer_type(tl.uint8)) + column)


@triton.jit
def in_runs(weights, run):
    """`weights`, computed 16 neighbors in a thread, as `run` was loaded.

    Without this, Triton spreads neighbors as blocks' alignment or the tensor cores have
    it, and threads decode the same scales and read the same entries of codebooks many
    times. The bytes of `run` are not used: the assembler drops them, and their load.
    """
    if _INTERPRETED:
        return weights
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=f,f,r",
            [weights, run.to(tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def decode(
    row_ptr,
    start,
    columns,
    tables_ptr,
    TYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """float32 weights [N, COLUMNS] from column `start` on, zeros beyond `columns`.

    row_ptr: pointers to the first byte of rows, [N, 1]. EVEN: COLUMNS divides columns.
    """
    column = start + tl.arange(0, COLUMNS)[None, :]
    mask = tl.full([1, COLUMNS], 1, tl.int1) if EVEN else column < columns
    return load_weights(row_ptr, column, mask, tables_ptr, TYPE)


@triton.jit
def load_vector(
    x_ptr,
    start,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One token's values for all rows of weights, float32 [ROWS, COLUMNS].

    Loads of one row would be laid out otherwise than those of weights, and the weights
    moved through shared memory in every step.
    """
    column = start + tl.arange(0, COLUMNS)[None, :]
    column = tl.broadcast_to(column, [ROWS, COLUMNS])
    mask = tl.full([ROWS, COLUMNS], 1, tl.int1) if EVEN else column < columns
    return tl.load(x_ptr + column, mask=mask, other=0).to(tl.float32)


@triton.jit
def load_tokens(token_ptr, start, columns, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Values [tokens, COLUMNS]; token_ptr: pointers to the tokens, [tokens, 1]."""
    column = start + tl.arange(0, COLUMNS)[None, :]
    if EVEN:
        return tl.load(token_ptr + column)
    else:
        return tl.load(token_ptr + column, mask=column < columns, other=0)


@triton.jit
def add_products(sums, x, weights, run):
    """`sums` [tokens, rows] plus x times the transposed weights, rounded to x's dtype.

    Weights come second: as the first factor, tensor cores would want them in registers,
    and they would pass through shared memory twice.
    """
    weights = in_runs(weights, run).to(x.dtype)
    return tl.dot(x, tl.trans(weights), sums, input_precision="ieee")


@triton.jit
def _vector_kernel(
    x_ptr,
    x_stride,
    blocks_ptr,
    row_stride,
    tables_ptr,
    out_ptr,
    out_stride,
    part_stride,
    rows,
    columns,
    part_columns,
    TYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Program (i, j): rows from i * ROWS on, for all tokens, over part j of columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows beyond the last repeat it, so that loads need no mask; they are not stored.
    known = tl.minimum(row, rows - 1).to(tl.int64)
    row_ptr = blocks_ptr + (known * row_stride)[:, None]
    part = tl.program_id(1)
    first = part * part_columns
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    sum_0, sum_1, sum_2, sum_3 = zero, zero, zero, zero
    for start in range(first, tl.minimum(first + part_columns, columns), COLUMNS):
        weights = decode(row_ptr, start, columns, tables_ptr, TYPE, COLUMNS, EVEN)
        sum_0 += weights * load_vector(x_ptr, start, columns, ROWS, COLUMNS, EVEN)
        if TOKENS > 1:
            x1_ptr = x_ptr + x_stride
            sum_1 += weights * load_vector(x1_ptr, start, columns, ROWS, COLUMNS, EVEN)
        if TOKENS > 2:
            x2_ptr = x_ptr + 2 * x_stride
            sum_2 += weights * load_vector(x2_ptr, start, columns, ROWS, COLUMNS, EVEN)
        if TOKENS > 3:
            x3_ptr = x_ptr + 3 * x_stride
            sum_3 += weights * load_vector(x3_ptr, start, columns, ROWS, COLUMNS, EVEN)
    target = out_ptr + part.to(tl.int64) * part_stride + row
    inside = row < rows
    tl.store(target, tl.sum(sum_0, 1), mask=inside)
    if TOKENS > 1:
        tl.store(target + out_stride, tl.sum(sum_1, 1), mask=inside)
    if TOKENS > 2:
        tl.store(target + 2 * out_stride, tl.sum(sum_2, 1), mask=inside)
    if TOKENS > 3:
        tl.store(target + 3 * out_stride, tl.sum(sum_3, 1), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _tile_kernel(
    x_ptr,
    x_stride,
    blocks_ptr,
    row_stride,
    tables_ptr,
    out_ptr,
    out_stride,
    part_stride,
    tokens,
    rows,
    columns,
    part_columns,
    TYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Program (i, j): tile i of tokens (which vary faster) and rows, part j."""
    token_tiles = tl.cdiv(tokens, TOKENS)
    row = tl.program_id(0) // token_tiles * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(0) % token_tiles * TOKENS + tl.arange(0, TOKENS)
    known = tl.minimum(row, rows - 1).to(tl.int64)
    row_ptr = blocks_ptr + (known * row_stride)[:, None]
    known_token = tl.minimum(token, tokens - 1).to(tl.int64)
    token_ptr = x_ptr + (known_token * x_stride)[:, None]
    part = tl.program_id(1)
    first = part * part_columns
    run = neighbors(x_ptr, ROWS, COLUMNS)
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(first, tl.minimum(first + part_columns, columns), COLUMNS):
        x = load_tokens(token_ptr, start, columns, COLUMNS, EVEN)
        weights = decode(row_ptr, start, columns, tables_ptr, TYPE, COLUMNS, EVEN)
        sums = add_products(sums, x, weights, run)
    target = out_ptr + part.to(tl.int64) * part_stride
    target += (token.to(tl.int64) * out_stride)[:, None] + row[None, :]
    inside = (token < tokens)[:, None] & (row < rows)[None, :]
    tl.store(target, sums, mask=inside)


@triton.jit
def _sum_parts_kernel(
    parts_ptr, part_stride, out_ptr, out_stride, parts, rows, COLUMNS: tl.constexpr
):
    """Program (i, j): outputs from i * COLUMNS on of token j, parts added in order."""
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(1).to(tl.int64)
    inside = row < rows
    total = tl.zeros([COLUMNS], tl.float32)
    source = parts_ptr + token * rows + row
    for _ in range(parts):
        total += tl.load(source, mask=inside, other=0)
        source += part_stride
    tl.store(out_ptr + token * out_stride + row, total, mask=inside)


def triton_linear(
    x: torch.Tensor,
    blocks: torch.Tensor,
    kind: GGMLType,
    out: torch.Tensor,
    *,
    chunk_weights: int,
    parts: int | None = None,
) -> None:
    """Write `x` times the transposed matrix into `out`.

    Args:
        x: [tokens, columns], float32, float16 or bfloat16.
        blocks: uint8 [rows, row bytes], on x's device; rows may be apart.
        out: [tokens, rows] of x's dtype; tokens may be apart.
        chunk_weights: how many weights are dequantized at a time, with many tokens.
        parts: into which columns are cut, with few tokens; by default, by size.

    Sums are float32 and do not depend on anything but sizes and values. Nothing waits
    for the host. Raises ValueError if sizes do not fit.
    """
    tokens, columns = x.shape
    _check(x, blocks, kind, out)
    if 0 in out.shape:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    blocks = aligned(blocks, kind)
    if tokens <= MANY_TOKENS:
        _few_tokens(x, blocks, kind, out, parts)
        return
    step = max(1, chunk_weights // columns)
    if step > 256:
        # Whole tiles of the matrix product.
        step = step // 256 * 256
    scratch = x.new_empty(min(step, len(blocks)), columns)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        weights = scratch[: len(part)]
        triton_dequantize(part, kind, columns, x.dtype, out=weights)
        torch.mm(x, weights.t(), out=out[:, start : start + step])


def _few_tokens(
    x: torch.Tensor,
    blocks: torch.Tensor,
    kind: GGMLType,
    out: torch.Tensor,
    parts: int | None,
) -> None:
    (tokens, columns), rows = x.shape, len(blocks)
    vector = tokens <= VECTOR_TOKENS
    tile = vector_tile(columns) if vector else linear_tile(tokens)
    programs = triton.cdiv(rows, tile.rows)
    if not vector:
        programs *= triton.cdiv(tokens, tile.tokens)
    steps = triton.cdiv(columns, tile.columns)
    if parts is None:
        wanted = _multiprocessors(x.device)
        wanted *= _VECTOR_PROGRAMS if vector else _TILE_PROGRAMS
        # A part of one step would write more than it reads.
        parts = min(triton.cdiv(wanted, programs), max(1, steps // 2))
    part_columns = triton.cdiv(steps, parts) * tile.columns
    parts = triton.cdiv(columns, part_columns)
    target = out
    if parts > 1:
        target = x.new_empty(parts, tokens, rows, dtype=torch.float32)
    sizes = (rows, columns, part_columns)
    kernel = _vector_kernel if vector else _tile_kernel
    kernel[programs, parts](
        x,
        x.stride(0),
        blocks,
        blocks.stride(0),
        tables(kind, x.device),
        target,
        target.stride(-2),
        target.stride(0),
        *(sizes if vector else (tokens, *sizes)),
        TYPE=kind.id,
        TOKENS=tokens if vector else tile.tokens,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        EVEN=columns % tile.columns == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if parts > 1:
        _sum_parts_kernel[triton.cdiv(rows, _SUM_COLUMNS), tokens](
            target,
            target.stride(0),
            out,
            out.stride(0),
            parts,
            rows,
            COLUMNS=_SUM_COLUMNS,
        )


def _check(
    x: torch.Tensor, blocks: torch.Tensor, kind: GGMLType, out: torch.Tensor
) -> None:
    tokens, columns = x.shape
    expected = (columns // kind.block_size * kind.block_bytes, tokens, len(blocks))
    found = (blocks.shape[1], *out.shape)
    if columns % kind.block_size or found != expected or out.dtype != x.dtype:
        raise ValueError(
            f"{tokens} tokens of {columns} values in {x.dtype} and {kind.name} blocks "
            f"{list(blocks.shape)} do not make {out.dtype} {list(out.shape)}."
        )
    if blocks.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(
            f"Bytes of a row of blocks, and outputs of a token, must be contiguous; "
            f"their strides are {blocks.stride(1)} and {out.stride(1)}."
        )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """How many there are; 1 for the CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
