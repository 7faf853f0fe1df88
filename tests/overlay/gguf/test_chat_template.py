# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Chat templates of GGUF files in vLLM's own rendering path."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.limits import HANG_SECONDS
from tiny_vocab import CHAT_TEMPLATE, tiny_vocabulary
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)
from vllm.renderers import BaseRenderer, ChatParams, hf
from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.gguf import chat_template
from vllm.transformers_utils.gguf.artifacts import POINTER
from vllm.transformers_utils.gguf.tokenizer import tokenizer_files

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße 🍎 \ud800 <think>"},
    {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hm",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": "é"}}}],
    },
    {"role": "tool", "content": "4"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": "ü"}}}]


class Model:
    """A model directory with `template`, and what vLLM's renderer asks of it."""

    def __init__(self, directory: Path, template: str, *, gguf: bool = True) -> None:
        metadata = tiny_vocabulary().metadata() | {"tokenizer.chat_template": template}
        config = {"model_type": "glm_moe_dsa"}
        files = tokenizer_files(metadata) | {"config.json": json.dumps(config)}
        if gguf:
            files[POINTER] = "{}"
        for name, text in files.items():
            (directory / name).write_text(text)
        self.tokenizer = get_tokenizer(str(directory))
        self.config: Any = SimpleNamespace(
            model=str(directory),
            tokenizer=str(directory),
            revision=None,
            tokenizer_revision=None,
            code_revision=None,
            trust_remote_code=False,
            hf_config=SimpleNamespace(model_type="glm_moe_dsa"),
        )

    def content_format(self) -> str:
        return hf.resolve_chat_template_content_format(
            None, None, "auto", self.tokenizer, model_config=self.config
        )

    def chat(self, messages: list[dict[str, Any]] = CHAT, **options: Any) -> str:
        """What a chat request does: detect the format, then render."""
        self.content_format()
        return hf.safe_apply_chat_template(
            self.config, self.tokenizer, messages, tokenize=False, **options
        )


@pytest.fixture(autouse=True)
def long_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine any render may take ten seconds."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 120)


@pytest.fixture
def short_limit(long_limit: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 1)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path, CHAT_TEMPLATE)


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """CPU time of a process that runs, or has ended and was not waited for."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spent() -> float:
    """CPU time of this thread and of the workers, in seconds."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = chat_template._worker._process
    running = cpu_seconds(process) if process and process.returncode is None else 0
    return time.thread_time() + ended.ru_utime + ended.ru_stime + running


def wait_until_it_renders(process: subprocess.Popen[bytes], before: float) -> None:
    """Return when a worker has worked longer than to read a request takes it."""
    deadline = time.monotonic() + HANG_SECONDS
    while cpu_seconds(process) < before + 0.5:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def status_of(error: BaseException) -> int:
    assert isinstance(error, Exception)
    return create_error_response(error).error.code


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"add_generation_prompt": True, "enable_thinking": False},
        {"tools": TOOLS, "add_generation_prompt": True},
        {"continue_final_message": True},
    ],
    ids=["plain", "prompt", "no thinking", "tools", "continue"],
)
def test_an_isolated_render_equals_transformers(tmp_path, model, options):
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    # One more line break keeps the texts apart, and Jinja drops it.
    other = Model(trusted, CHAT_TEMPLATE + "\n", gguf=False)
    assert model.chat(**options) == other.chat(**options)


def test_the_file_s_template_is_rendered_in_the_worker(model):
    model.chat()
    assert chat_template.is_isolated(CHAT_TEMPLATE)
    assert isinstance(hf_compile(CHAT_TEMPLATE), chat_template.IsolatedTemplate)


def hf_compile(text: str) -> Any:
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template(text)


def test_templates_of_other_models_stay_in_the_process(tmp_path):
    Model(tmp_path, "other model {{ messages | length }}", gguf=False).chat()
    compiled = hf_compile("other model {{ messages | length }}")
    assert not isinstance(compiled, chat_template.IsolatedTemplate)


