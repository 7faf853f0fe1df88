# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The shipped tiny model through `vllm serve`: it must answer, and never worse.

Three servers, all in float32, are asked the same held-out questions: the shipped file
dequantized to F32, the shipped Q8_0 file with speculation, and its weights in Q4_K
without `--enforce-eager`. bfloat16 is four times as slow on a CPU without AMX.

What the numbers can show: settings are compared on the same questions, so a difference
is made by the questions that only one of them answers rightly. One of 200 is half a
point, the bound for Q8_0: it tolerates one lost answer. Had 1.5 % of all questions
other answers, one run of twenty would not show it at all. The bound for Q4_K tolerates
six: a true loss of 1 point passes nearly always, one of 6 points in one run of twenty.
`benchmarks/quality.py` asks more questions; docs/quality.md has its results.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import MODEL
from benchmarks.quality_engines import (
    ServeOptions,
    Speculation,
    Transformers,
    vllm_server,
)
from benchmarks.quality_material import (
    END_TOKENS,
    conversation,
    paragraphs,
    prompt_ids,
    questions_of,
)
from benchmarks.quality_stats import Paired, Reported, kl_lower_bound, paired
from requantize import requantize
from tests.helpers.faults import FAULTS
from tools.tiny_glm_dsa.tasks import Question, is_correct
from tools.tiny_glm_dsa.vocabulary import default_encoder

SHORT_TASKS = ("copy", "sort", "add", "count", "story")
LONG = questions_of("needle", 3)
MEDIUM = questions_of("needle", 21, tokens=256)
HELLO = questions_of("hello", 6)
SHORT = [question for task in SHORT_TASKS for question in questions_of(task, 34)]
QUESTIONS = [*LONG, *MEDIUM, *HELLO, *SHORT]
WITHOUT_THINKING = [*MEDIUM[:5], *HELLO, *SHORT[::11]]
SCORED = [conversation(question) for question in (*MEDIUM[:2], *SHORT[::17])]
FAULTY_QUESTIONS = MEDIUM[:8]

