"""Adaptive FSPO: learns a band that clips a target share of responses at every length for each sign of the advantage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, ClipStats, Width, hookimpl, ops

BELOW, ABOVE = 0, 1  # columns of ClipStats, for advantages below and above zero
INERT = 1e-4  # in nats; no knots are placed while all log-ratios are smaller
USUAL = 1.5  # initial width, as a multiple of the log-ratio's root mean square
FOLLOW = 0.05  # fraction of the distance to the current lengths that knots move per update
FURTHEST = 20.0  # maximum absolute offset, in nats
HEAVIEST = 3.0  # maximum weight of a knot in an update; the mean over knots and signs is 1

Lengths = tuple[Annotated[float, Field(ge=1, le=1e9)], ...]
Offsets = tuple[Annotated[float, Field(ge=-FURTHEST, le=FURTHEST)], ...]


class FSPOAdaptive(ClipPolicy):
    """Clips the importance ratio of a whole response to a learned band that clips the same share of responses at every length.

    Formula:
        J = mean over responses of exp(clamp(S)) A,   S = sum_t log(pi_t / pi_old_t)
        clamp(S) = min(S, high(L)) where A > 0
        clamp(S) = max(S, -low(L)), at most ceiling_factor low(L) where A < 0
        low(L) = width_low sqrt(L) exp(offset_low(L)), high(L) in the same way: FSPO's band times a factor per length
        After each update, for each sign of A and each knot j:
        offset_j += rate weight_j (clip fraction_j - target)

    Where:
        L is the response's length, and A is its advantage. The offsets are stored at a few lengths, called knots, which
        follow the mean lengths of the length bins. Between knots, an offset is linear in log L. A response whose length lies
        between two knots counts towards both, in proportion to its closeness to each. clip fraction_j is the share of
        clipped responses, weighted in this way. weight_j is the number of responses that count towards knot j, divided by
        the mean of this number over knots and signs, and capped at 3. The update is a step of online quantile regression. The
        band narrows if too few responses are clipped and widens if too many are. As long as the offset stays within its
        limits of +-20, the weighted mean of (clip fraction_j - target) over many updates is (change in offset_j) / (rate sum
        of weight_j), for any distribution of S.

    Differences from GRPO:
        The importance ratio of the whole response is clipped as a unit. The main setting is the share of responses to clip
        instead of the width of the band.

    Reference:
        This rule originated in rlzoo. It is based on Fair Sequence Policy Optimization, arXiv 2509.09177, and starts
        with that paper's band, which grows with the square root of the length. This growth assumes that token log-ratios are
        independent.
    """

    name = "fspo-adaptive"
    paper = "arXiv 2509.09177"
    scope = "sequence"
    watch: ClassVar = {
        "clip/fraction": "approaches target_clip_fraction within a few dozen updates",
        "clip/fraction_length_bin_<k>": "equal in all bins once the band has converged",
        "clip/band_high_length_bin_<k>": "the upper edge of the learned band; the lower edge is `clip/band_low_length_bin_<k>`",
    }

    target_clip_fraction: float = Field(
        0.1, gt=0, lt=0.5, description="share of responses to clip at every length, for each sign of A"
    )
    rate: float = Field(2.0, ge=0, le=10, description="step size of the offsets in each update; 0 keeps them fixed")
    ceiling_factor: float | None = Field(
        3.0, gt=0, le=1000, description="dual clip where A < 0: ceiling as a multiple of the lower width; null for none"
    )
    width_low: Annotated[float, Width()] = Field(
        0.03, gt=0, le=1e6, description="lower width per sqrt(token), before the offsets"
    )
    width_high: Annotated[float, Width()] = Field(
        0.03, gt=0, le=1e6, description="upper width per sqrt(token), before the offsets"
    )
    lengths: Lengths = Field((), description="state: response lengths, ascending, at which the offsets are given")
    offsets_low: Offsets = Field((), description="state: log of the factor on the lower width, at each length")
    offsets_high: Offsets = Field((), description="state: log of the factor on the upper width, at each length")

    @model_validator(mode="after")
    def _offsets_belong_to_lengths(self) -> Self:
        if not len(self.lengths) == len(self.offsets_low) == len(self.offsets_high):
            raise ValueError("lengths, offsets_low and offsets_high must have the same number of entries")
        if any(later <= earlier for earlier, later in zip(self.lengths, self.lengths[1:], strict=False)):
            raise ValueError("lengths must be in ascending order")
        return self

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each response's summed log-ratio and return a ``(B, 1)`` objective."""
        length = ops.lengths(inputs.response_mask)
        low = self.width_low * length.sqrt() * interpolated(length, self.lengths, self.offsets_low).exp()
        high = self.width_high * length.sqrt() * interpolated(length, self.lengths, self.offsets_high).exp()
        ceiling = None if self.ceiling_factor is None else self.ceiling_factor * low
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-low, high=high, ceiling=ceiling))

    def targeting(self, clip_fraction: float) -> Self:
        """See `ClipPolicy.targeting`."""
        return self.replace(target_clip_fraction=clip_fraction)

    def updated(self, stats: ClipStats) -> Self:
        """Return a policy with the band for the next update, computed from the statistics of this update."""
        filled = stats.num_responses.sum(1) > 0
        length = (stats.length.sum(1) / stats.num_responses.sum(1))[filled].clamp(min=1)
        if not self.lengths:
            return self._started(length, (stats.log_ratio_squared.sum(1) / stats.num_responses.sum(1))[filled])
        stepped = self.replace(
            offsets_low=self._stepped(self.offsets_low, stats, BELOW),
            offsets_high=self._stepped(self.offsets_high, stats, ABOVE),
        )
        return stepped._followed(length)

    def _started(self, length: Tensor, square: Tensor) -> Self:
        """Place knots at the bins' mean lengths and set the initial band from the spread of the log-ratios."""
        if len(length) == 0 or float(square.max()) < INERT**2:
            return self
        knots = sorted(set(length.tolist()))
        typical = float((square.clamp(min=INERT**2) / length).sqrt().median())
        offsets = {
            f"offsets_{side}": [min(max(math.log(USUAL * typical / width), -FURTHEST), FURTHEST)] * len(knots)
            for side, width in (("low", self.width_low), ("high", self.width_high))
        }
        return self.replace(lengths=knots, **offsets)

    def _followed(self, length: Tensor) -> Self:
        """Move the knots towards this update's lengths, or place new knots at these lengths if they outnumber the knots."""
        following = torch.tensor(sorted(set(length.tolist())), dtype=torch.float64)
        if len(following) < len(self.lengths):
            return self
        if len(following) > len(self.lengths):
            low, high = (interpolated(following, self.lengths, side).tolist() for side in (self.offsets_low, self.offsets_high))
            return self.replace(lengths=following.tolist(), offsets_low=low, offsets_high=high)
        knots = torch.tensor(self.lengths, dtype=torch.float64)
        # each offset moves with its knot, so that offsets accumulated at different knots do not mix
        return self.replace(lengths=torch.exp(knots.log() + FOLLOW * (following.log() - knots.log())).tolist())

    def _stepped(self, offsets: Offsets, stats: ClipStats, sign: int) -> list[float]:
        """Take a step of online quantile regression for one side of the band and return the new offsets at its knots."""
        weight, error = self.errors(stats, sign)
        return (torch.tensor(offsets, dtype=torch.float64) + self.rate * weight * error).clamp(-FURTHEST, FURTHEST).tolist()

    def errors(self, stats: ClipStats, sign: int) -> tuple[Tensor, Tensor]:
        """Return the weight of each knot and its clip fraction minus the target, both as float64 ``(K,)``.

        Args:
            stats: statistics of an update with this policy, which must already have knots.
            sign: `BELOW` or `ABOVE`.
        """
        filled = stats.num_responses[:, sign] > 0
        count = stats.num_responses[filled, sign]
        error = stats.num_clipped[filled, sign] / count - self.target_clip_fraction
        share = hats((stats.length[filled, sign] / count).clamp(min=1), self.lengths) * count[:, None]
        seen = share.sum(0)
        mean = stats.num_responses.sum() / (2 * len(self.lengths))
        weight = torch.where(seen > 0, seen / mean, 0.0).clamp(max=HEAVIEST)
        return weight, torch.where(seen > 0, (share * error[:, None]).sum(0) / seen, 0.0)


def hats(length: Tensor, knots: Sequence[float]) -> Tensor:
    """Return each knot's weight at each length, ``(..., K)``, linear in log length and constant beyond the outermost knots."""
    x, at = length.double().log()[..., None], torch.tensor(knots, dtype=torch.float64, device=length.device).log()
    if len(knots) == 1:
        return torch.ones_like(x)
    right = torch.bucketize(x, at).clamp(1, len(knots) - 1)
    way = ((x - at[right - 1]) / (at[right] - at[right - 1])).clamp(0, 1)
    return (
        torch.zeros(*x.shape[:-1], len(knots), dtype=torch.float64, device=x.device)
        .scatter(-1, right, way)
        .scatter_add(-1, right - 1, 1 - way)
    )


def interpolated(length: Tensor, knots: Sequence[float], values: Sequence[float]) -> Tensor:
    """Interpolate the knots' values at each length. The result has the shape of ``length`` and is 0 if there are no knots."""
    if not knots:
        return torch.zeros_like(length)
    return (hats(length, knots) @ torch.tensor(values, dtype=torch.float64, device=length.device)).to(length.dtype)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [FSPOAdaptive]
