# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Endless training text for the tiny model: packed documents with a class per token.

Most documents are conversations about one haystack of facts; the others are the short
tasks and plain text. Every conversation is exactly what the chat template gives.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from tools.tiny_glm_dsa import tasks
from tools.tiny_glm_dsa.tasks import Pair, Span, Split
from tools.tiny_glm_dsa.vocabulary import default_encoder

RANDOM, TEXT, ANSWER = 0, 1, 2
"""Classes of tokens: not to be foretold (or padding), ordinary, part of an answer."""

Piece = tuple[str, int]
"""Text and the class of its tokens."""
Turn = tuple[Sequence[Span], str]
"""The user's message in spans, and the answer."""
Arrays = tuple[NDArray[np.int16], NDArray[np.uint8]]

END = "<|endoftext|>"
_START = [("[gMASK]", RANDOM), ("<sop>", TEXT)]
_MAX_WORKERS = 1000

# The mix. Shares are of tokens.
_THINKING_SHARE = 0.7
_REMEMBERED_SHARE = 0.5
_HAYSTACK_SHARES = (0.0, 0.5, 0.7, 0.8, 0.9, 1.0)
_PLAIN_DOCUMENTS = 0.12
_CHANGE_OF_TOPIC = 0.05
_SHORT_WEIGHTS = {"copy": 3, "sort": 4, "add": 8, "count": 3, "story": 3, "hello": 1}
_MAX_TURNS = 24

# What things take in tokens.
_FACT_TOKENS = 13
_TURN_TOKENS = 30
_SMALLEST_HAYSTACK = 64
_SMALLEST_SHORT = 24


def render(
    messages: Sequence[Mapping[str, str]],
    answer: str | None = None,
    *,
    thinking: bool,
) -> str:
    """The text of a conversation, as the chat template renders it.

    Args:
        messages: roles "user", "system" and "assistant"; the latter may have
            "reasoning_content".
        answer: None for the prompt alone; else the completion follows the prompt, up
            to and including the token that ends it.
        thinking: whether the prompt ends with <think>, which the model then closes.

    Raises:
        KeyError: a message has another role.
    """
    text = "[gMASK]<sop>"
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            reasoning = message.get("reasoning_content")
            thought = "" if reasoning is None else f"<think>{reasoning}"
            text += f"<|assistant|>\n{thought}</think>{content}"
        else:
            text += {"user": "<|user|>\n", "system": "<|system|>\n"}[message["role"]]
            text += content
    text += "<|assistant|>\n" + ("<think>" if thinking else "</think>")
    if answer is None:
        return text
    return text + ("</think>" if thinking else "") + answer + "<|user|>"


def conversation(
    turns: Sequence[Turn], *, thinking: bool, remembered: bool
) -> list[Piece]:
    """The pieces of a whole chat.

    Args:
        turns: user's messages and answers.
        thinking: whether the last answer follows <think></think>.
        remembered: whether the earlier ones do, as from clients that send back the
            (empty) reasoning; most do not.
    """
    pieces: list[Piece] = [*_START, ("<|user|>", TEXT)]
    for at, (message, answer) in enumerate(turns, 1):
        pieces.append(("\n", TEXT))
        pieces += [(text, TEXT if known else RANDOM) for text, known in message]
        pieces += [("<|assistant|>", TEXT), ("\n", TEXT)]
        if thinking if at == len(turns) else remembered:
            pieces += [("<think>", RANDOM), ("</think>", ANSWER)]
        else:
            pieces.append(("</think>", RANDOM))
        pieces += [(text, ANSWER) for text in _words(answer)]
        pieces.append(("<|user|>", ANSWER))
    return pieces


def _words(answer: str) -> list[str]:
    """An answer cut before each space; the digits of a fact's code stay together."""
    first, *others = answer.split(" ")
    return [first, *(f" {word}" for word in others)]


def _encode(pieces: Sequence[Piece]) -> tuple[list[int], bytearray]:
    """Token ids, and a class for each."""
    piece = default_encoder().piece
    ids: list[int] = []
    classes = bytearray()
    for text, kind in pieces:
        new = piece(text)
        ids += new
        classes += _RUNS[kind][len(new)]
    return ids, classes


_RUNS = [[bytes([kind]) * count for count in range(64)] for kind in range(3)]


