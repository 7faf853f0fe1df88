# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Let the CUDA platform choose TRITON_MLA_SPARSE."""

from vfork.spec import Edit, EditFile, Function, InsertAfter, Statement

FILE = EditFile(
    topic="triton-mla-sparse",
    edits=(
        Edit(
            id="triton-mla-sparse-rank",
            why=(
                "The order of backends is written into a function, and what is not in"
                " its lists is never tried. The only caller gets them here; the lists"
                " themselves are cached and shared."
            ),
            drop_when="upstream has a sparse MLA backend for SM80 and SM120",
            forwarded="no: to be offered together with the backend",
            at=Statement(
                Function("CudaPlatformBase.get_valid_backends"),
                "backend_priorities = _get_backend_priorities(...)",
            ),
            op=InsertAfter(
                """
                from vllm.platforms.cuda_sparse_mla import rank_triton_mla_sparse

                backend_priorities = rank_triton_mla_sparse(
                    backend_priorities, device_capability, attn_selector_config
                )
                """
            ),
            test="tests/overlay/test_triton_mla_sparse.py::test_selected_backends",
            bases=("cuda",),
        ),
    ),
)
