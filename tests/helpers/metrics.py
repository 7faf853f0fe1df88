# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How far two engines' next-token distributions lie apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Agreement:
    """KL divergences in nats, `top1` the share of equal best tokens, and `max_diff` the
    largest difference of two log-probabilities.

    The median shows the rounding, the mean mostly the few positions where rounding
    made another choice of expert or key.
    """

    mean_kl: float
    median_kl: float
    max_kl: float
    top1: float
    max_diff: float


def agreement(reference: np.ndarray, other: np.ndarray) -> Agreement:
    """Compare log-probabilities [..., vocab]; KL is of `other` from `reference`."""
    if reference.shape != other.shape:
        raise ValueError(f"shapes differ: {reference.shape} and {other.shape}")
    kl = kl_divergence(reference, other)
    return Agreement(
        mean_kl=float(kl.mean()),
        median_kl=float(np.median(kl)),
        max_kl=float(kl.max()),
        top1=float((reference.argmax(-1) == other.argmax(-1)).mean()),
        max_diff=float(np.abs(reference - other).max()),
    )


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(reference || other) in nats of log-probabilities [..., vocab]: [...]"""
    reference, other = reference.astype(np.float64), other.astype(np.float64)
    return np.sum(np.exp(reference) * (reference - other), axis=-1)
