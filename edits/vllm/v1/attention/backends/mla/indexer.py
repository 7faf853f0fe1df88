# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Give the Triton indexer one row for each query when decoding."""

from vfork.spec import Edit, EditFile, Function, PrependBody

FILE = EditFile(
    topic="dsa-indexer",
    edits=(
        Edit(
            id="dsa-indexer-rows",
            why=(
                "With several queries per request the release packs batches of mixed"
                " lengths by a kernel that does not compile below SM89, and pairs the"
                " packed queries with weights that are not packed. One row for each"
                " query needs no packing. The module imports no function for this that"
                " could be replaced."
            ),
            drop_when="the edit dsa-indexer-logits goes",
            forwarded="not-needed: belongs to dsa-indexer-logits",
            at=Function("_supports_native_decode"),
            op=PrependBody(
                """
                from vllm.v1.attention.ops.dsa_indexer import dispatch

                if dispatch.portable():
                    return False
                """
            ),
            test="tests/overlay/dsa_indexer_triton/test_dispatch.py::"
            "test_one_row_for_each_query",
            bases=("cuda",),
        ),
    ),
)
