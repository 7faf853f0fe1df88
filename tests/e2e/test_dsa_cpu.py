# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Sparse attention on the CPU, engine against transformers, on tiny random models.

The engine gets all prompts at once, cut into chunks of 128 tokens; what transformers
generates, one prompt at a time, is the truth.
"""

import pytest
import torch

from tests.helpers.tiny_hf_model import TOPK, random_prompts, write_tiny_model

LENGTHS = [1, 5, 63, 64, 65, 150, 300, 411]
STEPS = 48
CHUNK = 128
MODELS = {"4-layers": {"layers": 4}, "6-layers-shared": {"layers": 6}}


def generate_with_transformers(folder, prompts):
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(tokens[0, len(prompt) :].tolist())
    return answers


def make_engine(folder, **options):
    from vllm import LLM

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=64 * 2**20,
        **{"dtype": "float32", "max_num_batched_tokens": CHUNK} | options,
    )


def generate(engine, prompts, **options):
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=STEPS, detokenize=False, ignore_eos=True, **options
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return engine.generate(requests, params, use_tqdm=False)


def tokens_of(results):
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory, prompts):
    """Folder and expected tokens; transformers runs before the engine takes threads."""
    layers = MODELS[request.param]["layers"]
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder, layers=layers, shared_indexers=layers > 4)
    return folder, generate_with_transformers(folder, prompts)


@pytest.fixture(scope="module")
def engine(model):
    return make_engine(model[0])


def assert_same(got, want):
    for length, have, expect in zip(LENGTHS, got, want, strict=True):
        differing = [i for i in range(STEPS) if have[i] != expect[i]]
        assert not differing, f"prompt of {length}: differs from step {differing[0]}"


def test_batched_chunked_generation_equals_transformers(engine, model, prompts):
    config = engine.llm_engine.vllm_config
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == CHUNK
    assert_same(tokens_of(generate(engine, prompts)), model[1])


def test_generation_from_cached_prefixes_equals_transformers(engine, model, prompts):
    generate(engine, prompts)
    results = generate(engine, prompts)
    cached = {
        length: result.num_cached_tokens
        for length, result in zip(LENGTHS, results, strict=True)
    }
    assert cached[150] >= 128
    assert cached[300] >= 256
    assert cached[411] >= 384
    assert_same(tokens_of(results), model[1])


def select_most_recent(q, weights, cache, block_table, *, first_position, topk):
    positions = torch.arange(first_position, first_position + len(q))
    return (positions.unsqueeze(1) - torch.arange(topk)).clamp(min=-1)


def test_selecting_the_most_recent_keys_does_not_equal_transformers(
    engine, model, prompts, monkeypatch
):
    from vllm.model_executor.layers import cpu_sparse_attn_indexer

    monkeypatch.setattr(cpu_sparse_attn_indexer, "select_positions", select_most_recent)
    engine.reset_prefix_cache()
    got = tokens_of(generate(engine, prompts))
    engine.reset_prefix_cache()
    for length, have, expect in zip(LENGTHS, got, model[1], strict=True):
        sparse = length + STEPS > TOPK
        assert (have == expect) != sparse, f"prompt of {length}"


@pytest.fixture(scope="module")
def small_model(tmp_path_factory, prompts):
    """A folder, and the engine's results of it in float32."""
    folder = write_tiny_model(tmp_path_factory.mktemp("small"))
    return folder, generate(make_engine(folder), prompts, logprobs=5)


@pytest.mark.parametrize(
    ("dtype", "bound"), [("bfloat16", 0.2), ("float16", 0.03)], ids=["bf16", "fp16"]
)
def test_16_bit_models_stay_close(small_model, prompts, dtype, bound):
    """Logprobs of first tokens within top-k are bounded; all prompts must run.

    Beyond top-k rounding may select other keys, which has no useful bound.
    """
    folder, want = small_model
    got = generate(make_engine(folder, dtype=dtype), prompts, logprobs=5)
    assert all(len(tokens) == STEPS for tokens in tokens_of(got))
    worst = 0.0
    for length, have, expect in zip(LENGTHS, got, want, strict=True):
        if length > TOPK:
            continue
        values, reference = (r.outputs[0].logprobs[0] for r in (have, expect))
        common = values.keys() & reference.keys()
        assert len(common) >= 3, f"prompt of {length}: other tokens are likely"
        errors = [abs(values[t].logprob - reference[t].logprob) for t in common]
        worst = max(worst, *errors)
    assert worst <= bound, f"logprobs differ by {worst:.3g} > {bound}"
