# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Use the CPU indexer on the CPU."""

from vfork.spec import AppendBody, Edit, EditFile, Module

FILE = EditFile(
    topic="cpu-dsa",
    edits=(
        Edit(
            id="cpu-indexer",
            why=(
                "The release's indexer needs FP8 kernels that the CPU build lacks, and"
                " the attention layer names the class directly. At the end of the"
                " module the name is bound anew for it and for importers."
            ),
            drop_when="upstream's SparseAttnIndexer.forward_cpu runs on any CPU",
            forwarded="no: to be offered together with the backend",
            at=Module(),
            op=AppendBody(
                """
                from vllm.model_executor.layers import cpu_sparse_attn_indexer

                Indexer = cpu_sparse_attn_indexer.indexer_for_platform(Indexer)
                """
            ),
            test="tests/overlay/test_cpu_mla_sparse.py::test_model_uses_cpu_indexer",
        ),
    ),
)
