# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Rotary embedding of per-head tensors on the CPU."""

import pytest
import torch

HEADS, DIM, MARGIN = 3, 64, 5


@pytest.fixture(params=[True, False], ids=["neox", "interleaved"])
def rope(request):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        yield RotaryEmbedding(DIM, DIM, 128, 10_000, request.param, torch.float32)


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_per_head_tensors_rotate_like_flat_ones(rope, tokens):
    torch.manual_seed(0)
    positions = torch.arange(tokens) * 3
    query = torch.randn(tokens, HEADS, DIM)
    key = torch.randn(tokens, 1, DIM)
    flat_query, flat_key = query.flatten(1).clone(), key.flatten(1).clone()
    want_query, want_key = rope.forward_cpu(positions, flat_query, flat_key)
    native_query, _ = rope.forward_native(positions, query.clone(), key.clone())

    got_query, got_key = rope.forward_cpu(positions, query, key)

    assert torch.equal(got_query.flatten(1), want_query)
    assert torch.equal(got_key.flatten(1), want_key)
    torch.testing.assert_close(got_query, native_query)
    # The operation works in place; callers may rely on it.
    assert torch.equal(query, got_query)
    assert torch.equal(key, got_key)


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_neighbors_of_strided_tensors_stay_untouched(rope, tokens):
    torch.manual_seed(0)
    positions = torch.arange(tokens) * 3
    wide_query = torch.randn(tokens, HEADS, MARGIN + DIM + MARGIN)
    wide_key = torch.randn(tokens, MARGIN + DIM + MARGIN)
    query, key = wide_query.clone(), wide_key.clone()
    inside = slice(MARGIN, MARGIN + DIM)
    want_query, want_key = rope.forward_native(
        positions, query[..., inside].clone(), key[:, None, inside].clone()
    )

    got_query, got_key = rope.forward_cpu(
        positions, query[..., inside], key[:, None, inside]
    )

    torch.testing.assert_close(got_query, want_query)
    torch.testing.assert_close(got_key, want_key)
    for changed, before in ((query, wide_query), (key, wide_key)):
        assert torch.equal(changed[..., :MARGIN], before[..., :MARGIN])
        assert torch.equal(changed[..., -MARGIN:], before[..., -MARGIN:])


def test_query_alone_is_rotated(rope):
    query = torch.randn(4, HEADS, DIM)
    want, _ = rope.forward_native(torch.arange(4), query.clone())
    got, key = rope.forward_cpu(torch.arange(4), query)
    torch.testing.assert_close(got, want)
    assert key is None
