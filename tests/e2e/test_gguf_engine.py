# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The engine on tiny glm-dsa files, token for token against transformers.

Float32, greedy. The prompts lie below, at and above the top-k of 64 and the chunk of
128 tokens, and run in one batch. All weights are dequantized when they are loaded, so
that a type only needs some of the prompts.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.engine import engine
from tests.helpers.hf_reference import HfReference
from tests.helpers.tiny_prompts import STEPS, make_prompts
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from vllm import LLM, EngineArgs, SamplingParams
from vllm.model_executor.model_loader import gguf_loader
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.glm_dsa import read_config
from vllm.transformers_utils.gguf.reader import open_gguf

# Weight type -> seed, chosen by tools/find_seeds.py.
SEEDS = {
    "F32": 2,
    "BF16": 0,
    "F16": 5,
    "Q8_0": 0,
    "Q4_0": 0,
    "Q4_K": 0,
    "Q5_K": 2,
    "Q6_K": 0,
    "Q2_K": 2,
    "Q3_K": 1,
    "MXFP4": 9,
    "mixed": 0,
}
# The same with two layers instead of four: to quantize these takes long.
SEEDS_OF_TWO_LAYERS = {"IQ4_XS": 0, "IQ3_XXS": 0, "IQ2_XS": 0}
FULLY_CHECKED = ("F32", "mixed")
OTHERS = [t for t in (*SEEDS, *SEEDS_OF_TWO_LAYERS) if t not in FULLY_CHECKED]
LAYOUTS = {
    "shards": {"shards": 3},
    "tensorless-first-shard": {"shards": 3, "tensorless_first_shard": True},
    "mtp": {"mtp": True},
    "legacy-kv-b": {"legacy_kv_b": True},
    "tied": {"tied": True},
    "no-gating-func": {"gating_func": False},
    "shared-key": {"shared_indexers": "key"},
    "shared-key-int": {"shared_indexers": "key-int"},
    "shared-key-str": {"shared_indexers": "key-str"},
    "shared-key-surplus": {"shared_indexers": "key-surplus"},
    "shared-absent": {"shared_indexers": "absent"},
    "shared-duplicates": {"shared_indexers": "duplicates"},
    "shared-mtp": {"shared_indexers": "absent", "mtp": True},
}


def greedy(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached_tokens(llm: LLM, prompt: list[int]) -> int:
    params = SamplingParams(temperature=0, max_tokens=1)
    output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    return output.num_cached_tokens or 0


@pytest.fixture(scope="module")
def typed_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A file of each weight type."""

    @cache
    def write(weight_type: str) -> Path:
        spec = (
            TinySpec(weight_type=weight_type, seed=SEEDS[weight_type])
            if weight_type in SEEDS
            else TinySpec(
                weight_type=weight_type, seed=SEEDS_OF_TWO_LAYERS[weight_type], layers=2
            )
        )
        folder = tmp_path_factory.mktemp(weight_type)
        return write_tiny_glm_dsa(folder / "tiny.gguf", spec)[0]

    return write


def expected(
    model: Path, prompts: list[list[int]], guesses: list[list[int]]
) -> list[list[int]]:
    """transformers' tokens; they come fast where the guesses are the same."""
    reference = HfReference(model)
    return [
        reference.generate(prompt, len(guess), guess)
        for prompt, guess in zip(prompts, guesses, strict=True)
    ]


@pytest.mark.parametrize("weight_type", FULLY_CHECKED)
def test_tokens_equal_transformers(
    weight_type: str, typed_file: Callable[[str], Path]
) -> None:
    model = typed_file(weight_type)
    prompts = make_prompts()
    with engine(model) as llm:
        tokens = greedy(llm, prompts, STEPS)
        assert cached_tokens(llm, prompts[-1]) >= 384
        assert greedy(llm, prompts, STEPS) == tokens, "with cached prefixes"
    assert tokens == expected(model, prompts, tokens)


@pytest.mark.parametrize("weight_type", OTHERS)
def test_every_type_equals_transformers(
    weight_type: str, typed_file: Callable[[str], Path]
) -> None:
    check_tokens(typed_file(weight_type))


@pytest.mark.parametrize("weight_type", ["mixed", "Q4_K", "MXFP4"])
def test_tokens_equal_transformers_on_raw_blocks(
    weight_type: str, typed_file: Callable[[str], Path]
) -> None:
    check_tokens(typed_file(weight_type), count=16, quantization="gguf_native")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_file_gives_the_same_model(
    layout: str, tmp_path: Path
) -> None:
    spec = TinySpec(**LAYOUTS[layout])
    check_tokens(write_tiny_glm_dsa(tmp_path / "tiny.gguf", spec)[-1])


def check_tokens(model: Path, count: int = 24, **options: Any) -> None:
    prompts = [prompt for prompt in make_prompts() if len(prompt) in (5, 65, 150)]
    with engine(model, **options) as llm:
        tokens = greedy(llm, prompts, count)
    assert tokens == expected(model, prompts, tokens)


def test_speculation_with_the_mtp_block_keeps_the_tokens(tmp_path: Path) -> None:
    spec = TinySpec(weight_type="F32", seed=SEEDS["F32"], mtp=True)
    model = write_tiny_glm_dsa(tmp_path / "tiny.gguf", spec)[0]
    prompts = make_prompts((5, 65, 150))
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    with engine(model, speculative_config=speculation, disable_log_stats=False) as llm:
        tokens = greedy(llm, prompts, 24)
        assert drafted_tokens(llm) > 0
    assert tokens == expected(model, prompts, tokens)


def drafted_tokens(llm: LLM) -> int:
    name = "vllm:spec_decode_num_draft_tokens"
    return sum(m.value for m in llm.get_metrics() if m.name == name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2 is not supp"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "--quantization gguf_native",
        ),
    ],
    ids=["pipeline", "experts"],
)
def test_parallelism_that_the_cpu_lacks_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = write_tiny_glm_dsa(tmp_path / "tiny.gguf", TinySpec())[0]
    with pytest.raises(ValueError, match=message):
        EngineArgs(str(model), **options).create_engine_config()


def test_stage_that_needs_the_selection_of_another_is_refused(tmp_path: Path) -> None:
    spec = TinySpec(shared_indexers="absent")
    with open_gguf(write_tiny_glm_dsa(tmp_path / "tiny.gguf", spec)[0]) as file:
        config = read_config(file)
    shared = config.indexer_full.index(False)
    stage = SimpleNamespace(model=SimpleNamespace(start_layer=shared))
    with pytest.raises(GGUFError, match=f"begins at layer {shared}.* VLLM_PP_LAYER"):
        gguf_loader._check_stage(stage, config)
    stage.model.start_layer = 1
    gguf_loader._check_stage(stage, config)
