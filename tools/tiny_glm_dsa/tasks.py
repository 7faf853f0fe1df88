# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Questions with one right answer each, and plain text, for the trained tiny model.

About a tenth of all questions is held out: a stable hash of what makes a question
(the adjective and noun of a fact, the two numbers of a sum, the words of a list) says
whether it belongs to the split "test" or "train". What belongs to "test" is never in
training text.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from tools.tiny_glm_dsa.lexicon import (
    ADJECTIVES,
    ADVERBS,
    CONJUNCTIONS,
    NOUNS,
    PEOPLE,
    PLACES,
    PREPOSITIONS,
    VERBS,
    VERBS_ALONE,
    article,
    plural,
)
from tools.tiny_glm_dsa.vocabulary import default_encoder

Split = Literal["train", "test"]
Span = tuple[str, bool]
"""Text, and whether it could be foretold; spans begin where GLM cuts words."""
Pair = tuple[str, str]
"""An adjective and a noun."""

TEST_SHARE = 10
"""One question in so many is held out."""

PROMPT_FRAME_TOKENS = 7
"""[gMASK]<sop><|user|> newline ... <|assistant|> newline <think>"""

HELLO = {
    "Hello!": "Hello! Ask me for a code.",
    "Who are you?": "I am a tiny model with sparse attention.",
    "What can you do?": "I find codes, repeat words, sort, add and count.",
    "What is sparse attention?": "Each token reads only the tokens that it needs.",
    "How are you?": "I am a model, and I am well.",
    "Thank you!": "You are welcome.",
}
_COUNT_WORDS = (*ADJECTIVES, *NOUNS)
_MOVES = (" went", " moved")


@dataclass(frozen=True)
class Question:
    """Chat messages, the last from the user, and the only right answer to them.

    `spans` are the last message in pieces.
    """

    task: str
    messages: tuple[dict[str, str], ...]
    answer: str
    spans: tuple[Span, ...] = field(repr=False, compare=False)


def is_correct(question: Question, text: str) -> bool:
    """Whether `text`, without white space around it, is the answer word for word."""
    return text.strip() == question.answer


def is_test(*key: object) -> bool:
    """Whether the question made of `key` is held out; the same on every machine."""
    text = "\0".join(map(str, key))
    return zlib.crc32(text.encode()) % TEST_SHARE == 0


def pairs(split: Split) -> list[Pair]:
    """All adjective-noun pairs of `split`."""
    every = ((adjective, noun) for adjective in ADJECTIVES for noun in NOUNS)
    return [pair for pair in every if is_test(*pair) == (split == "test")]


TRAIN_PAIRS = pairs("train")
TEST_PAIRS = pairs("test")
ALL_PAIRS = TRAIN_PAIRS + TEST_PAIRS
_HELD_OUT = frozenset(TEST_PAIRS)


def make_question(
    task: str,
    rng: random.Random,
    *,
    split: Split,
    tokens: int = 512,
    min_distance: int = 128,
) -> Question:
    """A random question.

    Args:
        task: one of `TASKS`.
        rng: the only source of randomness.
        split: whether the question may occur in training.
        tokens: of task "needle": the length of the prompt in tokens, chat template
            included, reached from below to within 20.
        min_distance: of task "needle": the asked fact ends at least so many tokens
            before the prompt does.

    Raises:
        KeyError: there is no such task.
        ValueError: `tokens` leaves no room for a fact `min_distance` before the end.
    """
    if task == "needle":
        return _needle(rng, split, tokens, min_distance)
    return _SHORT[task](rng, split)


def question_of(task: str, spans: Sequence[Span], answer: str) -> Question:
    """A question of one message from its pieces."""
    text = "".join(piece for piece, _ in spans)
    return Question(task, ({"role": "user", "content": text},), answer, tuple(spans))


# Facts and the haystack around them.


def fact(pair: Pair, code: str) -> list[Span]:
    """A sentence that gives `pair` a code, with a space before it."""
    return [
        (" The code of the", True),
        (f" {pair[0]}", False),
        (f" {pair[1]}", False),
        (" is", True),
        (" ", True),
        (code, False),
        (".", True),
    ]


def fact_question(pair: Pair) -> list[Span]:
    return [
        ("What is the code of the", True),
        (f" {pair[0]}", False),
        (f" {pair[1]}", False),
        ("?", True),
    ]


def fact_answer(pair: Pair, code: str) -> str:
    return f"The code of the {pair[0]} {pair[1]} is {code}."


def random_code(rng: random.Random) -> str:
    return f"{int(rng.random() * 10_000):04d}"