prompt = partial(prompt_ids, thinking=True)
# For needles the length of their answers; most other turns end within 20 tokens.
PROMPTS = {
    20: [
        *map(prompt, SHORT[::5]),
        *map(prompt, HELLO[:4]),
        *(ids[: len(ids) // 3] for ids in paragraphs(4)),
    ],
    16: [*map(prompt, MEDIUM[:6]), *map(prompt, LONG[:2])],
}
END_IDS = {default_encoder().ids[name] for name in END_TOKENS}
DRAFTED = 3
# The jobs take one core each.
JOBS_AT_ONCE = 2

Tokens = dict[int, list[list[int]]]
"""What follows each of `PROMPTS`."""


@dataclass(frozen=True)
class Measured:
    """What one server said to `QUESTIONS` and the other prompts above."""

    said: list[str]
    speculation: Speculation
    without_thinking: list[str]
    tokens: Tokens
    scores: list[list[Reported]]

    def right(self, part: Sequence[Question] = QUESTIONS) -> list[bool]:
        """Of the questions of `part`, whether the answer is right."""
        pairs = zip(QUESTIONS, self.said, strict=True)
        return [is_correct(q, text) for q, text in pairs if q in part]


@dataclass(frozen=True)
class Expected:
    """What transformers says to the same, and with a mistake in its indexer.

    `tokens` are as many as the server gave, and come fast where they are the same.
    """

    tokens: Tokens
    scores: list[np.ndarray]
    faulty: list[str]


def serve(path: Path, log: Path, options: ServeOptions) -> Measured:
    with vllm_server(path, log, options) as server:
        return Measured(
            server.answers(QUESTIONS, thinking=True),
            server.speculation(),
            server.answers(WITHOUT_THINKING, thinking=False),
            {n: server.greedy(prompts, n) for n, prompts in PROMPTS.items()},
            # These are the same with speculation: nothing is generated.
            [] if options.mtp else server.logprobs(SCORED),
        )


def ask_q4_k(path: Path, log: Path) -> list[str]:
    with vllm_server(path, log, ServeOptions(graph=True)) as server:
        return server.answers(QUESTIONS, thinking=True)


def ask_transformers(path: Path, server: Future[Measured]) -> Expected:
    reference = Transformers(path)
    tokens = {
        count: [
            reference.reference.generate(prompt, len(guess), guess)
            for prompt, guess in zip(PROMPTS[count], guesses, strict=True)
        ]
        for count, guesses in server.result().tokens.items()
    }
    scores = [reference.all_logprobs(ids) for ids in SCORED]
    faulty = Transformers(path, FAULTS["indexer rope on last dims"])
    return Expected(tokens, scores, faulty.answers(FAULTY_QUESTIONS, thinking=True))


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mapping[str, Future[Any]]]:
    """All servers and transformers, a few at a time; most of their time is start-up."""
    folder = tmp_path_factory.mktemp("quality")
    f32, q4_k = folder / "f32.gguf", folder / "q4_k.gguf"
    requantize(MODEL, f32, "F32")
    requantize(MODEL, q4_k, "Q4_K")
    plain, drafting = ServeOptions(), ServeOptions(mtp=DRAFTED)
    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        first = pool.submit(serve, f32, folder / "f32.log", plain)
        yield {
            "f32": first,
            "speculating": pool.submit(serve, MODEL, folder / "mtp.log", drafting),
            "transformers": pool.submit(ask_transformers, f32, first),
            "q4_k": pool.submit(ask_q4_k, q4_k, folder / "q4_k.log"),
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def f32(jobs: Mapping[str, Future[Measured]]) -> Measured:
    return jobs["f32"].result()


@pytest.fixture(scope="module")
def speculating(jobs: Mapping[str, Future[Measured]]) -> Measured:
    return jobs["speculating"].result()


@pytest.fixture(scope="module")
def q4_k(jobs: Mapping[str, Future[list[str]]]) -> list[str]:
    return jobs["q4_k"].result()


@pytest.fixture(scope="module")
def expected(jobs: Mapping[str, Future[Expected]]) -> Expected:
    return jobs["transformers"].result()


def against(first: Measured, said: list[str]) -> Paired:
    flags = [is_correct(q, text) for q, text in zip(QUESTIONS, said, strict=True)]
    return paired(first.right(), flags)


def test_the_model_answers(f32: Measured) -> None:
    """It has learned all tasks but stories, of which two in five are right."""
    assert len(QUESTIONS) == 200
    learned = [question for question in SHORT if question.task != "story"]
    counts = [sum(f32.right(part)) for part in (LONG, MEDIUM, HELLO, learned)]
    print("right:", counts, "all:", sum(f32.right()))
    assert counts[0] == len(LONG)
    assert counts[1] >= len(MEDIUM) - 1
    assert counts[2] == len(HELLO)
    assert counts[3] >= len(learned) - 6


def test_it_answers_without_thinking(f32: Measured) -> None:
    pairs = zip(WITHOUT_THINKING, f32.without_thinking, strict=True)
    right = [is_correct(q, text) for q, text in pairs if q.task != "story"]
    assert sum(right) >= len(right) - 1, f32.without_thinking


def test_float32_tokens_equal_transformers(f32: Measured, expected: Expected) -> None:
    assert sum(map(len, PROMPTS.values())) == 50
    assert f32.tokens == expected.tokens
    for count, sequences in f32.tokens.items():
        for tokens in sequences:
            assert len(tokens) == count or tokens[-1] in END_IDS
            assert not END_IDS.intersection(tokens[:-1])


def test_float32_probabilities_equal_transformers(
    f32: Measured, expected: Expected
) -> None:
    for ids, rows, truth in zip(SCORED, f32.scores, expected.scores, strict=True):
        bounds = list(map(kl_lower_bound, truth, rows))
        assert sum(bounds) / len(bounds) < 1e-4
        own = [row[token] for row, token in zip(rows, ids[1:], strict=True)]
        exact = [row[token] for row, token in zip(truth, ids[1:], strict=True)]
        assert np.mean(own) == pytest.approx(np.mean(exact), abs=1e-3)


def test_speculation_keeps_the_tokens(f32: Measured, speculating: Measured) -> None:
    same = replace(speculating, speculation=f32.speculation, scores=f32.scores)
    assert same == f32


def test_most_drafts_are_accepted(speculating: Measured) -> None:
    found = speculating.speculation
    print(f"{found.rate:.1%} of drafts accepted, {found.length:.2f} tokens a step")
    assert found.drafted == DRAFTED * found.drafts > 0
    # Answers leave nothing to guess: nearly all first drafts are right. The block is
    # trained to draft one token, so later ones are right less often.
    assert found.accepted_at[0] / found.drafts > 0.9
    assert found.length > 2.5


def test_q8_0_answers_as_well_as_f32(f32: Measured, speculating: Measured) -> None:
    assert against(f32, speculating.said).points <= 0.5


def test_q4_k_loses_three_points_at_most(f32: Measured, q4_k: list[str]) -> None:
    assert against(f32, q4_k).points <= 3


def test_a_wrong_indexer_loses_the_needles(f32: Measured, expected: Expected) -> None:
    """What is asked for needs the indexer: transformers with a mistake in it fails."""
    assert sum(f32.right(FAULTY_QUESTIONS)) >= 7
    assert sum(map(is_correct, FAULTY_QUESTIONS, expected.faulty)) <= 1
