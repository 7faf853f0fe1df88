# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Sparse attention on the CPU, engine against transformers, on tiny random models.

The engine gets all prompts at once, cut into chunks of 128 tokens; what transformers
finds likeliest after each token, one prompt at a time, is the truth.
"""

import pytest
import torch
from transformers import GlmMoeDsaForCausalLM

from tests.helpers.engine import engine
from tests.helpers.hf_reference import greedy
from tests.helpers.tiny_hf_model import TOPK, random_prompts, write_tiny_model
from vllm import SamplingParams

# In ascending order: those within the top-k come first.
LENGTHS = [1, 5, 63, 64, 65, 150, 300, 411]
STEPS = 48
CHUNK = 128
MODELS = {"4-layers": {"layers": 4}, "6-layers-shared": {"layers": 6}}


def make_engine(folder, **options):
    return engine(folder, skip_tokenizer_init=True, max_model_len=512, **options)


def generate(llm, prompts, steps=STEPS, **options):
    params = SamplingParams(
        temperature=0, max_tokens=steps, detokenize=False, ignore_eos=True, **options
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(requests, params, use_tqdm=False)


def tokens_of(results):
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    layers = MODELS[request.param]["layers"]
    folder = tmp_path_factory.mktemp(request.param)
    return write_tiny_model(folder, layers=layers, shared_indexers=layers > 4)


@pytest.fixture(scope="module")
def llm(model):
    with make_engine(model) as running:
        yield running


@pytest.fixture(scope="module")
def answers(llm, prompts):
    return tokens_of(generate(llm, prompts))


@pytest.fixture(scope="module")
def expected(model, answers, prompts):
    """transformers' tokens; they come fast where the engine's are the same."""
    reference = GlmMoeDsaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    pairs = zip(prompts, answers, strict=True)
    return [greedy(reference, prompt, STEPS, guess) for prompt, guess in pairs]


def assert_same(got, want):
    for length, have, expect in zip(LENGTHS, got, want, strict=True):
        differing = [i for i in range(STEPS) if have[i] != expect[i]]
        assert not differing, f"prompt of {length}: differs from step {differing[0]}"


def test_batched_chunked_generation_equals_transformers(llm, answers, expected):
    config = llm.llm_engine.vllm_config
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == CHUNK
    assert_same(answers, expected)


def test_generation_from_cached_prefixes_equals_transformers(llm, expected, prompts):
    results = generate(llm, prompts)
    cached = {
        length: result.num_cached_tokens
        for length, result in zip(LENGTHS, results, strict=True)
    }
    assert cached[150] >= 128
    assert cached[300] >= 256
    assert cached[411] >= 384
    assert_same(tokens_of(results), expected)


def select_most_recent(q, weights, cache, block_table, *, first_position, topk):
    positions = torch.arange(first_position, first_position + len(q))
    return (positions.unsqueeze(1) - torch.arange(topk)).clamp(min=-1)


def test_selecting_the_most_recent_keys_does_not_equal_transformers(
    llm, expected, prompts, monkeypatch
):
    from vllm.model_executor.layers import cpu_sparse_attn_indexer

    monkeypatch.setattr(cpu_sparse_attn_indexer, "select_positions", select_most_recent)
    llm.reset_prefix_cache()
    got = tokens_of(generate(llm, prompts))
    llm.reset_prefix_cache()
    for length, have, expect in zip(LENGTHS, got, expected, strict=True):
        sparse = length + STEPS > TOPK
        assert (have == expect) != sparse, f"prompt of {length}"


@pytest.fixture(scope="module")
def small_model(tmp_path_factory, prompts):
    """A folder, and for each prompt within top-k the first logprobs in float32."""
    folder = write_tiny_model(tmp_path_factory.mktemp("small"))
    with make_engine(folder) as llm:
        results = generate(llm, within_topk(prompts), 1, logprobs=5)
    return folder, first_logprobs(results)


def within_topk(prompts):
    return [prompt for prompt in prompts if len(prompt) <= TOPK]


def first_logprobs(results):
    return [
        {token: entry.logprob for token, entry in result.outputs[0].logprobs[0].items()}
        for result in results
    ]


@pytest.mark.parametrize(
    ("dtype", "bound"), [("bfloat16", 0.2), ("float16", 0.03)], ids=["bf16", "fp16"]
)
def test_16_bit_models_stay_close(small_model, prompts, dtype, bound):
    """Logprobs of first tokens within top-k are bounded; a longer prompt must run.

    Beyond top-k rounding may select other keys, which has no useful bound.
    """
    folder, want = small_model
    some = prompts[: LENGTHS.index(150) + 1]
    with make_engine(folder, dtype=dtype) as llm:
        results = generate(llm, some, 16, logprobs=5)
    assert all(len(tokens) == 16 for tokens in tokens_of(results))
    got = first_logprobs(results)[: len(want)]
    worst = 0.0
    for values, reference in zip(got, want, strict=True):
        common = values.keys() & reference.keys()
        assert len(common) >= 3, "other tokens are likely"
        worst = max(worst, *(abs(values[t] - reference[t]) for t in common))
    assert worst <= bound, f"logprobs differ by {worst:.3g} > {bound}"
