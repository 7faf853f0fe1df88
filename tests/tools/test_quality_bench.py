# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The quality benchmark with an engine whose quality is known, and its questions."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks import quality, quality_engines
from benchmarks.quality_engines import ServeOptions, Speculation
from benchmarks.quality_material import (
    check_vocabulary,
    completion_text,
    completion_tokens,
    conversation,
    make_material,
    prompt_ids,
    questions_of,
)
from benchmarks.quality_stats import Reported
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from tools.tiny_glm_dsa.tasks import TASKS, Question, is_test
from tools.tiny_glm_dsa.vocabulary import SIZE, default_encoder

MATERIAL = make_material(8, texts=3, needle_tokens=300)
EVEN = quality.Truth(
    [np.full((len(ids) - 1, SIZE), -math.log(SIZE)) for ids in MATERIAL.texts],
    [np.full((len(ids) - 1, SIZE), -math.log(SIZE)) for ids in MATERIAL.conversations],
)


class Known:
    """Wrong about every fourth question; every token is as likely as any other."""

    def answers(self, questions: Sequence[Question], *, thinking: bool) -> list[str]:
        return [
            f"{'' if thinking else ' '}{question.answer}" if at % 4 else "no"
            for at, question in enumerate(questions)
        ]

    def logprobs(self, sequences: Sequence[list[int]]) -> list[list[Reported]]:
        likely = range(20)
        even = -math.log(SIZE)
        return [
            [dict.fromkeys({*likely, token}, even) for token in ids[1:]]
            for ids in sequences
        ]


class KnownBench(quality.Bench):
    @contextmanager
    def engine(self, setting: quality.Setting) -> Iterator[Known]:
        yield Known()


def results(tmp_path: Path) -> list[quality.Result]:
    bench = KnownBench(Path("none"), MATERIAL, EVEN, tmp_path)
    setting = quality.Setting("vllm", "Q8_0", ServeOptions(mtp=3))
    return list(bench.measure(setting, (True, False)))


def test_a_known_engine_gets_the_quality_it_has(tmp_path: Path) -> None:
    found, same = results(tmp_path)
    flags = [flag for task in found.right.values() for flag in task]
    assert flags == [bool(at % 4) for at in range(len(MATERIAL.questions))]
    assert list(found.right) == list(TASKS)
    assert found.perplexity == pytest.approx({"texts": SIZE, "conversations": SIZE})
    assert 0 <= found.kl < 1e-9
    assert (same.unlike_first, same.right) == (0, found.right)


def test_the_tables_name_every_column(tmp_path: Path) -> None:
    made = results(tmp_path)
    cells = dict(zip(quality.COLUMNS, quality.row(made[0]), strict=True))
    assert cells["needle"] == "75.0 % (40.9 to 92.9; 8)"
    assert cells["MTP"] == "3"
    assert cells["text ppl"] == f"{SIZE:.4f}"
    assert cells["unlike first"] == f"0 of {len(MATERIAL.questions)}"
    for cells_of_tasks in quality.by_task(made):
        assert len(cells_of_tasks) == 6 + len(TASKS)
    assert quality.jsonable(made[0])["right"]["needle"] == "01110111"
    [line] = quality.comparison(made)
    assert "0 lost, 0 won, 0.00 ± 0.00 points worse" in line


def test_the_truth_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "truth.npz"
    monkeypatch.setattr(quality, "truth_of", lambda *_: EVEN)
    quality.kept_truth(Path("none"), MATERIAL, file)
    monkeypatch.delattr(quality, "truth_of")
    again = quality.kept_truth(Path("none"), MATERIAL, file)
    for kind in ("texts", "conversations"):
        pairs = zip(getattr(again, kind), getattr(EVEN, kind), strict=True)
        assert all(np.allclose(a, b) for a, b in pairs)
    other = make_material(1, texts=2, needle_tokens=300)
    with pytest.raises(ValueError, match="is of other texts"):
        quality.kept_truth(Path("none"), other, file)


def test_settings_are_all_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "quality --engines vllm llamacpp transformers --types Q8_0 Q4_K"
    command += " --mtp 0 1 --kv-cache-dtype auto fp8_ds_mla --execution eager graph"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--faults", "no router bias"])
    found = list(quality.settings(quality.arguments()))
    assert len(found) == len(set(found)) == 2 * (2 * 2 * 2 + 1 + 2)


def test_options_of_the_server() -> None:
    plain = ServeOptions(dtype="auto", graph=True).arguments()
    assert plain == ["--enable-auto-tool-choice", "--dtype", "auto"]
    made = ServeOptions(cache="fp8_ds_mla", backend="X", mtp=1, more=("-v",))
    assert made.arguments()[2:] == [
        *("float32", "--kv-cache-dtype", "fp8_ds_mla", "--attention-backend", "X"),
        *("--enforce-eager", "--speculative-config"),
        *('{"method": "mtp", "num_speculative_tokens": 1}', "-v"),
    ]


def test_speculation_is_what_was_drafted_between() -> None:
    before = Speculation(10, 30, 15, (8, 5, 2))
    found = Speculation(30, 90, 45, (28, 14, 3)).since(before)
    assert found == Speculation(20, 60, 30, (20, 9, 1))
    assert (found.rate, found.length) == (0.5, 2.5)
    assert before.since(Speculation()) == before


def test_more_questions_begin_with_those_of_fewer() -> None:
    for task in TASKS:
        few, more = questions_of(task, 5, 300), questions_of(task, 12, 300)
        assert more[:5] == few
        assert len({str(question.messages) for question in more}) == len(more)
    assert len(questions_of("hello", 100)) == 6, "a task has only so many questions"


def test_needles_are_held_out_and_as_long_as_wanted() -> None:
    for tokens in (300, 1900):
        [question] = questions_of("needle", 1, tokens)
        assert tokens - 20 <= len(prompt_ids(question, thinking=True)) <= tokens
        adjective, noun = question.answer.split(" ")[4:6]
        assert is_test(adjective, noun)


@pytest.mark.parametrize("thinking", [True, False])
def test_the_right_completion_is_right(thinking: bool) -> None:
    for question in MATERIAL.questions:
        encoder = default_encoder()
        thought = "</think>" if thinking else ""
        made = encoder.encode(f"{thought}{question.answer}<|user|>\nWhat")
        assert completion_text(made, thinking=thinking) == question.answer
        assert completion_text(made[:-3], thinking=thinking) != question.answer
    if thinking:
        assert completion_text(encoder.encode("a b<|user|>"), thinking=True) == ""


def test_conversations_end_with_the_completion() -> None:
    question = MATERIAL.questions[0]
    ids = conversation(question)
    made = ids[-completion_tokens(question) :]
    assert completion_text(made, thinking=True) == question.answer
    assert ids[: -len(made)] == prompt_ids(question, thinking=True)


def test_reported_are_the_likeliest_tokens_and_the_one_that_came() -> None:
    row = np.log(np.arange(1, SIZE + 1) / np.arange(1, SIZE + 1).sum())
    [found] = quality_engines._reported(row[None], [0, 3])
    assert set(found) == {3, *range(SIZE - 20, SIZE)}
    assert all(found[i] == row[i] for i in found)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_tiny_glm_dsa(tmp_path / "tiny.gguf", TinySpec(layers=1))[0]
    with pytest.raises(ValueError, match="512 tokens that are not those of the tr"):
        check_vocabulary(path)
