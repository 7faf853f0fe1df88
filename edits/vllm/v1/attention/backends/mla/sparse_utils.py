# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Convert any number of sparse indices per query."""

from vfork.spec import AppendBody, Edit, EditFile, Module

FILE = EditFile(
    topic="triton-mla-sparse",
    edits=(
        Edit(
            id="sparse-indices-any-topk",
            why=(
                "Both conversions refuse a top-k that 128 does not divide, such as the"
                " 64 of small models, though their kernel is right for any tile width"
                " that divides it. At the end of the module their names are bound anew"
                " for importers and for each other."
            ),
            drop_when="the conversions of the release take any top-k",
            forwarded="no: waits for the fork's first release",
            at=Module(),
            op=AppendBody(
                """
                from vllm.platforms import cuda_sparse_mla

                triton_convert_req_index_to_global_index = cuda_sparse_mla.for_any_topk(
                    triton_convert_req_index_to_global_index
                )
                triton_filter_and_convert_dcp_index = cuda_sparse_mla.for_any_topk(
                    triton_filter_and_convert_dcp_index
                )
                """
            ),
            test="tests/overlay/test_triton_mla_sparse_impl.py::"
            "test_any_number_of_indices_is_converted",
            bases=("cuda",),
        ),
    ),
)
