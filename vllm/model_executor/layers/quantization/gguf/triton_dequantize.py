# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Dequantize raw GGUF blocks on a GPU, whole matrices or some of their rows."""

import torch

from vllm.model_executor.layers.quantization.gguf.triton_decode import (
    SUPPORTED,
    aligned,
    load_weights,
    tables,
)
from vllm.transformers_utils.gguf.ggml_types import GGMLType
from vllm.triton_utils import tl, triton

# Weights of a program: 16 for each of its threads.
_TILE = 2048
_MIN_COLUMNS = 256
_WARPS = 4


@triton.jit
def _dequantize_kernel(
    blocks_ptr,
    row_ids_ptr,
    out_ptr,
    tables_ptr,
    rows,
    out_rows,
    columns,
    row_stride,
    out_stride,
    TYPE: tl.constexpr,
    GATHER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    out_row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    wanted = out_row < out_rows
    if GATHER:
        row = tl.load(row_ids_ptr + out_row, mask=wanted, other=-1).to(tl.int64)
        found = (row >= 0) & (row < rows)
    else:
        row = out_row
        found = wanted
    inside = (column < columns)[None, :]
    weights = load_weights(
        blocks_ptr + (row * row_stride)[:, None],
        column[None, :],
        found[:, None] & inside,
        tables_ptr,
        TYPE,
    )
    if GATHER:
        # Nothing decodes to -0.0 in some types.
        weights = tl.where(found[:, None], weights, 0.0)
    tl.store(
        out_ptr + (out_row * out_stride)[:, None] + column[None, :],
        weights.to(out_ptr.dtype.element_ty),
        mask=wanted[:, None] & inside,
    )


def triton_dequantize(
    blocks: torch.Tensor,
    kind: GGMLType,
    columns: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    row_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weights of `blocks`, or of some of its rows, in `dtype`.

    Can be captured in a CUDA graph once the type's codebook is on the device, that is
    after a first call.

    Args:
        blocks: uint8 [rows, row bytes of `columns`]; the bytes of a row are contiguous,
            rows may lie apart. If they are not aligned as `alignment` says, they are
            copied first.
        kind: their type, one of `SUPPORTED`.
        columns: weights in a row.
        dtype: float32, float16 or bfloat16. Values are float32, rounded once.
        out: the result, [rows, columns] of `dtype`, if it is there already; columns are
            contiguous.
        row_ids: int32 or int64 [M], contiguous: rows to take. An id that is negative or
            not below `rows` gives zeros.

    Returns:
        [rows, columns], with `row_ids` [M, columns].

    Raises:
        ValueError: a type, shape, dtype or layout that is none of these.
    """
    _check_blocks(blocks, kind, columns)
    _check_row_ids(row_ids)
    rows = blocks.shape[0]
    shape = (rows if row_ids is None else row_ids.shape[0], columns)
    if out is None:
        out = blocks.new_empty(shape, dtype=dtype)
    elif out.shape != shape or out.dtype != dtype or out.stride(1) != 1:
        raise ValueError(
            f"The output must be {dtype} {list(shape)} with contiguous columns; found "
            f"{out.dtype} {list(out.shape)}, strides {list(out.stride())}."
        )
    if out.numel() == 0:
        return out
    blocks = aligned(blocks, kind)
    tile_columns = _tile_columns(columns)
    tile_rows = _TILE // tile_columns
    grid = (triton.cdiv(shape[0], tile_rows), triton.cdiv(columns, tile_columns))
    _dequantize_kernel[grid](
        blocks,
        blocks if row_ids is None else row_ids,
        out,
        tables(kind, blocks.device),
        rows,
        shape[0],
        columns,
        blocks.stride(0),
        out.stride(0),
        TYPE=kind.id,
        GATHER=row_ids is not None,
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
        num_warps=_WARPS,
    )
    return out


def _tile_columns(columns: int) -> int:
    """The largest power of two that divides `columns`, within bounds."""
    return max(_MIN_COLUMNS, min(columns & -columns, _TILE))


def _check_blocks(blocks: torch.Tensor, kind: GGMLType, columns: int) -> None:
    if kind.name not in SUPPORTED:
        raise ValueError(
            f"GGUF type {kind.name} cannot be decoded on a GPU; convert the file "
            f"to one of {', '.join(sorted(SUPPORTED))}."
        )
    if columns % kind.block_size:
        raise ValueError(
            f"Rows of {columns} weights are not a whole number of {kind.name} blocks "
            f"({kind.block_size} weights each)."
        )
    row_bytes = kind.row_bytes(columns)
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] != row_bytes:
        raise ValueError(
            f"{columns} weights of type {kind.name} are rows of {row_bytes} bytes, "
            f"uint8 [rows, {row_bytes}]; found {blocks.dtype} {list(blocks.shape)}."
        )
    if blocks.numel() and blocks.stride(1) != 1:
        raise ValueError(
            "The bytes of a row must be contiguous; the blocks have strides "
            f"{list(blocks.stride())}."
        )


def _check_row_ids(row_ids: torch.Tensor | None) -> None:
    if row_ids is None:
        return
    known = row_ids.dtype in (torch.int32, torch.int64)
    if not known or row_ids.dim() != 1 or not row_ids.is_contiguous():
        raise ValueError(
            "Row ids must be contiguous int32 or int64 [M]; found "
            f"{row_ids.dtype} {list(row_ids.shape)}, strides {list(row_ids.stride())}."
        )