def test_a_template_that_the_user_gives_stays_in_the_process(model):
    given = "given {{ messages | length }}"
    assert model.chat(chat_template=given) == "given 4"
    assert not isinstance(hf_compile(given), chat_template.IsolatedTemplate)


def test_the_content_format_is_still_detected(tmp_path, model):
    assert model.content_format() == "openai"
    plain = tmp_path / "plain"
    plain.mkdir()
    assert Model(plain, "{{ messages[0].content }}").content_format() == "string"


def test_what_templates_may_use_works(tmp_path):
    template = (
        "{%- generation %}{{ messages[0]['content'] }}{% endgeneration -%}"
        "{%- for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% endif %}"
        "{% if x == 4 %}{% break %}{% endif %}{{ x }}"
        "{%- endfor %} {{ {'a': 'é<'} | tojson(indent=1) }} {{ bos_token }}"
        " {{ strftime_now('%Y') | length }} {{ [1, 2] | pprint }}"
    )
    text = Model(tmp_path, template).chat([{"role": "user", "content": "hi"}])
    assert text == 'hi13 {\n "a": "é<"\n} [gMASK] 4 [1, 2]'


# Each of Jinja's filters once, and other places where it or Python imports lazily.
EXPRESSIONS = r"""
-1 | abs; 'a' | attr('x') is defined; [1, 2] | batch(1) | list; 'ab' | capitalize
'a' | center(9); [1] | count; x | d('e'); x | default('e'); {'b': 1} | dictsort
'<' | e; '<' | escape; 5000 | filesizeformat; [1] | first; '1.5' | float
'<' | forceescape; '%s' | format(1); documents | groupby('title') | length
'a\nb' | indent; '7' | int; {'b': 1} | items | list; [1, 2] | join(','); [1] | last
'abc' | length; 'ab' | list; 'Ab' | lower; [1] | map('string') | list; [1, 2] | max
[1, 2] | min; [1] | pprint; [1] | random; [0, 1] | reject | list
documents | rejectattr('title') | list; 'ab' | replace('a', 'c'); 'ab' | reverse
1.26 | round(1); 'a' | safe; [0, 1] | select | list
documents | selectattr('title') | list; [1, 2] | slice(1) | list; [2, 1] | sort
1 | string; '<b>a</b> &amp;' | striptags; [1, 2] | sum; 'ab cd' | title
{'a': ['é<']} | tojson(indent=2); ' a ' | trim; ('a b ' * 9) | truncate(9)
[1, 1] | unique | list; 'a' | upper; 'a b' | urlencode; 'see www.example.org' | urlize
'a b' | wordcount; 'a long line of words' | wordwrap(6); {'a': 1} | xmlattr
lipsum(n=1) | length > 9; '\N{BULLET}'; strftime_now('%A %x') | length > 9
cycler(1).next(); joiner(',')(); namespace(a=1).a; dict(a=1); range(3) | list
"""


def test_every_filter_works_as_in_transformers(tmp_path, model):
    expressions = [e for e in re.split(r";\s|\n", EXPRESSIONS) if e]
    used = {name for e in expressions for name in re.findall(r"\| (\w+)", e)}
    assert used == {*chat_template.chat_template_worker.syntax().filters}
    template = "".join(f"{{{{ {e} }}}}\n" for e in expressions)
    documents = [{"title": "A", "text": "a"}, {"title": "B", "text": "b"}]
    isolated, trusted = tmp_path / "isolated", tmp_path / "trusted"
    isolated.mkdir(), trusted.mkdir()
    text = Model(isolated, template).chat(documents=documents)
    other = Model(trusted, template + "\n", gguf=False)
    assert text.splitlines() == other.chat(documents=documents).splitlines()
    assert isinstance(hf_compile(template), chat_template.IsolatedTemplate)


