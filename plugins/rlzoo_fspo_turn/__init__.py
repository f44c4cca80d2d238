"""FSPO per turn: clips each turn's summed log-ratio to a band that grows with the square root of its length."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class FSPOTurn(ClipPolicy):
    """Clips the importance ratio of each turn to a band that grows with the square root of the turn's length.

    Formula:
        J = mean over responses of sum_t x_t A, where x_t has the gradient of its own token only
        x_t = exp(clamp(S_k)) of t's turn k,   S_k = sum over the tokens of turn k of log(pi / pi_old)
        clamp(S_k) = min(S_k, drift L_k + width_high sqrt(L_k))                              where A > 0
        clamp(S_k) = max(S_k, drift L_k - width_low sqrt(L_k)), at most drift L_k + width_ceiling sqrt(L_k)  where A < 0

    Where:
        A turn is the model's text between two messages of an environment, L_k is its length in tokens, and A is its
        advantage. Under the old policy, S_k is approximately normal with mean mu L_k and variance sigma^2 L_k.

    Differences from GRPO:
        The importance ratio is the product of a turn's token ratios, so the turn is clipped as a unit, while the response's
        other turns still contribute to the gradient. On a single-turn response, the clip and the gradient are the same as in
        FSPO.

    Reference:
        This rule originated in rlzoo. It applies the band of Fair Sequence Policy Optimization, arXiv 2509.09177, to
        each turn.
    """

    name = "fspo-turn"
    paper = "arXiv 2509.09177"
    scope = "token"
    needs: ClassVar = frozenset({"turn_ids"})
    watch: ClassVar = {
        "clip/fraction_turn_<k>": "flat across the turns of an episode if the band suits the model",
        "fairness/lre_turn_max": "compare rules only at equal clip/fraction",
        "ratio/sigma_token": "a width divided by this is z; unless it far exceeds ratio/mu_token times sqrt(L_k), set drift",
        "learner/grad_clipped": "close to 1, because the norm of a sum over tokens grows with L",
    }

    reduction: Reduction = Field("sequence_mean_token_sum", description="how the objective is reduced to a scalar")
    width_low: Annotated[float, Width()] = Field(
        0.03, gt=0, le=10, description="width of the band below its centre, per sqrt(token)"
    )
    width_high: Annotated[float, Width()] = Field(
        0.03, gt=0, le=10, description="width of the band above its centre, per sqrt(token)"
    )
    drift: float = Field(0.0, ge=-1, le=1, description="centre of the band per token: the mean token log-ratio")
    width_ceiling: Annotated[float | None, Width()] = Field(
        0.09, gt=0, le=10, description="dual clip where A < 0: ceiling of the log-ratio per sqrt(token); null for none"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each turn's summed log-ratio and return a ``(B, T)`` objective."""
        assert inputs.turn_ids is not None, "fspo-turn needs turn_ids: fill ClipInputs.turn_ids"
        token = ops.log_ratio(inputs)
        length = ops.turn_sum(torch.ones_like(token), inputs.turn_ids)
        centre, root = self.drift * length, length.sqrt()
        band = ClipBand(
            low=centre - self.width_low * root,
            high=centre + self.width_high * root,
            ceiling=None if self.width_ceiling is None else centre + self.width_ceiling * root,
        )
        log_ratio = ops.turn_sum(token.detach(), inputs.turn_ids) + token - token.detach()
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [FSPOTurn]
