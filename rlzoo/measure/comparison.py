"""Comparison of policies by one score per seed: intervals, tests, and verdicts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rlzoo.measure.intervals import Array, Interval, bootstrap

MIN_SEEDS = 5
"""Common seeds below which no winner is named: the sign-flip test of n differences cannot give less than 2 / 2^n."""
LEVEL = 0.1  # of the test, after Holm's correction over all pairs
NUM_FLIPS = 2**13  # all of them up to 13 seeds; of more, as many at random, which still can tell 400 pairs apart


@dataclass(frozen=True, slots=True)
class Estimate:
    """A policy's score over its seeds."""

    num_seeds: int
    mean: float
    mean_interval: Interval | None  # 95 %, bootstrap over seeds; None where resamples all agree, as with a single seed
    iqm: float  # interquartile mean (arXiv 2108.13264)
    iqm_interval: Interval | None


@dataclass(frozen=True, slots=True)
class Difference:
    """One policy against another, on the seeds both have."""

    first: str
    second: str
    num_seeds: int
    mean: float | None  # None without a common seed
    interval: Interval | None  # 95 %, paired bootstrap over seeds
    p_value: float | None  # two-sided sign-flip test of the paired differences, exact up to 13 seeds
    adjusted_p_value: float | None  # after Holm's correction over all pairs
    probability_of_improvement: float  # P(first > second) + half of P(equal), over all pairs of seeds
    probability_interval: Interval | None  # 95 %, bootstrap over the seeds of each
    verdict: str


def iqm(values: Array, axis: int = -1) -> Array:
    """Interquartile mean: the mean without the lowest and the highest quarter, rounded down to whole values."""
    return np.asarray(stats.trim_mean(values, 0.25, axis=axis))


def estimate(scores: Sequence[float]) -> Estimate:
    """Mean and interquartile mean with percentile bootstrap intervals.

    With few seeds they are too narrow. Of 2000 draws of normal scores, the 95 % interval held the true value in 82 % with 5
    seeds, 90 % with 10 and 92 % with 20 (the mean), and in 89 %, 93 % and 94 % (the interquartile mean);
    ``pytest tests/measure/test_comparison.py -k intervals_hold`` measures it again on fewer draws.
    """
    values = np.array(scores, dtype=float)
    of_mean, of_iqm = bootstrap([values], np.mean), bootstrap([values], iqm)
    return Estimate(len(values), float(values.mean()), of_mean, float(iqm(values)), of_iqm)


def probability_of_improvement(first: Array, second: Array, axis: int = -1) -> Array:
    """P(first > second) + P(equal) / 2 over all pairs of scores: Mann and Whitney's U as a share (arXiv 2108.13264)."""
    wins = stats.mannwhitneyu(first, second, axis=axis, method="asymptotic").statistic  # the method is that of the p-value
    return np.asarray(wins / (first.shape[axis] * second.shape[axis]))


def differences(scores: Mapping[str, Mapping[int, float]]) -> list[Difference]:
    """Compare every pair of policies; ``scores`` are by policy and seed.

    A winner is named where there are `MIN_SEEDS` common seeds, the paired interval excludes 0, and the sign-flip test is at
    most `LEVEL` after Holm's correction over all pairs that can be tested. Five seeds cannot give less than 2/32 = .0625 to
    one pair, and Holm's correction multiplies that by the number of pairs: among more than one pair, five seeds name nobody,
    and the verdict says how many could.
    """
    pairs = list(itertools.combinations(scores, 2))
    gaps: list[Array] = []
    for ours, theirs in ((scores[first], scores[second]) for first, second in pairs):
        differences_by_seed = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
        gaps.append(np.round(differences_by_seed, 12))  # .3 - .2 and .2 - .1 are the same difference
    p_values = [_sign_flip(gap) for gap in gaps]
    # with as many seeds, the least p-value there is passes Holm's correction
    num_tests = sum(p_value is not None for p_value in p_values)
    needed = next(number for number in itertools.count(MIN_SEEDS) if num_tests * 2 / 2**number <= LEVEL)
    found = []
    for (first, second), gap, p_value, adjusted in zip(pairs, gaps, p_values, holm(p_values), strict=True):
        all_ours, all_theirs = (np.array(list(scores[name].values()), dtype=float) for name in (first, second))
        interval = bootstrap([gap], np.mean)
        found.append(
            Difference(
                first,
                second,
                num_seeds=len(gap),
                mean=float(gap.mean()) if len(gap) else None,
                interval=interval,
                p_value=p_value,
                adjusted_p_value=adjusted,
                probability_of_improvement=float(probability_of_improvement(all_ours, all_theirs)),
                probability_interval=bootstrap([all_ours, all_theirs], probability_of_improvement),
                verdict=_verdict(first, second, gap, interval, adjusted, needed),
            )
        )
    return found


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction for several tests; None stays None and does not count."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        adjusted[index] = highest
    return adjusted


def _verdict(first: str, second: str, gap: Array, interval: Interval | None, adjusted: float | None, needed: int) -> str:
    if len(gap) < MIN_SEEDS:
        return f"too few seeds ({len(gap)} in common, of at least {MIN_SEEDS}): no winner is named"
    excludes_0 = interval is None or interval[0] > 0 or interval[1] < 0  # None: the same difference with every seed
    if gap.mean() != 0 and adjusted is not None and adjusted <= LEVEL and excludes_0:
        return f"{first} above {second}" if gap.mean() > 0 else f"{second} above {first}"
    more = f"; so many pairs need {needed}" if len(gap) < needed else ""
    return f"no difference that {len(gap)} seeds can show{more}"


def _sign_flip(gap: Array) -> float | None:
    """P of a mean at least as far from 0 if every difference could as well have had the other sign."""
    if len(gap) < MIN_SEEDS:
        return None
    result = stats.permutation_test(
        (gap,), np.mean, permutation_type="samples", vectorized=True, n_resamples=NUM_FLIPS, rng=np.random.default_rng(0)
    )
    return float(result.pvalue)
