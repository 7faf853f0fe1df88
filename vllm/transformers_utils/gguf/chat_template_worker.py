# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Renders chat templates in a process of its own, as a script.

    python -I chat_template_worker.py MODULES MEMORY_BYTES SECONDS MAX_CHARS

MODULES is the directory that jinja2 is imported from. Each message on stdin and stdout
is a length (4 bytes, little-endian) and a JSON object: {"template", "variables"} asks,
{"text"} or {"error"} answers, after one byte that says the request was read. The
process gives itself limits of memory and CPU time and can open no file, so a template
has neither the server's memory nor its rights.
"""

from __future__ import annotations

import importlib
import json
import resource
import struct
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    # Found at run time only after main() has set the path.
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<I")
BEGUN = b"!"
"""Comes before each answer, as soon as the request has been read."""


def main() -> None:
    modules, memory, seconds, max_chars = sys.argv[1], *map(int, sys.argv[2:])
    sys.path.append(modules)
    environment = _environment()
    _limit(memory)
    cache: dict[str, Any] = {}
    while (request := _read(sys.stdin.buffer)) is not None:
        _limit_cpu(seconds)
        _write(BEGUN)
        answer = _answer(environment, cache, request, max_chars)
        data = json.dumps(answer).encode()
        _write(LENGTH.pack(len(data)) + data)


def syntax() -> ImmutableSandboxedEnvironment:
    """An environment that parses chat templates as transformers does."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`generation` blocks mark text for training; here they are plain text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, loopcontrols],
    )


def _environment() -> ImmutableSandboxedEnvironment:
    """`syntax()` with what chat templates may call, as in transformers."""
    from datetime import datetime

    import jinja2

    # Jinja, markupsafe and Python's escapes import these when a template first needs
    # them, when no file can be opened any more.
    for name in ("html", "jinja2.constants", "pprint", "textwrap", "unicodedata"):
        importlib.import_module(name)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = syntax()
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    # The first use loads the time zone; the first error, code for tracebacks.
    with suppress(ZeroDivisionError):
        environment.from_string("{{ strftime_now('%Y') }}{{ 1 / 0 }}").render()
    return environment


def _limit(memory: int) -> None:
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def _limit_cpu(seconds: int) -> None:
    """The parent stops a slow render; this is for a parent that is gone."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 2, hard)
    )


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(head)[0]))
    return message


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _answer(
    environment: Any, cache: dict[str, Any], request: dict[str, Any], max_chars: int
) -> dict[str, str]:
    source = request["template"]
    try:
        template = cache.get(source)
        if template is None:
            cache.clear()
            template = cache[source] = environment.from_string(source)
        text = template.render(request["variables"])
    except MemoryError:
        return {"error": "the template needs too much memory"}
    except Exception as error:
        return {"error": (str(error) or type(error).__name__)[:2000]}
    if len(text) > max_chars:
        return {"error": f"the rendered chat has more than {max_chars} characters"}
    return {"text": text}


if __name__ == "__main__":
    main()
