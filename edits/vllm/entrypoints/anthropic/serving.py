# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="chat-template",
    edits=(
        Edit(
            id="chat-template-no-probe",
            why=(
                "The Anthropic endpoint renders the chat template when the server "
                "starts; nothing of a template in a GGUF file may run then. GLM's "
                "templates take system messages anywhere, so none is merged."
            ),
            drop_when="vLLM renders chat templates in a process with limits",
            forwarded="no: waits for the fork's first release",
            at=Function("AnthropicServingMessages._detect_merge_inline_system"),
            op=PrependBody(
                "from vllm.transformers_utils.gguf.chat_template import is_isolated\n"
                "\n"
                "if is_isolated(chat_template):\n"
                "    return False"
            ),
            test="tests/overlay/gguf/test_chat_template.py",
        ),
    ),
)
