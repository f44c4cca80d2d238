"""FSPO by turn: a clip band on the summed log-ratio of each turn that grows with the square root of the turn's length."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class FSPOTurn(ClipPolicy):
    """Clips the importance ratio of each turn to a band that accepts every length of a turn equally.

    Formula:
        J = mean over responses of sum_t x_t A, with the gradient of x_t that of its own token
        x_t = exp(clamp(S_k)) of t's turn k,   S_k = sum over the tokens of turn k of log(pi / pi_old)
        clamp(S_k) = min(S_k, drift L_k + width_high sqrt(L_k))                              where A > 0
        clamp(S_k) = max(S_k, drift L_k - width_low sqrt(L_k)), at most drift L_k + width_ceiling sqrt(L_k)  where A < 0

    Where:
        A turn is what the model writes between two messages of an environment, L_k its length in tokens, A its advantage.
        Under the old policy S_k is close to normal with mean mu L_k and variance sigma^2 L_k.

    Differences from GRPO:
        The ratio is the turn's, the product over its tokens, so a turn is clipped whole, and the other turns of its response
        still count. A response of one turn has the clip and the gradient of FSPO.

    Reference:
        Ours. The band is that of length-fair sequence policy optimisation, arXiv 2509.09177, taken by turn.
    """

    name = "fspo-turn"
    paper = "arXiv 2509.09177"
    scope = "token"
    needs: ClassVar = frozenset({"turn_ids"})
    watch: ClassVar = {
        "clip/fraction_turn_<k>": "level over the turns of an episode, if the band suits the model",
        "fairness/lre_turn_max": "compare it with another rule's only where clip/fraction is the same",
        "ratio/sigma_token": "a width in units of it is z; where ratio/mu_token times L_k is not small beside it, set drift",
        "learner/grad_clipped": "the norm of a sum over tokens grows with L: gradient-norm clipping acts on nearly every step",
    }

    reduction: Reduction = Field("sequence_mean_token_sum", description="how the objective becomes a scalar")
    width_low: Annotated[float, Width()] = Field(0.03, gt=0, le=10, description="width of the band below, per sqrt(token)")
    width_high: Annotated[float, Width()] = Field(0.03, gt=0, le=10, description="width of the band above, per sqrt(token)")
    drift: float = Field(0.0, ge=-1, le=1, description="centre of the band per token: the mean token log-ratio")
    width_ceiling: Annotated[float | None, Width()] = Field(
        0.09, gt=0, le=10, description="dual clip where A < 0: ceiling of the log-ratio per sqrt(token); null for none"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each turn's summed log-ratio; shapes as in `ClipInputs`, objective ``(B, T)``."""
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
    """The policies of this plugin."""
    return [FSPOTurn]
