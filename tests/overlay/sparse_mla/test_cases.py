# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the kernels are compared with is right itself, and comparing has teeth."""

import math
import struct

import pytest
import torch

from tests.overlay.sparse_mla.cases import (
    DS_MLA_BYTES,
    LATENT,
    PATTERNS,
    Case,
    Errors,
    attention,
    lse_bound,
    make,
    out_bound,
    pack_fp8_ds_mla,
    unpack,
)
from vllm.v1.attention.ops.sparse_mla.reference import sparse_mla_reference

CACHES = ("model", "fp8", "fp8_ds_mla")


@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_vectorized_attention_equals_the_reference(cache, counts, rope):
    case = Case(3, 10, 40, cache, torch.float16, rope, counts=counts)
    inputs, _ = make(case)
    values = unpack(inputs.rows, cache, inputs.kv_scale, rope)
    assert values.shape == (case.rows, LATENT + rope)
    want = sparse_mla_reference(
        inputs.joined_q,
        values,
        inputs.indices.masked_fill(~inputs.chosen, -1),
        scale=inputs.scale,
        kv_lora_rank=LATENT,
    )
    errors = Errors()
    errors.add("", attention(inputs), want, 1e-12, 1e-12)
    assert not errors.problems


def test_a_packed_row_has_its_fields_where_the_layout_says():
    values = torch.zeros(2, 576)
    values[1, 128:131] = torch.tensor([1.75, -448.0, 2.0**-9]) * 0.3
    values[1, 512:514] = torch.tensor([1.0, -2.5])
    scales = torch.tensor([[1.0, 1.0, 1.0, 1.0], [9.0, 0.3, 7.0, 8.0]])
    row = bytes(pack_fp8_ds_mla(values, scales)[1].tolist())
    assert len(row) == DS_MLA_BYTES == 656
    # 1.75 is exponent 0 with mantissa 6/8; the last one is the smallest subnormal.
    assert row[128:132] == bytes([0x3E, 0xFE, 0x01, 0x00])
    assert struct.unpack("<4f", row[512:528]) == pytest.approx((9.0, 0.3, 7.0, 8.0))
    assert row[528:532] == struct.pack("<HH", 0x3F80, 0xC020)


@pytest.mark.parametrize("cache", CACHES)
def test_cases_hold_what_they_promise(cache):
    case = Case(2, 10, 50, cache, counts=True)
    inputs, values = make(case)
    held = unpack(inputs.rows, cache, inputs.kv_scale, case.rope)
    used = torch.zeros(case.rows, dtype=torch.bool)
    used[inputs.indices[inputs.chosen].long()] = True
    assert held[~used].isnan().all()
    assert not used[0], "row 0 is what a kernel reads that clamps -1"
    close = 0.0 if cache == "model" else 0.05
    error = (held[used] - values[used].double()).norm() / held[used].norm()
    assert float(error) <= close
    assert (inputs.indices == 2**31 - 1).any(), "garbage lies beyond the counts"
    assert (inputs.indices < -1).any()
    scales = inputs.rows[used, 512:528].contiguous().view(torch.float32)
    if cache == "fp8_ds_mla":
        assert (scales.log2() % 1 != 0).all(), "a scale is a power of two"


def test_patterns_differ_by_token():
    inputs, _ = make(Case(1, len(PATTERNS), 90))
    found = inputs.chosen.sum(1).tolist()
    assert found[0] == 90
    assert 45 < found[1] < 85
    assert found[2:] == [30, 1, 0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda out, lse: out[0].mul_(1.01), "output error", id="off"),
        pytest.param(lambda out, lse: out[0, 1, 7].fill_(math.nan), "NaN", id="nan"),
        pytest.param(lambda out, lse: lse[2, 0].add_(0.003), "lse error", id="lse"),
        pytest.param(lambda out, lse: lse[0, 1].fill_(math.nan), "NaN", id="lse-nan"),
        pytest.param(lambda out, lse: lse[4].fill_(-9e9), "not 0 and -inf", id="low"),
        pytest.param(lambda out, lse: out[4, 1, 3].fill_(1e-3), "not 0", id="not-0"),
    ],
)
def test_comparing_finds(damage, message):
    inputs, _ = make(Case(2, 5, 70))
    out, lse = attention(inputs)
    good = out.to(torch.bfloat16), lse.float()
    damaged = good[0].clone(), good[1].clone()
    damage(*damaged)
    errors = Errors()
    errors.compare("good", good, inputs)
    assert not errors.problems
    errors.compare("bad", damaged, inputs)
    assert len(errors.problems) == 1
    assert message in errors.problems[0]


def test_only_short_rows_of_quantized_caches_have_a_wider_bound():
    inputs, _ = make(Case(1, 5, 90, "fp8"))
    assert lse_bound(inputs).flatten().tolist() == pytest.approx(
        [2e-3, 2e-3, 8e-3, 8e-3, 8e-3] if inputs.chosen[1].sum() >= 64 else []
    )
    assert out_bound(inputs) == 4e-3
    plain, _ = make(Case(1, 5, 90, dtype=torch.float16))
    assert (lse_bound(plain), out_bound(plain)) == (2e-3, 1e-3)
