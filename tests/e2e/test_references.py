# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The writer of tiny models and the two references prove each other.

transformers on gguf-py's reading of a file and llama.cpp on the file itself share no
code; where both give the same distributions, the file is laid out as llama.cpp's
converter would and both references read it right.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.faults import FAULTS, SHARING_FAULTS
from tests.helpers.hf_reference import HfReference
from tests.helpers.llamacpp_reference import LlamaCpp, LlamaCppError
from tests.helpers.metrics import agreement
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa

TOP_K = 64
WITHIN = (1, 5, 40, TOP_K)
# With fewer keys beyond the top-k a wrong choice of keys hardly shows.
BEYOND = (150, 180, 220, 260)
# In float32 rounding swaps two keys of nearly equal score at times: about 1e-4.
SWAPPED_KEYS_KL = 2e-3
# Of medians: llama.cpp's rounding of activations gives 5.1e-3, the mildest fault
# (no k_norm bias) 1.7e-2, the next one 6.8e-2.
FAULT_KL = 1e-2


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 480, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("full") / "tiny.gguf"
    return write_tiny_glm_dsa(path, TinySpec())[0]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "tiny.gguf"
    return write_tiny_glm_dsa(path, TinySpec(shared_indexers="key-surplus"))[0]


@pytest.fixture(scope="module")
def expected(full: Path, shared: Path) -> dict[Path, np.ndarray]:
    """llama.cpp's distributions after the prompts beyond the top-k."""
    return {
        path: LlamaCpp(path).next_logprobs(prompts(BEYOND)) for path in (full, shared)
    }


@pytest.mark.parametrize("file", ["full", "shared"])
def test_both_references_agree_within_top_k(
    file: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(file)
    ours = HfReference(path).next_logprobs(prompts(WITHIN))
    result = agreement(ours, LlamaCpp(path).next_logprobs(prompts(WITHIN)))
    assert result.max_diff < 1e-3, result
    assert ours.std() > 0.5, "the model is degenerate: all tokens nearly as likely"


@pytest.mark.parametrize("file", ["full", "shared"])
def test_both_references_agree_beyond_top_k(
    file: str, expected: dict[Path, np.ndarray], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(file)
    result = agreement(HfReference(path).next_logprobs(prompts(BEYOND)), expected[path])
    assert result.mean_kl < SWAPPED_KEYS_KL, result


def test_greedy_tokens_are_equal(full: Path) -> None:
    some = prompts((5, 70))
    reference = HfReference(full)
    ours = [reference.generate(prompt, 16) for prompt in some]
    assert ours == LlamaCpp(full).generate(some, 16)


def test_a_guess_changes_only_the_time(full: Path) -> None:
    [prompt] = prompts((70,))
    reference = HfReference(full)
    truth = reference.generate(prompt, 6)
    for place in range(6):
        wrong = [*truth[:place], (truth[place] + 1) % 480, *truth[place + 1 :]]
        assert reference.generate(prompt, 6, wrong) == truth
    assert reference.generate(prompt, 6, truth) == truth
    assert reference.generate(prompt, 6, truth[:3]) == truth
    assert reference.generate(prompt, 3, truth) == truth[:3]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_visible(
    fault: str, full: Path, expected: dict[Path, np.ndarray]
) -> None:
    faulty = HfReference(full, change=FAULTS[fault])
    result = agreement(expected[full], faulty.next_logprobs(prompts(BEYOND)))
    assert result.median_kl > FAULT_KL, result


@pytest.mark.parametrize("fault", SHARING_FAULTS)
def test_each_sharing_fault_is_visible(
    fault: str, shared: Path, expected: dict[Path, np.ndarray]
) -> None:
    faulty = HfReference(shared, change=SHARING_FAULTS[fault])
    result = agreement(expected[shared], faulty.next_logprobs(prompts(BEYOND)))
    assert result.median_kl > FAULT_KL, result


@pytest.mark.parametrize("weight_type", ["BF16", "Q8_0", "MXFP4", "mixed"])
def test_quantized_files_agree(weight_type: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_glm_dsa(path, TinySpec(weight_type=weight_type))
    ours = HfReference(path).next_logprobs(prompts(BEYOND))
    result = agreement(ours, LlamaCpp(path).next_logprobs(prompts(BEYOND)))
    assert result.median_kl < FAULT_KL, result


VARIANTS = {
    "MTP block": TinySpec(mtp=True),
    "shards": TinySpec(shards=3),
    "shards, the first without tensors": TinySpec(
        shards=4, tensorless_first_shard=True
    ),
    "tied head": TinySpec(tied=True),
    "no gating func": TinySpec(gating_func=False),
    "sharing by key, no surplus": TinySpec(shared_indexers="key"),
    "sharing by integers": TinySpec(shared_indexers="key-int"),
    # Without the key llama.cpp uses GLM-5.2's table if the context is that model's.
    "sharing by absence": TinySpec(
        shared_indexers="absent", indexer_pattern="FFFSSS", context=1 << 20
    ),
    "sharing by duplicates": TinySpec(
        shared_indexers="duplicates", indexer_pattern="FFFSSS", context=1 << 20
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_agree(variant: str, tmp_path: Path) -> None:
    files = write_tiny_glm_dsa(tmp_path / "tiny.gguf", VARIANTS[variant])
    lengths = (40, 100)
    ours = HfReference(files[-1]).next_logprobs(prompts(lengths))
    result = agreement(ours, LlamaCpp(files[0]).next_logprobs(prompts(lengths)))
    assert result.mean_kl < SWAPPED_KEYS_KL, result


def test_weights_do_not_depend_on_the_variant(full: Path, tmp_path: Path) -> None:
    spec = TinySpec(shards=2, mtp=True, legacy_kv_b=True)
    files = write_tiny_glm_dsa(tmp_path / "tiny.gguf", spec)
    some = prompts((40,))
    ours = HfReference(files[0]).next_logprobs(some)
    assert np.array_equal(ours, HfReference(full).next_logprobs(some))


UNREADABLE = {
    "indexer types as strings": TinySpec(shared_indexers="key-str"),
    "legacy kv_b": TinySpec(legacy_kv_b=True),
}


@pytest.mark.parametrize("variant", UNREADABLE)
def test_llama_cpp_still_refuses(variant: str, tmp_path: Path) -> None:
    """Our loader reads these; should llama.cpp learn to, compare with it above."""
    path = write_tiny_glm_dsa(tmp_path / "tiny.gguf", UNREADABLE[variant])[0]
    with pytest.raises(LlamaCppError):
        LlamaCpp(path).next_logprobs(prompts((5,)))
