"""How surely a clip profile is known: Wilson intervals, a bootstrap of the length reweighting error, and its noise floor."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlzoo.fairness import NUM_BINS, length_reweighting_error

Array = NDArray[Any]

CONFIDENCE = 0.95
NUM_RESAMPLES = 200
NUM_RESAMPLES_OF_MEAN = 2000
Interval = tuple[float, float]


def wilson(successes: Array, trials: Array, confidence: float = CONFIDENCE) -> tuple[Array, Array]:
    """Wilson's score interval of a proportion, elementwise; NaN without trials.

    Args:
        successes: counts, or sums of numbers between 0 and 1: a mean of such varies less than one of zeros and ones, so the
            interval is then on the wide side.
        trials: how many independent ones there were.
        confidence: the interval's.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = successes / trials
        middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
        half = z / (1 + z**2 / trials) * np.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return np.clip(middle - half, 0.0, 1.0), np.clip(middle + half, 0.0, 1.0)


def bootstrap_lre(bins: Array, clipped: Array, groups: Array, seed: int = 0) -> tuple[Interval, Interval] | None:
    """Bootstrap percentile intervals of ``lre_max`` and ``lre_mean``, 95 %, drawing whole groups.

    Responses to one prompt are alike in length and in how far they moved, so prompts are drawn, not responses. Both
    quantities are made of absolute values, so noise adds to them and to both ends of their intervals: the interval holds the
    truth about as often as it says where the truth is well above `lre_noise`, and lies above it elsewhere.

    Args:
        bins: ``(n,)`` length bin of each response with non-zero advantage.
        clipped: ``(n,)`` 0 to 1.
        groups: ``(n,)`` whom to draw together; any numbers.
        seed: of the resampling.

    Returns:
        The two intervals, or None with fewer than two groups, or where resamples have everything clipped.
    """
    names, group = np.unique(groups, return_inverse=True)
    if len(names) < 2:
        return None
    cells = group * NUM_BINS + bins
    count = np.bincount(cells, minlength=len(names) * NUM_BINS).reshape(-1, NUM_BINS).astype(float)
    total = np.bincount(cells, weights=clipped, minlength=len(names) * NUM_BINS).reshape(-1, NUM_BINS)

    def statistic(drawn: Array) -> Array:
        times = _times_drawn(drawn, len(names))
        return np.stack(_lre(times @ count, times @ total))

    low, high = _percentile_interval(statistic, len(names), NUM_RESAMPLES, seed)
    if np.isnan([*low, *high]).any():
        return None
    return (float(low[0]), float(high[0])), (float(low[1]), float(high[1]))


def lre_noise(bins: Array, clipped: Array, seed: int = 0) -> float | None:
    """The ``lre_max`` to expect of so many responses when every length is clipped alike: the mean over shuffled decisions.

    Args:
        bins: ``(n,)`` length bin of each response.
        clipped: ``(n,)`` 0 to 1.
        seed: of the shuffles.

    Returns:
        None where everything is clipped.
    """
    if clipped.mean() >= 1:
        return None
    rng = np.random.default_rng(seed)
    member = (np.sort(bins)[:, None] == np.arange(NUM_BINS)).astype(np.float32)
    decisions = np.sort(clipped).astype(np.float32)  # both sorted: the answer does not depend on the order of the rows
    shuffled = rng.permuted(np.broadcast_to(decisions, (NUM_RESAMPLES // 4, len(bins))), axis=1)
    worst, _ = _lre(np.broadcast_to(member.sum(0), (len(shuffled), NUM_BINS)), shuffled @ member)
    return float(worst.mean())


def bootstrap_mean(sums: Array, counts: Array, seed: int = 0) -> Interval:
    """Bootstrap percentile interval, 95 %, of a mean over everything that belongs to some problems, drawing whole problems.

    Where all problems have the same mean, as when nothing was solved, the bootstrap would claim to know it exactly; there
    Wilson's interval stands in, with each problem as one trial.

    Args:
        sums: ``(n,)`` for each problem the sum of its values, which lie between 0 and 1.
        counts: ``(n,)`` how many values that were; problems without any are left out.
        seed: of the resampling.
    """
    sums, counts = sums[counts > 0], counts[counts > 0]
    assert len(sums) > 0, "a mean of nothing"
    own = sums / counts
    if np.ptp(own) < 1e-12:
        low, high = wilson(own[:1] * len(own), np.array([len(own)]))
        return float(low[0]), float(high[0])

    low, high = _percentile_interval(
        lambda drawn: sums[drawn].sum(1) / counts[drawn].sum(1), len(sums), NUM_RESAMPLES_OF_MEAN, seed
    )
    return float(low), float(high)


def _percentile_interval(
    statistic: Callable[[Array], Array], number: int, num_resamples: int, seed: int
) -> tuple[Array, Array]:
    """The percentile bootstrap, drawing as `scipy.stats.bootstrap` does, which takes a second to import.

    Args:
        statistic: of drawings ``(num_resamples, number)``, each a row of indices, the values ``(..., num_resamples)``.
        number: how many there are to draw from.
        num_resamples: drawings.
        seed: of them.

    Returns:
        The ends, ``(...)``; NaN where a resample's value is.
    """
    drawn = np.random.default_rng(seed).integers(0, number, (num_resamples, number))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.percentile(statistic(drawn), [100 * tail, 100 * (1 - tail)], axis=-1)
    return low, high


def _times_drawn(drawn: Array, number: int) -> Array:
    """How often each of ``number`` groups was drawn, ``(n, number)``, from the groups drawn, ``(n, m)``."""
    cells = drawn + number * np.arange(len(drawn))[:, None]
    return np.bincount(cells.ravel(), minlength=number * len(drawn)).reshape(len(drawn), number).astype(float)


def _lre(count: Array, clipped: Array) -> tuple[Array, Array]:
    worst, mean = length_reweighting_error(torch.tensor(count), torch.tensor(clipped))
    return worst.numpy(), mean.numpy()
