"""Computes confidence intervals for clip fractions, length reweighting errors and means, with prompts as observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, ndtri, stdtrit

from rlzoo.core.fairness import NUM_BINS, LengthWeights

Array = NDArray[Any]

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
PRIOR = 4.0  # weight of an assumed or pooled design effect, expressed as a number of independent decisions
CLIPS, ANSWERS = 0.27, 0.55  # assumed correlations between decisions on one prompt, and between answers to one problem
NUM_DRAWS = 500  # number of noise draws for a length reweighting error
CAUSES = ("conditional", "composition", "total")
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Proportions:
    """Proportions that are estimated from the same prompts.

    The effective number of rows ``n`` of a proportion ``p`` is the size of an independent sample with the same variance,
    ``p (1 - p) / n``, if each prompt is one observation (Korn and Graubard, Survey Methodology 24 (1998), 193). The design
    effect is the number of rows divided by ``n``. It is shrunk towards the design effect of all bins together, which in turn is
    shrunk towards that of an assumed correlation (Smyth, Statistical Applications in Genetics 3 (2004), 3). The assumption is
    taken to be exact, so the degrees of freedom are those of the prompts divided by the weight of the data.
    """

    share: Array  # (K,)
    effective: Array  # (K,) effective number of rows
    degrees: Array  # (K,) degrees of freedom of the design effect
    correlation: Array  # (K, K) between the estimates, shrunk towards 0

    @classmethod
    def of(cls, count: Array, share: Array, influence: Array, correlation: float, unit: float = 1.0) -> Proportions:
        """Estimate the precision of proportions.

        Args:
            count: ``(m, K)`` number of rows by prompt and bin.
            share: ``(K,)`` proportions; NaN gives NaN.
            influence: ``(m, K)`` influence of each prompt on the proportions.
            correlation: assumed correlation between the rows of a prompt.
            unit: typical value of a row that is not 0, such as the share of a response's tokens that are clipped.
        """
        number, residual = count.sum(0), influence * count.sum(0)
        square, simple = np.square(residual).sum(0), np.nan_to_num(number * share * (1 - share))
        assumed = 1 + (np.square(count).sum() / max(count.sum(), 1) - 1) * correlation
        prior = PRIOR * unit * assumed
        pooled = (square.sum() + prior * unit * assumed) / (simple.sum() + prior)
        effect = (square + PRIOR * pooled**2) / (simple + PRIOR * pooled)
        weight = prior / (simple.sum() + prior) * PRIOR * pooled / (simple + PRIOR * pooled)  # weight of the assumption
        degrees = np.fmax(number**2 / np.fmax(np.square(count).sum(0), 1) - 1, 1.0) / np.fmax(1 - weight, 1e-9)
        deviation = np.sqrt(square + pooled**2)
        between = np.where(np.eye(len(number)), 1.0, residual.T @ residual / np.outer(deviation, deviation))
        return cls(share, np.fmax(number, 1.0) / effect, degrees, between)

    def interval(self, extra: float = 0.5, tail: float = TAIL) -> tuple[Array, Array]:
        """Compute binomial intervals. Their tail probability is that of a normal variable beyond Student's t quantile.

        Args:
            extra: 1/2 for Jeffreys' interval, or 1 for Clopper and Pearson's, which is wider and valid for every proportion.
            tail: probability of a miss on each side.
        """
        tails, share = ndtr(-stdtrit(self.degrees, 1 - tail)), self.share
        clipped, kept = share * self.effective, (1 - share) * self.effective
        # scipy returns NaN for quantiles below 1e-22
        lower, upper = (
            np.nan_to_num(betaincinv(a + 1 - extra, b + extra, tails)) for a, b in ((clipped, kept), (kept, clipped))
        )
        low, high = np.where(share > 0, lower, 0.0), np.where(share < 1, 1 - upper, 1.0)
        return np.minimum(low, share), np.maximum(high, share)


@dataclass(frozen=True, slots=True)
class Clusters:
    """Clip decisions summed by prompt, length bin and sign. A prompt's responses in all epochs form one observation."""

    count: Array  # (m, K, S) number of rows by prompt, bin and sign of the advantage; S = 1 if the sign is ignored
    clipped: Array  # (m, K, S) sum of the rows' clip decisions
    unit: float = 1.0  # typical decision that is not 0

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
        sums = cls.add_up(inside.astype(float), inside * clipped[:, None], prompts, positive)
        return replace(sums, unit=float(np.square(clipped).sum() / clipped.sum()) if clipped.any() else 1.0)

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
        number, total = (column.reshape(len(names), signs, NUM_BINS).swapaxes(1, 2) for column in sums)
        return cls(number, total)

    def proportions(self) -> tuple[Array, Array]:
        """Compute the low and high ends, ``(K,)`` each, of 95% intervals for the bins' clip fractions; NaN for an empty bin."""
        count, clipped = self.count.sum(-1), self.clipped.sum(-1)
        share = clipped.sum(0) / np.where(count.any(0), count.sum(0), np.nan)
        return Proportions.of(count, share, _influence(count, clipped), CLIPS, self.unit).interval(extra=1.0)

    def reweighting(self) -> Decomposition | None:
        """Compute the length reweighting errors with a correction for noise, or return None if everything is clipped.

        A weight w_k corresponds to the clip fraction ``1 - w_k a`` of bin k, where ``a`` is the overall acceptance rate. The
        influence of a prompt on this fraction is twice the change that results if the prompt counts only half. It lies between
        the influence in the infinitesimal jackknife, which is too small with few prompts, and that in the delete-one jackknife,
        which is too large. It is close to the CR2 estimator of Bell and McCaffrey (Survey Methodology 28 (2002), 169).
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
            known = self.count.sum(-1), (1 - weight * accepted).clip(0, 1), influence, CLIPS
            bins, observed = (Proportions.of(*known, unit) for unit in (self.unit, self.unit / 2))
            errors.append(_length_error(weight, accepted, weights.share.numpy(), bins, observed))
        return Decomposition(*errors)


def _length_error(weight: Array, accepted: float, share: Array, bins: Proportions, observed: Proportions) -> LengthError:
    """Compute the errors from the weights and clip fractions. ``observed`` gives the prior less weight than ``bins`` does."""
    low, high = bins.interval()
    slope = (np.outer(weight, share) - np.eye(NUM_BINS)) / accepted * (share > 0)[:, None]  # with respect to clip fractions
    values, vectors = np.linalg.eigh(bins.correlation)
    drawn = np.random.default_rng(0).standard_normal((NUM_BINS, NUM_DRAWS // 2))
    normal = (vectors * np.sqrt(values.clip(0))) @ np.concatenate([drawn, -drawn], axis=1)
    distances = np.where(normal > 0, (bins.share - low)[:, None], (high - bins.share)[:, None])
    noise = slope @ (normal * distances / -ndtri(TAIL))
    even, scaled = share @ bins.share, normal / np.sqrt(observed.effective)[:, None]
    alone = (share - np.eye(NUM_BINS)) @ scaled * (share > 0)[:, None] * np.sqrt(even / (1 - even))
    symmetric = slope @ (normal * np.sqrt(bins.share * (1 - bins.share) / bins.effective)[:, None])  # for the median
    as_small = np.mean(np.abs(alone).max(0) <= np.abs(weight - 1).max()).clip(0.1)  # probability of so small an error
    low, high = bins.interval(tail=TAIL / as_small)

    def error(forms: Array, measure: Callable[[Array], Array]) -> Reweighting:
        """Compute the error, the largest of the linear forms of ``w - 1`` with coefficients ``forms``, ``(F, K)``."""
        gradient = forms @ slope
        reach = gradient * np.where(gradient > 0, high - bins.share, bins.share - low)
        above = float((forms @ (weight - 1) + np.sqrt(((reach @ bins.correlation) * reach).sum(1))).max())
        return _reweighting(weight - 1, noise, symmetric, measure, above, float(measure(alone).mean()))

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
    """The length reweighting error by cause, using the weights defined in `rlzoo.core.fairness.LengthWeights`."""

    conditional: LengthError  # conditional on the sign of the advantage: the rule's effect on lengths
    composition: LengthError  # from the mix of signs alone: the rule's effect on signs
    total: LengthError  # the observed error


@dataclass(frozen=True, slots=True)
class Reweighting:
    """A length reweighting error with a correction for noise and an interval.

    The error is a function of absolute values, so noise increases it. ``corrected`` is the true error for which the measured
    error would be the median. The lower end of the interval is the true error for which the measured error would be the 97.5%
    quantile, or 0 if there is none (test inversion; Carpenter, Journal of the Royal Statistical Society B 61 (1999), 159).
    The error is the maximum of linear forms ``c (w - 1)``. The upper end of the interval is the largest of the forms' upper
    ends, so the interval is valid regardless of which bin is worst. The variance of a form comes from the intervals of the
    bins' clip fractions, which are valid for rare events (Zou and Donner, Statistics in Medicine 27 (2008), 1693). Their tail
    probability is 2.5% / q, where q is the probability of an error this small if all lengths were clipped equally. (The error
    is small only if it is small in every bin.) By construction, ``low <= corrected <= value <= high``, because a smaller value
    is less likely if the true error is larger (Anderson, Proceedings of the American Mathematical Society 6 (1955), 170).
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
    shape = deviation[:, None] / (value or 1.0)

    def at(chance: float, noise: Array) -> float:
        """Return the true error for which the measured error is at most ``value`` with probability ``chance``, or else 0."""
        true, step = 0.0, value
        for _ in range(14 if np.mean(error(noise) <= value) > chance else 0):
            step /= 2
            true += step * bool(np.mean(error((true + step) * shape + noise) <= value) > chance)
        return true

    low, corrected = at(1 - TAIL, tails), at(0.5, symmetric)
    return Reweighting(value, corrected, (min(low, corrected), max(value, high)), expected)


def _influence(count: Array, total: Array) -> Array:
    """Compute each prompt's influence on ``total / count``, ``(m, K)``. The squares sum to the variance of the quotient.

    Deviations are scaled up according to the prompt's leverage so that the variance is not too small with few prompts. This
    is the CR2 estimator of Bell and McCaffrey (Survey Methodology 28 (2002), 169).
    """
    number = np.where(count.sum(0) > 0, count.sum(0), 1.0)
    residual = total - total.sum(0) / number * count
    return np.asarray(residual / number / np.sqrt(np.where(count < number, 1 - count / number, 1.0)))


def mean_interval(sums: Array, counts: Array) -> Interval:
    """Compute Jeffreys' 95% interval for a mean over all problems, with problems as observations; see `Proportions`.

    Args:
        sums: ``(n,)`` sum of each problem's values, which are between 0 and 1.
        counts: ``(n,)`` number of values for each problem, not all 0.
    """
    sums, counts = sums[counts > 0, None].astype(float), counts[counts > 0, None].astype(float)
    low, high = Proportions.of(counts, sums.sum(0) / counts.sum(0), _influence(counts, sums), ANSWERS).interval()
    return float(low[0]), float(high[0])