REFUSED = {
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('id') }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "attr filter": "{{ (''|attr('__class__')|attr('__base__'))() }}",
    "import": "{% import 'os' as os %}{{ os.system('id') }}",
    "from import": "{% from 'os' import system %}{{ system('id') }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "long range": "{% for i in range(10**12) %}{% endfor %}",
    "macro recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "long text": "{{ 'a' * 10**12 }}",
    "gigabytes": "{% set x = 'a' * 10**10 %}",
    "long output": "{{ 'a' * (40 * 1024 * 1024) }}",
    "padding": "{{ 'x' | center(10**11) }}",
    "format width": "{{ '%99999999999d' | format(1) }}",
    "raise": "{{ raise_exception('no') }}",
    "division": "{{ 1 / 0 }}",
    "syntax": "{% for %}",
    "unclosed": "{% if true %}",
    "unknown filter": "{{ 1 | nosuchfilter }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "long sum": "{{ 1" + "+1" * 5000 + " }}",
    "many macros": "{% macro f() %}{% endmacro %}" * 100,
    "circle": (
        "{% set a = messages %}{% set b = a %}{% set a = b %}"
        "{% for m in a %}{% endfor %}"
    ),
    "doubling aliases": "".join(
        f"{{% set a{i + 1} = {name} %}}" * 2
        for i, name in enumerate(["messages", *(f"a{n}" for n in range(1, 40))])
    ),
}


@pytest.mark.parametrize("template", REFUSED.values(), ids=REFUSED)
def test_a_hostile_template_gives_status_400(tmp_path, template):
    model = Model(tmp_path, template)
    before = spent()
    with pytest.raises(Exception) as caught:
        model.chat()
    assert status_of(caught.value) == HTTPStatus.BAD_REQUEST
    assert "uid=" not in str(caught.value) and "root:" not in str(caught.value)
    assert spent() - before < 8


@pytest.mark.parametrize(
    "template",
    [
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ ''['__class__'] }}",
        "{{ (''|attr('__class__')|attr('__mro__')) | first }}",
        "{{ namespace | attr('__init__') | attr('__globals__') }}",
    ],
)
def test_a_look_at_internals_that_reads_nothing_renders_nothing(tmp_path, template):
    assert Model(tmp_path, template).chat() == ""


ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "constant power": "{{ 9 ** (9 ** 9) }}",
    "power": "{% set n = messages | length + 5 %}{{ n ** (n ** n) }}",
    "shared lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson | length }}",
    "doubling text": "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_template_is_stopped_with_status_400(
    tmp_path, template, short_limit
):
    model = Model(tmp_path, template)
    before = spent()
    with pytest.raises(Exception) as caught:
        model.chat()
    assert status_of(caught.value) == HTTPStatus.BAD_REQUEST
    assert spent() - before < 5


def test_the_process_goes_on_while_a_template_runs(tmp_path, model):
    # A large power holds the interpreter's lock: in this process nothing else ran.
    model.chat()
    process = chat_template._worker._process
    assert process is not None
    before = cpu_seconds(process)
    endless = tmp_path / "endless"
    endless.mkdir()
    with ThreadPoolExecutor(1) as pool:
        render = pool.submit(Model(endless, ENDLESS["constant power"]).chat)
        wait_until_it_renders(process, before)
        assert not render.done()
        process.kill()
    assert render.exception() is not None


def test_rendering_works_again_after_a_template_was_stopped(
    tmp_path, model, monkeypatch
):
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    expected = model.chat()
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "RENDER_SECONDS", 1)
        with pytest.raises(Exception, match="was stopped: .* more than 1 s"):
            Model(hostile, ENDLESS["nested loops"]).chat()
    assert model.chat() == expected


def test_a_worker_that_was_killed_is_replaced(model):
    expected = model.chat()
    for _ in range(10):
        process = chat_template._worker._process
        assert process is not None
        process.kill()
        assert model.chat() == expected


