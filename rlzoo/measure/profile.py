"""Measures a rule's fairness by response length, using clip fractions and gradient weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlzoo.core.fairness import NUM_BINS, bin_edges, bin_index, bin_sums, effective_sample_size
from rlzoo.measure.intervals import Clusters, Decomposition, Interval, LengthError
from rlzoo.measure.response_table import ResponseTable

MOVED = 1e-5  # root mean square log-ratio per token in nats; anything smaller is a rounding error


@dataclass(frozen=True, slots=True)
class Fractions:
    """Clip fractions by length bin, shortest first, with 95% intervals clustered by prompt; NaN for an empty bin."""

    count: tuple[int, ...]
    fraction: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, rows: ResponseTable, index: torch.Tensor) -> Fractions:
        """Compute clip fractions and their intervals by bin. ``index`` is the bin of each row, ``(n,)``."""
        count, clipped = bin_sums(index, torch.ones_like(rows.clipped)), bin_sums(index, rows.clipped)
        low, high = clusters(rows, index).proportions()
        share = tuple((clipped / count).tolist())
        return cls(tuple(int(number) for number in count), share, tuple(low.tolist()), tuple(high.tolist()))


def clusters(rows: ResponseTable, index: torch.Tensor) -> Clusters:
    """Sum clip decisions by prompt, bin and sign. ``index`` is the bin of each row, ``(n,)``."""
    positive = (rows.advantage > 0).numpy()
    return Clusters.of(index.numpy(), rows.clipped.double().numpy(), rows.group.numpy(), positive)


def labels(edges: Sequence[float]) -> list[str]:
    """Return the range of integers in each bin, such as ``"13-24"``, or ``"none"`` for a bin whose edges are equal."""
    firsts = [math.ceil(edges[0]), *(math.floor(edge) + 1 for edge in edges[1:-1])]
    spans = zip(firsts, map(math.floor, edges[1:]), strict=True)
    return [f"{first}-{last}" if first <= last else "none" for first, last in spans]


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """The fairness of a rule, measured on rows with a nonzero advantage. Tuples have one entry per length bin."""

    edges: tuple[float, ...]  # (K + 1,) tokens
    median_length: tuple[float, ...]
    clip_fraction: float
    both: Fractions
    below: Fractions  # A < 0
    above: Fractions  # A > 0
    lre: Decomposition | None  # None if everything is clipped
    unmoved: float  # share of rows whose log-ratios are 0, which no rule can clip
    ess: float  # effective sample size of the responses' gradient weights
    ess_by_length: tuple[float, ...]
    gradient_mass: tuple[float, ...]  # each bin's share of the sum of |dJ/dlog_probs|
    sigma_root: tuple[float, ...]  # standard deviation of S / sqrt(L) over the responses that moved
    drift: float  # mean log-ratio of a long response (at the 95th percentile of length), in standard deviations

    @classmethod
    def of(cls, table: ResponseTable) -> LengthProfile | None:
        """Compute the profile of pooled rows, or return None if no row has a nonzero advantage.

        Combine the rows of several runs with `rlzoo.measure.response_table.pooled_runs`.
        """
        rows = table.judged()
        if len(rows.length) == 0:
            return None
        edges = bin_edges(rows.length)
        index = bin_index(rows.length, edges)
        mass = bin_sums(index, rows.gradient_mass)
        sides = {sign: rows.advantage * sign > 0 for sign in (-1, 1)}
        sigma_root, drift = _spread_and_drift(rows, index)
        return cls(
            edges=tuple(edges.tolist()),
            median_length=_by_bin(index, rows.length, lambda lengths: float(lengths.median())),
            clip_fraction=float(rows.clipped.double().mean()),
            both=Fractions.of(rows, index),
            below=Fractions.of(rows.where(sides[-1]), index[sides[-1]]),
            above=Fractions.of(rows.where(sides[1]), index[sides[1]]),
            lre=clusters(rows, index).reweighting(),
            unmoved=1 - float(_moved(rows).double().mean()),
            ess=effective_sample_size(rows.weight),
            ess_by_length=_by_bin(index, rows.weight, effective_sample_size),
            gradient_mass=tuple((mass / mass.sum()).tolist()),
            sigma_root=sigma_root,
            drift=drift,
        )

    @property
    def lre_max(self) -> float | None:
        """The main result: the largest length reweighting error for a given sign of the advantage."""
        return None if self.lre is None else self.lre.conditional.max.value

    @property
    def lre_max_interval(self) -> Interval | None:
        """The 95% interval of `lre_max`, which contains the measured and the corrected error."""
        return None if self.lre is None else self.lre.conditional.max.interval

    @property
    def other_errors(self) -> tuple[float | None, float | None]:
        """The largest composition error and the largest total error."""
        return (None, None) if self.lre is None else (self.lre.composition.max.value, self.lre.total.max.value)

    @property
    def lre_noise(self) -> float | None:
        """The expected `lre_max` with this many prompts if all lengths were clipped equally."""
        return None if self.lre is None else self.lre.conditional.max.noise

    def bin_labels(self) -> list[str]:
        """Return the range of lengths in each bin; see `labels`."""
        return labels(self.edges)

    def metrics(self) -> dict[str, float]:
        """Return the profile as metrics by name, omitting unknown values."""
        metrics: dict[str, float | None] = {
            "clip/fraction": self.clip_fraction,
            "fairness/ess": self.ess,
            "ratio/drift_long": self.drift,
            "ratio/unmoved": self.unmoved,
        }
        if self.lre is not None:
            metrics |= error_metrics("fairness/lre", self.lre.conditional)
            metrics["fairness/lre_noise"] = self.lre.conditional.max.noise
            for name, error in (("composition", self.lre.composition), ("total", self.lre.total)):
                metrics[f"fairness/lre_{name}_max"] = error.max.value
                metrics[f"fairness/lre_{name}_mean"] = error.mean.value
        for k in range(NUM_BINS):
            metrics[f"clip/length_bin_{k}_edge"] = self.edges[k + 1]
            metrics[f"fairness/ess_length_bin_{k}"] = self.ess_by_length[k]
            metrics[f"fairness/gradient_mass_length_bin_{k}"] = self.gradient_mass[k]
            metrics[f"ratio/sigma_root_length_bin_{k}"] = self.sigma_root[k]
            for kind, side in (("", self.both), ("_negative", self.below), ("_positive", self.above)):
                name = f"clip/fraction{kind}_length_bin_{k}"
                metrics |= {name: side.fraction[k], f"{name}_ci_low": side.low[k], f"{name}_ci_high": side.high[k]}
        return {name: value for name, value in metrics.items() if value is not None and not math.isnan(value)}


def error_metrics(name: str, error: LengthError) -> dict[str, float]:
    """Return the metrics of a length reweighting error: the error, the corrected error and the ends of the interval."""
    metrics: dict[str, float] = {}
    for end, one in (("max", error.max), ("mean", error.mean)):
        metrics |= {f"{name}_{end}": one.value, f"{name}_{end}_corrected": one.corrected}
        metrics |= dict(zip((f"{name}_{end}_ci_low", f"{name}_{end}_ci_high"), one.interval, strict=True))
    return metrics


def _moved(rows: ResponseTable) -> torch.Tensor:
    """Return whether each row's log-ratios exceed rounding error."""
    return rows.token_log_ratio_squared > MOVED**2 * rows.length


def _by_bin(index: torch.Tensor, values: torch.Tensor, statistic: Callable[[torch.Tensor], float]) -> tuple[float, ...]:
    picked = [values[index == k] for k in range(NUM_BINS)]
    return tuple(statistic(chosen) if len(chosen) else math.nan for chosen in picked)


def _spread_and_drift(rows: ResponseTable, index: torch.Tensor) -> tuple[tuple[float, ...], float]:
    """Compute the spread by bin and the drift of the summed log-ratio S, using only the rows that moved."""
    moved = _moved(rows)
    total, length = rows.token_log_ratio_sum[moved].double(), rows.length[moved].double()
    mu = float(total.sum() / length.sum()) if len(total) else math.nan
    scaled = (total - mu * length) / length.sqrt()
    sigma = float(scaled.square().mean().sqrt())
    if not sigma > 0:
        return (math.nan,) * NUM_BINS, math.nan
    long = float(np.quantile(length.numpy(), 0.95))
    spread = _by_bin(index[moved], total / length.sqrt(), lambda scaled_sums: float(scaled_sums.std(correction=0)))
    return spread, mu * long**0.5 / sigma
