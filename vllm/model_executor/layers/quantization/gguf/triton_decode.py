# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Weights of raw GGUF blocks in Triton kernels, whatever the type.

Float32 values are those of gguf-py bit for bit, also where the compiler fuses a
multiplication with an addition: the factors of a weight have at most 24 significant
bits together, so every product is exact, and at most one addition of each formula
rounds. (float32's own subnormals, which MXFP4 can reach, are kept.)
"""

from functools import cache

import numpy as np
import torch

import gguf.quants
from vllm.model_executor.layers.quantization.gguf import triton_decode_iq as iq
from vllm.model_executor.layers.quantization.gguf import triton_decode_k as k
from vllm.model_executor.layers.quantization.gguf import triton_decode_legacy as legacy
from vllm.model_executor.layers.quantization.gguf.triton_decode_bytes import (
    eight_in_a_thread,
)
from vllm.transformers_utils.gguf.ggml_types import (
    GGML_TYPES,
    GGML_TYPES_BY_NAME,
    GGMLType,
)
from vllm.triton_utils import tl, triton


def _id(name: str) -> tl.constexpr:
    return tl.constexpr(GGML_TYPES_BY_NAME[name].id)


_F32 = _id("F32")
_F16 = _id("F16")
_BF16 = _id("BF16")
_Q4_0 = _id("Q4_0")
_Q4_1 = _id("Q4_1")
_Q5_0 = _id("Q5_0")
_Q5_1 = _id("Q5_1")
_Q8_0 = _id("Q8_0")
_Q2_K = _id("Q2_K")
_Q3_K = _id("Q3_K")
_Q4_K = _id("Q4_K")
_Q5_K = _id("Q5_K")
_Q6_K = _id("Q6_K")
_TQ1_0 = _id("TQ1_0")
_TQ2_0 = _id("TQ2_0")
_IQ4_NL = _id("IQ4_NL")
_MXFP4 = _id("MXFP4")
_NVFP4 = _id("NVFP4")
_IQ1_S = _id("IQ1_S")
_IQ1_M = _id("IQ1_M")
_IQ2_XXS = _id("IQ2_XXS")
_IQ2_XS = _id("IQ2_XS")
_IQ2_S = _id("IQ2_S")
_IQ3_XXS = _id("IQ3_XXS")
_IQ3_S = _id("IQ3_S")
_IQ4_XS = _id("IQ4_XS")

SUPPORTED = frozenset(kind.name for kind in GGML_TYPES.values() if kind.loadable)
"""Names of the types that can be decoded: all that hold weights."""


@triton.jit
def load_weights(row_ptr, column, mask, tables_ptr, TYPE: tl.constexpr):
    """Decode weights where they are used: float32, of the broadcast shape.

    Args:
        row_ptr: uint8 pointers to rows' first bytes, such as [N, 1]. See `alignment`.
        column: int32, the weights' numbers within the row, such as [1, K].
        mask: which weights to load; the others give zero, -0.0 maybe.
        tables_ptr: what `tables` gives for the type.
        TYPE: the type's id.

    It is fastest if columns are consecutive and start at a multiple of their number:
    then Triton sees which bytes lie together and which are shared. Scales and codebooks
    are read through the read-only cache: the kernel must not write them.
    """
    if TYPE == _F32:
        weights = legacy.plain(row_ptr, column, mask, tl.float32)
    elif TYPE == _F16:
        weights = legacy.plain(row_ptr, column, mask, tl.float16)
    elif TYPE == _BF16:
        weights = legacy.bf16(row_ptr, column, mask)
    elif TYPE == _Q4_0:
        weights = legacy.q4_0(row_ptr, column, mask)
    elif TYPE == _Q4_1:
        weights = legacy.q4_1(row_ptr, column, mask)
    elif TYPE == _Q5_0:
        weights = legacy.q5_0(row_ptr, column, mask)
    elif TYPE == _Q5_1:
        weights = legacy.q5_1(row_ptr, column, mask)
    elif TYPE == _Q8_0:
        weights = legacy.q8_0(row_ptr, column, mask)
    elif TYPE == _Q2_K:
        weights = k.q2_k(row_ptr, column, mask)
    elif TYPE == _Q3_K:
        weights = k.q3_k(row_ptr, column, mask)
    elif TYPE == _Q4_K:
        weights = k.q4_k(row_ptr, column, mask)
    elif TYPE == _Q5_K:
        weights = k.q5_k(row_ptr, column, mask)
    elif TYPE == _Q6_K:
        weights = k.q6_k(row_ptr, column, mask)
    elif TYPE == _TQ1_0:
        weights = k.tq1_0(row_ptr, column, mask)
    elif TYPE == _TQ2_0:
        weights = k.tq2_0(row_ptr, column, mask)
    elif TYPE == _IQ4_NL:
        weights = legacy.iq4_nl(row_ptr, column, mask, tables_ptr)
    elif TYPE == _MXFP4:
        weights = legacy.mxfp4(row_ptr, column, mask, tables_ptr)
    elif TYPE == _NVFP4:
        weights = legacy.nvfp4(row_ptr, column, mask, tables_ptr)
    elif TYPE == _IQ1_S:
        weights = iq.iq1_s(row_ptr, column, mask, tables_ptr)
    elif TYPE == _IQ1_M:
        weights = iq.iq1_m(row_ptr, column, mask, tables_ptr)
    elif TYPE == _IQ2_XXS:
        weights = iq.iq2_xxs(row_ptr, column, mask, tables_ptr)
    elif TYPE == _IQ2_XS:
        weights = iq.iq2_xs(row_ptr, column, mask, tables_ptr)
    elif TYPE == _IQ2_S:
        weights = iq.iq2_s(row_ptr, column, mask, tables_ptr)
    elif TYPE == _IQ3_XXS:
        weights = iq.iq3_xxs(row_ptr, column, mask, tables_ptr)
    elif TYPE == _IQ3_S:
        weights = iq.iq3_s(row_ptr, column, mask, tables_ptr)
    elif TYPE == _IQ4_XS:
        weights = iq.iq4_xs(row_ptr, column, mask, tables_ptr)
    else:
        tl.static_assert(False, "no such type of blocks")
    if TYPE != _F32 and TYPE != _F16 and TYPE != _BF16:
        weights = eight_in_a_thread(weights, column, tables_ptr)
    return weights


def alignment(kind: GGMLType) -> int:
    """Bytes of which the address of every row must be a multiple."""
    if kind.name == "F32":
        return 4
    return 2 - kind.block_bytes % 2


def aligned(blocks: torch.Tensor, kind: GGMLType) -> torch.Tensor:
    """`blocks`, uint8 [rows, row bytes], copied if rows begin where none may.

    They do behind an odd number of MXFP4's rows, which can be of odd length.
    """
    step = alignment(kind)
    if blocks.data_ptr() % step or blocks.stride(0) % step:
        return blocks.clone(memory_format=torch.contiguous_format)
    return blocks


@cache
def tables(kind: GGMLType, device: torch.device) -> torch.Tensor:
    """The codebook of the type as int32 [n], for `load_weights`.

    The first entries are its values, four signed bytes in an entry, the lowest first.
    The 128 rows of eight signs follow in types that have an index of signs, bit 0 for
    the first weight. [1] without meaning if the type has no codebook. Kept for the life
    of the process; make it before a CUDA graph is captured.
    """
    return torch.from_numpy(_codebook(kind)).to(device)


def _codebook(kind: GGMLType) -> np.ndarray:
    if kind.name in ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"):
        # IQ4_XS takes its values from IQ4_NL.
        name = "IQ4_NL" if kind.name == "IQ4_XS" else kind.name
        values = np.array(getattr(gguf.quants, name).kvalues, dtype=np.int8)
        return values.view(np.int32)
    quants = getattr(gguf.quants, kind.name, None)
    if quants is None or quants.grid_hex is None:
        return np.zeros(1, dtype=np.int32)
    quants.init_grid()
    grid = quants.grid.astype(np.int8).reshape(-1).view(np.int32)
    if kind.name not in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS"):
        return grid
    signs = np.frombuffer(gguf.quants.IQ2_XXS.ksigns, dtype=np.uint8)
    return np.concatenate([grid, signs.astype(np.int32)])
