"""CE-GPPO: PPO's clip with a bounded gradient for tokens outside the band."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class CEGPPO(ClipPolicy):
    """Keeps a bounded gradient for tokens that GRPO clips, with separate scales below and above the band.

    Formula:
        J = mean over the step's tokens of
            beta_low (1 - clip_low) (r_t / sg[r_t]) A      where A < 0 and r_t < 1 - clip_low
            beta_high (1 + clip_high) (r_t / sg[r_t]) A    where A > 0 and r_t > 1 + clip_high
            r_t A                                          elsewhere

    Where:
        r_t = pi_t / pi_old_t, sg[.] stops the gradient, and A = (R - mean) / std, with the mean and std of the rewards R in
        the group. A token counts as clipped in the first two cases.

    Differences from GRPO:
        Clipped tokens, most of which are rare tokens, keep a gradient of beta times the bound instead of 0. Learning from
        those above the band, where A > 0, raises the entropy. Learning from those below it, where A < 0, lowers the entropy.
        The mean is over all tokens.

    Reference:
        Coordinating Entropy via Gradient-Preserving Policy Optimization, arXiv 2509.20712, equations 8 and 10, with clips of
        0.2 and betas of 0.5 and 1, the settings of its 1.5B model (0.75 and 1 for 7B). The released code also has a dual
        clip, which limits r_t to 10 where A < 0.
    """

    name = "ce-gppo"
    paper = "arXiv 2509.20712"
    scope = "token"
    watch: ClassVar = {
        "learner/entropy": "rises with beta_high, and falls with beta_low",
        "clip/fraction": "the share of tokens outside the band; they still learn",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "a token outside the band keeps a gradient of beta times the bound"}

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    clip_low: Annotated[float, Width()] = Field(
        0.2, gt=0, lt=1, description="ratios below 1 - clip_low have a bounded weight where A < 0"
    )
    clip_high: Annotated[float, Width()] = Field(
        0.2, gt=0, le=100, description="ratios above 1 + clip_high have a bounded weight where A > 0"
    )
    beta_low: float = Field(0.5, ge=0, le=100, description="scale of the gradient below the band; 0 gives GRPO")
    beta_high: float = Field(1.0, ge=0, le=100, description="scale of the gradient above the band; 0 gives GRPO")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Bound the weight of tokens outside the band and return a ``(B, T)`` objective."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        below, above = (advantages < 0) & (log_ratio < band.low), (advantages > 0) & (log_ratio > band.high)
        one = (log_ratio - log_ratio.detach()).exp()  # equals 1, with the gradient of the log-ratio
        low, high = self.beta_low * (1 - self.clip_low), self.beta_high * (1 + self.clip_high)
        weight = torch.where(below, low * one, torch.where(above, high * one, ops.limited_exp(log_ratio)))
        return ClipResult(weight * advantages, log_ratio.detach(), below | above, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [CEGPPO]
