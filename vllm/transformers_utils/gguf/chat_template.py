# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Chat templates of GGUF files: checked, and rendered in a process of their own.

Jinja's sandbox keeps a template from the interpreter's internals, not from running for
hours or filling the memory, and a thread that does so cannot be stopped. So a template
that came in a GGUF file is rendered by a worker process with limits. Templates that the
user gave, and those of other models, are rendered by transformers as ever.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes

from vllm.transformers_utils.gguf import chat_template_worker
from vllm.transformers_utils.gguf.artifacts import POINTER

RENDER_SECONDS = 10
"""A render that takes longer is stopped."""
MEMORY_BYTES = 2 << 30
"""Address space of the worker process."""
MAX_CHARS = 32 << 20
"""A rendered chat may be this long; a million tokens are some 5 million characters."""

# Far beyond any template in use.
MAX_NODES = 20_000
MAX_DEPTH = 100
MAX_MACROS = 64
MAX_ALIASES = 64

# The text of each template of a file -> why it cannot be used, None if it can.
_isolated: dict[str, str | None] = {}


class ChatTemplateError(jinja2.TemplateError):
    """The template of the file cannot be used; the server answers 400."""


def from_gguf(model_config: Any) -> bool:
    """Whether the model is one that was made from a GGUF file."""
    return _has_pointer(str(model_config.model))


def skips_warmup(model_config: Any, chat_params: Any) -> bool:
    """Whether the render at the start is to be left out: it would run a template that
    came in a GGUF file before anybody asked for a chat."""
    return chat_params.chat_template is None and from_gguf(model_config)


def guard_template(resolve: Callable[..., str | None]) -> Callable[..., str | None]:
    """Decorator for vLLM's `resolve_chat_template`: templates that came in the file are
    checked and isolated before anything else sees them."""

    @functools.wraps(resolve)
    def guarded(tokenizer: Any, *args: Any, **kwargs: Any) -> str | None:
        template = resolve(tokenizer, *args, **kwargs)
        if template is not None and from_gguf(kwargs["model_config"]):
            own = getattr(tokenizer, "chat_template", None)
            if template in (own.values() if isinstance(own, Mapping) else (own,)):
                _isolate(template)
        return template

    return guarded


def is_isolated(template: str | None) -> bool:
    """Whether `template` came in a GGUF file and must not run in this process."""
    return template in _isolated


def template_variables(template: str) -> frozenset[str]:
    """All variables that an isolated template reads, its own ones too.

    `jinja2.meta`, which vLLM asks otherwise, evaluates constant expressions.

    Raises:
        VLLMValidationError: the template cannot be used; the server answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    if reason := _isolated[template]:
        raise VLLMValidationError(reason)
    names = chat_template_worker.syntax().parse(template).find_all(nodes.Name)
    return frozenset(name.name for name in names if name.ctx == "load")


@functools.lru_cache(maxsize=64)
def _has_pointer(model: str) -> bool:
    return (Path(model) / POINTER).is_file()


def _isolate(template: str) -> None:
    if template in _isolated:
        return
    try:
        check_template(template)
        reason = None
    except ChatTemplateError as error:
        reason = str(error)
    _redirect_transformers()
    _isolated[template] = reason


def check_template(template: str) -> None:
    """Parse `template` without compiling or running any of it.

    Raises:
        ChatTemplateError: it is no Jinja template, or so large, deep or entangled that
            vLLM's search for the message content in it could go on for ever.
    """
    prefix = "The model's chat template"
    try:
        tree = chat_template_worker.syntax().parse(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ChatTemplateError(f"{prefix} cannot be parsed: {error}") from error
    size = macros = 0
    pending: list[tuple[nodes.Node, int]] = [(tree, 1)]
    while pending:
        node, depth = pending.pop()
        size += 1
        macros += isinstance(node, nodes.Macro)
        if size > MAX_NODES or depth > MAX_DEPTH or macros > MAX_MACROS:
            raise ChatTemplateError(
                f"{prefix} is too large: at most {MAX_NODES} expressions, nested "
                f"{MAX_DEPTH} deep, and {MAX_MACROS} macros are taken."
            )
        pending.extend((child, depth + 1) for child in node.iter_child_nodes())
    _check_aliases(tree, prefix)


def _check_aliases(tree: nodes.Template, prefix: str) -> None:
    """Follow the assignments of messages to other variables as vLLM 0.32 will do,
    which has no end for a circle."""
    aliases: dict[str, list[str]] = {}
    for assignment in tree.find_all(nodes.Assign):
        source, target = _variable(assignment.node), _variable(assignment.target)
        if source and target and source != target:
            aliases.setdefault(source, []).append(target)
    names, seen = ["messages"], 0
    while names:
        seen += 1
        if seen > MAX_ALIASES:
            raise ChatTemplateError(
                f"{prefix} assigns variables in a circle, or messages to more than "
                f"{MAX_ALIASES} variables; the last is {names[-1]!r}."
            )
        names.extend(aliases.get(names.pop(), ()))


def _variable(node: nodes.Node | None) -> str | None:
    """The variable that `node` is, or of which it is a filtering or a slice."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node.name if isinstance(node, nodes.Name) else None


