# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="gguf",
    edits=(
        Edit(
            id="gguf-check-file-first",
            why=(
                "A bad file is refused in seconds with one line, before the command "
                "line imports the server and before any process is started."
            ),
            drop_when="the edit gguf-engine-args is dropped",
            forwarded="not-needed: belongs to gguf-engine-args",
            at=Function("main"),
            op=PrependBody(
                "from vllm.transformers_utils.gguf.serving import check_command_line\n"
                "\n"
                "check_command_line(sys.argv)"
            ),
            test="tests/e2e/test_serve_bad_files.py",
        ),
    ),
)
