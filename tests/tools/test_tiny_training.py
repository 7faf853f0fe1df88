# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The training of the tiny model, for a few steps on a CPU."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch

from demo import MODEL
from tools.tiny_glm_dsa import train
from tools.tiny_glm_dsa.export import SPEC, load_gguf
from tools.tiny_glm_dsa.model import DENSE, HALF_SPARSE, SPARSE, WARM_UP, TinyGlm
from tools.tiny_glm_dsa.train import (
    Stage,
    Trainer,
    arguments,
    token_loss,
    whole_answers,
)

SECONDS = 1


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a quarter of a second, all else takes no time.

    So the number of steps does not depend on the machine; a step has two looks.
    """
    looks = count()
    told = SimpleNamespace(monotonic=lambda: next(looks) / 4)
    monkeypatch.setattr(train, "time", told)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> tuple[Stage, ...]:
    """One short stage of each mode."""
    modes = (DENSE, WARM_UP, HALF_SPARSE, SPARSE)
    stages = tuple(Stage(mode, 128, 2, 1.0) for mode in modes)
    monkeypatch.setattr(train, "STAGES", stages)
    monkeypatch.setattr(train, "MINUTES", 4.0)
    return stages


def trainer(out: Path, *more: str) -> Trainer:
    minutes = str(4 * SECONDS / 60)
    given = ["--out", str(out), "--minutes", minutes, "--workers", "1"]
    return Trainer(arguments([*given, "--device", "cpu", *more]))


def test_all_stages_train_and_the_file_holds_the_weights(
    stages: tuple[Stage, ...], tmp_path: Path
) -> None:
    trained = trainer(tmp_path)
    before = {k: v.clone() for k, v in trained.model.state_dict().items()}
    steps = [0]
    for number, stage in enumerate(stages):
        trained.run(number, stage)
        steps.append(trained.step)
    assert all(a < b for a, b in zip(steps, steps[1:], strict=False)), steps
    trained.save()
    after = trained.model.state_dict()
    unmoved = [name for name, values in after.items() if values.equal(before[name])]
    assert unmoved == []
    loaded = TinyGlm(SPEC)
    load_gguf(loaded, tmp_path / "model.gguf")
    for name, values in loaded.state_dict().items():
        error = (values - after[name]).abs().max()
        assert error <= after[name].abs().max() / 127, name


def test_a_stopped_training_goes_on(stages: tuple[Stage, ...], tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.run(2, stages[2])
    first.save()
    second = trainer(tmp_path)
    assert (second.stage, second.step) == (2, first.step)
    assert second.seconds_in_stage >= SECONDS
    for name, values in first.model.state_dict().items():
        assert values.equal(second.model.state_dict()[name]), name
    second.run(2, stages[2])
    assert second.step == first.step


def test_the_loss_of_a_batch_falls(stages: tuple[Stage, ...], tmp_path: Path) -> None:
    started = trainer(tmp_path)
    ids = torch.randint(0, 600, (2, 96), generator=torch.Generator().manual_seed(1))
    classes = torch.full_like(ids, 2)
    for group in started.optimizer.param_groups:
        group["lr"] = 1e-3
    losses = [started._train_step(SPARSE, ids, classes) for _ in range(6)]
    for key in ("loss", "mtp_loss", "index_loss"):
        assert losses[-1][key] < 0.9 * losses[0][key], key


def test_a_busy_expert_gets_a_lower_bias(tmp_path: Path) -> None:
    started = trainer(tmp_path)
    load = torch.tensor([100.0] + [1.0] * (SPEC.experts - 1))
    started._balance(train.Output(load, load, load, [load, load, load]))
    for block in started.model.blk[SPEC.dense_layers :]:
        bias = block.exp_probs_b.bias
        assert bias[0] < 0 and (bias[1:] > 0).all()


def test_the_loss_weighs_tokens_by_class() -> None:
    ids = torch.tensor([[0, 1, 2, 3]])
    logits = torch.zeros(1, 4, 8)
    logits[0, 1, 2] = 20.0  # right about token 2, undecided about 1 and 3
    classes = torch.tensor([[0, 0, 2, 2]])
    loss, right = token_loss(logits, ids, classes, ahead=1)
    undecided = torch.log(torch.tensor(8.0))
    assert loss.item() == pytest.approx((undecided * 1.02 / 2.02).item(), rel=1e-3)
    assert right.item() == 0.5


def test_an_answer_is_right_if_all_its_tokens_are() -> None:
    ids = torch.tensor([[5, 1, 1, 0, 1, 1, 0, 1]])
    classes = torch.tensor([[0, 2, 2, 1, 2, 2, 1, 2]])
    logits = torch.zeros(1, 8, 8)
    logits[0, :, 1] = 1.0
    assert whole_answers(logits, ids, classes).item() == 1.0
    logits[0, 4, 3] = 2.0  # the second token of the second of three answers
    assert whole_answers(logits, ids, classes).item() == pytest.approx(2 / 3)


def test_the_shape_is_that_of_the_shipped_file() -> None:
    load_gguf(TinyGlm(SPEC), MODEL)  # raises if a tensor is missing or another shape
    key = gguf.GGUFReader(MODEL).fields["glm-dsa.attention.indexer.types"]
    assert key.contents() == [letter == "F" for letter in SPEC.pattern]
    assert MODEL.stat().st_size < 16_000_000
