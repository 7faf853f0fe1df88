# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The numbers of the quality benchmark against what they are defined as."""

import math

import numpy as np
import pytest

from benchmarks.quality_stats import (
    Paired,
    kl_lower_bound,
    paired,
    perplexity,
    wilson,
)
from tests.helpers.metrics import kl_divergence

VOCABULARY = 640


def distributions(spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of a peaked distribution and of a disturbed copy."""
    rng = np.random.default_rng(3)
    logits = 4 * rng.standard_normal(VOCABULARY)
    other = logits + spread * rng.standard_normal(VOCABULARY)
    return log_softmax(logits), log_softmax(other)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def best(logprobs: np.ndarray, count: int) -> dict[int, float]:
    return {int(i): float(logprobs[i]) for i in np.argsort(-logprobs)[:count]}


@pytest.mark.parametrize("spread", [0.01, 0.1, 1.0])
def test_the_bound_lies_below_the_divergence_and_grows_to_it(spread: float) -> None:
    reference, other = distributions(spread)
    exact = float(kl_divergence(reference, other))
    bounds = [kl_lower_bound(reference, best(other, n)) for n in (1, 5, 20, 639)]
    assert 0 <= bounds[0] <= bounds[1] <= bounds[2] <= bounds[3] + 1e-9
    assert bounds[2] > 0.5 * exact
    assert bounds[3] == pytest.approx(exact, rel=1e-3)


def test_the_bound_of_equal_distributions_is_zero() -> None:
    reference, _ = distributions(0)
    assert abs(kl_lower_bound(reference, best(reference, 20))) < 1e-9


def test_the_bound_stays_finite_where_nothing_is_left_for_the_rest() -> None:
    reference, _ = distributions(0)
    sure = {int(reference.argmax()): 0.0}
    assert 0 < kl_lower_bound(reference, sure) < 15


def test_wilson_interval_of_published_examples() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)


def test_pairs_count_the_answers_that_differ() -> None:
    found = paired([True, True, False, False, True], [True, False, True, False, False])
    assert found == Paired(asked=5, lost=2, won=1)
    assert found.points == pytest.approx(20)
    values = np.array([1, 1, -1, 0, 0])
    expected = 100 * 1.959964 * values.std() / math.sqrt(5)
    assert found.half_width == pytest.approx(expected)
    with pytest.raises(ValueError, match="longer|shorter"):
        paired([True], [True, False])


def test_perplexity_of_even_choices_is_their_number() -> None:
    assert perplexity([math.log(1 / 8)] * 5) == pytest.approx(8)