class _Documents:
    """Random documents of one split."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split: Split = split
        self.asked = tasks.pairs(split)
        self.others = self.asked if split == "train" else tasks.ALL_PAIRS

    def haystack(self, room: int) -> list[Piece]:
        """Facts among sentences and questions about them, in at most `room` tokens."""
        rng = self.rng
        used: set[Pair] = set()
        turns = round(room * rng.uniform(0.1, 0.7) / _TURN_TOKENS)
        turns = max(1, min(_MAX_TURNS, turns))
        room -= turns * _TURN_TOKENS + tasks.PROMPT_FRAME_TOKENS
        filler = rng.choice((0.1, 0.3, 0.5, 0.5))
        facts: list[tuple[Pair, str]] = []
        sentences: list[list[Span]] = []
        while room >= _FACT_TOKENS or not facts:
            if facts and rng.random() < filler:
                sentence = tasks.sentence_spans(rng, self.split)
            else:
                source = self.asked if len(facts) < turns else self.others
                facts.append(
                    (tasks.fresh_pair(rng, source, used), tasks.random_code(rng))
                )
                sentence = tasks.fact(*facts[-1])
            size = tasks.span_tokens(sentence)
            if size <= room or not sentences:
                sentences.append(sentence)
                room -= size
        rng.shuffle(sentences)
        first, *later = facts[:turns]
        message = [*tasks.join(sentences), ("\n", True), *tasks.fact_question(first[0])]
        talk: list[Turn] = [(message, tasks.fact_answer(*first))]
        for known in later:
            if rng.random() < _CHANGE_OF_TOPIC:
                talk.append(self.question(("add", "hello")))
            talk.append((tasks.fact_question(known[0]), tasks.fact_answer(*known)))
        return self.conversation(talk)

    def short(self, room: int) -> list[Piece]:
        """One to four questions of the short tasks."""
        turns = self.rng.choice((1, 1, 2, 4) if room >= 128 else (1,))
        talk = [self.question(tuple(_SHORT_WEIGHTS)) for _ in range(turns)]
        return self.conversation(talk)

    def question(self, names: Sequence[str]) -> Turn:
        weights = [_SHORT_WEIGHTS[name] for name in names]
        name = self.rng.choices(names, weights)[0]
        question = tasks.make_question(name, self.rng, split=self.split)
        return question.spans, question.answer

    def plain(self) -> list[Piece]:
        """A paragraph."""
        pieces = [
            (text, TEXT) for text, _ in tasks.paragraph_spans(self.rng, self.split)
        ]
        return [*_START, *pieces, (END, TEXT)]

    def conversation(self, talk: Sequence[Turn]) -> list[Piece]:
        thinking = self.rng.random() < _THINKING_SHARE
        remembered = self.rng.random() < _REMEMBERED_SHARE
        return conversation(talk, thinking=thinking, remembered=remembered)


def sequences(seed: int, length: int, *, split: Split = "train") -> Iterator[Arrays]:
    """Endless packed sequences, the same for a seed, a length and a split.

    Only plain text at the end of a sequence is cut.

    Yields:
        ids: int16 [length].
        classes: uint8 [length], `RANDOM`, `TEXT` or `ANSWER` for each token.

    Raises:
        ValueError: `length` is below 128.
    """
    if length < 128:
        raise ValueError(f"length is {length}; at least 128 tokens are needed")
    documents = _Documents(random.Random(f"{seed} {length} {split}"), split)
    while True:
        yield _pack(documents, length)


def _pack(documents: _Documents, length: int) -> Arrays:
    """One sequence: at most one haystack, and short documents around it."""
    rng = documents.rng
    ids: list[int] = []
    classes = bytearray()
    haystack = int(length * rng.choice(_HAYSTACK_SHARES))
    start = int((length - haystack) * rng.choice((0, rng.random())))
    while (room := length - len(ids)) > 0:
        if haystack and len(ids) >= start and room >= _SMALLEST_HAYSTACK:
            new, kinds = _encode(documents.haystack(min(room, haystack)))
            if len(new) > room:
                continue
            haystack = 0
        elif room < _SMALLEST_SHORT or rng.random() < _PLAIN_DOCUMENTS:
            new, kinds = _encode(documents.plain())
        else:
            new, kinds = _encode(documents.short(room))
            if len(new) > room:
                continue
        ids += new
        classes += kinds
    return (
        np.array(ids[:length], dtype=np.int16),
        np.frombuffer(bytes(classes[:length]), dtype=np.uint8).copy(),
    )


def batches(seed: int, length: int, batch: int, workers: int) -> Iterator[Arrays]:
    """Endless batches of training sequences, made ahead by `workers` processes.

    The same for the same arguments. Each worker makes every `workers`-th batch, of
    sequences of its own seed. Closing the generator ends the processes.

    Yields:
        ids: int16 [batch, length].
        classes: uint8 [batch, length].

    Raises:
        ValueError: there is no worker, or there are too many.
    """
    if not 0 < workers <= _MAX_WORKERS:
        raise ValueError(f"workers is {workers}; expected 1 to {_MAX_WORKERS}")
    context = multiprocessing.get_context("fork")
    processes = []
    readers = []
    try:
        for worker in range(workers):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_work,
                args=(reader, writer, seed * _MAX_WORKERS + worker, length, batch),
                daemon=True,
            )
            process.start()
            writer.close()
            processes.append(process)
            readers.append(reader)
        while True:
            for reader in readers:
                ids = np.frombuffer(bytearray(reader.recv_bytes()), np.int16)
                classes = np.frombuffer(bytearray(reader.recv_bytes()), np.uint8)
                yield ids.reshape(batch, length), classes.reshape(batch, length)
    finally:
        for process in processes:
            process.terminate()
            process.join()
        for reader in readers:
            reader.close()


def _work(
    reader: Connection, writer: Connection, seed: int, length: int, batch: int
) -> None:
    """Write batches until nobody reads them."""
    reader.close()  # else this process would not notice the other's end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    source = sequences(seed, length)
    with contextlib.suppress(BrokenPipeError):
        while True:
            rows = [next(source) for _ in range(batch)]
            writer.send_bytes(np.stack([ids for ids, _ in rows]).tobytes())
            writer.send_bytes(np.stack([kinds for _, kinds in rows]).tobytes())
