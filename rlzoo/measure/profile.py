"""The fairness of a clip by response length: clip fractions, weights in the gradient, and their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlzoo.fairness import NUM_BINS, bin_edges, bin_index, bin_sums, effective_sample_size
from rlzoo.measure.intervals import Clusters, Decomposition, Interval, LengthError
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
    """Clip decisions by prompt, bin and sign; ``index`` ``(n,)`` is the bin of each row."""
    positive = (rows.advantage > 0).numpy()
    return Clusters.of(index.numpy(), rows.clipped.double().numpy(), rows.group.numpy(), positive)


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
    lre: Decomposition | None  # None when everything is clipped
    unmoved: float  # share of the rows whose log-ratios were still 0, which no rule can clip
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
            lre=clusters(rows, index).reweighting(),
            unmoved=1 - float(_moved(rows).double().mean()),
            ess=effective_sample_size(rows.weight),
            ess_by_length=_by_bin(index, rows.weight, effective_sample_size),
            gradient_mass=tuple((mass / mass.sum()).tolist()),
            sigma_root=sigma_root,
            standardised=standardised,
            drift=drift,
        )

    @property
    def lre_max(self) -> float | None:
        """The headline: the largest length reweighting error given the sign of the advantage."""
        return None if self.lre is None else self.lre.conditional.max.value

    @property
    def lre_max_interval(self) -> Interval | None:
        """The 95 % interval of `lre_max`; it holds both the error and the corrected one."""
        return None if self.lre is None else self.lre.conditional.max.interval

    @property
    def other_errors(self) -> tuple[float | None, float | None]:
        """The largest errors of the composition by sign alone, and in total."""
        return (None, None) if self.lre is None else (self.lre.composition.max.value, self.lre.total.max.value)

    @property
    def lre_noise(self) -> float | None:
        """The `lre_max` to expect of so many prompts if every length were clipped alike."""
        return None if self.lre is None else self.lre.conditional.max.noise

    def bin_labels(self) -> list[str]:
        """The lengths that each bin holds; see `labels`."""
        return labels(self.edges)

    def metrics(self) -> dict[str, float]:
        """The profile by its metric names, without unknown values."""
        found: dict[str, float | None] = {
            "clip/fraction": self.clip_fraction,
            "fairness/ess": self.ess,
            "ratio/drift_long": self.drift,
            "ratio/unmoved": self.unmoved,
        }
        if self.lre is not None:
            found |= error_metrics("fairness/lre", self.lre.conditional)
            found["fairness/lre_noise"] = self.lre.conditional.max.noise
            for name, part in (("composition", self.lre.composition), ("total", self.lre.total)):
                found[f"fairness/lre_{name}_max"] = part.max.value
                found[f"fairness/lre_{name}_mean"] = part.mean.value
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


def error_metrics(name: str, error: LengthError) -> dict[str, float | None]:
    """A length reweighting error by metric names: the error, the corrected one, and the ends of its interval."""
    found: dict[str, float | None] = {}
    for end, one in (("max", error.max), ("mean", error.mean)):
        low, high = one.interval or (None, None)
        found |= {f"{name}_{end}": one.value, f"{name}_{end}_corrected": one.corrected}
        found |= {f"{name}_{end}_ci_low": low, f"{name}_{end}_ci_high": high}
    return found


def _moved(rows: ResponseTable) -> torch.Tensor:
    """Whether the log-ratios of each row are more than rounding."""
    return rows.token_log_ratio_squared > MOVED**2 * rows.length


def _by_bin(index: torch.Tensor, values: torch.Tensor, statistic: Callable[[torch.Tensor], float]) -> tuple[float, ...]:
    picked = [values[index == k] for k in range(NUM_BINS)]
    return tuple(statistic(part) if len(part) else math.nan for part in picked)


def _gaussian(rows: ResponseTable, index: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Spread by bin, standardised quantiles and drift of the summed log-ratio S, over the rows whose update moved them."""
    moved = _moved(rows)
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
