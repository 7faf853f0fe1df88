# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The rebuilt tokenizer against llama.cpp's, on a tiny model file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.helpers.llamacpp_reference import LlamaCpp
from tests.helpers.texts import TEXTS
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from tiny_vocab import tiny_vocabulary
from vllm.transformers_utils.gguf.tokenizer import tokenizer_files

PARTS = [
    *("the", " there", "'s", "'RE", "1", "22", "4444", "٣", " ", "   ", "\t", "\n"),
    *("\r\n", "\u00a0", "e\u0301", "é", "🍎", "書", "й", "ß", "_", "(){", "!?", "…"),
    *("<think>", "<|user|>", "</arg_key>", "[gMASK]", "<|", "x"),
]


def mixed_texts(count: int) -> list[str]:
    rng = random.Random(5)
    return ["".join(rng.choices(PARTS, k=rng.randint(1, 25))) for _ in range(count)]


@pytest.fixture(scope="module")
def llamacpp(tmp_path_factory: pytest.TempPathFactory) -> LlamaCpp:
    path = tmp_path_factory.mktemp("llamacpp") / "tiny.gguf"
    [written] = write_tiny_glm_dsa(path, TinySpec(weight_type="F32"))
    return LlamaCpp(Path(written))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    files = tokenizer_files(tiny_vocabulary().metadata())
    return Tokenizer.from_str(files["tokenizer.json"])


@pytest.mark.parametrize(
    "texts", [list(TEXTS), mixed_texts(400)], ids=["corpus", "mixed pieces"]
)
def test_ids_equal_llamacpp(llamacpp, tokenizer, texts):
    ours = [tokenizer.encode(text).ids for text in texts]
    theirs = llamacpp.tokenize(texts)
    unlike = [
        (text[:80], a[:40], b[:40])
        for text, a, b in zip(texts, ours, theirs, strict=True)
        if a != b
    ]
    assert not unlike


def test_llamacpp_knows_the_same_special_tokens(llamacpp):
    ids = tiny_vocabulary().ids
    assert llamacpp.tokenize(list(ids)) == [[number] for number in ids.values()]
