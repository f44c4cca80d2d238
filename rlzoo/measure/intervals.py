"""Confidence intervals for clip fractions, length reweighting errors and means, with prompts as observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit

from rlzoo.core.fairness import NUM_BINS, LengthWeights

Array = NDArray[Any]

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
PRIOR_DEGREES = 4.0  # weight of the pooled design effect relative to the design effect of a bin, in degrees of freedom
NUM_DRAWS = 2000  # number of noise draws for a length reweighting error
Interval = tuple[float, float]


def wilson(successes: Array, trials: Array) -> tuple[Array, Array]:
    """Compute Wilson's 95% score interval for a proportion, elementwise; NaN without trials.

    Args:
        successes: counts of successes, or sums of values between 0 and 1, for which the interval is slightly too wide.
        trials: number of independent trials.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return _wilson(successes / trials, trials, NormalDist().inv_cdf(0.5 + CONFIDENCE / 2))


def _wilson(share: Array, trials: Array, z: Array | float) -> tuple[Array, Array]:
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * np.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return np.clip(middle - half, 0.0, 1.0), np.clip(middle + half, 0.0, 1.0)


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
        """Compute 95% intervals for each bin's clip fraction, ``(K,)`` low and high; NaN for an empty bin.

        The method is Wilson's interval with an effective number of rows ``p (1 - p) / v`` and a quantile of Student's t, as for
        clustered samples (Korn and Graubard, Survey Methodology 24 (1998), 193; Franco et al., Journal of Survey Statistics
        and Methodology 7 (2019), 334). ``p`` is the clip fraction, and ``v`` is its variance, with prompts as observations.
        With few prompts, a bin's design effect is shrunk towards the design effect of all bins together (Smyth, Statistical
        Applications in Genetics 3 (2004), 3). In a bin with a fraction of 0 or 1, every prompt counts as one row.
        """
        count, clipped = self.count.sum(-1), self.clipped.sum(-1)
        number = count.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = clipped.sum(0) / number
            prompts = _effective_prompts(count)
            degrees = np.maximum(np.nan_to_num(prompts) - 1, 0.0)
            simple = share * (1 - share) / number  # variance of independent rows
            effect = np.square(_influence(count, clipped)).sum(0) / simple
            known = (simple > 0) & (degrees > 0)
            pooled = (degrees * effect)[known].sum() / degrees[known].sum()
            effect = np.where(known, (degrees * effect + PRIOR_DEGREES * pooled) / (degrees + PRIOR_DEGREES), np.nan)
            effective = np.where(effect > 0, number / np.maximum(effect, 1.0), prompts)
            return _wilson(share, effective, _t_quantile(prompts))

    def reweighting(self) -> Decomposition | None:
        """Compute the length reweighting errors with a correction for noise; None if everything is clipped.

        The influence of a prompt on a weight is twice the change in the weight when the prompt counts only half as much. It
        lies between the infinitesimal jackknife, which is too small with few prompts, and the delete-one jackknife, which is
        too large. It is close to the CR2 estimator of Bell and McCaffrey (Survey Methodology 28 (2002), 169).
        """
        count, clipped = self.count.sum(0), self.clipped.sum(0)
        if not (count - clipped).sum() > 0:
            return None
        weights, halved = (
            LengthWeights.of(torch.from_numpy(counts), torch.from_numpy(sums))
            for counts, sums in ((count, clipped), (count - self.count / 2, clipped - self.clipped / 2))
        )
        quantile = _t_quantile(_effective_prompts(self.count.sum(-1)))
        errors = []
        for cause in ("conditional", "composition", "total"):
            weight = getattr(weights, cause)
            influence = 2 * torch.nan_to_num(weight - getattr(halved, cause))
            errors.append(_length_error((weight - 1).numpy(), influence.numpy(), weights.share.numpy(), quantile))
        return Decomposition(*errors)


