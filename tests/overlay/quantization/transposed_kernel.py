# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""A kernel that loads weights as a matrix product would: part of some rows, transposed.

To be imported where Triton is the real one.
"""

from vllm.model_executor.layers.quantization.gguf.triton_decode import load_weights
from vllm.triton_utils import tl, triton

COLUMNS = 128
ROWS = 4


@triton.jit
def transposed_kernel(
    blocks_ptr,
    out_ptr,
    tables_ptr,
    row_bytes,
    start,
    end,
    rows,
    TYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """float32 [COLUMNS, ROWS]: columns `start` to `end` of the first `rows` rows."""
    column = start + tl.arange(0, COLUMNS)[:, None]
    row = tl.arange(0, ROWS)[None, :]
    weights = load_weights(
        blocks_ptr + row.to(tl.int64) * row_bytes,
        column,
        (column < end) & (row < rows),
        tables_ptr,
        TYPE,
    )
    tl.store(out_ptr + (column - start) * ROWS + row, weights)
