# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import AddImport, Assigned, Edit, EditFile, ExtendLiteral, Module

FILE = EditFile(
    topic="gguf",
    edits=(
        Edit(
            id="gguf-loader-import",
            why="The loader table below names the class.",
            drop_when="the edit gguf-loader is dropped",
            forwarded="not-needed: belongs to gguf-loader",
            at=Module(),
            op=AddImport(
                "from vllm.model_executor.model_loader.gguf_loader import "
                "GGUFModelLoader"
            ),
            test="tests/e2e/test_gguf_engine.py",
        ),
        Edit(
            id="gguf-load-format",
            why="The list of formats is what --help and type checkers show.",
            drop_when="the edit gguf-loader is dropped",
            forwarded="not-needed: belongs to gguf-loader",
            at=Assigned("LoadFormats"),
            op=ExtendLiteral('"gguf_native"'),
            test="tests/e2e/test_gguf_engine.py",
        ),
        Edit(
            id="gguf-loader",
            why=(
                "The public register hook acts only in processes that import the "
                "registering module; the table is there in each of them."
            ),
            drop_when="vLLM loads glm-dsa GGUF files itself",
            forwarded="no: waits for the fork's first release",
            at=Assigned("_LOAD_FORMAT_TO_MODEL_LOADER"),
            op=ExtendLiteral('"gguf_native": GGUFModelLoader'),
            test="tests/e2e/test_gguf_engine.py",
        ),
    ),
)
