"""Which of several policies scores higher, and how surely, from one score a seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from rlzoo.analysis.intervals import CONFIDENCE, Interval

MIN_SEEDS = 5
"""Common seeds below which no winner is named: the exact test below cannot say less than 2 / 2^n."""
LEVEL = 0.1  # of the test, after Holm's correction over all pairs
NUM_RESAMPLES = 2000

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A policy's score over its seeds.

    Example:
        Scores .70 .72 .74 .76 .98: ``mean`` .78, ``iqm`` .74, the mean of the middle three.
    """

    num_seeds: int
    mean: float
    mean_interval: Interval | None  # 95 %, bootstrap over seeds; None with a single one
    iqm: float  # interquartile mean (arXiv 2108.13264)
    iqm_interval: Interval | None


@dataclass(frozen=True, slots=True)
class Difference:
    """One policy against another, on the seeds both have.

    Example:
        ``Difference("a", "b", 5, 0.02, ...)``: a scored .02 more than b, on the average of five seeds.
    """

    first: str
    second: str
    num_seeds: int
    mean: float | None  # None without a common seed
    interval: Interval | None  # 95 %, paired bootstrap over seeds
    p_value: float | None  # two-sided sign-flip test of the paired differences, exact up to 15 seeds
    adjusted_p_value: float | None  # after Holm's correction over all pairs
    probability_of_improvement: float  # P(first > second) + half of P(equal), over all pairs of seeds
    verdict: str


def iqm(values: Array, axis: int = -1) -> Array:
    """Interquartile mean: the mean without the lowest and the highest quarter, rounded down to whole values."""
    return np.asarray(stats.trim_mean(values, 0.25, axis=axis))


def estimate(scores: Sequence[float]) -> Estimate:
    """Mean and interquartile mean with percentile bootstrap intervals.

    With few seeds the intervals are too narrow: with five normal scores they hold the mean four times out of five, not 19
    out of 20 (``tests/analysis/test_comparison.py`` measures it).
    """
    values = np.array(scores, dtype=float)
    return Estimate(len(values), float(values.mean()), _bootstrap(values, np.mean), float(iqm(values)), _bootstrap(values, iqm))


def probability_of_improvement(first: Sequence[float], second: Sequence[float]) -> float:
    """Mann and Whitney's U as a share of all pairs of scores (arXiv 2108.13264)."""
    return float(stats.mannwhitneyu(first, second).statistic) / (len(first) * len(second))


def differences(scores: Mapping[str, Mapping[int, float]]) -> list[Difference]:
    """Every pair of policies, each with a verdict.

    A winner is named where there are `MIN_SEEDS` common seeds, the paired interval excludes 0, and the exact sign-flip test
    is below `LEVEL` after Holm's correction over all pairs that can be tested. Five seeds cannot give less than 2/32 to one
    pair: among more than one pair, they name nobody.

    Args:
        scores: by policy and seed.
    """
    pairs = [(first, second, *_paired(scores[first], scores[second])) for first, second in itertools.combinations(scores, 2)]
    p_values = [_sign_flip(gap) for *_, gap in pairs]
    adjusted = holm(p_values)
    return [
        _difference(first, second, scores, gap, p_value, corrected)
        for (first, second, gap), p_value, corrected in zip(pairs, p_values, adjusted, strict=True)
    ]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction for several tests; None stays None and does not count."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        adjusted[index] = highest
    return adjusted


def _paired(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[Array]:
    return (np.array([first[seed] - second[seed] for seed in sorted(set(first) & set(second))]),)


def _difference(
    first: str,
    second: str,
    scores: Mapping[str, Mapping[int, float]],
    gap: Array,
    p_value: float | None,
    adjusted: float | None,
) -> Difference:
    interval = _bootstrap(gap, np.mean)
    better = probability_of_improvement(list(scores[first].values()), list(scores[second].values()))
    mean = float(gap.mean()) if len(gap) else None
    if len(gap) < MIN_SEEDS:
        verdict = f"too few seeds ({len(gap)} in common, of at least {MIN_SEEDS}): no winner is named"
    elif mean and adjusted is not None and adjusted <= LEVEL and interval and not interval[0] <= 0 <= interval[1]:
        verdict = f"{first} above {second}" if mean > 0 else f"{second} above {first}"
    else:
        verdict = f"no difference that {len(gap)} seeds show"
    return Difference(first, second, len(gap), mean, interval, p_value, adjusted, better, verdict)


def _sign_flip(gap: Array) -> float | None:
    """P of a mean at least as far from 0 if every difference could as well have had the other sign."""
    if len(gap) < MIN_SEEDS:
        return None
    result = stats.permutation_test(
        (gap,), np.mean, permutation_type="samples", vectorized=True, n_resamples=2**15, rng=np.random.default_rng(0)
    )
    return float(result.pvalue)


def _bootstrap(values: Array, statistic: Callable[..., Array]) -> Interval | None:
    if len(values) < 2:
        return None
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    result = stats.bootstrap(
        (values,),
        statistic,
        n_resamples=NUM_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
