"""The fairness of a clip by response length: clip fractions, weights in the gradient, and their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlzoo.fairness import NUM_BINS, bin_edges, bin_index, bin_sums, effective_sample_size
from rlzoo.measure.intervals import Clusters, Interval
from rlzoo.measure.response_table import ResponseTable

MOVED = 1e-5  # nats, root mean square per token: below it a log-ratio is rounding, not a step of the optimizer
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, slots=True)
class Fractions:
    """Clip fractions of the length bins, short to long, with 95 % intervals over prompts; NaN for an empty bin.

    Example:
        10 of 100 responses in a bin, each to a prompt of its own: ``fraction`` .1, ``low`` .055, ``high`` .176.
    """

    count: tuple[int, ...]
    fraction: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, rows: ResponseTable, index: torch.Tensor) -> Fractions:
        """Count clip decisions by bin; ``index`` ``(n,)`` is the bin of each row."""
        count, clipped = bin_sums(index, torch.ones_like(rows.clipped)), bin_sums(index, rows.clipped)
        low, high = clusters(rows, index).proportions()
        share = tuple((clipped / count).tolist())
        return cls(tuple(int(number) for number in count), share, tuple(low.tolist()), tuple(high.tolist()))


def clusters(rows: ResponseTable, index: torch.Tensor) -> Clusters:
    """Clip decisions by prompt and bin; ``index`` ``(n,)`` is the bin of each row."""
    return Clusters.of(index.numpy(), rows.clipped.double().numpy(), rows.group.numpy())


def labels(edges: Sequence[float]) -> list[str]:
    """The whole numbers that each bin holds, such as ``"13-24"``; ``"none"`` for a bin between quantiles that are the same."""
    firsts = [math.ceil(edges[0]), *(math.floor(edge) + 1 for edge in edges[1:-1])]
    spans = zip(firsts, map(math.floor, edges[1:]), strict=True)
    return [f"{first}-{last}" if first <= last else "none" for first, last in spans]


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """The fairness of a rule, from rows with non-zero advantage; a tuple has an entry per length bin."""

    edges: tuple[float, ...]  # (K + 1,) tokens
    median_length: tuple[float, ...]
    clip_fraction: float
    both: Fractions
    below: Fractions  # A < 0
    above: Fractions  # A > 0
    lre_max: float | None  # None when everything is clipped
    lre_mean: float | None
    lre_max_corrected: float | None  # without what noise adds, see `rlzoo.measure.intervals.Reweighting`
    lre_mean_corrected: float | None
    lre_max_interval: Interval | None  # 95 %; holds both the error and the corrected one
    lre_mean_interval: Interval | None
    lre_noise: float | None  # lre_max to expect of so many prompts if every length were clipped alike
    ess: float  # of the weights with which responses reach the gradient
    ess_by_length: tuple[float, ...]
    gradient_mass: tuple[float, ...]  # shares of sum |dJ/dlog_probs|, adding up to 1
    sigma_root: tuple[float, ...]  # standard deviation of S / sqrt(L), of the responses that moved
    standardised: tuple[float, ...]  # QUANTILES of (S - mu L) / (sigma sqrt(L)); a normal's are -1.64 -.67 0 .67 1.64
    drift: float  # mean log-ratio of a long response (95th percentile of length), in its standard deviations

    @classmethod
    def of(cls, table: ResponseTable) -> LengthProfile | None:
        """The profile of pooled rows; None if none has a non-zero advantage.

        Rows of several runs must have been put together by `rlzoo.measure.response_table.pooled_runs`.
        """
        rows = table.judged()
        if len(rows.length) == 0:
            return None
        edges = bin_edges(rows.length)
        index = bin_index(rows.length, edges)
        worst, mean = clusters(rows, index).reweighting() or (None, None)
        mass = bin_sums(index, rows.gradient_mass)
        sides = {sign: rows.advantage * sign > 0 for sign in (-1, 1)}
        sigma_root, standardised, drift = _gaussian(rows, index)
        return cls(
            edges=tuple(edges.tolist()),
            median_length=_by_bin(index, rows.length, lambda lengths: float(lengths.median())),
            clip_fraction=float(rows.clipped.double().mean()),
            both=Fractions.of(rows, index),
            below=Fractions.of(rows.where(sides[-1]), index[sides[-1]]),
            above=Fractions.of(rows.where(sides[1]), index[sides[1]]),
            lre_max=worst.value if worst else None,
            lre_mean=mean.value if mean else None,
            lre_max_corrected=worst.corrected if worst else None,
            lre_mean_corrected=mean.corrected if mean else None,
            lre_max_interval=worst.interval if worst else None,
            lre_mean_interval=mean.interval if mean else None,
            lre_noise=worst.noise if worst else None,
            ess=effective_sample_size(rows.weight),
            ess_by_length=_by_bin(index, rows.weight, effective_sample_size),
            gradient_mass=tuple((mass / mass.sum()).tolist()),
            sigma_root=sigma_root,
            standardised=standardised,
            drift=drift,
        )

    def bin_labels(self) -> list[str]:
        """The lengths that each bin holds; see `labels`."""
        return labels(self.edges)

    def metrics(self) -> dict[str, float]:
        """The profile by its metric names, without unknown values."""
        found: dict[str, float | None] = {
            "clip/fraction": self.clip_fraction,
            "fairness/ess": self.ess,
            "ratio/drift_long": self.drift,
            "fairness/lre_max_corrected": self.lre_max_corrected,
            "fairness/lre_mean_corrected": self.lre_mean_corrected,
            "fairness/lre_noise": self.lre_noise,
        }
        for name, error, interval in (
            ("fairness/lre_max", self.lre_max, self.lre_max_interval),
            ("fairness/lre_mean", self.lre_mean, self.lre_mean_interval),
        ):
            found[name], (found[f"{name}_ci_low"], found[f"{name}_ci_high"]) = error, interval or (None, None)
        for k in range(NUM_BINS):
            found[f"clip/length_bin_{k}_edge"] = self.edges[k + 1]
            found[f"fairness/ess_length_bin_{k}"] = self.ess_by_length[k]
            found[f"fairness/gradient_mass_length_bin_{k}"] = self.gradient_mass[k]
            found[f"ratio/sigma_root_length_bin_{k}"] = self.sigma_root[k]
            for kind, side in (("", self.both), ("_negative", self.below), ("_positive", self.above)):
                name = f"clip/fraction{kind}_length_bin_{k}"
                found |= {name: side.fraction[k], f"{name}_ci_low": side.low[k], f"{name}_ci_high": side.high[k]}
        for quantile, value in zip(QUANTILES, self.standardised, strict=True):
            found[f"ratio/standardised_p{quantile * 100:02.0f}"] = value
        return {name: value for name, value in found.items() if value is not None and not math.isnan(value)}


def _by_bin(index: torch.Tensor, values: torch.Tensor, statistic: Callable[[torch.Tensor], float]) -> tuple[float, ...]:
    picked = [values[index == k] for k in range(NUM_BINS)]
    return tuple(statistic(part) if len(part) else math.nan for part in picked)


def _gaussian(rows: ResponseTable, index: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Spread by bin, standardised quantiles and drift of the summed log-ratio S, over the rows whose update moved them."""
    moved = rows.token_log_ratio_squared > MOVED**2 * rows.length
    total, length = rows.token_log_ratio_sum[moved].double(), rows.length[moved].double()
    mu = float(total.sum() / length.sum()) if len(total) else math.nan
    scaled = (total - mu * length) / length.sqrt()
    sigma = float(scaled.square().mean().sqrt())
    if not sigma > 0:
        return (math.nan,) * NUM_BINS, (math.nan,) * len(QUANTILES), math.nan
    standardised = np.quantile((scaled / sigma).numpy(), QUANTILES)
    long = float(np.quantile(length.numpy(), 0.95))
    spread = _by_bin(index[moved], total / length.sqrt(), lambda part: float(part.std(correction=0)))
    return spread, tuple(standardised.tolist()), mu * long**0.5 / sigma
