# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Products with matrices of GGUF blocks, interpreted, against float64."""

from unittest import mock

import pytest
import torch

from tests.helpers.gguf_weights import weights
from tests.helpers.real_triton import in_interpreter
from tests.overlay.quantization.triton_gguf_cases import (
    FLOAT16,
    FLOAT32,
    check,
    kind_of,
    random_blocks,
    values,
)

TYPES = ("Q8_0", "Q4_K", "Q6_K", "IQ2_XXS", "IQ4_XS", "MXFP4", "F16")
# Around the bounds of all ways to compute and of their tiles.
TOKENS = (1, 2, 3, 8, 17, 64, 65)
NAN = float("nan")


def product(
    x: torch.Tensor, blocks: torch.Tensor, name: str, **options
) -> torch.Tensor:
    """The product, in the middle of a larger tensor that must stay as it is."""
    from vllm.model_executor.layers.quantization.gguf.triton_linear import triton_linear

    tokens, rows = len(x), len(blocks)
    whole = torch.full((tokens + 2, rows + 5), NAN, dtype=x.dtype)
    out = whole[1:-1, 2:-3]
    options.setdefault("chunk_weights", 1 << 24)
    triton_linear(x, blocks, kind_of(name), out, **options)
    assert whole.isnan().sum() == whole.numel() - out.numel()
    return out


@in_interpreter
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", TYPES)
def test_product_with_an_odd_number_of_rows(name, tokens):
    blocks, x = random_blocks(name, 21, 256), values(tokens, 256)
    expected = x.double() @ weights(name, blocks).t()
    check(product(x, blocks, name), expected, FLOAT32)


@in_interpreter
@pytest.mark.parametrize("tokens", [1, 2, 3, 33])
@pytest.mark.parametrize(
    ("name", "columns"), [("Q8_0", 96), ("MXFP4", 544), ("F16", 50), ("Q4_K", 768)]
)
def test_columns_need_not_be_whole_tiles(name, columns, tokens):
    blocks, x = random_blocks(name, 70, columns), values(tokens, columns)
    expected = x.double() @ weights(name, blocks).t()
    check(product(x, blocks, name), expected, FLOAT32)


@in_interpreter
@pytest.mark.parametrize("tokens", [1, 2, 3, 65])
def test_float16_rounds_sums_once_and_weights_for_tensor_cores(tokens):
    blocks = random_blocks("Q6_K", 21, 512)
    x = values(tokens, 512, dtype=torch.float16)
    exact = weights("Q6_K", blocks)
    used = exact if tokens <= 2 else exact.half().double()
    check(product(x, blocks, "Q6_K"), x.double() @ used.t(), FLOAT16)


@in_interpreter
@pytest.mark.parametrize("tokens", [1, 2, 3, 65])
def test_where_weights_stay_float32(tokens):
    row = torch.zeros(1, 256)
    row[0, 0], row[0, 1] = 1 + 2**-12, -1
    x = torch.zeros(tokens, 256, dtype=torch.float16)
    x[:, :2] = 1
    out = product(x, row.view(torch.uint8), "F32")
    expected = 2**-12 if tokens <= 2 else 0.0
    assert torch.equal(out, torch.full((tokens, 1), expected, dtype=torch.float16))


@in_interpreter
@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
@pytest.mark.parametrize("parts", [1, 2, 3, 100])
def test_columns_cut_into_parts(tokens, parts):
    blocks, x = random_blocks("Q4_K", 9, 1280), values(tokens, 1280)
    expected = x.double() @ weights("Q4_K", blocks).t()
    out = product(x, blocks, "Q4_K", parts=parts)
    check(out, expected, FLOAT32)
    assert torch.equal(product(x, blocks, "Q4_K", parts=parts), out)


@in_interpreter
@pytest.mark.parametrize("tokens", [1, 5])
def test_few_rows_are_cut_into_parts_for_a_large_device(tokens):
    from vllm.model_executor.layers.quantization.gguf import triton_linear

    blocks, x = random_blocks("Q8_0", 9, 2048), values(tokens, 2048)
    expected = x.double() @ weights("Q8_0", blocks).t()
    one_part = product(x, blocks, "Q8_0", parts=1)
    with mock.patch.object(triton_linear, "_multiprocessors", lambda device: 132):
        out = product(x, blocks, "Q8_0")
    check(out, expected, FLOAT32)
    # Other parts are other sums.
    assert not torch.equal(out, one_part)


