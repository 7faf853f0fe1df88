# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

import gguf.quants
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.ggml_types import (
    GGML_TYPES,
    GGML_TYPES_BY_NAME,
    ggml_type,
)


@pytest.mark.parametrize("theirs", GGMLQuantizationType, ids=lambda t: t.name)
def test_id_name_and_block_equal_gguf_py(theirs):
    ours = ggml_type(int(theirs))
    assert ours is GGML_TYPES_BY_NAME[theirs.name]
    assert ours.id == theirs
    assert (ours.block_size, ours.block_bytes) == GGML_QUANT_SIZES[theirs]


@pytest.mark.parametrize("theirs", GGMLQuantizationType, ids=lambda t: t.name)
def test_loadable_is_what_gguf_py_dequantizes(theirs):
    ours = ggml_type(int(theirs))
    block = np.zeros((1, ours.block_bytes), dtype=np.uint8)
    try:
        gguf.quants.dequantize(block, theirs)
        dequantizes = True
    except NotImplementedError:
        dequantizes = False
    assert ours.loadable is dequantizes


def test_only_q2_0_is_newer_than_gguf_py():
    ids = {int(t) for t in GGMLQuantizationType}
    extra = [t for t in GGML_TYPES.values() if t.id not in ids]
    assert [(t.id, t.name, t.block_size, t.block_bytes) for t in extra] == [
        (42, "Q2_0", 64, 18)
    ]
    assert not extra[0].loadable


@pytest.mark.parametrize(
    ("name", "n", "expected"),
    [
        ("F32", 1, 4),
        ("BF16", 6144, 12288),
        ("Q8_0", 192, 204),
        ("Q4_K", 6144, 3456),
        ("IQ1_S", 2048, 400),
        ("MXFP4", 2048, 1088),
    ],
)
def test_row_bytes(name, n, expected):
    assert GGML_TYPES_BY_NAME[name].row_bytes(n) == expected


def test_row_bytes_refuses_a_cut_block():
    with pytest.raises(GGUFError, match="192 elements .* Q4_K blocks of 256"):
        GGML_TYPES_BY_NAME["Q4_K"].row_bytes(192)


@pytest.mark.parametrize(
    ("type_id", "message"),
    [
        (139, r"id 139 \(IQ4_K\) is an ik_llama.cpp-only quantization"),
        (133, r"id 133 \(Q6_0\) is an ik_llama.cpp-only"),
        (229, r"id 229 \(IQ1_M_R4\) is an ik_llama.cpp-only"),
        (202, r"id 202 is an ik_llama.cpp-only"),
        (399, r"id 399 is an ik_llama.cpp-only"),
        *[(i, f"id {i} is retired") for i in (4, 5, 31, 32, 33, 36, 37, 38)],
        (43, "unknown ggml type id 43, expected one of 0 to 42"),
        (132, "unknown ggml type id 132"),
        (400, "unknown ggml type id 400"),
        (2**32 - 1, "unknown ggml type id 4294967295"),
    ],
)
def test_other_ids_are_refused_by_name(type_id, message):
    with pytest.raises(GGUFError, match=message):
        ggml_type(type_id)
