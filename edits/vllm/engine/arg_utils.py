# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="gguf",
    edits=(
        Edit(
            id="gguf-engine-args",
            why=(
                "Every entry point makes its model from EngineArgs. Turning the GGUF "
                "path into a model directory here, before anything probes the model, "
                "spares an edit at each of the probes; no public hook runs earlier."
            ),
            drop_when="vLLM routes a .gguf path to a registered loader and config",
            forwarded="no: waits for the fork's first release",
            at=Function("EngineArgs.__post_init__"),
            op=PrependBody(
                "from vllm.transformers_utils.gguf.serving import resolve_engine_args\n"
                "\n"
                "resolve_engine_args(self)"
            ),
            test="tests/e2e/test_gguf_engine.py",
        ),
    ),
)
