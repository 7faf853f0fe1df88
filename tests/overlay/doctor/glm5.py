# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""GLM-5 files at real size, without weights, that `vllm serve` would accept.

As `tests/helpers/glm_header.py`,
with a vocabulary and merges that fit each other.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.gguf_writer import Typed, write_shards
from tests.helpers.glm_header import MERGES, TOKENS, glm_metadata, glm_tensors

_WORDS = 154_820  # tokens behind them are special
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
_CONTROL = 3
_ARRAYS = ("tokens", "token_type", "merges")


def write_glm5(
    directory: Path,
    *,
    metadata: dict[str, Any] | None = None,
    vocabulary: bool = False,
) -> Path:
    """The first of 11 shards of a GLM-5.3 UD-Q4_K_XL; `metadata` changes keys.

    Without `vocabulary` it takes --tokenizer to be served.
    """
    tensors = glm_tensors()
    step = -(-len(tensors) // 10)
    groups = [tensors[i : i + step] for i in range(0, len(tensors), step)]
    keys = glm_metadata(1, 1)
    for name in _ARRAYS:
        del keys[f"tokenizer.ggml.{name}"]
    keys |= (_vocabulary() if vocabulary else {}) | (metadata or {})
    return write_shards(directory, "glm", keys, [[], *groups])[0]


def _vocabulary() -> dict[str, Any]:
    words = list(itertools.islice(_words(), _WORDS))
    special = [f"<|special {i}|>" for i in range(TOKENS - _WORDS)]
    kinds = [1] * _WORDS + [_CONTROL] * len(special)
    merges = list(itertools.islice(_merges(words), MERGES))
    assert len(merges) == MERGES
    arrays = (
        Typed("[string]", words + special),
        Typed("[i32]", kinds),
        Typed("[string]", merges),
    )
    return {
        f"tokenizer.ggml.{name}": array
        for name, array in zip(_ARRAYS, arrays, strict=True)
    }


def _words() -> Iterator[str]:
    """The letters that stand for bytes, then all words of 2, 3 and 4 of 40 letters."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    yield from (chr(i if i in visible else next(hidden)) for i in range(256))
    for length in (2, 3, 4):
        yield from map("".join, itertools.product(_LETTERS, repeat=length))


def _merges(words: list[str]) -> Iterator[str]:
    for word in words[256:]:
        yield from (f"{word[:at]} {word[at:]}" for at in range(1, len(word)))
