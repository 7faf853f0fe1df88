# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

import tracemalloc
import warnings

import gguf.quants
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from tests.helpers.ggml_quantize import ALL_TYPES, FLOAT_TYPES, random_blocks
from vllm.model_executor.layers.quantization.gguf import blocks
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reference(name: str, data: np.ndarray) -> torch.Tensor:
    """gguf-py's float32 values of uint8 [rows, row bytes]."""
    values = gguf.quants.dequantize(data, GGMLQuantizationType[name])
    return torch.from_numpy(np.array(values, dtype=np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL_TYPES)
def test_every_type_equals_gguf_py_bit_for_bit(name, dtype):
    data = random_blocks(name, 37, 768)
    out = torch.full((37, 768), float("nan"), dtype=dtype)
    blocks.dequantize_rows(data, GGML_TYPES_BY_NAME[name], 37, 768, out)
    expected = reference(name, data)
    assert expected.abs().max() > 0.05
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "IQ3_XXS", "BF16"])
def test_results_do_not_depend_on_where_chunks_end(name, monkeypatch):
    data = random_blocks(name, 37, 768)
    kind = GGML_TYPES_BY_NAME[name]
    monkeypatch.setattr(blocks, "_CHUNK_ELEMENTS", 1280)
    out = torch.empty(37, 768)
    blocks.dequantize_rows(data, kind, 37, 768, out)
    assert torch.equal(out, reference(name, data))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "F32"])
def test_read_only_memory_needs_no_warning(name):
    data = random_blocks(name, 2, 512)
    out = torch.empty(2, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocks.dequantize_rows(
            memoryview(data.tobytes()), GGML_TYPES_BY_NAME[name], 2, 512, out
        )
    assert torch.equal(out, reference(name, data))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ1_M", "IQ3_S", "NVFP4"])
def test_temporary_memory_is_bounded(name):
    rows, columns = 2048, 6144
    data = np.tile(random_blocks(name, 16, columns), (rows // 16, 1))
    out = torch.empty(rows, columns, dtype=torch.bfloat16)
    tracemalloc.start()
    try:
        blocks.dequantize_rows(data, GGML_TYPES_BY_NAME[name], rows, columns, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_zero_rows():
    out = torch.empty(0, 256)
    blocks.dequantize_rows(b"", GGML_TYPES_BY_NAME["Q4_K"], 0, 256, out)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "message"),
    [
        ("Q4_K", 1, 128, "not a whole number of Q4_K blocks"),
        ("Q4_K", 3, 256, "take 432 bytes, but 288 were given"),
        ("Q8_K", 2, 256, "Q8_K .* convert the file"),
    ],
)
def test_errors_name_type_and_sizes(name, rows, columns, message):
    data = bytes(584 if name == "Q8_K" else 288)
    with pytest.raises(ValueError, match=message):
        blocks.dequantize_rows(
            data, GGML_TYPES_BY_NAME[name], rows, columns, torch.empty(rows, columns)
        )


def test_output_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 256\)"):
        blocks.dequantize_rows(
            bytes(288), GGML_TYPES_BY_NAME["Q4_K"], 2, 256, torch.empty(256, 2)
        )


@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_float_rows_are_their_bytes(name):
    values = torch.randn(3, 64).to(blocks.FLOAT_DTYPES[name])
    data = blocks.to_bytes(values)
    kind = GGML_TYPES_BY_NAME[name]
    assert data.shape == (3, blocks.row_bytes(kind, 64, "x"))
    assert torch.equal(blocks.dequantize(data, kind, 64, values.dtype), values)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ4_XS", "F16"])
def test_narrowed_columns_are_the_columns_of_the_whole(name):
    data = torch.from_numpy(random_blocks(name, 5, 1024).copy())
    kind = GGML_TYPES_BY_NAME[name]
    part = blocks.narrow_columns(data, kind, 256, 512, "x")
    whole = blocks.dequantize(data, kind, 1024, torch.float32)
    values = blocks.dequantize(part, kind, 512, torch.float32)
    assert torch.equal(values, whole[:, 256:768])


@pytest.mark.parametrize(("start", "columns"), [(128, 256), (256, 128)])
def test_a_cut_inside_a_block_is_an_error(start, columns):
    data = torch.zeros(1, 576, dtype=torch.uint8)
    with pytest.raises(ValueError, match="blk.3.*splits a Q4_K block"):
        blocks.narrow_columns(data, GGML_TYPES_BY_NAME["Q4_K"], start, columns, "blk.3")


def test_dequantize_can_be_traced():
    kind = GGML_TYPES_BY_NAME["Q4_K"]
    data = torch.from_numpy(random_blocks("Q4_K", 8, 256).copy())

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x @ blocks.dequantize(data, kind, 256, torch.float32).t()

    x = torch.randn(3, 256)
    compiled = torch.compile(multiply, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), multiply(x))
