# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import (
    AddImport,
    Decorate,
    Edit,
    EditFile,
    Function,
    Module,
    PrependBody,
)

FILE = EditFile(
    topic="chat-template",
    edits=(
        Edit(
            id="chat-template-guard-import",
            why="Names the overlay module for the decorator below.",
            drop_when="the edit chat-template-guard goes",
            forwarded="no: waits for the fork's first release",
            at=Module(),
            op=AddImport(
                "from vllm.transformers_utils.gguf import chat_template as gguf_chat"
            ),
            test="tests/overlay/gguf/test_chat_template.py",
        ),
        Edit(
            id="chat-template-guard",
            why=(
                "A template that came in a GGUF file is untrusted; it is checked and "
                "handed to a worker process before the release compiles it."
            ),
            drop_when="vLLM renders chat templates in a process with limits",
            forwarded="no: waits for the fork's first release",
            at=Function("resolve_chat_template"),
            op=Decorate("gguf_chat.guard_template"),
            test="tests/overlay/gguf/test_chat_template.py",
        ),
        Edit(
            id="chat-template-variables",
            why=(
                "jinja2.meta evaluates constant expressions: a power in a template "
                "would stop the whole server."
            ),
            drop_when="vLLM finds a template's variables without jinja2's optimizer",
            forwarded="no: waits for the fork's first release",
            at=Function("_resolve_chat_template_kwargs"),
            op=PrependBody(
                "if gguf_chat.is_isolated(chat_template):\n"
                "    return gguf_chat.template_variables(chat_template)"
            ),
            test="tests/overlay/gguf/test_chat_template.py",
        ),
    ),
)
