# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Index logits of cached keys in Triton's interpreter, against float64."""

import pytest
import torch

from tests.helpers.real_triton import in_interpreter
from tests.overlay.dsa_indexer_triton.cases import (
    BOUND,
    FP8,
    TOKEN_BYTES,
    Paged,
    check,
    make_paged,
    poisoned_results,
)

WIDENED, NATIVE = (8, 0), (9, 0)
LENGTHS = (0, 1, 63, 64, 65, 200)


def run(case: Paged, capability=WIDENED, num_sms=1, **changes):
    from vllm.v1.attention.ops.dsa_indexer.paged_logits import paged_mqa_logits

    inputs = make_paged(case)
    inputs.call |= changes
    with poisoned_results(capability, num_sms):
        return paged_mqa_logits(**inputs.call), inputs


@in_interpreter
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 5, 6])
def test_logits_of_pages_equal_the_reference(next_n, heads):
    capability = NATIVE if next_n % 2 else WIDENED
    got, inputs = run(Paged(LENGTHS, next_n, heads), capability)
    assert not check(got, inputs)


@in_interpreter
@pytest.mark.parametrize("capability", [WIDENED, NATIVE])
def test_any_e4m3_value_is_taken(capability):
    got, inputs = run(Paged(LENGTHS, exact=False), capability)
    assert not check(got, inputs, BOUND)


@in_interpreter
@pytest.mark.parametrize("page", [32, 64])
def test_requests_share_pages(page):
    got, inputs = run(Paged((200, 130, 300, 130), 2, page=page, shared=True))
    table = inputs.call["block_table"]
    assert (table[0, :2] == table[1, :2]).all()
    assert not check(got, inputs)


@in_interpreter
@pytest.mark.parametrize("lengths_as", ["request", "column"])
@pytest.mark.parametrize("next_n", [1, 3])
def test_lengths_of_requests_give_those_of_queries(next_n, lengths_as):
    got, inputs = run(Paged(LENGTHS, next_n, lengths_as=lengths_as))
    assert not check(got, inputs)


@in_interpreter
@pytest.mark.parametrize("num_sms", [1, 3, 200])
def test_programs_share_the_pages_of_a_request(num_sms):
    got, inputs = run(Paged((700, 5), 1, heads=16), num_sms=num_sms)
    assert not check(got, inputs)


@in_interpreter
def test_keys_behind_the_width_are_left_out():
    got, inputs = run(Paged(LENGTHS, 2), width=70)
    assert not check(got, inputs)


@in_interpreter
def test_length_beyond_the_block_table_reads_no_page_behind_it():
    got, inputs = run(
        Paged((128,)),
        lengths=torch.tensor([1000], dtype=torch.int32),
        block_table=make_paged(Paged((128,))).call["block_table"][:, :2],
        width=1000,
    )
    assert not check(got, inputs)


@in_interpreter
def test_offsets_of_pages_have_64_bits():
    # Only what is written has memory: the first page, and the last of four, which is
    # three GiB behind it.
    inputs = make_paged(Paged((40,)))
    page = int(inputs.call["block_table"][0, 0])
    small = inputs.call["cache"][page].flatten()
    stride = 2**30
    whole = torch.empty(3 * stride + len(small), dtype=torch.uint8)
    whole[3 * stride :] = small
    whole[: len(small)] = 0x7F
    size = (4, 64, 1, TOKEN_BYTES)
    inputs.call["cache"] = whole.as_strided(size, (stride, TOKEN_BYTES, TOKEN_BYTES, 1))
    inputs.call["block_table"] = torch.full((1, 1), 3, dtype=torch.int32)
    from vllm.v1.attention.ops.dsa_indexer.paged_logits import paged_mqa_logits

    with poisoned_results(WIDENED):
        assert not check(paged_mqa_logits(**inputs.call), inputs)


@in_interpreter
def test_no_requests_no_pages_or_no_width():
    for changes in (
        {"block_table": torch.zeros(2, 0, dtype=torch.int32)},
        {"width": 0},
    ):
        got, inputs = run(Paged((5, 64)), **changes)
        assert got.shape == (2, inputs.call["width"]) and got.isnan().all()


@in_interpreter
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 1, 48, 128).to(FP8)}, "48 index heads"),
        ({"weights": torch.zeros(1, 32)}, "weights are"),
        ({"cache": torch.zeros(4, 16, 1, 132, dtype=torch.uint8)}, "cache is"),
        ({"cache": torch.zeros(4, 64, 1, 68, dtype=torch.uint8)}, "cache is"),
        ({"cache": torch.zeros(4, 64, 132)}, "cache is torch.float32"),
        ({"cache": torch.zeros(4, 64, 264, dtype=torch.uint8)[..., ::2]}, "cache is"),
        ({"lengths": torch.ones(2)}, "lengths are torch.float32"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, "lengths are"),
        ({"block_table": torch.zeros(1, 4, dtype=torch.int32)}, "block_table is"),
        ({"block_table": torch.zeros(2, 4)}, "block_table is torch.float32"),
        ({"block_table": torch.zeros(4, 2, dtype=torch.int32).T}, "block_table is"),
    ],
)
def test_other_inputs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run(Paged((5, 64)), **changes)
