# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="chat-template",
    edits=(
        Edit(
            id="chat-template-no-warmup",
            why=(
                "The warm-up renders the chat template when the server starts; "
                "nothing of a template in a GGUF file may run then."
            ),
            drop_when="vLLM renders chat templates in a process with limits",
            forwarded="no: waits for the fork's first release",
            at=Function("BaseRenderer.warmup"),
            op=PrependBody(
                "from vllm.transformers_utils.gguf.chat_template import skips_warmup\n"
                "\n"
                "if skips_warmup(self.model_config, chat_params):\n"
                "    return"
            ),
            test="tests/overlay/gguf/test_chat_template.py",
        ),
    ),
)
