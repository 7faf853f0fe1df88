# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Compute the logits of the DSA indexer where DeepGEMM cannot."""

from vfork.spec import AppendBody, Edit, EditFile, Module

FILE = EditFile(
    topic="dsa-indexer",
    edits=(
        Edit(
            id="dsa-indexer-logits",
            why=(
                "The indexer knows no other logits than those of DeepGEMM, which needs"
                " nvcc at run time and has no kernels for SM8x; its constructor fails"
                " without the package. All callers import these names from here, so"
                " that binding them anew at the end reaches every one."
            ),
            drop_when="upstream has indexer logits without DeepGEMM on CUDA",
            forwarded="no: waits for the fork's first release",
            at=Module(),
            op=AppendBody(
                """
                from vllm.v1.attention.ops.dsa_indexer import dispatch

                globals().update(dispatch.portable_names(globals()))
                """
            ),
            test="tests/overlay/dsa_indexer_triton/test_dispatch.py::"
            "test_logits_without_deep_gemm",
            bases=("cuda",),
        ),
    ),
)
