# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Register the sparse MLA backends of the fork."""

from vfork.spec import AddMember, Class, Edit, EditFile

FILE = EditFile(
    topic="sparse-mla-backends",
    edits=(
        Edit(
            id="cpu-mla-sparse-member",
            why=(
                "--attention-backend only takes members of this enum, and its"
                " register() would have to run in every process before options are"
                " parsed."
            ),
            drop_when="upstream has a sparse MLA backend for the CPU",
            forwarded="no: to be offered together with the backend",
            at=Class("AttentionBackendEnum"),
            op=AddMember(
                """
                CPU_MLA_SPARSE = (
                    "vllm.v1.attention.backends.mla.cpu_mla_sparse.CPUMLASparseBackend"
                )
                """
            ),
            test="tests/overlay/test_cpu_mla_sparse.py::test_backend_is_registered",
        ),
        Edit(
            id="triton-mla-sparse-member",
            why="As for cpu-mla-sparse-member; the selector ranks members, too.",
            drop_when="upstream has a sparse MLA backend for SM80 and SM120",
            forwarded="no: to be offered together with the backend",
            at=Class("AttentionBackendEnum"),
            op=AddMember(
                "TRITON_MLA_SPARSE = (\n"
                '    "vllm.v1.attention.backends.mla.triton_mla_sparse'
                '.TritonMLASparseBackend"\n'
                ")"
            ),
            test="tests/overlay/test_triton_mla_sparse.py::test_backend_is_registered",
            bases=("cuda",),
        ),
    ),
)
