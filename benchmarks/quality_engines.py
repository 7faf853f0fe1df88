# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""vLLM's server, transformers and llama.cpp behind one interface."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.request import urlopen

import numpy as np
from openai import APIConnectionError, OpenAI

from benchmarks.quality_material import (
    END_TOKENS,
    completion_text,
    completion_tokens,
    prompt_ids,
)
from benchmarks.quality_stats import Reported
from tools.tiny_glm_dsa.tasks import Question
from tools.tiny_glm_dsa.vocabulary import default_encoder

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import demo  # noqa: E402

TOP_LOGPROBS = 20
"""As many as `vllm serve` gives unless told otherwise."""
CONTEXT = 2048
MAX_ANSWER_TOKENS = 64
CONCURRENT_REQUESTS = 32
REQUEST_SECONDS = 600
CALL_TOKENS = 8000
"""Of prompts in one call of llama.cpp."""
THINKING = {True: {}, False: {"chat_template_kwargs": {"enable_thinking": False}}}

T = TypeVar("T")
S = TypeVar("S")


class Engine(Protocol):
    """What is measured of an engine that holds one model."""

    def answers(self, questions: Sequence[Question], *, thinking: bool) -> list[str]:
        """What it says to each question, greedily, without its thoughts."""

    def greedy(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        """The likeliest next `count` tokens of each prompt, fewer if the turn ends."""

    def logprobs(self, sequences: Sequence[list[int]]) -> list[list[Reported]]:
        """For each token but the first: log-probabilities, given those before it, of
        the `TOP_LOGPROBS` likeliest tokens and of itself."""


@dataclass(frozen=True)
class Speculation:
    """Counters of drafted tokens; `accepted_at` by position in the draft."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def length(self) -> float:
        """Mean number of tokens of a step, the model's own one included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    def since(self, before: Speculation) -> Speculation:
        old = before.accepted_at or (0,) * len(self.accepted_at)
        return Speculation(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(a - b for a, b in zip(self.accepted_at, old, strict=True)),
        )


@dataclass(frozen=True)
class ServeOptions:
    """How to run `vllm serve`; None leaves a choice to vLLM.

    `mtp` is the number of drafted tokens, 0 for no speculation.
    """

    dtype: str = "float32"
    cache: str = "auto"
    backend: str | None = None
    graph: bool = False
    mtp: int = 0
    more: tuple[str, ...] = field(default=())

    def arguments(self) -> list[str]:
        # Asking for tools makes the fork pick GLM's parsers, also that of thoughts.
        made = ["--enable-auto-tool-choice", "--dtype", self.dtype]
        if self.cache != "auto":
            made += ["--kv-cache-dtype", self.cache]
        if self.backend is not None:
            made += ["--attention-backend", self.backend]
        if not self.graph:
            made.append("--enforce-eager")
        if self.mtp:
            speculation = {"method": "mtp", "num_speculative_tokens": self.mtp}
            made += ["--speculative-config", json.dumps(speculation)]
        return [*made, *self.more]


class VllmServer:
    """A running server of vLLM, through its OpenAI API."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            # Client and server both drop a connection that was idle for 5 s; one that
            # is used again just then fails. A server that is gone still is an error.
            max_retries=2,
            timeout=REQUEST_SECONDS,
        )
        self.name = self.client.models.list().data[0].id

    def answers(self, questions: Sequence[Question], *, thinking: bool) -> list[str]:
        def ask(question: Question) -> str:
            answer = self.client.chat.completions.create(
                model=self.name,
                messages=list(question.messages),
                max_tokens=MAX_ANSWER_TOKENS,
                temperature=0,
                extra_body=THINKING[thinking],
            )
            return answer.choices[0].message.content or ""

        return self._each(ask, questions)

    def greedy(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        def complete(prompt: list[int]) -> list[int]:
            answer = self.client.completions.create(
                model=self.name,
                prompt=prompt,
                max_tokens=count,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            tokens: list[int] = answer.choices[0].token_ids
            return tokens

        return self._each(complete, prompts)

    def logprobs(self, sequences: Sequence[list[int]]) -> list[list[Reported]]:
        def score(ids: list[int]) -> list[Reported]:
            answer = self.client.completions.create(
                model=self.name,
                prompt=ids,
                max_tokens=1,
                temperature=0,
                extra_body={"prompt_logprobs": TOP_LOGPROBS},
            )
            _, *rows = answer.choices[0].prompt_logprobs
            return [{int(i): e["logprob"] for i, e in row.items()} for row in rows]

        return self._each(score, sequences)

    def speculation(self) -> Speculation:
        """What was drafted since the server started."""
        with urlopen(f"{self.url}/metrics", timeout=REQUEST_SECONDS) as response:
            text = response.read().decode()

        def counts(name: str) -> list[int]:
            line = rf"^vllm:spec_decode_num_{name}_total\{{.*\}} (\S+)$"
            return [int(float(value)) for value in re.findall(line, text, re.M)]

        return Speculation(
            sum(counts("drafts")),
            sum(counts("draft_tokens")),
            sum(counts("accepted_tokens")),
            tuple(counts("accepted_tokens_per_pos")),
        )

    def _each(self, request: Callable[[T], S], items: Sequence[T]) -> list[S]:
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            return list(pool.map(request, items))


@contextmanager
def vllm_server(model: Path, log: Path, options: ServeOptions) -> Iterator[VllmServer]:
    """Serve `model` until the context ends.

    An error of the connection has the end of the server's log as a note.
    """
    with demo.serve(model, log, *options.arguments()) as url:
        try:
            yield VllmServer(url)
        except APIConnectionError as error:
            text = log.read_text(encoding="utf-8", errors="replace")
            error.add_note(f"the server's log ends with:\n{text[-4000:]}")
            raise


class Transformers:
    """GlmMoeDsa of transformers in float32 on the dequantized weights.

    `change` makes mistakes in the model; see `tests.helpers.faults`.
    """

    def __init__(self, model: Path, change: Any = None) -> None:
        # transformers and torch are needed here only, and slow to import.
        from tests.helpers.hf_reference import HfReference

        self.reference = HfReference(model, change=change)

    def answers(self, questions: Sequence[Question], *, thinking: bool) -> list[str]:
        texts = []
        for question in questions:
            prompt = prompt_ids(question, thinking=thinking)
            made = self.reference.generate(prompt, completion_tokens(question))
            texts.append(completion_text(made, thinking=thinking))
        return texts

    def greedy(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        made = [self.reference.generate(prompt, count) for prompt in prompts]
        return [_turn(tokens) for tokens in made]

    def logprobs(self, sequences: Sequence[list[int]]) -> list[list[Reported]]:
        return [_reported(self.all_logprobs(ids), ids) for ids in sequences]

    def all_logprobs(self, ids: list[int]) -> np.ndarray:
        """Of every token for each token but the first: float64 [ids - 1, vocab]"""
        return self.reference.logprobs(ids)[:-1]


class LlamaCpp:
    """llama.cpp on the CPU, with a float32 cache."""

    def __init__(self, model: Path) -> None:
        from tests.helpers.llamacpp_reference import LlamaCpp as Reference

        self.reference = Reference(model, context=CONTEXT)

    def answers(self, questions: Sequence[Question], *, thinking: bool) -> list[str]:
        # Each call loads the model anew, so questions go by the task.
        texts: dict[int, str] = {}
        for task in {question.task for question in questions}:
            at = [i for i, question in enumerate(questions) if question.task == task]
            prompts = [prompt_ids(questions[i], thinking=thinking) for i in at]
            count = max(completion_tokens(questions[i]) for i in at)
            made = self._generate(prompts, count)
            for i, tokens in zip(at, made, strict=True):
                texts[i] = completion_text(tokens, thinking=thinking)
        return [texts[i] for i in range(len(questions))]

    def greedy(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        return [_turn(tokens) for tokens in self._generate(list(prompts), count)]

    def logprobs(self, sequences: Sequence[list[int]]) -> list[list[Reported]]:
        rows = []
        for ids in sequences:
            beginnings = [ids[:end] for end in range(1, len(ids))]
            rows.append(_reported(self.reference.next_logprobs(beginnings), ids))
        return rows

    def _generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        made: list[list[int]] = []
        while len(made) < len(prompts):
            # A call has a limit of time, and long prompts take 20 s on a slow machine.
            end = len(made) + 1
            while sum(map(len, prompts[len(made) : end + 1])) <= CALL_TOKENS and (
                end < len(prompts)
            ):
                end += 1
            made += self.reference.generate(prompts[len(made) : end], count)
        return made


def _turn(tokens: list[int]) -> list[int]:
    """Up to and including the first end token, as servers stop."""
    ends = {default_encoder().ids[name] for name in END_TOKENS}
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


def _reported(rows: np.ndarray, ids: list[int]) -> list[Reported]:
    """Of log-probabilities [ids - 1, vocab], what `Engine.logprobs` gives."""
    reported = []
    for row, token in zip(rows, ids[1:], strict=True):
        best = np.argpartition(-row, TOP_LOGPROBS)[:TOP_LOGPROBS]
        reported.append({int(i): float(row[i]) for i in {*best.tolist(), token}})
    return reported
