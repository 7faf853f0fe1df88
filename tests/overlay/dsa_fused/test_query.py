# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`fused_q` in Triton's interpreter, bit for bit: its inputs make float32 exact."""

from typing import Any

import pytest
import torch

from tests.helpers.real_triton import in_interpreter
from tests.overlay.dsa_fused.cases import Query, query_inputs


def run(
    case: Query, **changes: Any
) -> tuple[dict[str, Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    from vllm.v1.attention.ops.dsa_fused.query import fused_q

    inputs = query_inputs(case) | changes
    return inputs, fused_q(**inputs)


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("indexer", ["", "neox", "interleaved"])
@pytest.mark.parametrize("heads", [1, 8, 11])
def test_queries_are_rotated(heads, indexer, dtype):
    from vllm.v1.attention.ops.dsa_fused.reference import rotate_reference

    inputs, (codes, weights, q_pe) = run(Query(indexer, heads, 2, dtype))
    table = inputs["q_pe_cos_sin_cache"]
    want = rotate_reference(inputs["q_pe"], inputs["positions"], table, True)
    assert torch.equal(q_pe, want.to(dtype))
    assert q_pe.is_contiguous()
    if not indexer:
        assert codes.numel() == weights.numel() == 0


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("indexer", ["neox", "interleaved"])
@pytest.mark.parametrize("index_heads", [1, 32, 37])
def test_index_queries_are_rotated_and_quantized(index_heads, indexer, dtype):
    from vllm.v1.attention.ops.dsa_fused.reference import (
        quantize_reference,
        rotate_reference,
    )

    inputs, (codes, weights, _) = run(Query(indexer, 3, index_heads, dtype))
    want = rotate_reference(
        inputs["index_q"],
        inputs["positions"],
        inputs["index_q_cos_sin_cache"],
        indexer == "interleaved",
    )
    want_codes, scale = quantize_reference(want, 1e-4 / 448)
    assert scale.min() < 1e-6 < 1e-2 < scale.max()
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(codes.view(torch.uint8), want_codes)
    softmax_scale = torch.tensor(inputs["index_weights_softmax_scale"])
    want_weights = inputs["index_weights"].float() * scale * softmax_scale
    assert torch.equal(weights, want_weights * inputs["index_weights_head_scale"])


@in_interpreter
def test_no_token():
    _, (codes, weights, q_pe) = run(Query(dtype=torch.float32, tokens=0))
    assert codes.shape == (0, 32, 128)
    assert weights.shape == (0, 32)
    assert q_pe.shape == (0, 8, 64)


REFUSED = {
    "quantized": ({"quantize_mqa": True}, "supports_quant_query_input = False"),
    "index queries": ({"index_q": None}, "Index queries"),
    "weights": ({"index_weights": torch.zeros(5, 31)}, r"expected \[5, 32\]"),
    "table": ({"q_pe_cos_sin_cache": torch.zeros(9, 32)}, "q_table has shape"),
    "rotated": ({"index_q_cos_sin_cache": torch.zeros(9, 256)}, "256 of 128"),
    "rope": ({"q_pe": torch.zeros(5, 8, 48)}, "is 48, expected a power of two"),
}


@in_interpreter
@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run(Query(dtype=torch.float32), **changes)