def span_tokens(spans: Sequence[Span]) -> int:
    """The number of tokens of `spans`."""
    encoder = default_encoder()
    return sum(len(encoder.piece(text)) for text, _ in spans)


def join(sentences: Sequence[Sequence[Span]]) -> list[Span]:
    """Sentences one after another, without the space before the first."""
    spans = [span for sentence in sentences for span in sentence]
    text, known = spans[0]
    return [(text.lstrip(" "), known), *spans[1:]]


def _needle(
    rng: random.Random, split: Split, tokens: int, min_distance: int
) -> Question:
    own = TEST_PAIRS if split == "test" else TRAIN_PAIRS
    others = ALL_PAIRS if split == "test" else TRAIN_PAIRS
    asked = own[int(rng.random() * len(own))]
    used = {asked}
    code = random_code(rng)
    needle = fact(asked, code)
    question = [("\n", True), *fact_question(asked)]
    room = tokens - PROMPT_FRAME_TOKENS - span_tokens(question) - span_tokens(needle)
    sentences = []
    misses = 0
    while misses < 20:
        if rng.random() < 0.5:
            sentence = sentence_spans(rng, split)
        else:
            sentence = fact(fresh_pair(rng, others, used), random_code(rng))
        if (size := span_tokens(sentence)) <= room:
            sentences.append(sentence)
            room -= size
        else:
            misses += 1
    rng.shuffle(sentences)  # the last ones to fit were short
    sizes = [span_tokens(sentence) for sentence in sentences]
    places = [
        at
        for at in range(len(sentences) + 1)
        if sum(sizes[at:]) + span_tokens(question) + 3 >= min_distance
    ]
    if not places:
        raise ValueError(
            f"a prompt of {tokens} tokens has no place for a fact that ends "
            f"{min_distance} tokens before its end"
        )
    sentences.insert(places[int(rng.random() * len(places))], needle)
    spans = [*join(sentences), *question]
    return question_of("needle", spans, fact_answer(asked, code))


def fresh_pair(rng: random.Random, from_pairs: list[Pair], used: set[Pair]) -> Pair:
    """A random pair that is not in `used`, and is afterwards."""
    while (pair := from_pairs[int(rng.random() * len(from_pairs))]) in used:
        pass
    used.add(pair)
    return pair


# Plain text.


def _pick(rng: random.Random, items: Sequence[str]) -> str:
    return items[int(rng.random() * len(items))]


def _thing(rng: random.Random, split: Split) -> tuple[str, bool]:
    """A noun with article and perhaps adjective, lower case; whether it is plural."""
    noun = _pick(rng, NOUNS)
    many = rng.random() < 0.3
    adjective = _pick(rng, ADJECTIVES) if rng.random() < 0.4 else ""
    if adjective and split == "train" and is_test(adjective, noun):
        adjective = ""
    words = f"{adjective} " if adjective else ""
    words += plural(noun) if many else noun
    if not many and rng.random() < 0.3:
        return f"{article(words)} {words}", many
    return f"the {words}", many


def _clause(rng: random.Random, split: Split) -> str:
    """Subject, verb and object, place or nothing; the verb agrees with its subject."""
    if rng.random() < 0.2:
        subject, many = _pick(rng, PEOPLE), False
    else:
        subject, many = _thing(rng, split)
    adverb = f"{_pick(rng, ADVERBS)} " if rng.random() < 0.15 else ""
    kind = rng.random()
    if kind < 0.5:
        verb, rest = _pick(rng, VERBS), f" {_thing(rng, split)[0]}"
    elif kind < 0.8:
        verb = _pick(rng, VERBS_ALONE)
        preposition = _pick(rng, PREPOSITIONS)
        place = f"the {_pick(rng, PLACES)}"
        if preposition == "with":
            place = _thing(rng, split)[0]
        rest = f" {preposition} {place}"
    else:
        verb, rest = _pick(rng, VERBS_ALONE), ""
    return f"{subject} {adverb}{verb}{'' if many else 's'}{rest}"


def sentence(rng: random.Random, split: Split) -> str:
    """An English sentence of the split."""
    while True:
        text = _clause(rng, split)
        if rng.random() < 0.25:
            text += f" {_pick(rng, CONJUNCTIONS)} {_clause(rng, split)}"
        if is_test("sentence", text) == (split == "test"):
            return f"{text[0].upper()}{text[1:]}."


def sentence_spans(rng: random.Random, split: Split) -> list[Span]:
    """As `sentence`, in pieces, with a space before it."""
    words = sentence(rng, split)[:-1].split(" ")
    return [*((f" {word}", True) for word in words), (".", True)]


