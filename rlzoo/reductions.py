"""From an unreduced objective to a scalar, with the counts of the whole optimizer step; and the KL estimators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from rlzoo import ops
from rlzoo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant_length"]
"""How the objective becomes a scalar; see `reduce_objective`."""

KLEstimator = Literal["k1", "k2", "k3", "unbiased_k3"]
"""Estimators of KL(pi || pi_ref) per token (Schulman, "Approximating KL Divergence"): k1 = log(pi/pi_ref), k2 = k1^2 / 2,
k3 = exp(-k1) - 1 + k1, unbiased_k3 = (pi/pi_old) k3 (DeepSeek-V3.2, arXiv 2512.02556, equation 7)."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The denominators of one optimizer step, over all its micro-batches and ranks.

    Example:
        Three responses of 5, 2 and 9 tokens: ``StepCounts(num_responses=3, num_tokens=16)``.
    """

    num_responses: int  # responses with at least one token
    num_tokens: int

    @classmethod
    def of(cls, response_mask: Tensor) -> StepCounts:
        """Count the responses and tokens of a whole optimizer step, given its mask ``(B, T)``."""
        lengths = response_mask.sum(dim=-1)
        return cls(int((lengths > 0).sum()), int(lengths.sum()))


def is_per_response(objective: Tensor, response_mask: Tensor) -> bool:
    """Whether an objective has one value per response, ``(B, 1)``, where responses have several tokens."""
    return objective.shape[-1] == 1 and response_mask.shape[-1] != 1


def reduce_objective(
    objective: Tensor, response_mask: Tensor, reduction: Reduction, counts: StepCounts, max_length: int | None = None
) -> Tensor:
    """This micro-batch's share of the step's scalar objective; shares of all micro-batches add up to the whole.

    | reduction | ``(B, T)`` objective | ``(B, 1)`` objective |
    |---|---|---|
    | token_mean | sum over tokens / tokens of the step | refused |
    | sequence_mean | mean over responses of the mean over tokens | mean over responses |
    | sequence_mean_token_sum | mean over responses of the sum over tokens | mean over responses |
    | constant_length | sum over tokens / (responses x max_length) | sum / (responses x max_length) |

    Args:
        objective: ``(B, T)`` or ``(B, 1)``.
        response_mask: ``(B, T)`` bool.
        reduction: which of the four.
        counts: denominators of the whole step, never of the micro-batch.
        max_length: the constant of ``constant_length`` (arXiv 2503.20783), in tokens.

    Raises:
        UserError: an unknown reduction, token_mean of a per-response objective, or constant_length without its constant.
    """
    if reduction not in get_args(Reduction):
        raise UserError(f"unknown reduction {reduction!r} (known: {', '.join(get_args(Reduction))})")
    per_response = is_per_response(objective, response_mask)
    if reduction == "token_mean" and per_response:
        raise UserError("reduction 'token_mean' needs an objective per token; this policy's is per response")
    num_responses = max(counts.num_responses, 1)
    if per_response:
        total = torch.where(response_mask.any(-1, keepdim=True), objective, torch.zeros_like(objective)).sum()
    elif reduction == "sequence_mean":
        total = ops.sequence_mean(objective, response_mask).sum()
    else:
        total = ops.sequence_sum(objective, response_mask).sum()
    if reduction == "token_mean":
        return total / max(counts.num_tokens, 1)
    if reduction == "constant_length":
        if max_length is None:
            raise UserError("reduction 'constant_length' needs max_length, the number of tokens to divide by")
        return total / (num_responses * max_length)
    return total / num_responses


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator, old_log_probs: Tensor | None = None
) -> Tensor:
    """KL to a reference per token, in nats, same shape; differentiable in ``log_probs``.

    k1 is unbiased with high variance, k2 biased with low variance, k3 unbiased with low variance and never negative.
    The gradient that an estimator gives as a *loss* is another matter: in expectation, k2's is the KL's own, k1's is
    zero (arXiv 2510.01555), and k3's is that of the KL in the other direction. The ratio in ``unbiased_k3`` carries its
    gradient, which makes both value and gradient those of KL(pi || pi_ref), whatever the policy that sampled.

    Args:
        log_probs: of the current model.
        ref_log_probs: of the reference, same shape.
        estimator: which of them.
        old_log_probs: of the model that sampled; needed by ``unbiased_k3``, whose log-ratio is limited to
            +-`rlzoo.ops.LOG_RATIO_LIMIT`.

    Raises:
        UserError: an unknown estimator.
    """
    if estimator not in get_args(KLEstimator):
        raise UserError(f"unknown KL estimator {estimator!r} (known: {', '.join(get_args(KLEstimator))})")
    k1 = log_probs - ref_log_probs
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return k1.square() / 2
    k3 = torch.expm1(-k1) + k1
    if estimator == "k3":
        return k3
    assert old_log_probs is not None, "the learner gives them"
    return ops.limited_exp(log_probs - old_log_probs) * k3
