# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="gguf",
    edits=(
        Edit(
            id="gguf-tokenizer-source",
            why=(
                "The benchmark commands load the tokenizer by the model's path without "
                "engine arguments, and --tokenizer may name a GGUF file."
            ),
            drop_when="the edit gguf-engine-args is dropped",
            forwarded="not-needed: belongs to gguf-engine-args",
            at=Function("get_tokenizer"),
            op=PrependBody(
                "from vllm.transformers_utils.gguf.serving import tokenizer_source\n"
                "\n"
                "tokenizer_name = tokenizer_source(tokenizer_name)"
            ),
            test="tests/overlay/gguf/test_artifacts.py::"
            "test_tokenizer_is_found_by_the_path_of_the_file",
        ),
    ),
)
