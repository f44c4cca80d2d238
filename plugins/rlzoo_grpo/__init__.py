"""GRPO, which clips every token's ratio like PPO, and UP, which clips it only where the advantage is negative."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class GRPO(ClipPolicy):
    """Clips every token's importance ratio to the same band around 1.

    Formula:
        J = mean over responses of mean_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A),   r_t = pi_t / pi_old_t
        With `dual_clip` c, where A < 0: max(that minimum, c A)

    Where:
        A = (R - mean) / std, with the mean and std of the rewards R in the group.

    Differences from GRPO:
        None. DAPO, Dr. GRPO, REINFORCE++ and the dual clip are configurations of this policy: configs/dapo.yaml,
        dr-grpo.yaml, reinforce-pp.yaml and dual-clip.yaml.

    Reference:
        DeepSeekMath, arXiv 2402.03300. The clip is from PPO, arXiv 1707.06347. The dual clip, which is off by default, is
        from arXiv 1912.09729, where c = 3.
    """

    name = "grpo"
    paper = "arXiv 2402.03300"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction": "each response contributes its share of clipped tokens; usually a few per cent or less",
        "clip/fraction_dual": "the share of tokens that are clipped by dual_clip, if it is set",
    }

    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        0.2, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )
    dual_clip: float | None = Field(None, gt=1, le=1e6, description="largest ratio where A < 0; null for none")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each token's log-ratio and return a ``(B, T)`` objective."""
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.clip_low, self.clip_high, self.dual_clip, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


class UP(ClipPolicy):
    """Gives tokens with A > 0 the plain policy gradient, without a ratio or a clip, and clips the others as GRPO does.

    Formula:
        J = mean over responses of mean_t u_t
        u_t = (pi_t / sg[pi_t]) A where A > 0, max(min(r_t A, clip(r_t, 1 - clip_low, inf) A), dual_clip A) elsewhere

    Where:
        r_t = pi_t / pi_old_t, and sg[.] stops the gradient. Where A > 0, u_t is A, and its gradient is that of A log pi_t.

    Differences from GRPO:
        Where A > 0, a token keeps its gradient however likely it has become, and the gradient's weight is 1 instead of the
        ratio. The dual clip is on by default.

    Reference:
        UP, arXiv 2607.06987, equation 15 (UP-GRPO). With `reduction` token_mean and no dual clip, the rule is UP-DAPO.
    """

    name, paper, scope = "up", "arXiv 2607.06987", "token"
    watch: ClassVar = {
        "clip/fraction_low": "the share of tokens whose ratio is below the band; where A > 0, no token is clipped",
        "learner/entropy": "rises or stays if unlikely tokens of good responses are learned; a fall to 0 is a collapse",
    }

    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    dual_clip: float | None = Field(3.0, gt=1, le=1e6, description="largest ratio where A < 0; null for none")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip the log-ratio where A < 0, set it to 0 but keep its gradient where A > 0, and return a ``(B, T)`` objective."""
        log_ratio, own, advantages = ops.log_ratio(inputs), ops.log_probs(inputs), inputs.advantages.float()
        band = ops.ratio_band(self.clip_low, torch.inf, self.dual_clip, like=log_ratio)
        within = log_ratio.clamp(band.low, band.ceiling)
        clipped = (advantages < 0) & (within != log_ratio)
        judged = torch.where(advantages > 0, own - own.detach(), within).clamp(max=ops.LOG_RATIO_LIMIT)
        return ClipResult(judged.exp() * advantages, log_ratio.detach(), clipped, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [GRPO, UP]