def _redirect_transformers() -> None:
    """Let transformers' compile function return isolated templates for these texts.

    vLLM renders through transformers, which is not ours to edit and has no hook.
    """
    from transformers.utils import chat_template_utils

    utils: Any = chat_template_utils
    original = utils._compile_jinja_template
    if hasattr(original, "isolates_gguf_templates"):
        return

    @functools.wraps(original)
    def compile_template(chat_template: str) -> Any:
        if chat_template in _isolated:
            return IsolatedTemplate(chat_template)
        return original(chat_template)

    utils._compile_jinja_template = compile_template
    utils._compile_jinja_template.isolates_gguf_templates = True


class IsolatedTemplate:
    """Stands in for a compiled `jinja2.Template`; `environment` only parses.

    Raises ChatTemplateError for an unusable template.
    """

    def __init__(self, source: str) -> None:
        if reason := _isolated[source]:
            raise ChatTemplateError(reason)
        self._source = source
        self.environment = chat_template_worker.syntax()

    def render(self, /, **variables: Any) -> str:
        """Raises ChatTemplateError: what the template raised, or the limit it hit."""
        request = {"template": self._source, "variables": variables}
        data = json.dumps(request, default=_plain).encode()
        return _worker.render(data)


def _plain(value: Any) -> Any:
    """What JSON lacks, as templates see it."""
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    return str(value)


class _NotBegun(ChatTemplateError):
    """The worker process died before it had read the request."""


class _Worker:
    """The worker process: started by the first render, and again after it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, request: bytes) -> str:
        with self._lock:
            try:
                answer = self._exchange(request)
            except _NotBegun:
                # Something ended it since the last render, such as the kernel for
                # want of memory: not the fault of this template.
                answer = self._exchange(request)
        if "text" not in answer:
            raise ChatTemplateError(str(answer.get("error")))
        return str(answer["text"])

    def _exchange(self, request: bytes) -> dict[str, Any]:
        """The answer. Raises ChatTemplateError if the process was stopped or died."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(RENDER_SECONDS, stop)
        timer.start()
        length = chat_template_worker.LENGTH
        begun = False
        try:
            process.stdin.write(length.pack(len(request)) + request)
            process.stdin.flush()
            begun = process.stdout.read(1) == chat_template_worker.BEGUN
            size = length.unpack(process.stdout.read(length.size))[0]
            # JSON spells a character in at most 12.
            answer = process.stdout.read(min(size, 12 * MAX_CHARS + 4096))
            result: dict[str, Any] = json.loads(answer)
            return result
        except (OSError, ValueError, struct.error) as error:
            process.kill()
            process.wait()
            raise _stopped(late.is_set(), begun) from error
        finally:
            timer.cancel()

    def _running(self) -> subprocess.Popen[bytes]:
        # A forked child must not talk to the worker of its parent.
        forked = self._owner != os.getpid()
        if forked or self._process is None or self._process.poll() is not None:
            modules = str(Path(jinja2.__file__).parents[1])
            limits = (MEMORY_BYTES, RENDER_SECONDS, MAX_CHARS)
            script = chat_template_worker.__file__
            self._process = subprocess.Popen(
                [sys.executable, "-I", script, modules, *map(str, limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ("TZ",) if name in os.environ},
                cwd="/",
            )
            self._owner = os.getpid()
        return self._process


def _stopped(late: bool, begun: bool) -> ChatTemplateError:
    if late:
        return ChatTemplateError(
            "The model's chat template was stopped: rendering took more than "
            f"{RENDER_SECONDS} s. Give another one with --chat-template."
        )
    text = (
        "The process that renders the model's chat template died: it went beyond "
        f"{MEMORY_BYTES >> 30} GiB, or something killed it. If it does so again, give "
        "another template with --chat-template."
    )
    return ChatTemplateError(text) if begun else _NotBegun(text)


_worker = _Worker()
