"""Confidence intervals for clip fractions, length reweighting errors and means, with prompts as observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, stdtrit

from rlzoo.core.fairness import NUM_BINS, LengthWeights

Array = NDArray[Any]

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
PRIOR = 4.0  # weight of the pooled design effect, as a number of independent decisions
NUM_DRAWS = 500  # number of noise draws for a length reweighting error
CAUSES = ("conditional", "composition", "total")
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Proportions:
    """Proportions that are estimated from the same prompts, with their 95% intervals; NaN for a bin without rows.

    The effective number of rows ``n`` of a proportion ``p`` is that of an independent sample with the same variance,
    ``p (1 - p) / n``, where prompts are the observations (Korn and Graubard, Survey Methodology 24 (1998), 193). The design
    effect, the quotient of the number of rows and ``n``, is shrunk towards that of all bins together (Smyth, Statistical
    Applications in Genetics 3 (2004), 3). The interval is binomial, at the tail probability that the normal distribution gives
    to a quantile of Student's t. If all rows agree, every prompt counts as one row.
    """

    share: Array  # (K,)
    effective: Array  # (K,) effective number of rows
    low: Array
    high: Array
    correlation: Array  # (K, K) between the estimates, shrunk towards 0

    @classmethod
    def of(cls, count: Array, share: Array, influence: Array, extra: float = 0.5, unseen: float = 0.0) -> Proportions:
        """Compute the intervals.

        Args:
            count: ``(m, K)`` number of rows by prompt and bin.
            share: ``(K,)`` proportions.
            influence: ``(m, K)`` influence of each prompt on the proportions.
            extra: 1/2 for Jeffreys' interval, or 1 for Clopper and Pearson's, which is wider and holds for every proportion.
            unseen: rows of a prompt that is assumed to differ completely, in case the variance comes from rare prompts.
        """
        number, prompts = count.sum(0), _effective_prompts(count)
        residual = influence * number
        square, simple = np.square(residual).sum(0), np.nan_to_num(number * share * (1 - share))
        effect, correlation = number / np.where(number > 0, prompts, np.nan), np.eye(len(share))
        if unseen or min(square.sum(), simple.sum()) > 1e-9:
            pooled = (square.sum() + unseen**2) / (simple.sum() + unseen)
            effect = (square + PRIOR * pooled**2) / (simple + PRIOR * pooled)
            deviation = np.sqrt(square + pooled**2)
            correlation = residual.T @ residual / np.outer(deviation, deviation)
            np.fill_diagonal(correlation, 1.0)
        tail = ndtr(-stdtrit(np.fmax(prompts - 1, 1.0), 1 - TAIL))
        effective = np.where(number > 0, number / effect, np.nan)
        clipped, kept = share * effective, (1 - share) * effective
        low = np.where(share > 0, betaincinv(clipped + 1 - extra, kept + extra, tail), 0.0)
        high = np.where(share < 1, 1 - betaincinv(kept + 1 - extra, clipped + extra, tail), 1.0)
        empty = np.where(number > 0, 0.0, np.nan)
        return cls(share, effective, np.fmin(low, share) + empty, np.fmax(high, share) + empty, correlation)


@dataclass(frozen=True, slots=True)
class Clusters:
    """Clip decisions summed by prompt, length bin and sign; a prompt's responses in all epochs form one observation."""

    count: Array  # (m, K, S) number of rows by prompt, bin and sign of the advantage; S = 1 if the sign is ignored
    clipped: Array  # (m, K, S) sum of the rows' clip decisions

    @classmethod
    def of(cls, bins: Array, clipped: Array, prompts: Array, positive: Array | None = None) -> Clusters:
        """Sum the rows.

        Args:
            bins: ``(n,)`` length bin of each row.
            clipped: ``(n,)`` clip decision of each row, between 0 and 1.
            prompts: ``(n,)`` a number that identifies each row's prompt.
            positive: ``(n,)`` bool, whether the advantage is positive; None ignores the sign.
        """
        inside = bins[:, None] == np.arange(NUM_BINS)
        return cls.add_up(inside.astype(float), inside * clipped[:, None], prompts, positive)

    @classmethod
    def add_up(cls, count: Array, clipped: Array, prompts: Array, positive: Array | None = None) -> Clusters:
        """Sum rows that hold a count and a sum of clip decisions for every bin, ``(n, K)`` each."""
        names, index = np.unique(prompts, return_inverse=True)
        signs = 1 if positive is None else 2
        cell = index * signs + (0 if positive is None else positive.astype(int))
        sums = [
            np.stack([np.bincount(cell, weights=column, minlength=signs * len(names)) for column in values.T], axis=1)
            for values in (count, clipped)
        ]
        by_prompt = (total.reshape(len(names), signs, NUM_BINS).swapaxes(1, 2) for total in sums)
        return cls(*by_prompt)

    def proportions(self) -> tuple[Array, Array]:
        """Compute 95% intervals for each bin's clip fraction, ``(K,)`` low and high; NaN for an empty bin."""
        count, clipped = self.count.sum(-1), self.clipped.sum(-1)
        with np.errstate(invalid="ignore"):
            share = clipped.sum(0) / count.sum(0)
        bins = Proportions.of(count, share, _influence(count, clipped), extra=1.0)
        return bins.low, bins.high

    def reweighting(self) -> Decomposition | None:
        """Compute the length reweighting errors with a correction for noise; None if everything is clipped.

        ``1 - w_k a``, with ``a`` the overall acceptance, is the clip fraction of bin k to which a weight corresponds. The
        influence of a prompt on it is twice its change when the prompt counts only half as much. That lies between the
        infinitesimal jackknife, which is too small with few prompts, and the delete-one jackknife, which is too large. It is
        close to the CR2 estimator of Bell and McCaffrey (Survey Methodology 28 (2002), 169).
        """
        count, clipped = self.count.sum(0), self.clipped.sum(0)
        if not (count - clipped).sum() > 0:
            return None
        pairs = (count, clipped), (count - self.count / 2, clipped - self.clipped / 2)
        accepted, halves = (1 - sums.sum((-2, -1)) / counts.sum((-2, -1)) for counts, sums in pairs)
        weights, halved = (LengthWeights.of(torch.from_numpy(counts), torch.from_numpy(sums)) for counts, sums in pairs)
        errors = []
        for cause in CAUSES:
            weight = getattr(weights, cause).numpy()
            influence = 2 * np.nan_to_num(weight * accepted - getattr(halved, cause).numpy() * halves[:, None])
            bins = Proportions.of(self.count.sum(-1), (1 - weight * accepted).clip(0, 1), influence)
            errors.append(_length_error(weight, accepted, weights.share.numpy(), bins))
        return Decomposition(*errors)


