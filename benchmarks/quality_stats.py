# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What is computed from right and wrong answers and from log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Of a token at least this much is assumed for all that an engine did not report. Sums
# of float32 log-probabilities are not surer than that.
REST = 1e-6
CONFIDENCE_95 = 1.959964

Reported = Mapping[int, float]
"""Log-probabilities that an engine gave for one position, in nats, by token id."""


def wilson(right: int, asked: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of right answers, in 0..1.

    Unlike the normal one it is not empty where all answers are right.
    """
    z2 = CONFIDENCE_95**2
    share = right / asked
    middle = share + z2 / (2 * asked)
    spread = share * (1 - share) / asked + z2 / (4 * asked**2)
    half = CONFIDENCE_95 * math.sqrt(spread)
    scale = 1 + z2 / asked
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


@dataclass(frozen=True)
class Paired:
    """Two settings on the same questions: `lost` were right only in the first, `won`
    only in the second. Questions both get right, or wrong, say nothing about their
    difference, so a few hundred questions resolve less than their intervals suggest."""

    asked: int
    lost: int
    won: int

    @property
    def points(self) -> float:
        """How much worse the second is, in percentage points of all questions."""
        return 100 * (self.lost - self.won) / self.asked

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval of `points`, as of a mean of -1, 0 and 1.

        It is 0 where no answer differs; then 3 differing ones in `asked` questions
        could have stayed unseen with 5 % probability (the rule of three).
        """
        mean = self.points / 100
        variance = (self.lost + self.won) / self.asked - mean**2
        return 100 * CONFIDENCE_95 * math.sqrt(variance / self.asked)


def paired(first: Sequence[bool], second: Sequence[bool]) -> Paired:
    """Compare right answers to the same questions in the same order."""
    both = list(zip(first, second, strict=True))
    return Paired(len(both), both.count((True, False)), both.count((False, True)))


def perplexity(logprobs: Iterable[float]) -> float:
    """exp of the mean negative log-probability of the tokens that came."""
    values = list(logprobs)
    return math.exp(-sum(values) / len(values))


def kl_lower_bound(reference: np.ndarray, reported: Reported) -> float:
    """A lower bound of KL(reference || other), in nats, at one position.

    The other engine reports its likeliest tokens only, so both distributions are
    compared on the partition into each reported token and all the rest together. No
    partition can have a larger KL than the tokens themselves.

    Args:
        reference: Log-probabilities of all tokens, float64 [vocab].
        reported: What the other engine gave; at least one token.
    """
    tokens = list(reported)
    p = np.exp(reference[tokens])
    log_q = np.array([reported[token] for token in tokens])
    rest_p = max(1 - float(p.sum()), REST)
    rest_q = max(1 - float(np.exp(log_q).sum()), REST)
    known = float(np.sum(p * (reference[tokens] - log_q)))
    return known + rest_p * math.log(rest_p / rest_q)