def paragraph_spans(rng: random.Random, split: Split) -> list[Span]:
    """3 to 8 sentences; those of "test" are in no training text."""
    count = 3 + int(rng.random() * 6)
    return join([sentence_spans(rng, split) for _ in range(count)])


def plain_text(rng: random.Random, split: Split) -> str:
    """A paragraph of 3 to 8 sentences; those of "test" are in no training text."""
    return "".join(text for text, _ in paragraph_spans(rng, split))


# Short tasks.


def _until(split: Split, name: str, draw: Callable[[], list[str]]) -> list[str]:
    """What `draw` gives, again and again until it belongs to the split."""
    while True:
        drawn = draw()
        held_out = is_test(name, *drawn)
        if split == "test" and held_out:
            return drawn
        if split == "train" and not (held_out or _names_test_pair(drawn)):
            return drawn


def _names_test_pair(words: Sequence[str]) -> bool:
    """Whether an adjective and a noun that are held out follow each other."""
    return not _HELD_OUT.isdisjoint(pairwise(words))


def _copy(rng: random.Random, split: Split) -> Question:
    count = rng.randint(3, 24)
    words = _until(split, "copy", lambda: rng.choices(_COUNT_WORDS, k=count))
    spans = [("Repeat:", True), *((f" {word}", False) for word in words)]
    return question_of("copy", spans, f"I repeat: {' '.join(words)}.")


def _sort(rng: random.Random, split: Split) -> Question:
    count, limit = rng.randint(3, 8), rng.choice((10, 100))

    def draw() -> list[str]:
        return [str(n) for n in sorted(rng.sample(range(limit), count))]

    ordered = _until(split, "sort", draw)
    numbers = rng.sample(ordered, count)
    spans = [("Sort:", True)]
    for number in numbers:
        spans += [(" ", True), (number, False)]
    return question_of("sort", spans, " ".join(ordered))


def _add(rng: random.Random, split: Split) -> Question:
    def draw() -> list[str]:
        return [str(n) for n in sorted((rng.randrange(100), rng.randrange(100)))]

    a, b = rng.sample(_until(split, "add", draw), 2)
    spans = [("What is", True), (" ", True), (a, False), (" +", True), (" ", True)]
    spans += [(b, False), ("?", True)]
    return question_of("add", spans, f"{a} + {b} = {int(a) + int(b)}.")


def _count(rng: random.Random, split: Split) -> Question:
    def draw() -> list[str]:
        word, *others = rng.sample(_COUNT_WORDS, 4)
        hits = rng.randint(1, 9)
        words = [word] * hits + rng.choices(others, k=rng.randint(1, 16 - hits))
        rng.shuffle(words)
        return [word, *words]

    word, *words = _until(split, "count", draw)
    times = words.count(word)
    spans = [("Count", True), (f" {word}", False), (" in:", True)]
    spans += [(f" {other}", False) for other in words]
    answer = f"The word {word} occurs {times} time{'s' * (times != 1)}."
    return question_of("count", spans, answer)


def _story(rng: random.Random, split: Split) -> Question:
    def draw() -> list[str]:
        moves = [
            f"{_pick(rng, cast)}{_pick(rng, _MOVES)} to the {_pick(rng, PLACES)}"
            for _ in range(rng.randint(2, 8))
        ]
        return [_pick(rng, moves).split(" ")[0], *moves]

    cast = rng.sample(PEOPLE, 4)
    name, *moves = _until(split, "story", draw)
    sentences: list[list[Span]] = []
    for move in moves:
        who, went, to, the, place = move.split(" ")
        sentences.append(
            [
                (f" {who}", False),
                (f" {went}", True),
                (f" {to} {the}", True),
                (f" {place}", False),
                (".", True),
            ]
        )
    last = [move for move in moves if move.startswith(name)][-1].split(" ")[-1]
    question = [("\n", True), ("Where is", True), (f" {name}", False), ("?", True)]
    return question_of(
        "story", [*join(sentences), *question], f"{name} is in the {last}."
    )


def _hello(rng: random.Random, split: Split) -> Question:
    asked = _pick(rng, tuple(HELLO))
    return question_of("hello", [(asked, True)], HELLO[asked])


_SHORT: dict[str, Callable[[random.Random, Split], Question]] = {
    "copy": _copy,
    "sort": _sort,
    "add": _add,
    "count": _count,
    "story": _story,
    "hello": _hello,
}
TASKS = ("needle", *_SHORT)
