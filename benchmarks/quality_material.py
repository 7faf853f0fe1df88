# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The held-out questions and texts on which quality is measured.

The same counts give the same questions on every machine, and more questions begin with
those of fewer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import gguf

from tools.tiny_glm_dsa.corpus import render
from tools.tiny_glm_dsa.tasks import TASKS, Question, make_question, plain_text
from tools.tiny_glm_dsa.vocabulary import default_encoder, trained_vocabulary

NEEDLE_TOKENS = 1900
"""Length of a needle's prompt, near the end of the model's context of 2048."""
CONVERSATIONS = 2
"""Of each task."""
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
THINK_END = "</think>"
# Where so many draws bring nothing new, a task has no more questions.
DRAWS = 200


@dataclass(frozen=True)
class Material:
    """Questions of all tasks, each asked once; token ids of paragraphs and of whole
    conversations, both held out from training and at least 3 tokens long."""

    questions: tuple[Question, ...]
    texts: tuple[list[int], ...]
    conversations: tuple[list[int], ...]


def make_material(
    questions: int,
    texts: int = 32,
    tasks: Iterable[str] = TASKS,
    needles: int | None = None,
    needle_tokens: int = NEEDLE_TOKENS,
) -> Material:
    """`questions` of each task (fewer where a task has fewer; `needles` of task needle,
    if given), `texts` paragraphs, and a few conversations of each task."""
    tasks = tuple(tasks)
    counts = dict.fromkeys(tasks, questions)
    if needles is not None and "needle" in counts:
        counts["needle"] = needles
    asked = [
        question
        for task, count in counts.items()
        for question in questions_of(task, count, needle_tokens)
    ]
    talks = [
        conversation(question)
        for task in tasks
        for question in questions_of(task, CONVERSATIONS, needle_tokens)
    ]
    return Material(tuple(asked), tuple(paragraphs(texts)), tuple(talks))


def questions_of(task: str, count: int, tokens: int = NEEDLE_TOKENS) -> list[Question]:
    """Up to `count` different held-out questions of a task."""
    return list(islice(_questions(task, tokens), count))


def _questions(task: str, tokens: int) -> Iterator[Question]:
    rng = random.Random(f"quality {task} {tokens}")
    seen: set[str] = set()
    draws = 0
    while draws < DRAWS:
        options = {"tokens": tokens} if task == "needle" else {}
        question = make_question(task, rng, split="test", **options)
        draws += 1
        key = str(question.messages)
        if key not in seen:
            seen.add(key)
            draws = 0
            yield question


def paragraphs(count: int) -> Iterator[list[int]]:
    """Token ids of held-out paragraphs, each a document of its own."""
    encoder = default_encoder()
    rng = random.Random("quality text")
    for _ in range(count):
        text = plain_text(rng, "test")
        yield encoder.encode(f"[gMASK]<sop>{text}<|endoftext|>")


def prompt_ids(question: Question, *, thinking: bool) -> list[int]:
    """The prompt as the chat template makes it."""
    return default_encoder().encode(render(question.messages, thinking=thinking))


def conversation(question: Question) -> list[int]:
    """The prompt, the right answer after an empty thought, and the end of the turn."""
    text = render(question.messages, question.answer, thinking=True)
    return default_encoder().encode(text)


def completion_tokens(question: Question) -> int:
    """Length of the right completion; one that is longer is wrong."""
    whole = conversation(question)
    return len(whole) - len(prompt_ids(question, thinking=True))


def completion_text(tokens: Sequence[int], *, thinking: bool) -> str:
    """The answer within generated ids; empty if the thought does not end.

    What follows the first end token is not part of it. A turn that does not end
    keeps a token too many and so is wrong.
    """
    encoder = default_encoder()
    ends = {encoder.ids[name] for name in END_TOKENS}
    kept = []
    for token in tokens:
        if token in ends:
            break
        kept.append(token)
    text = encoder.decode(kept)
    if len(kept) == len(tokens):
        text += " [unfinished]"
    if not thinking:
        return text
    return text.partition(THINK_END)[2]


def check_vocabulary(model: Path) -> None:
    """Raise ValueError if the file's tokens are not those of the tasks."""
    field = gguf.GGUFReader(model).get_field("tokenizer.ggml.tokens")
    tokens = () if field is None else tuple(field.contents())
    if tokens != trained_vocabulary().tokens:
        raise ValueError(
            f"{model} has {len(tokens)} tokens that are not those of the trained tiny "
            "model; its tasks can be asked of no other vocabulary"
        )
