"""Adaptive FSPO: a band that finds its drift, its width and its growth with length from what it clips."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, ClipStats, Width, hookimpl, ops

BELOW, ABOVE = 0, 1  # columns of ClipStats: advantages below and above zero
INERT = 1e-4  # nats: log-ratios all smaller than this tell nothing of their spread
RIDGE = 0.05  # keeps the fit's slope and bend small where all lengths are alike


class FSPOAdaptive(ClipPolicy):
    """Clips the importance ratio of a whole response to a band that learns to clip the same share at every length.

    Formula:
        J = mean over responses of exp(clamp(S)) A,   S = sum_t log(pi_t / pi_old_t)
        clamp(S) = min(S, drift L + width_high(L)) where A > 0
        clamp(S) = max(S, drift L - width_low(L)), at most drift L + ceiling_factor width_low(L) where A < 0
        S = 0 is always inside the band.
        width(L) = factor x spread x exp(exponent x + bend x^2),   x = log(L / reference_length), for each sign of A
        After each update, by sign: the mean m of e = clip fraction - target over the length bins moves the level,
        log width += rate m, and the fit of e - m by c0 + c1 x + c2 x^2 the shape, log width += shape_rate (c0 + c1 x + c2 x^2)

    Where:
        L is the response's length, A its advantage. spread is the typical |S - drift L| at the reference length, drift the
        typical S per token: medians over the length bins, averaged over updates. The steps are those of quantile
        regression: they rest where every length is clipped at the target.

    Differences from GRPO:
        The ratio is the response's, so a response is clipped whole; what is set is how much is clipped, not how wide the
        band is.

    Reference:
        Ours, after length-fair sequence policy optimisation, arXiv 2509.09177, whose band is this one before the first
        update. Its square root supposes that token log-ratios are independent.
    """

    name = "fspo-adaptive"
    paper = "arXiv 2509.09177"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction": "approaches target_clip_fraction within some tens of updates",
        "clip/fraction_length_bin_<k>": "level from bin to bin once exponent and bend have settled",
        "clip/setting_<name>": "the state; an exponent is 0.5 where token log-ratios are independent, 1 where they are equal",
    }

    target_clip_fraction: float = Field(0.1, gt=0, lt=0.5, description="share of responses to clip, at every length and sign")
    rate: float = Field(0.5, ge=0, le=10, description="step of the log factors per update; 0 keeps them")
    shape_rate: float = Field(0.5, ge=0, le=10, description="step of exponents and bends per update; 0 keeps them")
    average: float = Field(0.02, gt=0, le=1, description="weight of the newest update in drift and spread")
    ceiling_factor: float | None = Field(
        3.0, gt=0, le=1000, description="dual clip where A < 0: ceiling in units of the width below; null for none"
    )
    factor_low: Annotated[float, Width()] = Field(1.5, ge=1e-6, le=1e6, description="state: width below, in spreads")
    factor_high: Annotated[float, Width()] = Field(1.5, ge=1e-6, le=1e6, description="state: width above, in spreads")
    exponent_low: float = Field(0.5, ge=-1, le=2, description="state: growth with length of the width below")
    exponent_high: float = Field(0.5, ge=-1, le=2, description="state: growth with length of the width above")
    bend_low: float = Field(0.0, ge=-2, le=2, description="state: change of that growth with length, below")
    bend_high: float = Field(0.0, ge=-2, le=2, description="state: change of that growth with length, above")
    spread_low: float = Field(0.2, gt=0, le=1e6, description="state: typical distance from the centre where A < 0")
    spread_high: float = Field(0.2, gt=0, le=1e6, description="state: typical distance from the centre where A > 0")
    drift: float = Field(0.0, ge=-50, le=50, description="state: centre of the band per token")
    reference_length: float = Field(100.0, gt=0, le=1e9, description="state: length at which the spread is told, in tokens")
    num_updates: int = Field(0, ge=0, description="state: updates in drift and spread")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each response's summed log-ratio; shapes as in `ClipInputs`, objective ``(B, 1)``."""
        length = ops.lengths(inputs.response_mask)
        centre, x = self.drift * length, (length / self.reference_length).log()
        low = self.factor_low * self.spread_low * (self.exponent_low * x + self.bend_low * x * x).exp()
        high = self.factor_high * self.spread_high * (self.exponent_high * x + self.bend_high * x * x).exp()
        ceiling = None if self.ceiling_factor is None else (centre + self.ceiling_factor * low).clamp(min=INERT)
        # whatever the drift, ratio 1 is inside: the first update of a rollout batch is never clipped
        band = ClipBand(low=(centre - low).clamp(max=-INERT), high=(centre + high).clamp(min=INERT), ceiling=ceiling)
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)

    def updated(self, stats: ClipStats) -> Self:
        """The band for the next update, from the counts and sums of this one."""
        number = float(stats.num_responses.sum())
        if number == 0:
            return self
        moved = float(stats.log_ratio_squared.sum()) / number > INERT**2
        policy = self._located(stats) if moved else self
        return policy._stepped(stats, BELOW, "low")._stepped(stats, ABOVE, "high")

    def _located(self, stats: ClipStats) -> Self:
        """Drift and spread brought up to date; the first time, the reference length is set."""
        count, length = stats.num_responses, (stats.length / stats.num_responses).clamp(min=1)
        first = self.num_updates == 0
        weight = 1.0 if first else self.average
        reference = float(torch.exp((count * length.log()).nansum() / count.sum())) if first else self.reference_length
        drift = self.drift + weight * (median(stats.log_ratio / (count * length), count) - self.drift)
        centre = drift * length
        variance = stats.log_ratio_squared / count - 2 * centre * stats.log_ratio / count + centre**2
        x = (length / reference).log()
        changed: dict[str, float] = {}
        for sign, side in ((BELOW, "low"), (ABOVE, "high")):
            if float(count[:, sign].sum()) > 0:
                shape = getattr(self, f"exponent_{side}") * x + getattr(self, f"bend_{side}") * x**2
                spread = max(median((variance.clamp(min=0).sqrt() / shape.exp())[:, sign], count[:, sign]), INERT)
                before = getattr(self, f"spread_{side}")
                changed[f"spread_{side}"] = before * (spread / before) ** weight
        return self.replace(drift=drift, reference_length=reference, num_updates=self.num_updates + 1, **changed)

    def _stepped(self, stats: ClipStats, sign: int, side: str) -> Self:
        """One side after a step of quantile regression on the length."""
        filled = stats.num_responses[:, sign] > 0
        count = stats.num_responses[filled, sign]
        if len(count) == 0:
            return self
        error = stats.num_clipped[filled, sign] / count - self.target_clip_fraction
        share = (count / count.sum())[:, None]
        x = ((stats.length[filled, sign] / count).clamp(min=1) / self.reference_length).log()
        powers = torch.stack([x, x**2], dim=-1)
        middle, mean = (share * powers).sum(0), (share[:, 0] * error).sum()
        centred = powers - middle
        fitted = torch.linalg.solve((share * centred).T @ centred + RIDGE * torch.eye(2).to(x), (share * centred).T @ error)
        slope, curve = (self.shape_rate * fitted).tolist()
        names = (f"factor_{side}", f"exponent_{side}", f"bend_{side}")
        factor, exponent, bend = (getattr(self, name) for name in names)
        level = self.rate * float(mean) - slope * float(middle[0]) - curve * float(middle[1])
        stepped = (factor * math.exp(level), exponent + slope, bend + curve)
        limits = ((1e-6, 1e6), (-1.0, 2.0), (-2.0, 2.0))
        kept = {name: min(max(value, low), high) for name, value, (low, high) in zip(names, stepped, limits, strict=True)}
        return self.replace(**kept)


def median(values: Tensor, weights: Tensor) -> float:
    """The smallest value at which half of the weight is reached; cells without weight are left out."""
    keep = weights > 0
    values, order = values[keep].sort()
    reached = weights[keep][order].cumsum(0)
    return float(values[int((reached >= reached[-1] / 2).int().argmax())])


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [FSPOAdaptive]
