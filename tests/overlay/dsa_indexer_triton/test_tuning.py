# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How the index logits are divided over a device."""

import itertools

import pytest

from tests.helpers.real_triton import in_interpreter

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]


@in_interpreter
def test_prompts_fill_the_device_if_they_can():
    from vllm.v1.attention.ops.dsa_indexer.logits_tuning import keys_per_program

    for blocks, keys, sms in itertools.product(
        (1, 9, 512), (1, 5000, 10**6), (40, 188)
    ):
        share = keys_per_program(blocks, keys, sms)
        programs = blocks * -(-keys // share)
        assert share in (512, 1024, 2048, 4096, 8192)
        assert programs >= 8 * sms or share == 512
        assert share == 8192 or blocks * -(-keys // (2 * share)) < 8 * sms


@in_interpreter
def test_requests_have_a_program_and_none_without_a_page():
    from vllm.v1.attention.ops.dsa_indexer.logits_tuning import programs_per_request

    for requests, pages, sms in itertools.product((1, 32, 2000), (1, 2560), (40, 188)):
        programs = programs_per_request(requests, pages, sms)
        assert 1 <= programs <= pages
        assert requests * programs >= 8 * sms or programs == pages


@in_interpreter
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_queries_of_a_request_are_covered(capability):
    from vllm.v1.attention.ops.dsa_indexer.logits_tuning import choose_paged

    for heads, next_n in itertools.product((16, 32, 64), range(1, 10)):
        block = choose_paged(capability, heads, next_n).block_queries
        assert block & (block - 1) == 0 and block * heads <= 256
        assert block >= next_n or 2 * block * heads >= 256
        assert block < 2 * next_n


@in_interpreter
def test_fp8_arithmetic_is_used_from_sm89_on():
    from vllm.v1.attention.ops.dsa_indexer.logits_tuning import has_fp8_mma

    assert [has_fp8_mma(c) for c in CAPABILITIES] == [False, False] + [True] * 5
