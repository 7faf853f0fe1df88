# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Rotate per-head tensors rightly on the CPU."""

from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="cpu-dsa",
    edits=(
        Edit(
            id="cpu-rotary-per-head",
            why=(
                "The compiled CPU operation silently rotates wrong rows of the"
                " [tokens, heads, head_size] tensors that MLA passes, and overwrites"
                " columns next to strided keys."
            ),
            drop_when="the release's rotary_embedding is right for 3-D CPU tensors",
            forwarded="no: an issue with the reproducing test is to be filed",
            at=Function("RotaryEmbedding.forward_cpu"),
            op=PrependBody(
                """
                from vllm.model_executor.layers.rotary_embedding import cpu_rotary

                if query.dim() > 2:
                    return cpu_rotary.rotate_flattened(
                        self.forward_cpu, positions, query, key
                    )
                """
            ),
            test="tests/overlay/test_cpu_rotary.py",
        ),
    ),
)
