# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Quantize float32 rows into any ggml type that llama.cpp can write.

gguf-py writes F32, F16, BF16, Q8_0 and a few older types. K- and I-types go through
the C functions that the `xllamacpp` wheel exports, which is imported on first use only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_BY_GGUF_PY = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    "MXFP4",
)
_BY_GGML = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"),
    *("IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "NVFP4"),
    "Q1_0",
)
TYPES = _BY_GGUF_PY + _BY_GGML


def quantize(type_name: str, rows: np.ndarray) -> np.ndarray:
    """Quantize float32 `rows` [r, c] to uint8 [r, row bytes] of the named ggml type.

    Raises:
        ValueError: unknown type, not 2 dimensions, or the block does not divide c.
        ImportError: the type needs `xllamacpp`, which is not installed.
    """
    if type_name not in TYPES:
        raise ValueError(
            f"ggml type {type_name!r} cannot be written; use one of {', '.join(TYPES)}"
        )
    if rows.ndim != 2:
        raise ValueError(f"rows must have 2 dimensions, found shape {rows.shape}")
    ggml_type = GGMLQuantizationType[type_name]
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    count, columns = rows.shape
    if columns % block:
        raise ValueError(
            f"{type_name} has blocks of {block} values, which do not divide rows of "
            f"{columns}; choose a type with smaller blocks"
        )
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    if type_name in _BY_GGUF_PY:
        packed = gguf.quants.quantize(rows, ggml_type)
        return np.ascontiguousarray(packed).view(np.uint8).reshape(count, -1)
    out = np.zeros((count, columns // block * block_bytes), dtype=np.uint8)
    # Some I-types refuse to run without weights of importance; here all are equal.
    importance = np.ones(columns, dtype=np.float32)
    written = _quantizer(int(ggml_type))(
        int(ggml_type),
        rows.ctypes.data,
        out.ctypes.data,
        0,
        count,
        columns,
        importance.ctypes.data,
    )
    if written != out.nbytes:
        raise RuntimeError(
            f"ggml wrote {written} bytes of {type_name}, expected {out.nbytes}: gguf "
            "and xllamacpp disagree about the type; update both"
        )
    return out


@cache
def _library() -> ctypes.CDLL:
    # Located, not imported: only the symbols are needed, not a running llama.cpp.
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise ImportError(
            "K- and I-types need llama.cpp's quantizers: pip install xllamacpp"
        )
    extensions = sorted(Path(spec.origin).parent.glob("xllamacpp*.so"))
    if not extensions:
        raise ImportError(f"no xllamacpp*.so beside {spec.origin}: reinstall xllamacpp")
    library = ctypes.CDLL(str(extensions[0]))
    library.ggml_quantize_init.argtypes = [ctypes.c_int]
    library.ggml_quantize_init.restype = None
    library.ggml_quantize_chunk.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),  # type, source, destination
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),  # first row, rows, columns
        ctypes.c_void_p,  # importance
    ]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


@cache
def _quantizer(ggml_type: int) -> Callable[..., int]:
    library = _library()
    # Builds the tables that the I-types search; takes seconds for the smallest ones.
    library.ggml_quantize_init(ggml_type)
    quantize_chunk: Callable[..., int] = library.ggml_quantize_chunk
    return quantize_chunk
