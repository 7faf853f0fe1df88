# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vllm serve` on a file whose chat templates attack the server.

One file holds all attacks as named templates; a request picks one by name. The default
template is the one that stops stock vLLM at the start.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import BadRequestError

from tests.helpers.gguf_contents import read_contents
from tests.helpers.gguf_writer import Typed, write_gguf
from tests.helpers.server import Server, running_server
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa

# Constants are evaluated on parsing, and a power cannot be interrupted.
CONSTANT_POWER = "{{ 9 ** (9 ** 9) }}"
# `{marker}` stands for a file that code run by the template would leave.
ATTACKS = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": (
        "{{ cycler.__init__.__globals__['os'].system('touch {marker}') }}"
        "{{ joiner.__init__.__globals__.os.system('touch {marker}') }}"
    ),
    "attr": "{{ (lipsum | attr('__globals__'))['os'].system('touch {marker}') }}",
    "import": "{% import 'os' as os %}{{ os.system('touch {marker}') }}",
    "include": "{% include '/etc/passwd' %}",
    "long_range": "{% for i in range(10**12) %}{% endfor %}",
    "long_text": "{{ 'a' * 10**11 }}",
    "no_jinja": "{% for %}{{ messages[0].content }",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "division": "{{ 1 / 0 }}",
}


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marker") / "ran"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, marker: Path) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("untrusted")
    tiny = write_tiny_glm_dsa(directory / "tiny.gguf", TinySpec(weight_type="Q8_0"))[0]
    contents = read_contents(tiny)
    key = "tokenizer.chat_template"
    templates = {key: CONSTANT_POWER}
    for name, text in ATTACKS.items():
        templates[f"{key}.{name}"] = text.replace("{marker}", str(marker))
    for name, text in templates.items():
        contents.metadata[name] = Typed("string", text)
    model = directory / "untrusted.gguf"
    write_gguf(model, contents.metadata, list(contents.tensors.values()))
    options = ("--trust-request-chat-template", "--enforce-eager")
    with running_server(model, *options) as running:
        yield running


def ask(server: Server, template: str | None) -> str:
    """The message of the 400 that a chat with the template must give."""
    with pytest.raises(BadRequestError) as refused:
        server.client.chat.completions.create(
            model=server.name,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=1,
            extra_body={"chat_template": template} if template else {},
        )
    return refused.value.message


def test_the_server_starts_and_has_run_nothing(server: Server, marker: Path) -> None:
    assert server.lives()
    assert not marker.exists()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_chat_gets_a_400_and_the_server_lives(
    name: str, server: Server, marker: Path
) -> None:
    message = ask(server, name)
    assert "root:" not in message
    assert not marker.exists()
    assert server.lives()


def test_the_server_answers_others_while_a_template_runs(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(ask, server, None)
        answers = 0
        while not chat.done():
            assert server.lives()
            answers += not chat.done()
        assert "stopped" in chat.result()
    assert answers > 0


def test_a_template_of_the_request_still_works(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model=server.name,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=1,
        extra_body={"chat_template": "{{ messages[0].content }}"},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 1
