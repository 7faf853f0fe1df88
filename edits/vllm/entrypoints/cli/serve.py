# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="gguf",
    edits=(
        Edit(
            id="gguf-serve-arguments",
            why=(
                "--enable-auto-tool-choice asks for a parser's name, which a glm-dsa "
                "file implies; the release has no default by model. Options that a "
                "GGUF file cannot be combined with are refused in one line."
            ),
            drop_when="vLLM chooses tool and reasoning parsers by architecture",
            forwarded="no: waits for the fork's first release",
            at=Function("ServeSubcommand.validate"),
            op=PrependBody(
                "from vllm.transformers_utils.gguf.serving import (\n"
                "    check_serve_arguments,\n"
                ")\n"
                "\n"
                "check_serve_arguments(args)"
            ),
            test="tests/e2e/test_serve.py",
        ),
    ),
)
