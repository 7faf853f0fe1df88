# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How raw matrices lie in a parameter, and products with them.

A parameter of bytes holds one or more matrices ("shards"), one after another and
without padding; each may have a type of its own. docs/design/gguf_blocks.md is the
description that kernels rely on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import torch
import torch.nn.functional as F

from vllm.model_executor.layers.quantization.gguf.blocks import (
    dequantize,
    narrow_columns,
    row_bytes,
)
from vllm.transformers_utils.gguf.ggml_types import GGMLType, ggml_type

# Weights dequantized at a time: 32 MiB as bfloat16, whatever the matrix.
_CHUNK_WEIGHTS = 1 << 24


class UnreadBlocks(Protocol):
    """A matrix of the file that is read once it is known which part is needed.

    Stands for a tensor, uint8 [rows, row bytes].
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...

    def dim(self) -> int: ...

    def narrow(self, dim: int, start: int, length: int) -> Self: ...

    def read_into(self, target: torch.Tensor) -> None:
        """Have the bytes read into `target`, of the same shape; maybe later."""


Blocks: TypeAlias = torch.Tensor | UnreadBlocks


@dataclass(frozen=True)
class BlockShard:
    """One matrix inside a parameter of bytes, as this rank holds it."""

    kind: GGMLType
    rows: int
    columns: int
    row_bytes: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """uint8 [..., bytes] of the parameter -> uint8 [..., rows, row bytes]."""
        part = data.narrow(-1, self.offset, self.nbytes)
        return part.unflatten(-1, (self.rows, self.row_bytes))


def lay_out(
    kinds: Sequence[GGMLType], rows: Sequence[int], columns: int, what: str
) -> tuple[BlockShard, ...]:
    """Shards of `rows` x `columns` weights, in order, from byte 0 on.

    Raises ValueError, naming `what`, if a row is not a whole number of blocks.
    """
    shards: list[BlockShard] = []
    offset = 0
    for kind, count in zip(kinds, rows, strict=True):
        shard = BlockShard(kind, count, columns, row_bytes(kind, columns, what), offset)
        shards.append(shard)
        offset += shard.nbytes
    return tuple(shards)


def load_shard(
    target: torch.Tensor,
    shard: BlockShard,
    loaded: Blocks,
    *,
    row_parts: int,
    column_parts: int,
    rank: int,
    what: str,
) -> None:
    """Copy or read this rank's part of a whole matrix of the file into `target`.

    `target`: uint8 [rows, row bytes] of this rank. `loaded`: uint8 [rows, row bytes]
    of the file, `row_parts` times as many rows and `column_parts` times as many
    columns as this rank holds. Raises ValueError if the sizes do not fit or a block
    would be cut.
    """
    full_columns = shard.columns * column_parts
    expected = (
        shard.rows * row_parts,
        row_bytes(shard.kind, full_columns, what),
    )
    if loaded.dtype != torch.uint8 or tuple(loaded.shape) != expected:
        raise ValueError(
            f"{what}: expected the {shard.kind.name} blocks of {expected[0]} rows of "
            f"{full_columns} weights, uint8 {list(expected)}; found "
            f"{loaded.dtype} {list(loaded.shape)}."
        )
    if row_parts > 1:
        loaded = loaded.narrow(0, rank * shard.rows, shard.rows)
    if column_parts > 1:
        loaded = narrow_columns(
            loaded, shard.kind, rank * shard.columns, shard.columns, what
        )
    if isinstance(loaded, torch.Tensor):
        target.copy_(loaded)
    else:
        loaded.read_into(target)


def linear(x: torch.Tensor, shard: BlockShard, blocks: torch.Tensor) -> torch.Tensor:
    """`x` [..., columns] times the transposed matrix: [..., rows], in x's dtype.

    `blocks`: uint8 [rows, row bytes]. Weights are rounded to x's dtype, some rows at
    a time. This is the reference.
    """
    step = max(1, _CHUNK_WEIGHTS // shard.columns)
    parts = [
        F.linear(x, dequantize(part, shard.kind, shard.columns, x.dtype))
        for part in blocks.split(step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def linear_of_shards(
    x: torch.Tensor, shards: Sequence[BlockShard], blocks: torch.Tensor
) -> torch.Tensor:
    """`x` [..., columns] times all transposed matrices of a parameter, side by side.

    `blocks`: uint8 [bytes], the shards back to back. Returns [..., rows of all shards]
    in x's dtype. Traceable by torch.compile, also with any number of tokens.
    """
    return torch.ops.vllm_glm_dsa.gguf_linear(
        x,
        blocks,
        [shard.kind.id for shard in shards],
        [shard.rows for shard in shards],
    )


@torch.library.custom_op("vllm_glm_dsa::gguf_linear", mutates_args=())
def _linear(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type_ids: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    shards = lay_out([*map(ggml_type, type_ids)], rows, x.shape[-1], "linear")
    parts = [linear(x, shard, shard.view(blocks)) for shard in shards]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


@_linear.register_kernel("cuda")
def _linear_on_gpu(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type_ids: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.gguf.cuda_linear import (
        cuda_linear,
        takes_linear,
    )
    from vllm.model_executor.layers.quantization.gguf.triton_linear import triton_linear

    matrices = _joined([*map(ggml_type, type_ids)], rows)
    kinds = [kind for kind, _ in matrices]
    columns = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], sum(rows))
    flat_x, flat_out = x.reshape(-1, columns), out.view(-1, sum(rows))
    counts = [count for _, count in matrices]
    for shard in lay_out(kinds, counts, columns, "linear"):
        part, flat_out = flat_out.tensor_split([shard.rows], dim=1)
        matrix = shard.view(blocks)
        if takes_linear(flat_x, matrix, shard.kind):
            cuda_linear(flat_x, matrix, shard.kind, part)
        else:
            triton_linear(
                flat_x, matrix, shard.kind, part, chunk_weights=_CHUNK_WEIGHTS
            )
    return out


@_linear.register_fake
def _(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type_ids: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(rows)))


def _joined(
    kinds: Sequence[GGMLType], rows: Sequence[int]
) -> list[tuple[GGMLType, int]]:
    """Types and rows of matrices, neighbors of one type being one matrix."""
    matrices: list[tuple[GGMLType, int]] = []
    for kind, count in zip(kinds, rows, strict=True):
        if matrices and matrices[-1][0] == kind:
            matrices[-1] = (kind, matrices[-1][1] + count)
        else:
            matrices.append((kind, count))
    return matrices
