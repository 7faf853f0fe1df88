# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vllm serve` on a shard, with a tokenizer of the user and defaults of the file.

The tokenizer in the file is of a kind that is not rebuilt, so that only --tokenizer
makes it usable.
"""

import json
from collections.abc import Iterator

import pytest

from tests.helpers.gguf_contents import read_contents
from tests.helpers.gguf_writer import Typed, write_shards
from tests.helpers.server import IGNORE_EOS, Server, running_server
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from tiny_vocab import tiny_vocabulary
from vllm.transformers_utils.gguf.tokenizer import tokenizer_files

NAME = "glm-tiny"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("options")
    tiny = write_tiny_glm_dsa(directory / "tiny.gguf", TinySpec(weight_type="Q8_0"))[0]
    contents = read_contents(tiny)
    contents.metadata |= {
        "tokenizer.ggml.pre": Typed("string", "qwen2"),
        "general.sampling.temp": Typed("f32", 0.0),
        "general.sampling.top_p": Typed("f32", 0.95),
    }
    tensors = list(contents.tensors.values())
    step = -(-len(tensors) // 3)
    groups = [tensors[i : i + step] for i in range(0, len(tensors), step)]
    last = write_shards(directory, "options", contents.metadata, groups)[-1]
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir()
    template = {"tokenizer.chat_template": "the user's: {{ messages[0].content }}"}
    files = tokenizer_files(tiny_vocabulary().metadata() | template)
    for name, text in files.items():
        (tokenizer / name).write_text(text)
    options = ("--tokenizer", str(tokenizer), "--served-model-name", NAME)
    length = ("--max-model-len", "512")
    with running_server(last, *options, *length, "--enforce-eager") as running:
        yield running


def complete(server: Server, **options: float) -> str:
    answer = server.client.completions.create(
        model=NAME, prompt=[1, 2, 3], max_tokens=24, extra_body=IGNORE_EOS, **options
    )
    return answer.choices[0].text


def test_a_shard_serves_the_whole_model(server: Server) -> None:
    assert server.model.name == "options-00003-of-00003.gguf"
    assert server.lives()


def test_the_name_and_the_length_are_those_of_the_user(server: Server) -> None:
    [model] = server.client.models.list().data
    assert model.id == NAME
    assert getattr(model, "max_model_len", None) == 512


def test_the_tokenizer_and_template_are_those_of_the_user(server: Server) -> None:
    request = {"model": NAME, "messages": [{"role": "user", "content": "x ferry"}]}
    ids = json.loads(server.post("/tokenize", request)[1])["tokens"]
    status, body = server.post("/detokenize", {"model": NAME, "tokens": ids})
    assert status == 200
    assert json.loads(body)["prompt"] == "the user's: x ferry"


def test_a_request_without_sampling_takes_that_of_the_file(server: Server) -> None:
    greedy = complete(server, temperature=0)
    assert [complete(server), complete(server)] == [greedy, greedy]
    assert complete(server, temperature=2, seed=1) != greedy
    assert "'top_p': 0.95" in server.log()


def test_bfloat16_is_the_default(server: Server) -> None:
    assert "dtype=torch.bfloat16" in server.log()


def test_the_end_tokens_are_still_those_of_the_file(server: Server) -> None:
    for token in ("<|endoftext|>", "<|user|>", "<|observation|>"):
        answer = server.client.completions.create(
            model=NAME,
            prompt=[1, 2, 3],
            max_tokens=4,
            logit_bias={str(tiny_vocabulary().ids[token]): 100},
        )
        assert answer.choices[0].finish_reason == "stop"
