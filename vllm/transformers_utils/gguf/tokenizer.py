# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Tokenizer, chat template and generation config of a GGUF, as Hugging Face files.

`tokenizer_files` turns the `tokenizer.*` and `general.sampling.*` keys into the text of
the files that transformers and vLLM read from a model directory. Only GLM's byte-level
BPE is rebuilt; another kind of tokenizer is an error. Chat templates are passed on as
text: nothing here parses, compiles or renders them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from vllm.transformers_utils.gguf.errors import GGUFError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
"""Values of `tokenizer.ggml.token_type`; 6 (byte) has no place in byte-level BPE."""

GLM4_SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
"""How GLM cuts text into words before merging."""

MAX_TEMPLATE_CHARS = 1 << 18
"""A chat template may be this long; GLM's has under 10,000 characters."""

_SUPPORTED_PRE = ("glm4", "chatglm-bpe")
_TEMPLATE_KEY = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# Generation stops at each of these.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Key below tokenizer.ggml. -> name of the special token in Hugging Face files.
_SPECIAL_KEYS = {
    "bos_token_id": "bos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}
# Key below general.sampling. -> field of generation_config.json and its range.
_SAMPLING = {
    "temp": ("temperature", 0.0, math.inf),
    "top_k": ("top_k", -1, 2**31 - 1),
    "top_p": ("top_p", 1e-6, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "penalty_repeat": ("repetition_penalty", 1e-6, math.inf),
}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The contents of the tokenizer files of a model directory, by file name.

    Args:
        metadata: GGUF keys and values. An array is a sequence, or an object whose
            `decode()` returns one.

    Returns:
        tokenizer.json, tokenizer_config.json and generation_config.json, and
        chat_template.jinja if the file has one chat template. Several named templates
        are in tokenizer_config.json instead.

    Raises:
        GGUFError: a key is missing, has the wrong type, or names a tokenizer that is
            not GLM's; the vocabulary, merges, ids or sampling values are unusable. The
            message gives key, index and value.
    """
    _check_kind(metadata)
    vocabulary = _read_vocabulary(metadata)
    templates = _chat_templates(metadata)
    config = _tokenizer_config(metadata, vocabulary)
    files = {
        "tokenizer.json": _dump(_tokenizer(metadata, vocabulary)),
        "generation_config.json": _dump(_generation_config(metadata, vocabulary)),
    }
    if list(templates) == ["default"]:
        files["chat_template.jinja"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    files["tokenizer_config.json"] = _dump(config)
    return files


@dataclass(frozen=True)
class _Vocabulary:
    """`ids` are those of all tokens that are kept: padding rows are left out."""

    tokens: Sequence[str]
    types: Sequence[int]
    ids: dict[str, int]
    merges: list[list[str]]
    special: dict[str, int]
    """The `*_token_id` keys that the file has, without their prefix."""

    def content(self, key: str) -> str:
        return self.tokens[self.special[key]]

    @property
    def eos_ids(self) -> list[int]:
        """Without repeats, the end-of-sequence token first if the file names one."""
        ids = [self.special[key] for key in _EOS_KEYS if key in self.special]
        return list(dict.fromkeys(ids))


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _check_kind(metadata: Mapping[str, Any]) -> None:
    model = _text(metadata, "tokenizer.ggml.model")
    if model != "gpt2":
        raise GGUFError(
            f"tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) is "
            "rebuilt. Give the model's own tokenizer with --tokenizer."
        )
    pre = _text(metadata, "tokenizer.ggml.pre")
    if pre not in _SUPPORTED_PRE:
        raise GGUFError(
            f"tokenizer.ggml.pre is {pre!r}; expected one of {_SUPPORTED_PRE}. "
            "Give the model's own tokenizer with --tokenizer."
        )


def _text(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    if value is None:
        raise GGUFError(f"The file has no {key}. Convert the model again.")
    if not isinstance(value, str):
        raise GGUFError(f"{key} is {type(value).__name__}; expected a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise GGUFError(f"{key} is not valid text: {error}") from None
    return value


def _array(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """The list at `key`, all elements of `kind`."""
    value = metadata.get(key)
    if value is None:
        raise GGUFError(f"The file has no {key}. Convert the model again.")
    if callable(decode := getattr(value, "decode", None)) and not isinstance(
        value, (str, bytes)
    ):
        value = decode()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise GGUFError(f"{key} is {type(value).__name__}; expected an array.")
    items = list(value)
    if set(map(type, items)) - {kind}:
        at = next(i for i, item in enumerate(items) if type(item) is not kind)
        raise GGUFError(f"{key}[{at}] is {items[at]!r}; expected {kind.__name__}.")
    return items


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = _array(metadata, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise GGUFError("tokenizer.ggml.tokens is empty. Convert the model again.")
    types = _array(metadata, "tokenizer.ggml.token_type", int)
    _check_counts(metadata, tokens, types)
    special = {
        key.removeprefix("tokenizer.ggml."): _token_id(key, value, len(tokens))
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
    }
    _check_unique(tokens)
    named = set(special.values())
    ids = {
        token: i for i, token in enumerate(tokens) if types[i] != UNUSED or i in named
    }
    if not any(key in special for key in _EOS_KEYS):
        raise GGUFError(
            "The file has none of tokenizer.ggml.eos_token_id, .eot_token_id and "
            ".eom_token_id: generation would never stop. Convert the model again."
        )
    merges = _read_merges(_array(metadata, "tokenizer.ggml.merges", str), ids)
    _check_bytes(ids)
    return _Vocabulary(tokens, types, ids, merges, special)


def _check_counts(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> None:
    if len(types) != len(tokens):
        raise GGUFError(
            f"tokenizer.ggml.token_type has {len(types)} elements; "
            f"tokenizer.ggml.tokens has {len(tokens)}. Convert the model again."
        )
    key = f"{_architecture(metadata)}.vocab_size"
    size = metadata.get(key)
    if size is not None and size != len(tokens):
        raise GGUFError(
            f"{key} is {size!r}; tokenizer.ggml.tokens has {len(tokens)}. "
            "Convert the model again."
        )
    if unknown := set(types) - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED}:
        at = next(i for i, kind in enumerate(types) if kind in unknown)
        raise GGUFError(
            f"tokenizer.ggml.token_type[{at}] is {types[at]} for {tokens[at]!r}; "
            "a byte-level BPE vocabulary has only types 1 to 5."
        )
    if "" in tokens:
        raise GGUFError(f"tokenizer.ggml.tokens[{tokens.index('')}] is empty.")


def _architecture(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("general.architecture", "glm-dsa"))


def _check_unique(tokens: Sequence[str]) -> None:
    if len(set(tokens)) == len(tokens):
        return
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        first = seen.setdefault(token, i)
        if first != i:
            raise GGUFError(
                f"tokenizer.ggml.tokens[{i}] is {token!r}, as is [{first}]; each "
                "token must be there once."
            )


def _token_id(key: str, value: Any, count: int) -> int:
    try:
        number = index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < count:
        raise GGUFError(f"{key} is {value!r}; expected an id from 0 to {count - 1}.")
    return number


def _read_merges(lines: Iterable[str], ids: Mapping[str, int]) -> list[list[str]]:
    merges: list[list[str]] = []
    seen: set[str] = set()
    for i, line in enumerate(lines):
        pair = line.split(" ")
        where = f"tokenizer.ggml.merges[{i}] is {line!r}"
        if len(pair) != 2 or not pair[0] or not pair[1]:
            raise GGUFError(f"{where}; expected two tokens and one space between.")
        for token in (*pair, pair[0] + pair[1]):
            if token not in ids:
                raise GGUFError(f"{where}; {token!r} is not in the vocabulary.")
        if line in seen:
            raise GGUFError(f"{where}, which an earlier element is, too.")
        seen.add(line)
        merges.append(pair)
    return merges


def _check_bytes(ids: Mapping[str, int]) -> None:
    """Every byte of UTF-8 text needs a token, or text would vanish silently."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    for byte in range(256):
        char = chr(byte if byte in visible else next(hidden))
        occurs = byte not in (0xC0, 0xC1) and byte < 0xF5
        if occurs and char not in ids:
            raise GGUFError(
                f"tokenizer.ggml.tokens has no token {char!r} for byte 0x{byte:02X}. "
                "Convert the model again."
            )


def _tokenizer(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": GLM4_SPLIT},
                    "behavior": "Isolated",
                    "invert": False,
                },
                _byte_level(),
            ],
        },
        "post_processor": _post_processor(metadata, vocabulary),
        "decoder": _byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            # Added tokens are here, too: only so do they keep their ids when rows
            # between them are left out.
            "vocab": vocabulary.ids,
            "merges": vocabulary.merges,
        },
    }


