# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Raw GGUF blocks as tensors: shapes, cuts on block boundaries, dequantization.

A row of ``n`` weights is ``n / block_size`` blocks of ``block_bytes`` bytes, one
after another; a matrix is its rows one after another, without padding. A block
therefore never spans two rows, and any whole number of rows or of blocks can be
dequantized alone. This is the reference: block values come from gguf-py, apart from
the types that are a reinterpretation of bytes (F32, F16, BF16) and Q8_0.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

import gguf.quants
from gguf.constants import GGMLQuantizationType
from vllm.logger import init_logger
from vllm.transformers_utils.gguf.ggml_types import GGMLType, ggml_type

logger = init_logger(__name__)

Buffer: TypeAlias = bytes | memoryview | np.ndarray

FLOAT_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types whose rows are plain numbers: type name -> dtype of the same bytes."""

# Elements handled at a time. gguf-py needs up to about ten float32 temporaries of
# this size for a codebook type, which stays within a core's cache and under 16 MiB.
_CHUNK_ELEMENTS = 1 << 18


def is_float(kind: GGMLType) -> bool:
    """Whether blocks of `kind` are plain floating-point numbers."""
    return kind.name in FLOAT_DTYPES


def row_bytes(kind: GGMLType, columns: int, what: str) -> int:
    """Bytes of one row of `columns` weights of the matrix called `what`.

    Raises ValueError if the row is not a whole number of blocks.
    """
    if columns % kind.block_size:
        raise ValueError(
            f"{what}: rows of {columns} weights are not a whole number of "
            f"{kind.name} blocks ({kind.block_size} weights each)."
        )
    return columns // kind.block_size * kind.block_bytes


def narrow_columns(
    data: torch.Tensor, kind: GGMLType, start: int, columns: int, what: str
) -> torch.Tensor:
    """The weights `start` to `start + columns` of every row, as a view.

    `data`: uint8 [..., row bytes]; the result is uint8 [..., row bytes of `columns`].
    Raises ValueError if either end lies inside a block.
    """
    if start % kind.block_size or columns % kind.block_size:
        raise ValueError(
            f"{what}: the cut at weights {start} to {start + columns} of a row splits "
            f"a {kind.name} block of {kind.block_size} weights. Use a smaller "
            "tensor-parallel size."
        )
    scale = kind.block_bytes
    return data.narrow(
        -1, start // kind.block_size * scale, columns // kind.block_size * scale
    )


def to_bytes(values: torch.Tensor) -> torch.Tensor:
    """Numbers as the raw bytes of their type: [..., n] -> uint8 [..., n * itemsize]."""
    return values.contiguous().view(torch.uint8)


def _floats(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def decode(blocks: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(blocks.view(dtype))

    return decode


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale = blocks[:, :2].contiguous().view(torch.float16).to(torch.float32)
    quants = blocks[:, 2:].view(torch.int8)
    if out.dtype == torch.float32:
        torch.mul(quants, scale, out=out)
    else:
        out.copy_(quants * scale)


def _from_gguf_py(kind: GGMLType) -> Callable[[torch.Tensor, torch.Tensor], None]:
    gguf_type = GGMLQuantizationType(kind.id)

    def decode(blocks: torch.Tensor, out: torch.Tensor) -> None:
        # As one row: gguf-py loops in Python over groups of rows.
        row = blocks.view(1, -1).numpy()
        values = gguf.quants.dequantize(row, gguf_type)
        out.copy_(torch.from_numpy(values).view(out.shape))

    return decode


def _decoder(kind: GGMLType) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A function that decodes uint8 [n, block bytes] into [n, block size]."""
    if not kind.loadable:
        raise ValueError(
            f"GGUF type {kind.name} (id {kind.id}) holds no weights that can be "
            "dequantized; convert the file to another type."
        )
    if kind.name in FLOAT_DTYPES:
        return _floats(FLOAT_DTYPES[kind.name])
    if kind.name == "Q8_0":
        return _q8_0
    return _from_gguf_py(kind)


def dequantize_rows(
    data: Buffer, kind: GGMLType, rows: int, columns: int, out: torch.Tensor
) -> None:
    """Dequantize `rows` rows of `columns` weights into `out`.

    `data`: the rows' bytes in host memory, contiguous; it may be read-only.
    `out`: [rows, columns] on the CPU, contiguous, float32, float16 or bfloat16;
    values are computed in float32 and rounded once. Temporary memory stays below
    16 MiB whatever the size. Raises ValueError if a size does not fit or the type
    cannot be dequantized.
    """
    source = np.frombuffer(data, dtype=np.uint8)
    expected = rows * row_bytes(kind, columns, "dequantize")
    if source.size != expected:
        raise ValueError(
            f"{rows} x {columns} weights of type {kind.name} take {expected} bytes, "
            f"but {source.size} were given."
        )
    if out.shape != (rows, columns) or not out.is_contiguous() or not out.is_cpu:
        raise ValueError(
            f"The output must be a contiguous CPU tensor of shape {(rows, columns)}; "
            f"it has shape {tuple(out.shape)} and is on {out.device}."
        )
    decode = _decoder(kind)
    blocks = source.reshape(-1, kind.block_bytes)
    target = out.view(-1, kind.block_size)
    step = _CHUNK_ELEMENTS // kind.block_size
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        if not chunk.flags.writeable:
            # torch refuses (with a warning) to share read-only memory.
            chunk = chunk.copy()
        decode(torch.from_numpy(chunk), target[start : start + step])


@torch.library.custom_op("vllm_glm_dsa::gguf_dequantize", mutates_args=())
def _dequantize(
    blocks: torch.Tensor, type_id: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    kind = ggml_type(type_id)
    if not blocks.is_cpu:
        logger.warning_once(
            "GGUF blocks on %s are dequantized on the host for every use. This is the "
            "slow reference path.",
            blocks.device.type,
        )
    host = blocks.detach().cpu().contiguous()
    out = torch.empty(host.shape[0], columns, dtype=dtype)
    dequantize_rows(host.numpy(), kind, host.shape[0], columns, out)
    return out.to(blocks.device)


@_dequantize.register_kernel("cuda")
def _dequantize_on_gpu(
    blocks: torch.Tensor, type_id: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    # Where there is no GPU, Triton may be missing.
    from vllm.model_executor.layers.quantization.gguf import triton_dequantize

    kind = ggml_type(type_id)
    return triton_dequantize.triton_dequantize(blocks, kind, columns, dtype)


@_dequantize.register_fake
def _(
    blocks: torch.Tensor, type_id: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    return blocks.new_empty((blocks.shape[0], columns), dtype=dtype)


def dequantize(
    blocks: torch.Tensor, kind: GGMLType, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weights of `blocks` as a new tensor on the same device.

    `blocks`: uint8 [rows, row bytes of `columns`]. Returns [rows, columns] of `dtype`
    (float32 arithmetic, rounded once). On a CUDA device Triton computes; elsewhere off
    the CPU the data makes a round trip to the host. Traceable by torch.compile.
    """
    return torch.ops.vllm_glm_dsa.gguf_dequantize(blocks, kind.id, columns, dtype)
