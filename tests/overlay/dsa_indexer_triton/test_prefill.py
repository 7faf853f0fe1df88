# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Index logits of prompts in Triton's interpreter, against float64."""

from unittest import mock

import pytest
import torch

from tests.helpers.real_triton import in_interpreter
from tests.overlay.dsa_indexer_triton.cases import (
    BOUND,
    OPS,
    Prefill,
    check,
    make_prefill,
    poisoned_results,
)

# Without fp8 arithmetic, and with it: interpreted, both give the same.
WIDENED, NATIVE = (8, 0), (9, 0)
LENGTHS = ((0, 1), (3, 66), (10, 74), (100, 165), (0, 200), (50, 50), (150, 199))


def run(case: Prefill, capability=WIDENED, num_sms=1, **changes):
    from vllm.v1.attention.ops.dsa_indexer.prefill_logits import mqa_logits

    inputs = make_prefill(case)
    inputs.call |= changes
    with poisoned_results(capability, num_sms):
        return mqa_logits(**inputs.call), inputs


@in_interpreter
@pytest.mark.parametrize("capability", [WIDENED, NATIVE])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_logits_of_ranges_equal_the_reference(heads, capability):
    got, inputs = run(Prefill(LENGTHS, heads), capability)
    assert not check(got, inputs)


@in_interpreter
@pytest.mark.parametrize("capability", [WIDENED, NATIVE])
def test_any_e4m3_value_is_taken(capability):
    got, inputs = run(Prefill(LENGTHS, exact=False), capability)
    assert not check(got, inputs, BOUND)


@in_interpreter
def test_many_queries_have_their_keys_widened_once_in_parts():
    ranges = tuple((i % 7, min(200, i % 7 + 3 * i)) for i in range(66))
    with mock.patch(f"{OPS}.prefill_logits.WIDENED_KEYS", 80):
        got, inputs = run(Prefill(ranges, heads=16))
    assert not check(got, inputs)


@in_interpreter
def test_programs_share_the_keys_of_long_prompts():
    ranges = ((0, 1100), (500, 530), (1030, 1100), (511, 513), (0, 0))
    got, inputs = run(Prefill(ranges, keys=1100), num_sms=100)
    assert not check(got, inputs)


@in_interpreter
def test_keys_behind_the_width_are_left_out():
    got, inputs = run(Prefill(LENGTHS), width=64)
    assert not check(got, inputs)


@in_interpreter
def test_range_ends_with_the_keys():
    inputs = make_prefill(Prefill(((0, 200), (190, 200))))
    inputs.call["ends"] += 100
    inputs.call["width"] = 300
    with poisoned_results(WIDENED):
        from vllm.v1.attention.ops.dsa_indexer.prefill_logits import mqa_logits

        assert not check(mqa_logits(**inputs.call), inputs)


@in_interpreter
def test_nan_keys_reach_their_own_column_only():
    inputs = make_prefill(Prefill(((0, 64), (0, 64)), keys=64))
    inputs.call["keys"].view(torch.uint8)[7] = 0x7F
    with poisoned_results(WIDENED):
        from vllm.v1.attention.ops.dsa_indexer.prefill_logits import mqa_logits

        got = mqa_logits(**inputs.call)
    assert got[:, 7].isnan().all()
    assert not got[:, :7].isnan().any() and not got[:, 8:64].isnan().any()


@in_interpreter
def test_negative_dot_products_count_nothing():
    inputs = make_prefill(Prefill(((0, 200), (5, 100))))
    inputs.call["q"] = (-inputs.call["q"].float().abs()).to(torch.float8_e4m3fn)
    inputs.call["keys"] = inputs.call["keys"].float().abs().to(torch.float8_e4m3fn)
    with poisoned_results(WIDENED):
        from vllm.v1.attention.ops.dsa_indexer.prefill_logits import mqa_logits

        got = mqa_logits(**inputs.call)
    assert (got[0] == 0).all() and (got[1, :95] == 0).all()


@in_interpreter
def test_no_keys_or_no_queries():
    for case in (Prefill(((0, 0),), keys=0), Prefill(((0, 3),) * 2, keys=0)):
        got, inputs = run(case)
        assert got.shape == (len(case.ranges), inputs.call["width"])
        assert got.isnan().all()


@in_interpreter
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 32, 128)}, "q is torch.float32"),
        ({"q": torch.zeros(2, 8, 128).to(torch.float8_e4m3fn)}, "8 index heads"),
        ({"weights": torch.zeros(2, 16)}, "weights are"),
        ({"weights": torch.zeros(2, 32).half()}, "weights are torch.float16"),
        ({"keys": torch.zeros(200, 64).to(torch.float8_e4m3fn)}, "keys are"),
        ({"keys": torch.zeros(200, 256).to(torch.float8_e4m3fn)[:, ::2]}, "keys are"),
        ({"scales": torch.ones(200).int()}, "scales are torch.int32"),
        ({"scales": torch.ones(199)}, "scales are"),
    ],
)
def test_other_inputs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run(Prefill(((0, 5), (1, 7))), **changes)
