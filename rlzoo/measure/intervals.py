"""Intervals of clip fractions, of the length reweighting error and of means, with whole prompts as observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit

from rlzoo.fairness import NUM_BINS, LengthWeights

Array = NDArray[Any]

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
PRIOR_DEGREES = 4.0  # degrees of freedom that the design effect of all bins has in that of one
NUM_DRAWS = 2000  # of the noise in a length reweighting error
Interval = tuple[float, float]


def wilson(successes: Array, trials: Array) -> tuple[Array, Array]:
    """Wilson's score interval of a proportion, 95 %, elementwise; NaN without trials.

    Args:
        successes: counts, or sums of numbers between 0 and 1, for which the interval is slightly too wide.
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
    """Clip decisions added up by prompt, length bin and sign: a prompt's responses, over all epochs, are one observation."""

    count: Array  # (m, K, S) rows of each prompt in each bin, by the sign of the advantage; S = 1 where it is not told apart
    clipped: Array  # (m, K, S) sum of their clip decisions

    @classmethod
    def of(cls, bins: Array, clipped: Array, prompts: Array, positive: Array | None = None) -> Clusters:
        """Add up rows.

        Args:
            bins: ``(n,)`` the length bin of each row.
            clipped: ``(n,)`` its clip decision, from 0 to 1.
            prompts: ``(n,)`` any number for its prompt.
            positive: ``(n,)`` bool, whether its advantage is above 0; None: signs are not told apart.
        """
        inside = bins[:, None] == np.arange(NUM_BINS)
        return cls.add_up(inside.astype(float), inside * clipped[:, None], prompts, positive)

    @classmethod
    def add_up(cls, count: Array, clipped: Array, prompts: Array, positive: Array | None = None) -> Clusters:
        """Add up rows that have something in every bin, each ``(n, K)``."""
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
        """95 % intervals of the clip fraction of each bin, ``(K,)`` low and high; NaN for an empty bin.

        Wilson's interval with an effective number of rows ``p (1 - p) / v`` and a quantile of Student's t, as for clustered
        samples (Korn and Graubard, Survey Methodology 24 (1998), 193; Franco et al., Journal of Survey Statistics and
        Methodology 7 (2019), 334). ``v`` is the variance between prompts. With few prompts it is moderated by the design
        effect of all bins together (Smyth, Statistical Applications in Genetics 3 (2004), 3). In a bin with a fraction of 0
        or 1, every prompt counts as one row.
        """
        count, clipped = self.count.sum(-1), self.clipped.sum(-1)
        number = count.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = clipped.sum(0) / number
            prompts = _effective_prompts(count)
            degrees = np.maximum(np.nan_to_num(prompts) - 1, 0.0)
            simple = share * (1 - share) / number  # what independent rows would have
            effect = np.square(_influence(count, clipped)).sum(0) / simple
            known = (simple > 0) & (degrees > 0)
            pooled = (degrees * effect)[known].sum() / degrees[known].sum()
            effect = np.where(known, (degrees * effect + PRIOR_DEGREES * pooled) / (degrees + PRIOR_DEGREES), np.nan)
            effective = np.where(effect > 0, number / np.maximum(effect, 1.0), prompts)
            return _wilson(share, effective, _t_quantile(prompts))

    def reweighting(self) -> Decomposition | None:
        """The length reweighting errors with what noise does to them; None where everything is clipped.

        The influence of a prompt on a weight is twice the change when half of the prompt is left out. It lies between the
        infinitesimal jackknife, which is too small with few prompts, and the one that deletes whole prompts, which is too
        large, and is close to CR2 of Bell and McCaffrey (Survey Methodology 28 (2002), 169).
        """
        count, clipped = self.count.sum(0), self.clipped.sum(0)
        if not (count - clipped).sum() > 0:
            return None
        found = _weights(count, clipped)
        without = _weights(count - self.count / 2, clipped - self.clipped / 2)
        share = found.share.numpy()
        quantile = _t_quantile(_effective_prompts(self.count.sum(-1)))
        parts = (
            _length_error((weight - 1).numpy(), 2 * torch.nan_to_num(weight - half).numpy(), share, quantile)
            for weight, half in (
                (found.conditional, without.conditional),
                (found.composition, without.composition),
                (found.total, without.total),
            )
        )
        return Decomposition(*parts)


def _weights(count: Array, clipped: Array) -> LengthWeights:
    return LengthWeights.of(torch.from_numpy(count), torch.from_numpy(clipped))


