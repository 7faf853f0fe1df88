# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How long things may take.

What takes too much work is told by CPU time, which another program on the machine
hardly changes; wall time only tells that something hangs.
"""

HANG_SECONDS = 600
"""Nothing takes that long that ends at all, however busy the machine is."""
