# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The prompts that engines are compared on."""

import numpy as np

LENGTHS = (1, 5, 63, 64, 65, 150, 300, 411)
"""Below, at and above the tiny models' top-k of 64 and chunks of 128 tokens."""

STEPS = 48


def make_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """One prompt of random ordinary tokens for each length."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, 480, length).tolist() for length in lengths]
