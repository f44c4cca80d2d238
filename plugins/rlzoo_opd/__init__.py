"""OPD: on-policy distillation, a policy gradient whose advantages come from a teacher."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, Reduction, hookimpl, ops


class OPD(ClipPolicy):
    """Maximises each token's importance ratio times its log-ratio to a teacher, without a clip.

    Formula:
        J = mean over the step's tokens of r_t A_t,   r_t = pi_t / pi_old_t

    Where:
        A_t = log pi_T_t - log pi_old_t, with the teacher pi_T (`model.reference`). Rewards are not used.

    Differences from GRPO:
        The advantages are per token and come from a teacher. There is no clip, and the mean is over all tokens.

    Reference:
        On-Policy Distillation, Thinking Machines Lab, 2025 (thinkingmachines.ai/blog/on-policy-distillation).
    """

    name = "opd"
    paper = "none"
    scope = "token"
    watch: ClassVar = {
        "reward/kl": "the mean of -A_t: an estimate of the reverse KL per token, which falls towards 0",
        "ratio/sigma_token": "how far off-policy the data is; no clip limits it",
    }
    exempt: ClassVar = {"clipped_means_no_gradient": "nothing is clipped"}

    advantage: Advantage = Field("reverse_kl", description="how a response's tokens get their advantages")
    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Weight each token's advantage by its ratio and return a ``(B, T)`` objective."""
        return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [OPD]