@in_interpreter
@pytest.mark.parametrize("chunk", [1, 7 * 512, 300 * 512, 1 << 24])
def test_many_tokens_dequantize_some_rows_at_a_time(chunk):
    from vllm.model_executor.layers.quantization.gguf import triton_linear

    rows = 20 if chunk < 512 * 256 else 520
    blocks, x = random_blocks("Q4_K", rows, 512), values(70, 512)
    inner, seen = triton_linear.triton_dequantize, []

    def dequantize(part, *args, **kwargs):
        seen.append(len(part))
        return inner(part, *args, **kwargs)

    with mock.patch.object(triton_linear, "triton_dequantize", dequantize):
        out = product(x, blocks, "Q4_K", chunk_weights=chunk)
    check(out, x.double() @ weights("Q4_K", blocks).t(), FLOAT32)
    most = {1: 1, 7 * 512: 7, 300 * 512: 256, 1 << 24: 520}[chunk]
    assert max(seen) == most and sum(seen) == rows


@in_interpreter
@pytest.mark.parametrize("tokens", [1, 3, 65])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "MXFP4"])
def test_blocks_that_are_a_part_of_the_rows_of_a_larger_matrix(name, tokens):
    kind = kind_of(name)
    whole, x = random_blocks(name, 12, 1024), values(tokens, 512)
    scale = kind.block_bytes
    part = whole[3:10, 256 // kind.block_size * scale : 768 // kind.block_size * scale]
    expected = x.double() @ weights(name, whole)[3:10, 256:768].t()
    check(product(x, part, name), expected, FLOAT32)


@in_interpreter
@pytest.mark.parametrize("tokens", [1, 3, 65])
def test_blocks_at_an_odd_address_are_copied(tokens):
    blocks, x = random_blocks("Q8_0", 7, 256), values(tokens, 256)
    odd = torch.zeros(blocks.numel() + 1, dtype=torch.uint8)
    odd[1:] = blocks.flatten()
    moved = odd[1:].view_as(blocks)
    assert moved.data_ptr() % 2 == 1
    from vllm.model_executor.layers.quantization.gguf import triton_linear

    addresses = []
    inner = (
        triton_linear._few_tokens if tokens < 65 else triton_linear.triton_dequantize
    )

    def record(*args, **kwargs):
        addresses.append(args[1 if tokens < 65 else 0].data_ptr())
        return inner(*args, **kwargs)

    with mock.patch.object(triton_linear, inner.__name__, record):
        out = product(x, moved, "Q8_0")
    check(out, x.double() @ weights("Q8_0", blocks).t(), FLOAT32)
    assert addresses and not any(address % 2 for address in addresses)


@in_interpreter
@pytest.mark.parametrize("tokens", [1, 3, 65])
def test_tokens_may_be_apart_or_transposed(tokens):
    blocks = random_blocks("Q8_0", 7, 256)
    x = values(tokens, 300)[:, 20:276]
    expected = x.double() @ weights("Q8_0", blocks).t()
    check(product(x, blocks, "Q8_0"), expected, FLOAT32)
    check(product(x.t().contiguous().t(), blocks, "Q8_0"), expected, FLOAT32)


@in_interpreter
@pytest.mark.parametrize(("tokens", "rows"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_compute(tokens, rows):
    from vllm.model_executor.layers.quantization.gguf.triton_linear import triton_linear

    out = torch.empty(tokens, rows)
    blocks = torch.empty(rows, 272, dtype=torch.uint8)
    triton_linear(
        torch.empty(tokens, 256), blocks, kind_of("Q8_0"), out, chunk_weights=1
    )


@in_interpreter
@pytest.mark.parametrize(
    ("shape", "out", "dtype"),
    [
        ((3, 271), (2, 3), torch.float32),
        ((3, 272), (3, 2), torch.float32),
        ((3, 272), (2, 3), torch.float16),
    ],
    ids=["bytes", "out", "dtype"],
)
def test_what_does_not_fit_is_refused(shape, out, dtype):
    from vllm.model_executor.layers.quantization.gguf.triton_linear import triton_linear

    x, blocks = torch.empty(2, 256), torch.empty(shape, dtype=torch.uint8)
    with pytest.raises(ValueError, match="2 tokens of 256 values .* Q8_0 blocks"):
        triton_linear(
            x, blocks, kind_of("Q8_0"), torch.empty(out, dtype=dtype), chunk_weights=1
        )


@in_interpreter
@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_beyond_two_and_four_gigabytes(tokens):
    """Only the pages of the last rows are ever touched."""
    blocks, x = random_blocks("Q8_0", 3, 256), values(tokens, 256)
    stride = (1 << 31) + 64
    whole = torch.empty(2 * stride + 272, dtype=torch.uint8)
    apart = whole.as_strided((3, 272), (stride, 1))
    apart.copy_(blocks)
    expected = x.double() @ weights("Q8_0", blocks).t()
    check(product(x, apart, "Q8_0"), expected, FLOAT32)
