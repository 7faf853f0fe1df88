# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Products with a matrix of GGUF blocks in CUDA C++.

With few tokens, quants are multiplied as they are and sums of groups are scaled, so
that nothing is rounded but the result. With more, weights are rounded to bfloat16, for
a tile of tokens each time. With very many, `triton_linear` dequantizes for cuBLAS.
"""

import torch

from vllm.model_executor.layers.quantization.gguf.cuda_extension import (
    LARGE_TILE,
    SMALL_TILE,
    can_read,
    fits,
)
from vllm.model_executor.layers.quantization.gguf.triton_decode import tables
from vllm.transformers_utils.gguf.ggml_types import GGMLType

# Tokens up to which weights are not rounded; 8 share one reading of the blocks.
FEW_TOKENS = 16
# Tokens up to which small tiles are faster.
SMALL_TILE_TOKENS = 64
# Tokens from which on it takes less time to dequantize the matrix.
MANY_TOKENS = 768


def takes_linear(x: torch.Tensor, blocks: torch.Tensor, kind: GGMLType) -> bool:
    """Whether `cuda_linear` can and should multiply them."""
    tokens, columns = x.shape
    return (
        0 < tokens <= MANY_TOKENS
        and len(blocks) > 0
        and can_read(x)
        and fits(x, kind, columns, blocks.data_ptr(), blocks.stride(0))
    )


def cuda_linear(
    x: torch.Tensor, blocks: torch.Tensor, kind: GGMLType, out: torch.Tensor
) -> None:
    """Write `x` times the transposed matrix into `out`.

    Args:
        x: bfloat16 [tokens, columns]; tokens may be apart.
        blocks: uint8 [rows, row bytes]; rows may be apart.
        out: bfloat16 [tokens, rows]; tokens may be apart.

    See `takes_linear`. Sums are float32; they depend on sizes, values and the device.
    """
    args = (out, x, blocks, tables(kind, x.device), kind.id)
    if len(x) <= FEW_TOKENS:
        torch.ops.vllm_glm_dsa.gguf_skinny_linear(*args)
    else:
        tile = SMALL_TILE if len(x) <= SMALL_TILE_TOKENS else LARGE_TILE
        torch.ops.vllm_glm_dsa.gguf_tiles_linear(*args, tile)
