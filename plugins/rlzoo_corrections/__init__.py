"""The mismatch corrections that ship with rlzoo."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlzoo import Correction, CorrectionInputs, hookimpl, ops

Pool = Literal["token", "sum", "mean"]
"""The ratio to judge: that of each token, or that of the whole response, from the sum or the mean of its log-ratios."""


class Pooled(Correction):
    """Base class for corrections based on rho, the ratio ``exp(log pi_old - log pi_rollout)`` of each token or response."""

    pool: Pool = Field(
        "token", description="ratio to judge: each token's, or the response's, computed from its summed or mean log-ratio"
    )
    high: float = Field(2.0, gt=0, description="largest ratio that is kept")

    @property
    def is_per_token(self) -> bool:
        """See `Correction.is_per_token`."""
        return self.pool == "token"

    def ratio(self, inputs: CorrectionInputs) -> Tensor:
        """Compute the pooled ratio, limited by `rlzoo.ops.limited_exp`."""
        if self.pool == "token":
            return ops.limited_exp(inputs.log_ratio)
        pool = ops.sequence_sum if self.pool == "sum" else ops.sequence_mean
        return ops.limited_exp(pool(inputs.log_ratio, inputs.response_mask))


class Truncate(Pooled):
    """Truncates the ratio (truncated importance sampling).

    Formula:
        w = min(rho, high)

    Reference:
        Truncated importance sampling, Ionides 2008. Yao et al. 2025 applied it to inference engines.
    """

    name, paper = "tis", "none"

    def weigh(self, inputs: CorrectionInputs) -> Tensor:
        """See `Correction.weigh`."""
        return self.ratio(inputs).clamp(max=self.high)


class IcePop(Pooled):
    """Drops tokens or responses whose ratio is too large or too small, and weights the others by their ratio.

    Formula:
        w = rho where low <= rho <= high, else 0

    Reference:
        Ring-1T, arXiv 2510.18855. With ``low = 0``, this is masked importance sampling, for which ``mis`` is an alias.
    """

    name, paper = "icepop", "arXiv 2510.18855"
    aliases: ClassVar = {"mis": {"low": 0.0}}

    low: float = Field(0.5, ge=0, description="smallest ratio that is kept")

    def weigh(self, inputs: CorrectionInputs) -> Tensor:
        """See `Correction.weigh`."""
        ratio = self.ratio(inputs)
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)


class LengthFair(Correction):
    """Drops responses whose summed log-ratio is outside a band that grows with the square root of their length.

    Formula:
        w = 1 where |sum of the log-ratios| <= width * sqrt(L), else 0

    Reference:
        This correction originated in rlzoo. The spread of a sum of independent log-ratios grows with the square root of the
        length. Fixed bounds therefore drop long responses more often than short ones, while this band drops responses of
        every length equally often.
    """

    name, paper = "length_fair", "none"

    width: float = Field(0.03, gt=0, description="half-width of the band in nats per sqrt(token)")

    def weigh(self, inputs: CorrectionInputs) -> Tensor:
        """See `Correction.weigh`."""
        total = ops.sequence_sum(inputs.log_ratio, inputs.response_mask)
        return (total.abs() <= self.width * ops.lengths(inputs.response_mask).sqrt()).float()


class TrustRegionMask(Correction):
    """Drops a response if any of its tokens diverges too far from the sampler, or if its tokens do so on average.

    Formula:
        w = 1 where max_t l_t^2 / 2 <= max_divergence and mean_t (exp(l_t) - 1 - l_t) <= mean_divergence, else 0

    Where:
        l_t = log pi_old - log pi_rollout of the sampled token. The paper computes the KL divergence over the whole
        vocabulary. This correction estimates it from the sampled token, with the k2 estimator for the maximum and k3 for the
        mean, as the paper recommends.

    Reference:
        Trust Region Masking, arXiv 2512.23075, with the thresholds 0.1 and 0.002 from its combined criterion over the whole
        vocabulary. In the paper, the mask follows the current model. In rlzoo, it is computed once, before the first update.
    """

    name, paper = "trm", "arXiv 2512.23075"

    max_divergence: float | None = Field(0.1, gt=0, description="largest divergence of a token; null for no limit")
    mean_divergence: float | None = Field(
        0.002, gt=0, description="largest mean divergence over the response; null for no limit"
    )

    def weigh(self, inputs: CorrectionInputs) -> Tensor:
        """See `Correction.weigh`."""
        log_ratio, mask = inputs.log_ratio.clamp(-ops.LOG_RATIO_LIMIT, ops.LOG_RATIO_LIMIT), inputs.response_mask
        worst = (log_ratio.square() / 2).amax(-1, keepdim=True)
        mean = ops.sequence_mean(torch.expm1(log_ratio) - log_ratio, mask)
        kept = torch.ones_like(worst, dtype=torch.bool)
        if self.max_divergence is not None:
            kept &= worst <= self.max_divergence
        if self.mean_divergence is not None:
            kept &= mean <= self.mean_divergence
        return kept.float()


class TVGate(Correction):
    """Drops tokens that would increase the distance from the sampler, in responses that are already far from it.

    Formula:
        w_t = 0 where D > threshold and sign(log rho_t) A_t > 0, else min(rho_t, high)

    Where:
        D = mean over the response's tokens of |rho_t - 1|, with rho_t = pi_old / pi_rollout.

    Reference:
        VACO, arXiv 2603.01365, as in open-instruct's TVPO, which applies the filter once, before the update. In the paper,
        the filter follows the current model. The cap of 2 is from open-instruct. The threshold of 0.2 is quoted in a review,
        and using it is rlzoo's choice.
    """

    name, paper, per_token = "tv_gate", "arXiv 2603.01365", True

    threshold: float = Field(0.2, gt=0, description="mean distance of the ratios from 1 above which tokens are dropped")
    high: float = Field(2.0, gt=0, description="cap on the ratio of the tokens that are kept")

    def weigh(self, inputs: CorrectionInputs) -> Tensor:
        """See `Correction.weigh`."""
        ratio = ops.limited_exp(inputs.log_ratio)
        distance = ops.sequence_mean((ratio - 1).abs(), inputs.response_mask)
        pushes = inputs.log_ratio.sign() * inputs.advantages > 0  # the token would move further away
        return torch.where((distance > self.threshold) & pushes, 0.0, ratio.clamp(max=self.high))


@hookimpl
def rlzoo_corrections() -> list[type[Correction]]:
    """Return the corrections that this plugin provides."""
    return [Truncate, IcePop, LengthFair, TrustRegionMask, TVGate]
