# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The trained tiny model's vocabulary, and a fast tokenizer for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

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
)

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from tiny_vocab import (  # noqa: E402
    CONTROL,
    NORMAL,
    UNUSED,
    TinyVocabulary,
    tiny_vocabulary,
)

SIZE = 640

_SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GLM's rule for cutting text into words: pre-tokenizer `glm4`."""

_FRAMES = (
    "The code of the",
    "What is the",
    "Where is",
    "I repeat: Repeat: Sort: Count in:",
    "The word occurs times time.",
    " is in the went to the moved to the",
    "A",
    "An",
    " The a an A An",
    "I am a tiny model with sparse attention",
    "Hello",
    " you reads token foxes",
    " + =",
)
"""What tasks and sentences are made of besides the lexicon, without digits."""


def _sentences() -> Iterator[str]:
    """Text to learn the merges from; no digits, so that each stays one token.

    How often a word is there decides which words become one token where not all can.
    """
    for word in (*ADJECTIVES, *NOUNS, *PEOPLE, *PLACES):
        yield from [f" {word}"] * 12
    for frame in _FRAMES:
        yield from [frame] * 8
    for name in PEOPLE:
        yield from [name] * 8
    for word in (*VERBS, *VERBS_ALONE, *ADVERBS, *PREPOSITIONS, *CONJUNCTIONS):
        yield from [f" {word}"] * 8


@cache
def trained_vocabulary() -> TinyVocabulary:
    """The vocabulary of 640 tokens; one and the same on every call."""
    return tiny_vocabulary(SIZE, _sentences())


class Encoder:
    """Text to ids and back, as the tokenizer that is rebuilt from the GGUF does it."""

    def __init__(self, vocabulary: TinyVocabulary | None = None) -> None:
        self.vocabulary = vocabulary or trained_vocabulary()
        self.ids = self.vocabulary.ids
        self._pieces: dict[str, list[int]] = {}
        rows = zip(self.vocabulary.tokens, self.vocabulary.types, strict=True)
        kept = [(i, *row) for i, row in enumerate(rows) if row[1] != UNUSED]
        merges = [merge.partition(" ")[::2] for merge in self.vocabulary.merges]
        self._tokenizer = Tokenizer(
            models.BPE(vocab={token: i for i, token, _ in kept}, merges=merges)
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=kind == CONTROL)
                for _, token, kind in kept
                if kind != NORMAL
            ]
        )

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; special tokens in it are found."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, text: str) -> list[int]:
        """As `encode`, remembered: for text that comes again and again."""
        ids = self._pieces.get(text)
        if ids is None:
            ids = self._pieces[text] = self.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as `encode`."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


@cache
def default_encoder() -> Encoder:
    """One encoder of the trained vocabulary for the whole process."""
    return Encoder()
