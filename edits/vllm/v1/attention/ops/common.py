# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Keep the release's warm-up from compiling fp8 where Triton has none."""

from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="dsa-indexer",
    edits=(
        Edit(
            id="pack-seq-warmup-below-sm89",
            why=(
                "The indexer has a kernel compiled at startup for e4m3 tensors. Below"
                " SM89 that is an error, and the engine does not start. The indexer's"
                " constructor chooses the dtype in the middle of other work."
            ),
            drop_when="upstream packs e4m3 tensors as bytes",
            forwarded="no: waits for the fork's first release",
            at=Function("PackSeqTritonKernel.get_warmup_keys"),
            op=PrependBody(
                """
                from vllm.v1.attention.ops.dsa_indexer import dispatch

                dtype, pad_value = dispatch.packed_format(dtype, pad_value)
                """
            ),
            test="tests/overlay/dsa_indexer_triton/test_dispatch.py::"
            "test_warmup_compiles_no_fp8_below_sm89",
            bases=("cuda",),
        ),
    ),
)