def _length_error(deviation: Array, influence: Array, share: Array, quantile: Array) -> LengthError:
    """The errors of ``w - 1``, ``(K,)``, given the influence of each prompt on it, ``(m, K)``."""
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
    """The length reweighting error over the bins."""

    max: Reweighting  # the largest |w_k - 1|
    mean: Reweighting  # the sum of p_k |w_k - 1|


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The length reweighting error in parts; the weights of each are defined in `rlzoo.fairness.LengthWeights`."""

    conditional: LengthError  # given the sign of the advantage: what the rule does to lengths
    composition: LengthError  # from the mix of signs alone: what it does to signs, seen by length
    total: LengthError  # what lengths come to


@dataclass(frozen=True, slots=True)
class Reweighting:
    """A length reweighting error, its correction for noise, and its interval.

    The error is a function of absolute values, so noise adds to it. ``corrected`` is the error for which the measured one is
    the median of samples of these prompts. The lower end of the interval is the error for which it is the 97.5 % quantile, or
    0 (test inversion, Carpenter, Journal of the Royal Statistical Society B 61 (1999), 159). The upper end is the largest
    upper end of any linear form ``c (w - 1)`` that the error is the maximum of, so it holds whichever bin is the worst. By
    construction ``low <= corrected <= value <= high``, since the chance of a value below the measured one falls with the
    error (Anderson, Proceedings of the American Mathematical Society 6 (1955), 170).
    """

    value: float
    corrected: float
    interval: Interval | None  # 95 %; None where no prompt differs from another
    noise: float  # the error to expect of so many prompts if every length were clipped alike


def _reweighting(deviation: Array, noise: Array, error: Callable[[Array], Array], high: float) -> Reweighting:
    """The error of ``w - 1``, given draws ``(n, K)`` of what noise adds to it and the upper end of its interval."""
    value, alone = float(error(deviation)), error(noise)
    if not noise.any():
        return Reweighting(value, value, None, 0.0)
    shape = deviation / value if value > 0 else deviation

    def at(chance: float) -> float:
        """The error under which a sample shows ``value`` or less with this chance; 0 where even none gives more."""
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
    """What each prompt adds to the error of ``total / count``, ``(m, K)``; their squares add up to its variance.

    Deviations are enlarged by the leverage of a prompt, so that the variance is not too small with few of them (CR2 of Bell and
    McCaffrey, Survey Methodology 28 (2002), 169).
    """
    number = np.where(count.sum(0) > 0, count.sum(0), 1.0)
    leverage = count / number
    residual = total - total.sum(0) / number * count
    return np.asarray(residual / number / np.sqrt(np.where(leverage < 1, 1 - leverage, 1.0)))


def _effective_prompts(count: Array) -> Array:
    """Kish's effective number of prompts in each bin."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(count.sum(0) ** 2 / np.square(count).sum(0))


def _t_quantile(prompts: Array) -> Array:
    degrees = np.maximum(np.nan_to_num(prompts, nan=2.0) - 1, 1.0)
    return np.asarray(stdtrit(degrees, 0.5 + CONFIDENCE / 2))


def _draws(influence: Array) -> Array:
    """Normal draws ``(n, K)`` with the covariance of sums over prompts, each with its mirror image."""
    values, vectors = np.linalg.eigh(influence.T @ influence)
    values = np.where(values > 1e-12 * values[-1], values, 0.0)  # rounding of what is exactly 0
    drawn = np.random.default_rng(0).standard_normal((NUM_DRAWS // 2, NUM_BINS)) * np.sqrt(values) @ vectors.T
    return np.concatenate([drawn, -drawn])


def bootstrap(
    samples: Sequence[Array], statistic: Callable[..., Array], *, paired: bool = False, seed: int = 0
) -> Interval | None:
    """95 % percentile bootstrap interval; None for fewer than two values, or if all resamples give the same.

    Args:
        samples: arrays ``(n,)``.
        statistic: of the samples, along ``axis``.
        paired: resample all samples by the same indices.
        seed: of the resampling.
    """
    from scipy import stats  # takes a second to import

    if min(map(len, samples)) < 2:
        return None
    result = stats.bootstrap(
        samples,
        statistic,
        paired=paired,
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
    """Bootstrap interval, 95 %, of a mean over the values of all problems, resampling whole problems.

    If all problems have the same mean, as when nothing was solved, the bootstrap interval would have no width. Wilson's
    interval replaces it, with each problem as one trial.

    Args:
        sums: ``(n,)`` sum of each problem's values, which lie between 0 and 1.
        counts: ``(n,)`` number of each problem's values; problems without any are left out.
        seed: of the resampling.
    """
    sums, counts = sums[counts > 0], counts[counts > 0]
    assert len(sums) > 0, "a mean of nothing"
    own = sums / counts
    if np.ptp(own) >= 1e-12:
        found = bootstrap((sums, counts), lambda s, c, axis: s.sum(axis) / c.sum(axis), paired=True, seed=seed)
        if found is not None:
            return found
    low, high = wilson(own[:1] * len(own), np.array([len(own)]))
    return float(low[0]), float(high[0])
