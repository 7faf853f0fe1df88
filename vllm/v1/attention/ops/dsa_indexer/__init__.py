# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The DSA indexer: which earlier positions does each query attend to?"""

from vllm.v1.attention.ops.dsa_indexer.reference import (
    index_logits_reference,
    select_positions_reference,
)
from vllm.v1.attention.ops.dsa_indexer.torch_indexer import select_positions

__all__ = [
    "index_logits_reference",
    "select_positions",
    "select_positions_reference",
]
