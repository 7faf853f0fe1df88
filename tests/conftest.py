# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Lets tests import the modules of `examples/` by their own names."""

import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).parents[1] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)
