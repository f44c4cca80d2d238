"""DRO: a quadratic penalty on every token's log-ratio instead of a clip."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rlzoo import Advantage, ClipInputs, ClipPolicy, ClipResult, Reduction, hookimpl, ops


class DRO(ClipPolicy):
    """Maximises each token's log-probability times its advantage, with a penalty on the squared log-ratio.

    Formula:
        J = mean over the step's tokens of A log pi_t - (beta / 2) (log r_t)^2,   r_t = pi_t / pi_old_t

    Where:
        A = R - mean of the rewards R in the group. The gradient is zero at log r_t = A / beta and reverses beyond it, where
        the token counts as clipped.

    Differences from GRPO:
        The log-ratio is not exponentiated, and there is no clip. The penalty on every token acts as the trust region.
        Advantages are not divided by std, and the mean is over all tokens.

    Reference:
        Direct Reward Optimisation, arXiv 2405.19107, applied per token, as in verl's implementation, which leaves beta to
        the user. The value of 0.05 is from an example in Tinker's documentation. The paper learns a value function, which the
        group's mean reward replaces here.
    """

    name = "dro"
    paper = "arXiv 2405.19107"
    scope = "token"
    learns_without_advantages = True
    watch: ClassVar = {
        "clip/fraction": "the share of tokens that are pulled back",
        "ratio/sigma_token": "multiplied by beta, this is the penalty's gradient, which A must exceed",
    }
    exempt: ClassVar = {
        "advantages_scale_the_gradient": "the penalty does not grow with the advantage",
        "zero_advantage_zero_gradient": "the penalty acts at any advantage",
        "clipped_means_no_gradient": "the gradient reverses and is never cut",
    }

    advantage: Advantage = Field("group_mean", description="how a group's rewards become advantages")
    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    beta: float = Field(0.05, gt=0, le=1e6, description="weight of the penalty")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Penalise each token's log-ratio and return a ``(B, T)`` objective."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        pull = self.beta * log_ratio.detach()
        reversed_ = ((advantages > 0) & (pull > advantages)) | ((advantages < 0) & (pull < advantages))
        objective = advantages * ops.log_probs(inputs) - self.beta / 2 * log_ratio.square()
        return ClipResult(objective, log_ratio.detach(), reversed_)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [DRO]
