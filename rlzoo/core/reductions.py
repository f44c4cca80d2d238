"""Reduces objectives to a scalar, with denominators from the whole optimizer step, and estimates the KL divergence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.errors import UserError

Reduction = Literal["token_mean", "prompt_mean", "sequence_mean", "sequence_mean_token_sum", "constant_length"]
"""How the objective becomes a scalar; see `reduce_objective`."""

PER_TOKEN = ("token_mean", "prompt_mean")
"""The reductions that need a per-token objective."""

KLEstimator = Literal["k1", "k2", "k3", "unbiased_k3"]
"""Per-token estimators of KL(pi || pi_ref) (Schulman, "Approximating KL Divergence"): k1 = log(pi/pi_ref), k2 = k1^2 / 2,
k3 = exp(-k1) - 1 + k1, unbiased_k3 = (pi/pi_old) k3 (DeepSeek-V3.2, arXiv 2512.02556, equation 7)."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The denominators for one optimizer step, counted across all its micro-batches and ranks.

    Example:
        >>> import torch
        >>> mask = torch.arange(9) < torch.tensor([[5], [2], [9]])
        >>> StepCounts.of(mask)
        StepCounts(num_responses=3, num_tokens=16)
    """

    num_responses: int  # number of responses with at least one token
    num_tokens: int
    num_prompts: int = field(default=0, repr=False)  # number of prompts whose responses have tokens; only for ``prompt_mean``
    # (B, 1) number of tokens in all responses to each row's prompt
    prompt_tokens: Tensor | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, response_mask: Tensor, group_ids: Tensor | None = None) -> StepCounts:
        """Count the responses and tokens in a whole optimizer step, given its mask ``(B, T)``.

        With ``group_ids``, ``(B, 1)``, also count the prompts and the tokens of each prompt's responses.
        """
        lengths = response_mask.sum(dim=-1)
        counts = cls(int((lengths > 0).sum()), int(lengths.sum()))
        if group_ids is None:
            return counts
        num_prompts = len(torch.unique(group_ids[lengths > 0]))
        return replace(counts, num_prompts=num_prompts, prompt_tokens=ops.group_sum(lengths[:, None], group_ids))

    def select(self, rows: Tensor) -> StepCounts:
        """Return the same counts for some rows of the step, ``(R,)``, such as those of a micro-batch."""
        return self if self.prompt_tokens is None else replace(self, prompt_tokens=self.prompt_tokens[rows])


def is_per_response(objective: Tensor, response_mask: Tensor) -> bool:
    """Return whether an objective has one value per response, ``(B, 1)``, although responses have several tokens."""
    return objective.shape[-1] == 1 and response_mask.shape[-1] != 1


def reduce_objective(
    objective: Tensor, response_mask: Tensor, reduction: Reduction, counts: StepCounts, max_length: int | None = None
) -> Tensor:
    """Compute a micro-batch's share of the step's scalar objective. The shares of all micro-batches sum to the objective.

    | reduction | ``(B, T)`` objective | ``(B, 1)`` objective |
    |---|---|---|
    | token_mean | sum over tokens / tokens of the step | error |
    | prompt_mean | mean over prompts of (sum over tokens / tokens of the prompt's responses) | error |
    | sequence_mean | mean over responses of the mean over tokens | mean over responses |
    | sequence_mean_token_sum | mean over responses of the sum over tokens | mean over responses |
    | constant_length | sum over tokens / (responses x max_length) | sum / (responses x max_length) |

    Args:
        objective: ``(B, T)`` or ``(B, 1)``.
        response_mask: ``(B, T)`` bool.
        reduction: one of the five reductions above; ``prompt_mean`` is from ScaleRL (arXiv 2510.13786).
        counts: denominators of the whole step, not of the micro-batch.
        max_length: the divisor for ``constant_length`` (arXiv 2503.20783), in tokens.

    Raises:
        UserError: the reduction is unknown, the objective is per response for token_mean or prompt_mean, the token counts of
            the prompts are missing for prompt_mean, or max_length is missing for constant_length.
    """
    if reduction not in get_args(Reduction):
        raise UserError(f"unknown reduction {reduction!r} (known: {', '.join(get_args(Reduction))})")
    per_response = is_per_response(objective, response_mask)
    if reduction in PER_TOKEN and per_response:
        raise UserError(f"reduction {reduction!r} needs a per-token objective, but this rule has a per-response objective")
    if reduction == "prompt_mean":
        if counts.prompt_tokens is None:
            raise UserError("reduction 'prompt_mean' needs to know which responses have the same prompt (group_ids)")
        shares = ops.sequence_sum(objective, response_mask) / counts.prompt_tokens.clamp(min=1).to(objective.device)
        return shares.sum() / max(counts.num_prompts, 1)
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
    """Estimate the per-token KL to a reference model in nats. The result has the shape of ``log_probs`` and is differentiable.

    k1 is unbiased with high variance, k2 is biased with low variance, and k3 is unbiased with low variance and never negative.
    These properties do not carry over to the gradients when an estimator is used as a *loss*. In expectation, the gradient
    of k2 equals the gradient of the KL, the gradient of k1 is zero (arXiv 2510.01555), and the gradient of k3 equals the
    gradient of KL(pi_ref || pi). The ratio in ``unbiased_k3`` carries a gradient, so both the estimate and its gradient
    are unbiased for KL(pi || pi_ref) under any sampling policy.

    All log-ratios are clamped to +-`rlzoo.ops.LOG_RATIO_LIMIT`. A token whose log-ratio to the reference is beyond the
    limit has a finite estimate and zero gradient, so the update comes from the other tokens.

    Args:
        log_probs: log-probs of the current model.
        ref_log_probs: log-probs of the reference model, with the same shape.
        estimator: name of the estimator.
        old_log_probs: log-probs of the sampling model; required by ``unbiased_k3``.

    Raises:
        UserError: the estimator is unknown.
    """
    if estimator not in get_args(KLEstimator):
        raise UserError(f"unknown KL estimator {estimator!r} (known: {', '.join(get_args(KLEstimator))})")
    k1 = (log_probs - ref_log_probs).clamp(-ops.LOG_RATIO_LIMIT, ops.LOG_RATIO_LIMIT)
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return k1.square() / 2
    k3 = torch.expm1(-k1) + k1
    if estimator == "k3":
        return k3
    assert old_log_probs is not None, "the learner provides them"
    ratio = ops.limited_exp(log_probs - old_log_probs)
    return torch.where(k1.abs() < ops.LOG_RATIO_LIMIT, ratio, ratio.detach()) * k3
