# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Which configuration a call of the sparse MLA kernel gets."""

import itertools

import pytest

from vllm.v1.attention.ops.sparse_mla.tuning import (
    OVERRIDE,
    CacheFormat,
    Kernel,
    KernelConfig,
    choose_config,
    device_class,
    parse_config,
    table,
)

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1))
HEADS = (1, 4, 8, 11, 16, 17, 32, 64, 128)
TOKENS = (1, 2, 7, 64, 128, 1000, 40_000)
TOPK = (1, 17, 64, 2048, 2176)
calls = list(itertools.product(CAPABILITIES, HEADS, TOKENS, TOPK, CacheFormat))


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv(OVERRIDE, raising=False)


def test_every_call_gets_a_configuration_of_the_device():
    shapes = {
        (row.device, row.cache): {
            (other.config.block_heads, other.config.block_rows)
            for other in table()
            if (other.device, other.cache) == (row.device, row.cache)
        }
        for row in table()
    }
    for capability, heads, tokens, topk, cache in calls:
        config = choose_config(capability, heads, tokens, topk, cache, 100)
        shape = config.block_heads, config.block_rows
        assert shape in shapes[device_class(capability), cache]


def test_no_split_is_without_rows_and_none_more_than_the_device_runs_at_once():
    for capability, heads, tokens, topk, cache in calls:
        for num_sms in (10, 48, 132):
            config = choose_config(capability, heads, tokens, topk, cache, num_sms)
            tiles = -(-topk // config.block_rows)
            tiles_per_split = -(-tiles // config.splits)
            assert (config.splits - 1) * tiles_per_split < tiles
            programs = tokens * -(-heads // config.block_heads) * config.splits
            assert config.splits == 1 or programs <= num_sms


@pytest.mark.parametrize("cache", CacheFormat)
def test_a_single_token_is_split_over_the_device(cache):
    config = choose_config((9, 0), 16, 1, 2048, cache, 132)
    assert config.splits == 2048 // config.block_rows
    few = choose_config((9, 0), 16, 1, 2048, cache, 10)
    assert 6 <= few.splits <= 10


@pytest.mark.parametrize("tokens", [132, 4096])
def test_many_tokens_are_not_split(tokens):
    assert choose_config((9, 0), 8, tokens, 2048, CacheFormat.MODEL, 132).splits == 1


@pytest.mark.parametrize("cache", CacheFormat)
def test_the_interpreter_gets_the_kernel_that_it_can_run(cache):
    for heads, tokens in itertools.product(HEADS, TOKENS):
        config = choose_config((0, 0), heads, tokens, 64, cache, 1)
        assert config.kernel is Kernel.TRITON


def test_a_device_that_is_not_known_gets_what_fits_everywhere():
    assert device_class((13, 5)) is device_class((8, 6))
    assert device_class((8, 6)).shared_memory == 101_376


def test_more_heads_than_the_kernel_takes_are_refused():
    with pytest.raises(ValueError, match="129 heads"):
        choose_config((9, 0), 129, 1, 64, CacheFormat.MODEL, 132)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("32,64,8,2", KernelConfig(32, 64, 8, 2)),
        ("16,16,4,1,9", KernelConfig(16, 16, 4, 1, 9)),
        ("gluon,32,64,8,2,3", KernelConfig(32, 64, 8, 2, 3, kernel=Kernel.GLUON)),
    ],
)
def test_the_environment_overrides_the_table(text, config, monkeypatch):
    monkeypatch.setenv(OVERRIDE, text)
    assert choose_config((9, 0), 64, 1, 2048, CacheFormat.FP8, 132) == config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("16,64,4", "missing"),
        ("16,64,4,3,1,1", "takes from"),
        ("16,x,4,3", "'x'"),
        ("24,64,4,3", "block_heads is 24"),
        ("16,8,4,3", "block_rows is 8"),
        ("16,64,3,3", "num_warps is 3"),
        ("16,64,4,0", "num_stages is 0"),
        ("16,64,4,3,0", "splits is 0"),
        ("gluon,32,32,4,2", "multiple of 8 warps"),
        ("gluon,16,32,4,3", "2 stages"),
        ("gluon,16,16,4,2", "needs 32"),
    ],
)
def test_a_wrong_override_is_named(text, reason):
    with pytest.raises(ValueError, match=reason) as error:
        parse_config(text)
    assert f"{OVERRIDE}={text!r}" in str(error.value)
    assert "as 16,64,4,3" in str(error.value)
