# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The DSA model's fused operations between its projections and its attention.

They do what the release's functions of the same names do, without the fp8 types that
Triton compiles for SM89 and later only.
"""

from vllm.v1.attention.ops.dsa_fused.dispatch import portable_below_sm89
from vllm.v1.attention.ops.dsa_fused.norm_rope import fused_norm_rope
from vllm.v1.attention.ops.dsa_fused.query import fused_q

__all__ = ["fused_norm_rope", "fused_q", "portable_below_sm89"]