def _length_error(deviation: Array, influence: Array, share: Array, quantile: Array) -> LengthError:
    """Compute the errors from ``w - 1``, ``(K,)``, and each prompt's influence on ``w``, ``(m, K)``."""
    signs = share * (1 - 2 * (np.arange(2**NUM_BINS)[:, None] >> np.arange(NUM_BINS) & 1))
    worst = (np.abs(deviation) + quantile * np.sqrt(np.square(influence).sum(0))).max()
    spread = np.sqrt(np.square(influence @ signs.T).sum(0))
    mean_high = (signs @ deviation + quantile[share > 0].max() * spread).max()
    noise = _draws(influence)
    return LengthError(
        _reweighting(deviation, noise, lambda values: np.abs(values).max(-1), float(worst)),
        _reweighting(deviation, noise, lambda values: np.abs(values) @ share, float(mean_high)),
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
    ends, so the interval is valid whichever bin is worst. By construction, ``low <= corrected <= value <= high``, because the
    probability of measuring a smaller value decreases as the true error grows (Anderson, Proceedings of the American
    Mathematical Society 6 (1955), 170).
    """

    value: float
    corrected: float
    interval: Interval | None  # 95%; None if all prompts have the same values
    noise: float  # expected error with this many prompts if all lengths were clipped equally


def _reweighting(deviation: Array, noise: Array, error: Callable[[Array], Array], high: float) -> Reweighting:
    """Compute an error with its interval from ``w - 1``, noise draws ``(n, K)``, and the upper end of the interval."""
    value, alone = float(error(deviation)), error(noise)
    if not noise.any():
        return Reweighting(value, value, None, 0.0)
    shape = deviation / value if value > 0 else deviation

    def at(chance: float) -> float:
        """Return the true error for which the measured error is at most ``value`` with this probability; 0 if there is none."""
        if value == 0 or np.mean(alone <= value) <= chance:
            return 0.0
        low, middle, above = 0.0, 0.0, value
        for _ in range(20):
            middle = (low + above) / 2
            if np.mean(error(middle * shape + noise) <= value) > chance:
                low = middle
            else:
                above = middle
        return middle

    tail = (1 - CONFIDENCE) / 2
    low, corrected = at(1 - tail), at(0.5)
    return Reweighting(value, corrected, (min(low, corrected), max(value, high)), float(alone.mean()))


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


def _t_quantile(prompts: Array) -> Array:
    degrees = np.maximum(np.nan_to_num(prompts, nan=2.0) - 1, 1.0)
    return np.asarray(stdtrit(degrees, 0.5 + CONFIDENCE / 2))


def _draws(influence: Array) -> Array:
    """Draw normal noise ``(n, K)``, in antithetic pairs, with the covariance of the influences summed over prompts."""
    values, vectors = np.linalg.eigh(influence.T @ influence)
    values = np.where(values > 1e-12 * values[-1], values, 0.0)  # replace rounding errors with exact zeros
    drawn = np.random.default_rng(0).standard_normal((NUM_DRAWS // 2, NUM_BINS)) * np.sqrt(values) @ vectors.T
    return np.concatenate([drawn, -drawn])


def bootstrap(sums: Array, counts: Array, seed: int = 0) -> Interval | None:
    """Compute a 95% percentile bootstrap interval for ``sum(sums) / sum(counts)``, resampling the pairs ``(n,)`` of both.

    Returns None for fewer than two pairs or if all resamples are equal.
    """
    from scipy import stats  # takes a second to import

    if len(sums) < 2:
        return None
    result = stats.bootstrap(
        (sums, counts),
        lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=NUM_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    if np.ptp(result.bootstrap_distribution) == 0:
        return None
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def bootstrap_mean(sums: Array, counts: Array, seed: int = 0) -> Interval:
    """Compute a 95% bootstrap interval for a mean over all problems, resampling whole problems.

    If all problems have the same mean, for example because none was solved, the bootstrap interval would have zero width.
    In that case, Wilson's interval with one trial per problem is returned instead.

    Args:
        sums: ``(n,)`` sum of each problem's values, which are between 0 and 1.
        counts: ``(n,)`` number of values for each problem; problems without values are ignored.
        seed: seed of the resampling.
    """
    sums, counts = sums[counts > 0], counts[counts > 0]
    assert len(sums) > 0, "at least one problem has values"
    means = sums / counts
    if np.ptp(means) >= 1e-12 and (interval := bootstrap(sums, counts, seed)) is not None:
        return interval
    low, high = wilson(means[:1] * len(means), np.array([len(means)]))
    return float(low[0]), float(high[0])
