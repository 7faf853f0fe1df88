# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The network that trains the tiny model, against transformers' and by its losses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.hf_reference import HfReference
from tiny_glm_dsa import tiny_tensors
from tools.tiny_glm_dsa.export import SPEC, load_gguf, save_gguf
from tools.tiny_glm_dsa.model import DENSE, SPARSE, WARM_UP, TinyGlm, select

LENGTH = 200


@pytest.fixture(scope="module")
def model() -> TinyGlm:
    model = TinyGlm(SPEC)
    state = {name: torch.from_numpy(v.copy()) for name, v in tiny_tensors(SPEC)}
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="module")
def file(model: TinyGlm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    save_gguf(model, path, "F32")
    return path


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 600, (1, LENGTH), generator=generator)


def test_the_sparse_network_equals_transformers(
    model: TinyGlm, file: Path, ids: torch.Tensor
) -> None:
    with torch.no_grad():
        logits = model(ids, SPARSE).logits[0]
    logprobs = logits.double().log_softmax(-1).numpy()
    expected = HfReference(file).logprobs(ids[0].tolist())
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)


def test_dense_attention_equals_sparse_within_the_top_k_only(
    model: TinyGlm, ids: torch.Tensor
) -> None:
    with torch.no_grad():
        dense, warm_up, sparse = (
            model(ids, mode).logits[0] for mode in (DENSE, WARM_UP, SPARSE)
        )
    torch.testing.assert_close(dense, warm_up, atol=2e-5, rtol=0)
    torch.testing.assert_close(
        dense[: SPEC.top_k], sparse[: SPEC.top_k], atol=2e-5, rtol=0
    )
    assert (dense[SPEC.top_k :] - sparse[SPEC.top_k :]).abs().max() > 1e-2


def test_a_saved_model_loads_again_with_equal_weights(
    model: TinyGlm, file: Path
) -> None:
    loaded = TinyGlm(SPEC)
    load_gguf(loaded, file)
    for name, values in model.state_dict().items():
        assert torch.equal(values, loaded.state_dict()[name]), name


def test_the_indexer_learns_from_its_own_loss_only(
    model: TinyGlm, ids: torch.Tensor
) -> None:
    model.zero_grad()
    output = model(ids, SPARSE)
    output.index_loss.backward()
    for name, weight in model.named_parameters():
        assert (weight.grad is not None) == (".indexer." in name), name
    model.zero_grad()
    output = model(ids, SPARSE)
    (output.logits.square().mean() + output.mtp_logits.square().mean()).backward()
    for name, weight in model.named_parameters():
        assert (weight.grad is None) == (".indexer." in name), name


def test_the_index_loss_is_zero_when_the_scores_predict_the_attention() -> None:
    """One layer whose attention and scores are both uniform."""
    spec = replace(SPEC, layers=1, indexer_pattern="F", dense_layers=1)
    model = TinyGlm(spec)
    with torch.no_grad():
        for block in model.blk:
            block.attn_q_b.weight.zero_()
            block.indexer.proj.weight.zero_()
    ids = torch.arange(100)[None]
    with torch.no_grad():
        assert abs(float(model(ids, WARM_UP).index_loss)) < 1e-5
        model.blk[0].indexer.proj.weight.normal_()
        assert float(model(ids, WARM_UP).index_loss) > 1e-3


def test_mtp_reads_the_hidden_state_and_the_token_that_follows(
    model: TinyGlm, ids: torch.Tensor
) -> None:
    changed = ids.clone()
    changed[0, 100] = (changed[0, 100] + 1) % 600
    with torch.no_grad():
        before = model(ids, SPARSE).mtp_logits[0]
        after = model(changed, SPARSE).mtp_logits[0]
    moved = (before - after).abs().amax(-1) > 1e-4
    assert not moved[:99].any()
    assert moved[99]


def test_select_takes_the_highest_finite_scores() -> None:
    scores = torch.tensor([[[3.0, 1.0, 2.0], [5.0, -torch.inf, -torch.inf]]])
    chosen = select(scores, 2)
    assert chosen.tolist() == [[[True, False, True], [True, False, False]]]
