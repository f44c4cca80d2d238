"""OPMD: online policy mirror descent with a quadratic penalty on the response's log-ratio."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, hookimpl, ops


class OPMD(ClipPolicy):
    """Maximises the response's log-ratio times its advantage, with a penalty on the squared log-ratio.

    Formula:
        J = mean over responses of A S - (tau / 2) S^2,   S = sum_t log(pi_t / pi_old_t)

    Where:
        A = R - mean of the rewards R in the group. The gradient is zero at S = A / tau and reverses beyond it, where the
        response counts as clipped.

    Differences from GRPO:
        The log-ratio is not exponentiated, and there is no clip. The penalty on the whole response acts as the trust region.

    Reference:
        Kimi k1.5, arXiv 2501.12599, section 2.3.2. The paper's reference model is the policy at the start of the iteration.
        The paper does not state tau. The default of 0.1 is rlzoo's choice.
    """

    name = "opmd"
    paper = "arXiv 2501.12599"
    scope = "sequence"
    learns_without_advantages = True
    watch: ClassVar = {
        "clip/fraction": "the share of responses that are pulled back",
        "ratio/mu_token": "multiplied by L and tau, this is the penalty's gradient, which A must exceed",
    }
    exempt: ClassVar = {
        "zero_advantage_zero_gradient": "the penalty acts at any advantage",
        "clipped_means_no_gradient": "the gradient reverses and is never cut",
    }

    advantage: Advantage = Field("group_mean", description="how a group's rewards become advantages")
    tau: float = Field(0.1, gt=0, le=1e6, description="weight of the penalty")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Penalise each response's summed log-ratio and return a ``(B, 1)`` objective."""
        total = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        advantages = inputs.advantages.detach().float()
        pull = self.tau * total.detach()
        reversed_ = ((advantages > 0) & (pull > advantages)) | ((advantages < 0) & (pull < advantages))
        return ClipResult(advantages * total - self.tau / 2 * total.square(), total.detach(), reversed_)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [OPMD]
