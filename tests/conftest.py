# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Settings of all tests, made before torch is imported.

Modules of `examples/` can be imported by their own names. One thread per process: the
models are tiny, and threads that wait for each other cost more than they bring. vLLM
must not bind its threads either, or the engines of all processes share one core.
"""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

EXAMPLES = str(Path(__file__).parents[1] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)

# How fast examples are made depends on what else the machine does.
settings.register_profile(
    "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")
