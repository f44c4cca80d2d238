"""M2PO: clips the step's tokens at a log-ratio that keeps the second moment of the log-ratios within a bound."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class M2PO(ClipPolicy):
    """Clips the step's most extreme tokens at a log-ratio that keeps the mean square of the clipped log-ratios within a bound.

    Formula:
        J = mean over the step's tokens of min(r_t A, clip(r_t, exp(-tau), exp(tau)) A),   r_t = pi_t / pi_old_t
        tau = the largest |log r_i| with   mean over i of min((log r_i)^2, tau^2) <= `threshold`;   0 if there is none

    Where:
        i runs over the tokens of the step that their advantage pushes further away from ratio 1: A > 0 and r > 1, or A < 0
        and r < 1. Of these, tokens with |log r_i| > tau are clipped. No token is clipped while the mean of (log r_i)^2 is
        within `threshold`.

    Differences from GRPO:
        The threshold depends on all tokens in the step. Nothing is clipped while the policies are close, and only
        outliers are clipped otherwise. The mean is over all tokens.

    Reference:
        Prosperity before Collapse, arXiv 2510.01161, with its threshold of 0.04, as in the authors' code
        (github.com/Infini-AI-Lab/M2PO). Algorithm 1 of the paper bounds the mean square of the kept tokens and clips fewer
        tokens.
    """

    name = "m2po"
    paper = "arXiv 2510.01161"
    scope = "batch"
    watch: ClassVar = {
        "clip/fraction": "0 while the policies are close, and the share of outliers otherwise",
        "ratio/sigma_token": "the threshold bounds the square of this, taken over the tokens that are pushed outwards",
    }

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    threshold: Annotated[float, Width()] = Field(
        0.04, gt=0, le=400, description="largest mean square of the token log-ratios after clipping"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip the step's outliers and return a ``(B, T)`` objective."""
        log_ratio = ops.log_ratio(inputs)
        judged = log_ratio.detach()
        pushed_out = inputs.response_mask & (judged * inputs.advantages.detach().float() > 0)
        edge = clip_edge(torch.where(pushed_out, judged.abs(), 0.0), pushed_out.sum(), self.threshold)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


def clip_edge(distances: Tensor, number: Tensor, threshold: float) -> Tensor:
    """Return the largest distance at which capping all distances keeps their mean square within the threshold.

    Args:
        distances: non-negative tensor of any shape; 0 for entries that do not count.
        number: number of entries that count.
        threshold: bound on the mean of ``min(distance, edge)^2``, where ``edge`` is the result.

    Returns:
        A scalar, which is 0 if even the smallest distance that counts is too large.
    """
    ascending = distances.flatten().sort().values
    squares = ascending.double().square()
    larger = torch.arange(len(squares) - 1, -1, -1, device=squares.device)
    capped = squares.cumsum(0) + squares * larger  # sum of squares if every distance is capped at this distance
    return torch.where(capped <= threshold * number, ascending, 0.0).amax()


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [M2PO]
