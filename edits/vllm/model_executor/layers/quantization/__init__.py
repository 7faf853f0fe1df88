# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
from vfork.spec import Assigned, Edit, EditFile, ExtendLiteral, Function, PrependBody

FILE = EditFile(
    topic="gguf",
    edits=(
        Edit(
            id="gguf-quantization-name",
            why=(
                "A method must be in this list to be accepted. The public register "
                "hook adds it only in processes that import the registering module, "
                "which imports every layer class."
            ),
            drop_when="vLLM has a quantization method that keeps GGUF blocks",
            forwarded="no: waits for the fork's first release",
            at=Assigned("QuantizationMethods"),
            op=ExtendLiteral('"gguf_native"'),
            test="tests/overlay/quantization/test_config.py::"
            "test_the_method_is_known_by_name",
        ),
        Edit(
            id="gguf-quantization-config",
            why="The table of classes is local to this function.",
            drop_when="the edit gguf-quantization-name is dropped",
            forwarded="not-needed: belongs to gguf-quantization-name",
            at=Function("get_quantization_config"),
            op=PrependBody(
                """
                if quantization == "gguf_native":
                    from vllm.model_executor.layers.quantization.gguf.config import (
                        GGUFConfig,
                    )

                    return GGUFConfig
                """
            ),
            test="tests/overlay/quantization/test_config.py::"
            "test_the_method_is_known_by_name",
        ),
    ),
)
