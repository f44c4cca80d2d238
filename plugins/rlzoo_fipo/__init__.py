"""FIPO: GRPO's clip, with each token weighted by how much the policy has changed on the tokens after it."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Reduction, Width, hookimpl, ops


class FIPO(ClipPolicy):
    """Applies GRPO's clip and weights each token's advantage by how much likelier the rest of the response has become.

    Formula:
        J = mean over the step's tokens of min(r_t f_t A, clip(r_t, 1 - clip_low, 1 + clip_high) f_t A),   r_t = pi_t / pi_old_t
        f_t = sg clip(exp F_t, 1 - weight_low, 1 + weight_high),   but 1 where A < 0 and r_t > safety
        F_t = sum_{k >= t} 2^(-(k - t) / half_life) m_k log r_k,   m_k = 0 where A < 0 and r_k > dual_clip, else 1
        With `dual_clip` c, where A < 0: max(that minimum, c f_t A)

    Where:
        t counts the model's tokens, sg stops the gradient, and A = (R - mean) / std, with the mean and std of the rewards R
        in the group.

    Differences from GRPO:
        Credit differs within a response: tokens that lead to text that the policy now prefers get up to (1 + weight_high)
        times the advantage. The ceiling is higher, as in DAPO, and the mean is over all tokens. On the first update, f is 1.

    Reference:
        Future-KL Influenced Policy Optimization, arXiv 2603.19835, equations 5 to 8, with the settings of its 32B model:
        weights in [1, 1.2], a half-life of 32, clips of 0.2 and 0.28, and 10 for both the dual clip and the safety
        threshold. The dual clip is in the paper's text but not in equation 8. The released code also sets m_k to 0 where A >
        0, clips f to [0.8, 1] where the paper sets it to 1, and drops responses with more than one token above the dual
        clip.
    """

    name = "fipo"
    paper = "arXiv 2603.19835"
    scope = "token"
    watch: ClassVar = {
        "response/length_mean": "the weights should let responses grow",
        "ratio/sigma_token": "multiplied by about sqrt(half_life), this is the spread of F; near 0, the rule equals DAPO",
    }

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        0.28, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )
    dual_clip: float | None = Field(
        10.0, gt=1, le=1e6, description="largest ratio where A < 0, and the threshold of m_k; null for none"
    )
    weight_low: float = Field(0.0, ge=0, lt=1, description="a token's weight stays above 1 - weight_low")
    weight_high: float = Field(0.2, ge=0, le=100, description="a token's weight stays below 1 + weight_high")
    half_life: float = Field(32.0, gt=0, le=1e6, description="distance in tokens at which a later token counts half")
    safety: float = Field(10.0, gt=1, le=1e6, description="a token with A < 0 and a larger ratio has weight 1")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Weight and clip each token and return a ``(B, T)`` objective."""
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        judged = log_ratio.detach()
        band = ops.ratio_band(self.clip_low, self.clip_high, self.dual_clip, like=log_ratio)
        left_out = (advantages < 0) & (judged > (torch.inf if band.ceiling is None else band.ceiling))
        future = discounted_future(torch.where(left_out, 0.0, judged), inputs.response_mask, self.half_life)
        weight = ops.limited_exp(future).clamp(1 - self.weight_low, 1 + self.weight_high)
        runaway = (advantages < 0) & (ops.limited_exp(judged) > self.safety)
        result = ops.clipped_surrogate(log_ratio, torch.where(runaway, 1.0, weight) * advantages, band)
        return ClipResult(result.objective, result.log_ratio, result.clipped, band, {"future_weight": weight})


def discounted_future(values: Tensor, response_mask: Tensor, half_life: float) -> Tensor:
    """Compute ``sum_{k >= t} 2^(-(k - t) / half_life) values_k`` over a response's tokens, ``(B, T)``, with 0 where masked.

    The sum is built up from windows of 1, 2, 4, ... tokens so that it cannot overflow for long responses.
    """
    order = (~response_mask).long().argsort(dim=-1, stable=True)  # move the response's tokens to the front, keeping their order
    summed = torch.where(response_mask, values, 0.0).gather(-1, order)
    window = 1
    while window < values.shape[-1]:
        later = torch.nn.functional.pad(summed[:, window:], (0, window))
        summed = summed + 2 ** (-window / half_life) * later
        window *= 2
    return torch.where(response_mask, torch.zeros_like(summed).scatter(-1, order, summed), 0.0)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [FIPO]
