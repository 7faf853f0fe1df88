# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Let DSA models run on NVIDIA GPUs for which Triton compiles no fp8 types."""

from vfork.spec import AddImport, Decorate, Edit, EditFile, Function, Module

FILE = EditFile(
    topic="triton-mla-sparse",
    edits=(
        Edit(
            id="dsa-fused-import",
            why="The decorators below are ours, and have to be imported.",
            drop_when="the edits of this file are gone",
            forwarded="no: to be offered together with TRITON_MLA_SPARSE",
            at=Module(),
            op=AddImport("from vllm.v1.attention.ops import dsa_fused"),
            test="tests/overlay/dsa_fused/test_dispatch.py",
            bases=("cuda",),
        ),
        Edit(
            id="dsa-fused-norm-rope",
            why=(
                "Triton compiles the fp8 types of this kernel for SM89 and later only."
                " Older NVIDIA GPUs get an operation that makes the same bytes with"
                " integers."
            ),
            drop_when="the release's fused_norm_rope compiles for sm_80",
            forwarded="no: to be offered together with TRITON_MLA_SPARSE",
            at=Function("fused_norm_rope"),
            op=Decorate("dsa_fused.portable_below_sm89(dsa_fused.fused_norm_rope)"),
            test="tests/overlay/dsa_fused/test_dispatch.py",
            bases=("cuda",),
        ),
        Edit(
            id="dsa-fused-q",
            why="As for fused_norm_rope: index queries are quantized to fp8 here.",
            drop_when="the release's fused_q compiles for sm_80",
            forwarded="no: to be offered together with TRITON_MLA_SPARSE",
            at=Function("fused_q"),
            op=Decorate("dsa_fused.portable_below_sm89(dsa_fused.fused_q)"),
            test="tests/overlay/dsa_fused/test_dispatch.py",
            bases=("cuda",),
        ),
    ),
)
