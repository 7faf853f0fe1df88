# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vllm serve FILE.gguf` through the OpenAI API.

One server: tools enabled without naming a parser, and float32, in which the same
request gives the same tokens in any batch.
"""

import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from tests.helpers.server import IGNORE_EOS, Server, running_server
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from tiny_vocab import tiny_vocabulary

CONTEXT = 1024
VOCABULARY = tiny_vocabulary()
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Lyon", "Turin"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("serve") / "tiny.gguf"
    spec = TinySpec(weight_type="Q8_0", context=CONTEXT)
    model = write_tiny_glm_dsa(path, spec)[0]
    options = ("--dtype", "float32", "--enable-auto-tool-choice")
    with running_server(model, *options, "--max-num-batched-tokens", "256") as running:
        yield running


def chat(server: Server, text: str = "How high is the river?", **options: Any) -> Any:
    """A greedy chat of up to 16 tokens that does not think or call tools."""
    defaults: dict[str, Any] = {
        "max_tokens": 16,
        "temperature": 0,
        "logit_bias": bias({"<think>": -100, "<tool_call>": -100}),
        "extra_body": NO_THINKING,
    }
    return server.client.chat.completions.create(
        model=server.name,
        messages=[{"role": "user", "content": text}],
        **{**defaults, **options},
    )


def only(answer: ChatCompletion) -> Choice:
    [choice] = answer.choices
    return choice


def bias(weights: dict[str, float]) -> dict[str, float]:
    """The logit bias that these named tokens get."""
    return {str(VOCABULARY.ids[token]): weight for token, weight in weights.items()}


def test_chat_answers(server: Server) -> None:
    choice = only(chat(server))
    assert choice.finish_reason == "length"
    assert choice.message.content


def test_a_stream_has_the_text_of_the_whole_answer(server: Server) -> None:
    expected = only(chat(server, max_tokens=48, extra_body=NO_THINKING | IGNORE_EOS))
    chunks = list(
        chat(
            server,
            max_tokens=48,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=NO_THINKING | IGNORE_EOS,
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == expected.message.content
    assert choices[-1].finish_reason == "length"
    assert len(choices) > 10
    assert chunks[-1].usage.completion_tokens == 48


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|user|>", "<|observation|>"])
def test_each_end_token_of_the_file_stops(token: str, server: Server) -> None:
    answer = chat(server, logit_bias=bias({token: 100}))
    assert only(answer).finish_reason == "stop"
    assert not only(answer).message.content
    assert answer.usage.completion_tokens == 1


def test_another_special_token_does_not_stop(server: Server) -> None:
    answer = chat(server, logit_bias=bias({"<|assistant|>": 100}))
    assert only(answer).finish_reason == "length"


def test_logprobs_are_those_of_the_answer(server: Server) -> None:
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = only(
        chat(
            server,
            max_tokens=8,
            logprobs=True,
            top_logprobs=5,
            extra_body=NO_THINKING | IGNORE_EOS | ids,
        )
    )
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    made = getattr(choice, "token_ids", None)
    assert [entry.token for entry in entries] == [f"token_id:{i}" for i in made]
    assert len(entries) == 8
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0], "greedy takes the likeliest token"
        assert 0 < sum(map(math.exp, values)) <= 1 + 1e-5


def test_concurrent_requests_equal_single_ones(server: Server) -> None:
    questions = [f"Question {i}: " + "the ferry and the harbor " * i for i in range(16)]

    def answer(question: str) -> str | None:
        body = NO_THINKING | IGNORE_EOS
        return only(chat(server, question, extra_body=body)).message.content

    single = [answer(question) for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        assert list(pool.map(answer, questions)) == single
    assert len(set(single)) > 8, "the answers depend on the questions"


def test_completions_take_token_ids(server: Server) -> None:
    prompt = "The river was high that morning"
    status, body = server.post("/tokenize", {"model": server.name, "prompt": prompt})
    assert status == 200
    ids = json.loads(body)["tokens"]
    assert len(ids) > 5
    texts = [
        server.client.completions.create(
            model=server.name, prompt=given, max_tokens=16, temperature=0
        )
        .choices[0]
        .text
        for given in (prompt, ids)
    ]
    assert texts[0] == texts[1] != ""


def test_models_health_and_metrics(server: Server) -> None:
    [model] = server.client.models.list().data
    assert model.id == str(server.model)
    assert getattr(model, "max_model_len", None) == CONTEXT
    assert server.get("/health")[0] == 200
    before = generated_tokens(server)
    chat(server, max_tokens=7, extra_body=NO_THINKING | IGNORE_EOS)
    assert generated_tokens(server) == before + 7


def generated_tokens(server: Server) -> float:
    text = server.get("/metrics")[1]
    line = re.search(r"^vllm:generation_tokens_total\{(.*)\} (\S+)$", text, re.M)
    assert line is not None
    assert str(server.model) in line[1]
    return float(line[2])


@pytest.mark.parametrize("length", [CONTEXT + 1, 20 * CONTEXT])
def test_a_prompt_beyond_the_context_gets_a_400(length: int, server: Server) -> None:
    with pytest.raises(BadRequestError, match=f"maximum context length is {CONTEXT}"):
        server.client.completions.create(
            model=server.name, prompt=[1] * length, max_tokens=1
        )
    with pytest.raises(BadRequestError, match=f"maximum context length is {CONTEXT}"):
        chat(server, "ferry " * length)
    assert server.lives()


def test_a_prompt_that_fills_the_context_is_answered(server: Server) -> None:
    answer = server.client.completions.create(
        model=server.name, prompt=[1] * (CONTEXT - 1), max_tokens=1
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == CONTEXT


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"messages": []}',
        b'{"messages": "text"}',
        b'{"messages": [{"content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 9999}',
        b'{"messages": [{"role": "user", "content": "x"}], "top_logprobs": -5}',
    ],
)
def test_a_malformed_chat_gets_a_400(body: bytes, server: Server) -> None:
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 400
    assert json.loads(answer)["error"]["message"]
    assert server.lives()


@pytest.mark.parametrize("prompt", [[], [VOCABULARY.ids["<sop>"], 512], [-1], [2**40]])
def test_token_ids_outside_the_vocabulary_get_a_400(
    prompt: list[int], server: Server
) -> None:
    with pytest.raises(BadRequestError):
        server.client.completions.create(model=server.name, prompt=prompt, max_tokens=1)
    assert server.lives()


def test_tools_without_a_named_parser_use_those_of_glm(server: Server) -> None:
    log = server.log()
    assert "'tool_call_parser': 'glm47'" in log
    assert "'reasoning_parser': 'glm45'" in log


def test_thinking_is_told_apart_from_the_answer(server: Server) -> None:
    message = only(chat(server, extra_body={})).message
    assert message.content is None
    assert getattr(message, "reasoning", None)


def test_a_tool_call_makes_a_round_trip(server: Server) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 64}
    # The grammar of a call allows blanks between these tokens, the bias spares them.
    inside = ("<arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
    forced = dict.fromkeys(inside, 50.0) | {"<|observation|>": 90.0}
    call = only(
        chat(server, tool_choice="required", logit_bias=bias(forced), **options)
    )
    assert call.finish_reason == "tool_calls"
    [made] = call.message.tool_calls or []
    assert made.function.name == "weather"
    city = json.loads(made.function.arguments)["city"]
    assert city.strip() in ("Lyon", "Turin"), "the grammar allows blanks around it"
    answer = server.client.chat.completions.create(
        model=server.name,
        messages=[
            {"role": "user", "content": "What is the weather?"},
            call.message.model_dump(include={"role", "tool_calls"}),
            {"role": "tool", "tool_call_id": made.id, "content": "rain"},
        ],
        extra_body=NO_THINKING,
        **options,
    )
    assert only(answer).finish_reason in ("stop", "length", "tool_calls")


def test_a_tool_call_streams(server: Server) -> None:
    chunks = chat(
        server,
        tools=[WEATHER],
        tool_choice="auto",
        max_tokens=64,
        stream=True,
        logit_bias=bias({"<tool_call>": 50}),
    )
    calls = [
        call
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert calls
    assert calls[0].function.name == "weather"
