"""LUSPO: GSPO with each response's objective multiplied by its length."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class LUSPO(ClipPolicy):
    """Clips the geometric mean of a response's token ratios, and weights the response by its length.

    Formula:
        J = mean over responses of L min(s A, clip(s, 1 - clip_low, 1 + clip_high) A),   s = exp(S / L)

    Where:
        S = sum_t log(pi_t / pi_old_t). L is the response's length in tokens, and A is its advantage.

    Differences from GRPO:
        There is one ratio per response, and tokens count equally in long and short responses. In GRPO and GSPO, the mean
        over a response's tokens gives the tokens of long responses less weight.

    Reference:
        Length-Unbiased Sequence Policy Optimization, arXiv 2602.05261, with widths of 2e-3 and 2.5e-3 as in its section 5.1.
    """

    name = "luspo"
    paper = "arXiv 2602.05261"
    scope = "sequence"
    watch: ClassVar = {
        "response/length_mean": "the factor L should keep it from falling",
        "clip/fraction": "equal to that of gspo at the same widths",
        "learner/grad_norm": "grows with length; compare it with other rules before reusing their learning rate",
    }

    clip_low: Annotated[float, Width()] = Field(2e-3, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        2.5e-3, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each response's mean log-ratio, and return a ``(B, 1)`` objective."""
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        result = ops.clipped_surrogate(log_ratio, inputs.advantages, band)
        return dataclasses.replace(result, objective=ops.lengths(inputs.response_mask) * result.objective)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the clip policies that this plugin provides."""
    return [LUSPO]