def _byte_level() -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }


def _added_tokens(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are found in text as they are, in order of id."""
    stops = set(vocabulary.eos_ids)
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.types[i] != USER_DEFINED or i in stops,
        }
        for token, i in vocabulary.ids.items()
        if vocabulary.types[i] != NORMAL or i in stops
    ]


def _post_processor(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary
) -> dict[str, Any]:
    add_bos, add_eos = (
        _wants(metadata, vocabulary, name, token)
        for name, token in (
            ("add_bos_token", "bos_token_id"),
            ("add_eos_token", "eos_token_id"),
        )
    )
    if not (add_bos or add_eos):
        return _byte_level()
    names = {
        vocabulary.content(key): vocabulary.special[key]
        for key, wanted in (("bos_token_id", add_bos), ("eos_token_id", add_eos))
        if wanted
    }

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        parts = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if add_bos:
            content = vocabulary.content("bos_token_id")
            parts.insert(0, {"SpecialToken": {"id": content, "type_id": type_id}})
        if add_eos:
            content = vocabulary.content("eos_token_id")
            parts.append({"SpecialToken": {"id": content, "type_id": type_id}})
        return parts

    template = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            content: {"id": content, "ids": [number], "tokens": [content]}
            for content, number in names.items()
        },
    }
    return {"type": "Sequence", "processors": [_byte_level(), template]}


def _wants(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, name: str, token: str
) -> bool:
    key = f"tokenizer.ggml.{name}"
    wanted = metadata.get(key, False)
    if not isinstance(wanted, bool):
        raise GGUFError(f"{key} is {wanted!r}; expected a bool.")
    if wanted and token not in vocabulary.special:
        raise GGUFError(f"{key} is true; the file has no tokenizer.ggml.{token}.")
    return wanted


def _tokenizer_config(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary
) -> dict[str, Any]:
    eos = vocabulary.tokens[vocabulary.eos_ids[0]]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        # transformers takes a large local vocabulary for an old Mistral one unless it
        # is told that the expression is right.
        "fix_mistral_regex": False,
        "eos_token": eos,
        "pad_token": eos,
    }
    for key, name in _SPECIAL_KEYS.items():
        number = vocabulary.special.get(key)
        # A name makes a token special, so that it is left out of decoded text; some
        # files name an ordinary word.
        if number is not None and vocabulary.types[number] != NORMAL:
            config[name] = vocabulary.tokens[number]
    config["additional_special_tokens"] = [
        token["content"] for token in _added_tokens(vocabulary) if token["special"]
    ]
    length = metadata.get(f"{_architecture(metadata)}.context_length")
    if length is not None:
        config["model_max_length"] = length
    return config


def _generation_config(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary
) -> dict[str, Any]:
    eos = vocabulary.eos_ids
    config: dict[str, Any] = {
        "eos_token_id": eos,
        "pad_token_id": vocabulary.special.get("padding_token_id", eos[0]),
    }
    if "bos_token_id" in vocabulary.special:
        config["bos_token_id"] = vocabulary.special["bos_token_id"]
    return config | sampling_defaults(metadata)


def sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `general.sampling.*` keys as fields of generation_config.json.

    Raises:
        GGUFError: a value is out of its range.
    """
    config: dict[str, Any] = {}
    for name, (field, low, high) in _SAMPLING.items():
        key = f"general.sampling.{name}"
        value = metadata.get(key)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not low <= value <= high:
            raise GGUFError(f"{key} is {value!r}; expected from {low} to {high}.")
        if field == "top_k" and value <= 0:
            continue  # llama.cpp's spelling of "all tokens", which is the default
        # 0.95 is stored as the 32-bit 0.949999988; seven digits give 0.95 back.
        config[field] = int(value) if field == "top_k" else float(f"{value:.7g}")
    if "temperature" in config:
        config["do_sample"] = config["temperature"] > 0
    return config


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The file's templates by name; the unnamed one is "default" and comes first."""
    prefix = _TEMPLATE_KEY + "."
    keys = [key for key in metadata if key.startswith(prefix)]
    if metadata.get("tokenizer.chat_templates") is not None:
        names = _array(metadata, "tokenizer.chat_templates", str)
        keys += [prefix + name for name in names if prefix + name not in keys]
    named = {"default": _TEMPLATE_KEY} if _TEMPLATE_KEY in metadata else {}
    for key in keys:
        name = key.removeprefix(prefix)
        if not _TEMPLATE_NAME.fullmatch(name) or name in named:
            raise GGUFError(
                f"{key!r} is not a usable template key: expected a name of letters, "
                "digits, _ and -, given once."
            )
        named[name] = key
    templates = {name: _text(metadata, key) for name, key in named.items()}
    for name, text in templates.items():
        if len(text) > MAX_TEMPLATE_CHARS:
            raise GGUFError(
                f"{named[name]} has {len(text)} characters; at most "
                f"{MAX_TEMPLATE_CHARS} are taken."
            )
    return templates