def _length_error(weight: Array, accepted: float, share: Array, bins: Proportions) -> LengthError:
    """Compute the errors from the weights and from the clip fractions to which they correspond."""
    above, below = np.nan_to_num(bins.high - bins.share), np.nan_to_num(bins.share - bins.low)
    slope = (np.outer(weight, share) - np.eye(NUM_BINS)) / accepted * (share > 0)[:, None]  # derivatives by clip fractions
    values, vectors = np.linalg.eigh(bins.correlation)
    drawn = np.random.default_rng(0).standard_normal((NUM_BINS, NUM_DRAWS // 2))
    normal = (vectors * np.sqrt(values.clip(0))) @ np.concatenate([drawn, -drawn], axis=1)
    noise = slope @ (normal * np.where(normal > 0, below[:, None], above[:, None])) / NormalDist().inv_cdf(1 - TAIL)
    even, scaled = share @ bins.share, normal * np.nan_to_num(bins.effective**-0.5)[:, None]
    alone = (share - np.eye(NUM_BINS)) @ scaled * (share > 0)[:, None] * np.sqrt(even / (1 - even))
    symmetric = slope @ (scaled * np.sqrt(bins.share * (1 - bins.share))[:, None])  # for the median

    def error(forms: Array, measure: Callable[[Array], Array]) -> Reweighting:
        """Compute the error that is the largest of linear forms of ``w - 1``, ``(F, K)``."""
        gradient = forms @ slope
        reach = gradient * np.where(gradient > 0, above, below)
        high = float((forms @ (weight - 1) + np.sqrt(((reach @ bins.correlation) * reach).sum(1))).max())
        return _reweighting(weight - 1, noise, symmetric, measure, high, float(measure(alone).mean()))

    one_bin, signs = np.eye(NUM_BINS), 1 - 2 * (np.arange(2**NUM_BINS)[:, None] >> np.arange(NUM_BINS) & 1)
    return LengthError(
        error(np.concatenate([one_bin, -one_bin]), lambda values: np.abs(values).max(0)),
        error(signs * share, lambda values: share @ np.abs(values)),
    )


@dataclass(frozen=True, slots=True)
class LengthError:
    """The maximum and the mean length reweighting error over the bins."""

    max: Reweighting  # the largest |w_k - 1|
    mean: Reweighting  # the sum of p_k |w_k - 1|


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The length reweighting error by cause, with the weights defined in `rlzoo.core.fairness.LengthWeights`."""

    conditional: LengthError  # conditional on the sign of the advantage: the rule's effect on lengths
    composition: LengthError  # from the mix of signs alone: the rule's effect on signs
    total: LengthError  # the observed error


@dataclass(frozen=True, slots=True)
class Reweighting:
    """A length reweighting error with its correction for noise and its interval.

    The error is a function of absolute values, so noise increases it. ``corrected`` is the true error for which the measured
    error would be the median. The lower end of the interval is the true error for which the measured error would be the 97.5%
    quantile, or 0 if there is none (test inversion; Carpenter, Journal of the Royal Statistical Society B 61 (1999), 159).
    The error is the maximum of linear forms ``c (w - 1)``; the upper end of the interval is the largest of the forms' upper
    ends, so the interval is valid whichever bin is worst. The variance of a form comes from the intervals of the bins' clip
    fractions, which are valid for rare events (Zou and Donner, Statistics in Medicine 27 (2008), 1693). By construction,
    ``low <= corrected <= value <= high``, because the probability of measuring a smaller value decreases as the true error
    grows (Anderson, Proceedings of the American Mathematical Society 6 (1955), 170).
    """

    value: float
    corrected: float
    interval: Interval  # 95%
    noise: float  # expected error with this many prompts if all lengths were clipped equally


def _reweighting(
    deviation: Array, tails: Array, symmetric: Array, error: Callable[[Array], Array], high: float, expected: float
) -> Reweighting:
    """Compute an error with its interval from ``w - 1``, noise draws ``(K, n)``, and the upper end of the interval."""
    value = float(error(deviation))
    shape = deviation[:, None] / value if value > 0 else deviation[:, None]

    def at(chance: float, noise: Array) -> float:
        """Return the true error for which the measured error is at most ``value`` with this probability; 0 if there is none."""
        if value == 0 or np.mean(error(noise) <= value) <= chance:
            return 0.0
        low, middle, above = 0.0, 0.0, value
        for _ in range(14):
            middle = (low + above) / 2
            if np.mean(error(middle * shape + noise) <= value) > chance:
                low = middle
            else:
                above = middle
        return middle

    low, corrected = at(1 - TAIL, tails), at(0.5, symmetric)
    return Reweighting(value, corrected, (min(low, corrected), max(value, high)), expected)


def _influence(count: Array, total: Array) -> Array:
    """Compute each prompt's influence on ``total / count``, ``(m, K)``; the squares sum to the variance of that quotient.

    Deviations are scaled up according to the prompt's leverage, so that the variance is not too small with few prompts (the CR2
    estimator of Bell and McCaffrey, Survey Methodology 28 (2002), 169).
    """
    number = np.where(count.sum(0) > 0, count.sum(0), 1.0)
    leverage = count / number
    residual = total - total.sum(0) / number * count
    return np.asarray(residual / number / np.sqrt(np.where(leverage < 1, 1 - leverage, 1.0)))


def _effective_prompts(count: Array) -> Array:
    """Compute Kish's effective number of prompts in each bin."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(count.sum(0) ** 2 / np.square(count).sum(0))


def mean_interval(sums: Array, counts: Array) -> Interval:
    """Compute a 95% interval for a mean over all problems, with problems as observations; see `Proportions`.

    Args:
        sums: ``(n,)`` sum of each problem's values, which are between 0 and 1.
        counts: ``(n,)`` number of values for each problem, not all 0.
    """
    sums, counts = sums[counts > 0, None].astype(float), counts[counts > 0, None].astype(float)
    problem = np.square(counts).sum() / counts.sum()
    mean = Proportions.of(counts, sums.sum(0) / counts.sum(0), _influence(counts, sums), unseen=problem)
    return float(mean.low[0]), float(mean.high[0])
