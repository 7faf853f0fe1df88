# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What products with GGUF blocks in CUDA C++ need: `csrc/gguf`, in wheels for CUDA.

`cuda_linear` and `cuda_moe` launch the kernels. Where these do not fit (other dtypes,
rows that end within a run, a wheel or device without them), Triton's do the work.
"""

import functools

import torch

from vllm.logger import init_logger
from vllm.transformers_utils.gguf.ggml_types import GGMLType

logger = init_logger(__name__)

# Types with kernels, as csrc/gguf/types.cuh has them.
CUDA_TYPES = frozenset(
    {
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
    }
)

# Tokens of a tile, as in csrc/gguf/tiles.h.
SMALL_TILE = 32
LARGE_TILE = 128

# Weights of a row of which every kernel can take a multiple, and bytes of which the
# values of a token must begin at a multiple.
_RUN = 256
_VALUES_ALIGNMENT = 16


@functools.cache
def is_available(device: torch.device) -> bool:
    """Whether the extension is there and has machine code for the device.

    If not, a warning says so: what comes instead is slower.
    """
    try:
        import vllm._glm_dsa_C  # noqa: F401
    except ImportError as error:
        problem = f"cannot be imported ({error})"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        problem = f"has no code for compute capability {major}.{minor}"
        try:
            if torch.ops.vllm_glm_dsa.gguf_has_kernels(device.index or 0):
                return True
        except RuntimeError as error:
            problem = f"does not run ({str(error).splitlines()[0]})"
    logger.warning_once(
        "The compiled extension vllm._glm_dsa_C %s. Triton multiplies GGUF blocks "
        "instead, more slowly. A wheel for CUDA has the extension if nvcc was there "
        "when it was built; VLLM_GLM_DSA_CUDA_ARCHS chooses architectures.",
        problem,
    )
    return False


def alignment(kind: GGMLType) -> int:
    """Bytes of which the address of every row must be a multiple."""
    if kind.block_size == _RUN and kind.block_bytes % 16 == 0:
        return 16
    return 4 if kind.block_bytes % 4 == 0 else 2 - kind.block_bytes % 2


def fits(x: torch.Tensor, kind: GGMLType, columns: int, *places: int) -> bool:
    """Whether kernels can multiply values like `x` with matrices of `columns`.

    places: the matrices' addresses in bytes, and strides between them.
    """
    return (
        x.dtype == torch.bfloat16
        and kind.name in CUDA_TYPES
        and columns % _RUN == 0
        and all(place % alignment(kind) == 0 for place in places)
        and is_available(x.device)
    )


def can_read(x: torch.Tensor) -> bool:
    """Whether the tokens of `x`, [tokens, columns], begin where kernels can read."""
    places = (x.data_ptr(), x.stride(0) * x.element_size())
    return x.stride(1) == 1 and all(p % _VALUES_ALIGNMENT == 0 for p in places)