def test_a_worker_killed_while_it_renders_is_no_timeout(tmp_path, model):
    model.chat()
    process = chat_template._worker._process
    assert process is not None
    before = cpu_seconds(process)
    endless = tmp_path / "endless"
    endless.mkdir()
    with ThreadPoolExecutor(1) as pool:
        render = pool.submit(Model(endless, ENDLESS["constant power"]).chat)
        wait_until_it_renders(process, before)
        process.kill()
        error = render.exception(timeout=HANG_SECONDS)
    assert error is not None and status_of(error) == HTTPStatus.BAD_REQUEST
    assert "died" in str(error) and " s." not in str(error)
    assert chat_template._worker._process is process, "the template ran a second time"


def test_a_worker_that_cannot_start_is_no_endless_retry(tmp_path, model, monkeypatch):
    started = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        started.append(command)
        return popen([sys.executable, "-c", "raise SystemExit"], **options)

    monkeypatch.setattr(chat_template, "_worker", chat_template._Worker())
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(Exception, match="died"):
        model.chat()
    assert len(started) == 2


def test_renders_from_several_threads_do_not_mix(model):
    def render(number: int) -> bool:
        text = model.chat([{"role": "user", "content": f"message {number}."}])
        return f"message {number}." in text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(render, range(64)))


def test_a_forked_process_starts_a_worker_of_its_own(model):
    expected = model.chat()
    child = os.fork()
    if child == 0:
        os._exit(0 if model.chat() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert model.chat() == expected


def test_the_worker_can_open_no_file():
    # Were the sandbox broken, code in the worker still had no file or network.
    script = Path(chat_template.chat_template_worker.__file__)
    code = (
        "import runpy, socket\n"
        f"runpy.run_path({str(script)!r})['_limit'](1 << 30)\n"
        "for attempt in (lambda: open('/etc/passwd'), socket.socket):\n"
        "    try: attempt()\n"
        "    except OSError: continue\n"
        "    raise SystemExit(1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_broken_template_is_no_error_before_a_chat(tmp_path):
    model = Model(tmp_path, "{% for %}")
    assert model.content_format() == "string"
    resolved = hf.resolve_chat_template(
        model.tokenizer, None, None, model_config=model.config
    )
    assert resolved == "{% for %}"


def test_request_variables_reach_the_template_and_others_do_not(tmp_path):
    model = Model(tmp_path, "{{ effort }}{% if x is defined %}x{% endif %}")
    assert model.chat(effort="high", x=1, unknown=2) == "highx"


def test_the_warm_up_renders_no_template_of_a_file(tmp_path, model):
    rendered = []
    trusted = tmp_path / "trusted"
    trusted.mkdir()

    def warm_up(config: Any, given: str | None) -> int:
        rendered.clear()
        renderer: Any = SimpleNamespace(
            model_config=config,
            render_chat=lambda *args: rendered.append(args),
            warmup_mm=lambda: None,
            _mm_warmup_future=None,
        )
        BaseRenderer.warmup(renderer, ChatParams(chat_template=given))
        return len(rendered)

    assert warm_up(model.config, None) == 0
    assert warm_up(model.config, "given") == 1
    assert warm_up(Model(trusted, "x", gguf=False).config, None) == 1


def test_the_anthropic_endpoint_probes_no_template_of_a_file(tmp_path):
    template = "anthropic {{ 1 / 0 }}"
    probe = AnthropicServingMessages._detect_merge_inline_system
    with pytest.raises(ZeroDivisionError):
        probe(template)
    Model(tmp_path, template).content_format()
    assert probe(template) is False


def test_a_long_chat_renders_quickly(model):
    messages = [{"role": "user", "content": "word " * 4000}] * 200
    before = spent()
    text = model.chat(messages)
    assert len(text) > 4_000_000
    assert spent() - before < 3
