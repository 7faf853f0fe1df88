# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Let the CPU platform run sparse MLA models."""

from vfork.spec import Edit, EditFile, Function, InsertAfter, PrependBody, Statement

FILE = EditFile(
    topic="cpu-dsa",
    edits=(
        Edit(
            id="cpu-select-sparse-mla",
            why="The platform refuses every sparse attention layer; no hook precedes.",
            drop_when="upstream has a sparse MLA backend for the CPU",
            forwarded="no: to be offered together with the backend",
            at=Function("CpuPlatform.get_attn_backend_cls"),
            op=PrependBody(
                """
                from vllm.platforms.cpu_sparse_mla import sparse_mla_backend

                if attn_selector_config.use_sparse:
                    return sparse_mla_backend(selected_backend, attn_selector_config)
                """
            ),
            test="tests/overlay/test_cpu_mla_sparse.py::test_platform_selects_backend",
        ),
        Edit(
            id="cpu-lift-mla-limits",
            why=(
                "For every MLA model the platform forces 16-token blocks and turns"
                " chunked prefill and prefix caching off. These are limits of the dense"
                " kernel, which sparse MLA does not use."
            ),
            drop_when="upstream ties these limits to the CPU_MLA backend",
            forwarded="no: to be offered together with the backend",
            at=Statement(
                Function("CpuPlatform.check_and_update_config"),
                "amx_mla_or_dsv4_enabled = ...",
            ),
            op=InsertAfter(
                """
                from vllm.platforms.cpu_sparse_mla import lift_mla_limits

                reference_cpu_mla_enabled, amx_mla_or_dsv4_enabled = lift_mla_limits(
                    vllm_config, reference_cpu_mla_enabled, amx_mla_or_dsv4_enabled
                )
                """
            ),
            test="tests/overlay/test_cpu_mla_sparse.py::test_platform_lifts_mla_limits",
        ),
    ),
)
