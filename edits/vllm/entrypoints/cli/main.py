# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import Edit, EditFile, Function, InsertAfter, PrependBody, Statement

FILE = EditFile(
    topic="gguf",
    edits=(
        Edit(
            id="gguf-check-file-first",
            why=(
                "What a GGUF file alone tells is answered in seconds, before the "
                "command line imports the server and before any process is started: "
                "`vllm serve` refuses a bad file in one line, `vllm glm-doctor` "
                "reports, also where there is no GPU and the release's command line "
                "fails on that."
            ),
            drop_when="the edit gguf-engine-args is dropped",
            forwarded="not-needed: belongs to gguf-engine-args",
            at=Function("main"),
            op=PrependBody(
                "from vllm.entrypoints.cli.glm_doctor import run_early\n"
                "from vllm.transformers_utils.gguf.serving import check_command_line\n"
                "\n"
                "run_early(sys.argv) or check_command_line(sys.argv)"
            ),
            test="tests/e2e/test_serve_bad_files.py",
        ),
        Edit(
            id="glm-doctor-command",
            why=(
                "`vllm --help` lists the command. Its list of commands is a local "
                "variable; there is no hook for others."
            ),
            drop_when="vLLM loads commands from entry points",
            forwarded="no: waits for the fork's first release",
            at=Statement(Function("main"), "CMD_MODULES = ..."),
            op=InsertAfter(
                "from vllm.entrypoints.cli import glm_doctor\n"
                "\n"
                "CMD_MODULES.append(glm_doctor)"
            ),
            test="tests/overlay/doctor/test_cli.py",
        ),
    ),
)
