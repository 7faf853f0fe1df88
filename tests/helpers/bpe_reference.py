# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Byte-level BPE in plain Python, straight from the keys of a GGUF file.

Slow and short: the yardstick for the tokenizer that the overlay rebuilds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import regex

_CONTRACTION = r"'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])"
_WORD = regex.compile(
    "|".join(
        (
            _CONTRACTION,
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
)


def _byte_characters() -> dict[int, str]:
    table: dict[int, str] = {}
    shifted = 0
    for byte in range(256):
        printable = 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)
        if printable:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + shifted)
            shifted += 1
    return table


class ReferenceBPE:
    """Encodes and decodes text by the `tokenizer.ggml.*` keys in `metadata`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.tokens: list[str] = list(metadata["tokenizer.ggml.tokens"])
        types = metadata["tokenizer.ggml.token_type"]
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        self._added = sorted(
            (t for t, kind in zip(self.tokens, types, strict=True) if kind in (3, 4)),
            key=len,
            reverse=True,
        )
        self._special = {i for i, kind in enumerate(types) if kind == 3}
        self._rank = {
            tuple(merge.split(" ")): rank
            for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])
        }
        self._char_of = _byte_characters()
        self._byte_of = {char: byte for byte, char in self._char_of.items()}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece, is_added in self._split_added(text):
            if is_added:
                ids.append(self._ids[piece])
                continue
            for word in _WORD.findall(piece):
                ids += self._encode_word(word)
        return ids

    def decode(self, ids: list[int], *, skip_special: bool = False) -> str:
        data = b""
        for number in ids:
            token = self.tokens[number]
            if token in self._added:
                hidden = skip_special and number in self._special
                data += b"" if hidden else token.encode()
            else:
                data += bytes(self._byte_of[char] for char in token)
        return data.decode(errors="replace")

    def _split_added(self, text: str) -> Iterator[tuple[str, bool]]:
        start = at = 0
        while at < len(text):
            token = next((t for t in self._added if text.startswith(t, at)), None)
            if token is None:
                at += 1
                continue
            yield text[start:at], False
            yield token, True
            start = at = at + len(token)
        yield text[start:], False

    def _encode_word(self, word: str) -> list[int]:
        parts = [self._char_of[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            known = [pair for pair in pairs if pair in self._rank]
            if not known:
                break
            at = pairs.index(min(known, key=self._rank.__getitem__))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._ids[part] for part in parts]
