"""Top-entropy tokens: learns only from the tokens with the highest entropy."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class TopEntropy(ClipPolicy):
    """Learns only from the tokens with the highest entropy, with GRPO's clip.

    Formula:
        J = mean over the tokens t with H_t >= h of min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)
        h = the ceil(top_share n)-th largest entropy of the step's n response tokens

    Where:
        H_t is the entropy of the model at the start of the update, in nats, and r_t = pi_t / pi_old_t. A token with H_t < h
        has no gradient and does not count as clipped. A = (R - mean) / std, with the mean and std of the rewards R in the
        group.

    Differences from GRPO:
        Most tokens are left out, because they are determined by earlier tokens and carry little signal. The ceiling is
        higher, as in DAPO. The mean is over the remaining tokens.

    Reference:
        Beyond the 80/20 Rule, arXiv 2506.01939, and the authors' code, with a top share of 0.2 and clips of 0.2 and 0.28.
        The authors' code uses the entropies under the current model and selects the top share of each micro-batch. It also
        has a dual clip, which limits r_t to 10 where A < 0. TRL divides by all tokens, which makes the gradient five times
        smaller at the default share.
    """

    name = "top-entropy"
    paper = "arXiv 2506.01939"
    scope = "batch"
    needs: ClassVar = frozenset({"old_entropy"})
    watch: ClassVar = {
        "learner/entropy": "should stay high, because low-entropy tokens are not sharpened",
        "clip/fraction": "the share of all tokens that are both in the top share and clipped; at most `top_share`",
    }
    exempt: ClassVar = {
        "ratio_one_is_reinforce": "only the tokens with the highest entropy have a gradient",
        "clipped_means_no_gradient": "a token that is left out has no gradient and does not count as clipped",
        "clipped_means_held_back": "a token that is left out has no gradient and does not count as clipped",
    }

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    top_share: float = Field(0.2, gt=0, le=1, description="share of the step's tokens to learn from")
    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        0.28, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip the tokens with the highest entropy and return a ``(B, T)`` objective."""
        assert inputs.old_entropy is not None, "top-entropy needs old_entropy: fill ClipInputs.old_entropy"
        mask, number = inputs.response_mask, inputs.response_mask.sum().clamp(min=1)
        ordered = inputs.old_entropy.float().masked_fill(~mask, -torch.inf).flatten().sort(descending=True).values
        last = (self.top_share * number.double()).ceil().long() - 1
        threshold = ordered.gather(0, last[None])
        top = mask & (inputs.old_entropy >= threshold)
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        result = ops.clipped_surrogate(log_ratio, inputs.advantages, band)
        objective = torch.where(top, result.objective * (number / top.sum().clamp(min=1)), 0.0)
        metrics = {"entropy_threshold": threshold.expand(len(mask), 1)}
        return ClipResult(objective, result.log_ratio, result.clipped & top, metrics=metrics)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [TopEntropy]
