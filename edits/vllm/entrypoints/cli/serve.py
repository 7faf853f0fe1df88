# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="gguf",
    edits=(
        Edit(
            id="gguf-parser-defaults",
            why=(
                "--enable-auto-tool-choice asks for a parser's name, which a glm-dsa "
                "file implies; the release has no default by model."
            ),
            drop_when="vLLM chooses tool and reasoning parsers by architecture",
            forwarded="no: waits for the fork's first release",
            at=Function("ServeSubcommand.validate"),
            op=PrependBody(
                "from vllm.transformers_utils.gguf.serving import (\n"
                "    apply_parser_defaults,\n"
                ")\n"
                "\n"
                "apply_parser_defaults(args)"
            ),
            test="tests/e2e/test_serve.py",
        ),
    ),
)
