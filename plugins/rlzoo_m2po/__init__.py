"""M2PO: drops the tokens furthest out until the second moment of the log-ratio is within its bound."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class M2PO(ClipPolicy):
    """Drops the most extreme tokens of the step until the mean square of the log-ratio is small enough.

    Formula:
        J = mean over the step's tokens of M_t r_t A,   r_t = pi_t / pi_old_t
        M drops the tokens with the largest (log r_t)^2, until the mean of (log r_t)^2 is at most `threshold`

    Where:
        Mean and drops concern the tokens that the advantage pushes further out: A > 0 and r_t > 1, or A < 0 and r_t < 1.
        Tokens of equal (log r_t)^2 stay or go together.

    Differences from GRPO:
        Where the cut lies is decided by all tokens of the step together, so nothing is cut while the policies are close
        and only outliers when they are not. Mean over all tokens.

    Reference:
        Prosperity before Collapse, arXiv 2510.01161, algorithm 1; threshold 0.04 as there. Its published code clamps at
        the value of the last token kept, never tighter than 0.7 to 1.5; the gradient is the paper's but for that floor.
    """

    name = "m2po"
    paper = "arXiv 2510.01161"
    scope = "batch"
    watch: ClassVar = {
        "clip/fraction": "0 while the policies are close; the share of outliers when they are not",
        "ratio/sigma_token": "its square, over the tokens pushed outwards, is what the threshold bounds",
    }

    reduction: Reduction = Field("token_mean", description="how the objective becomes a scalar")
    threshold: Annotated[float, Width()] = Field(0.04, gt=0, le=400, description="largest mean of the squared token log-ratio")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Drop the step's outliers; shapes as in `ClipInputs`, objective ``(B, T)``."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        pushed_out = inputs.response_mask & (log_ratio.detach() * advantages > 0)
        square = torch.where(pushed_out, log_ratio.detach().square(), torch.inf)
        dropped = pushed_out & (square >= first_beyond(square, self.threshold))
        objective = ops.limited_exp(log_ratio) * advantages
        return ClipResult(torch.where(dropped, torch.zeros_like(objective), objective), log_ratio.detach(), dropped)


def first_beyond(square: Tensor, threshold: float) -> Tensor:
    """The smallest value whose mean with all smaller ones exceeds the threshold; infinite where none does."""
    ascending = torch.cat([square.flatten().sort().values.double(), square.new_full((1,), torch.inf, dtype=torch.float64)])
    mean = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=square.device)
    first = (mean > threshold).int().argmax()
    return ascending.gather(0, first[None]).float()


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [M2PO]
