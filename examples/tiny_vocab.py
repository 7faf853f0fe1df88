# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""A tiny vocabulary and chat template in the manner of GLM, made up here.

The vocabulary is small (512 tokens by default), covers every byte, and is the same on
every run and machine: its merges are learned from the sentences below, or from others
that are given. Only the standard library is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
USER_DEFINED_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
)
MIN_PADDING_ROWS = 4
MIN_SIZE = 256 + len(SPECIAL_TOKENS) + len(USER_DEFINED_TOKENS) + MIN_PADDING_ROWS

SENTENCES = (
    "The river was high that morning, and the ferry could not cross it.",
    "She counted the lamps along the harbor: there were 128 of them in 1999.",
    "When the rain stopped, the children ran out and the whole street was theirs.",
    "I'm sure they're late; we've waited and we'll wait, but it's what he'd want.",
    "Ask the baker whether the bread that he made yesterday is still there.",
    "Der Zug fährt über die Brücke und hält an einer kleinen Station.",
    "Les élèves écoutent l'histoire de la forêt et posent des questions.",
    "El niño pequeño comió una manzana y después durmió la siesta.",
    "Вечером над рекой поднимался туман, и город становился тише.",
    "Η θάλασσα ήταν ήρεμη και ο ουρανός καθαρός.",
    "今天的天气很好,我们一起去公园散步。",
    "他们在图书馆里读书,然后去吃饭。",
    "昨日は雨でしたが、今日は晴れています。",
    "오늘은 날씨가 좋아서 산책을 했습니다.",
    "القطار يصل إلى المحطة في الصباح.",
    "गाँव के पास एक छोटी नदी बहती है।",
    "def area(width, height):\n    return width * height\n",
    'for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", values[i]);\n}\n',
    'if value is None:\n        raise ValueError(f"no value for {name!r}")\n',
    '{"name": "harbor", "count": 3, "open": true, "tags": ["a", "b"]}',
    "12 + 34 = 46; 100 - 1 = 99; 3.14159 * 2 = 6.28318; 2024-05-17 08:30:00",
    "Bring apples 🍎🍎, tea ☕ and the cat 🐈!  😀😀\r\n\r\n",
)

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is not none -%}
    {%- for part in content -%}
      {%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
[gMASK]<sop>
{%- if tools -%}
  {{- '<|system|>\\nThese functions can be called:\\n' -}}
  {%- for tool in tools -%}
    {{- tool | tojson -}}{{- '\\n' -}}
  {%- endfor -%}
  {{- 'A call looks like this: <tool_call>name<arg_key>key</arg_key>' -}}
  {{- '<arg_value>value</arg_value></tool_call>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {{- '<|system|>\\n' -}}{{- text_of(message.content) -}}
  {%- elif message.role == 'user' -%}
    {{- '<|user|>\\n' -}}{{- text_of(message.content) -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|assistant|>\\n' -}}
    {%- if message.reasoning_content is string -%}
      {{- '<think>' -}}{{- message.reasoning_content -}}{{- '</think>' -}}
    {%- else -%}
      {{- '</think>' -}}
    {%- endif -%}
    {{- text_of(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '<tool_call>' -}}{{- function.name -}}
      {%- for key, value in function.arguments.items() -%}
        {{- '<arg_key>' -}}{{- key -}}{{- '</arg_key><arg_value>' -}}
        {%- if value is string -%}
          {{- value -}}
        {%- else -%}
          {{- value | tojson -}}
        {%- endif -%}
        {{- '</arg_value>' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}
      {{- '<|observation|>' -}}
    {%- endif -%}
    {{- '<tool_response>' -}}{{- text_of(message.content) -}}{{- '</tool_response>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>\\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}
    {{- '</think>' -}}
  {%- else -%}
    {{- '<think>' -}}
  {%- endif -%}
{%- endif -%}
"""


@dataclass(frozen=True)
class TinyVocabulary:
    """Token i is `tokens[i]`, of GGUF token type `types[i]`.

    `merges` are in order of rank, each "left right". `ids` gives the ids of the special
    and user-defined tokens by name.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    ids: dict[str, int]
    chat_template: str

    def metadata(self) -> dict[str, Any]:
        """The `tokenizer.*` keys of a GGUF file, with plain Python values."""
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "glm4",
            "tokenizer.ggml.tokens": list(self.tokens),
            "tokenizer.ggml.token_type": list(self.types),
            "tokenizer.ggml.merges": list(self.merges),
            "tokenizer.ggml.eos_token_id": self.ids["<|endoftext|>"],
            "tokenizer.ggml.padding_token_id": self.ids["<|endoftext|>"],
            "tokenizer.ggml.bos_token_id": self.ids["[gMASK]"],
            "tokenizer.ggml.eot_token_id": self.ids["<|user|>"],
            "tokenizer.ggml.eom_token_id": self.ids["<|observation|>"],
            "tokenizer.ggml.unknown_token_id": self.ids["<|endoftext|>"],
            "tokenizer.chat_template": self.chat_template,
        }


def byte_alphabet() -> tuple[str, ...]:
    """The character that stands for each byte value in byte-level BPE tokens.

    Bytes that print as one visible Latin-1 character stand for themselves; the others
    take the code points from 256 on, in ascending order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return tuple(chr(b if b in visible else next(hidden)) for b in range(256))


def tiny_vocabulary(
    size: int = 512, sentences: Iterable[str] = SENTENCES
) -> TinyVocabulary:
    """Build the vocabulary of `size` tokens: bytes, merges, named tokens, padding rows.

    The merges are learned from `sentences`. Where these give fewer merges than fit,
    padding rows fill the rest.

    Raises:
        ValueError: `size` is below `MIN_SIZE`.
    """
    if size < MIN_SIZE:
        raise ValueError(f"size is {size}; the smallest vocabulary has {MIN_SIZE}")
    tokens = sorted(byte_alphabet())
    merges = []
    for left, right in _learn_merges(size - MIN_SIZE, sentences):
        tokens.append(left + right)
        merges.append(f"{left} {right}")
    types = [NORMAL] * len(tokens)
    ids = {}
    for names, kind in ((SPECIAL_TOKENS, CONTROL), (USER_DEFINED_TOKENS, USER_DEFINED)):
        for name in names:
            ids[name] = len(tokens)
            tokens.append(name)
            types.append(kind)
    for row in range(len(tokens), size):
        tokens.append(f"[PAD{row}]")
        types.append(UNUSED)
    return TinyVocabulary(
        tuple(tokens), tuple(types), tuple(merges), ids, CHAT_TEMPLATE
    )


def _words(sentence: str) -> Iterator[str]:
    """Runs of one kind of character, a leading space kept with the run."""
    word, kind = "", ""
    for char in sentence:
        char_kind = "a" if char.isalpha() else "d" if char.isdigit() else "o"
        if char.isspace():
            char_kind = "s"
        joins = char_kind == kind or (word == " " and char_kind != "d")
        if word and (not joins or (kind == "d" and len(word) == 3)):
            yield word
            word = ""
        word += char
        kind = char_kind
    if word:
        yield word


def _learn_merges(count: int, sentences: Iterable[str]) -> list[tuple[str, str]]:
    """The usual greedy training: join the most frequent pair, again and again."""
    alphabet = byte_alphabet()
    frequency = Counter(word for sentence in sentences for word in _words(sentence))
    words = [
        ([alphabet[b] for b in word.encode()], times)
        for word, times in frequency.items()
    ]
    known = set(alphabet)
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for pieces, times in words:
            for pair in pairwise(pieces):
                pairs[pair] += times
        fresh = [pair for pair in pairs if "".join(pair) not in known]
        if not fresh:
            break
        best = min(fresh, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        known.add("".join(best))
        for pieces, _ in words:
            _join(pieces, best)
    return merges


def _join(pieces: list[str], pair: tuple[str, str]) -> None:
    """Replace each occurrence of `pair` in `pieces`, from the left, in place."""
    at = 0
    while at < len(pieces) - 1:
        if pieces[at] == pair[0] and pieces[at + 1] == pair[1]:
            pieces[at : at + 2] = ["".join(pair)]
        at += 1
