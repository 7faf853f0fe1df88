# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Sparse MLA: every query attends to its own list of cached latent rows.

A cached row holds `kv_lora_rank` latent values, which serve as key and value, and
behind them the rotated key part, which only serves as key.
"""

from vllm.v1.attention.ops.sparse_mla.paged import (
    gather_rows,
    locate_rows,
    write_rows,
)
from vllm.v1.attention.ops.sparse_mla.reference import sparse_mla_reference
from vllm.v1.attention.ops.sparse_mla.torch_sparse_mla import sparse_mla

__all__ = [
    "gather_rows",
    "locate_rows",
    "sparse_mla",
    "sparse_mla_reference",
    "write_rows",
]
