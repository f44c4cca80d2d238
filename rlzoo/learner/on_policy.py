"""Computes a rule's gradient at ratio 1, which is the baseline for its importance weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlzoo.core.errors import PolicyError
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.reductions import StepCounts, is_per_response, reduce_objective
from rlzoo.core.types import ClipInputs, ClipResult
from rlzoo.learner.judge import judge, judgement


def on_policy_gradient(
    policy: ClipPolicy,
    inputs: ClipInputs,
    result: ClipResult,
    counts: StepCounts,
    max_length: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute g = dJ/dlog_probs ``(B, T)`` at ratio 1 without evaluating the rule again on the batch.

    At ratio 1, the gradient of every rule is A times a positive constant per response that depends only on the length and
    the sign of A. The constant is measured on one synthetic response per length and sign. If a rule needs more than
    log-probs and advantages, it is instead evaluated a second time on the batch at ratio 1.

    Args:
        policy: the rule.
        inputs: the rule's inputs.
        result: the rule's result. The shape of its objective determines the denominator of the reduction.
        counts: denominators for the whole step.
        max_length: constant of the reduction ``constant_length``, in tokens.
        weights: factors for the objective.
    """
    if policy.needs:
        at = inputs.old_log_probs
        at_ratio_1 = replace(inputs, log_probs=at, rollout_log_probs=at)
        return judgement(policy, at_ratio_1, counts, max_length, weights).gradient
    mask, device = inputs.response_mask, inputs.log_probs.device
    lengths = mask.sum(-1).tolist()
    measured = _constants(policy, sorted(set(lengths) - {0}), mask.shape[-1], device)
    constants = torch.tensor([measured.get(length, (0.0, 0.0)) for length in lengths], device=device)
    constant = torch.where(inputs.advantages > 0, constants[:, :1], constants[:, 1:])
    with torch.enable_grad():
        leaf = torch.zeros_like(result.objective, requires_grad=True)
        total = reduce_objective(leaf, mask, policy.reduction, counts, max_length)
        (share,) = torch.autograd.grad(total, leaf)
    gradient = share * constant * inputs.advantages * (1.0 if weights is None else weights.to(device))
    return torch.where(mask, gradient, 0.0)


def _constants(policy: ClipPolicy, lengths: list[int], size: int, device: torch.device) -> dict[int, tuple[float, float]]:
    """Return the constants for A > 0 and A < 0 by length. They are measured on responses padded to the batch's width."""
    number = len(lengths)
    if not number:
        return {}
    mask = (torch.arange(size, device=device) < torch.tensor(lengths, device=device)[:, None]).repeat(2, 1)
    at = torch.where(mask, -1.0, 0.0)
    signs = torch.tensor([1.0] * number + [-1.0] * number, device=device)[:, None]
    with torch.enable_grad():
        leaf = at.clone().requires_grad_()
        try:
            objective = judge(policy, ClipInputs(leaf, at, signs, mask, rollout_log_probs=at.clone())).objective
        except PolicyError as error:
            error.add_note("on synthetic responses at ratio 1")
            raise
        (gradient,) = torch.autograd.grad(torch.where(mask, objective, 0.0).sum(), leaf)
    # a rule may drop tokens at random even at ratio 1, but the maximum comes from a token that was not dropped
    largest = torch.where(mask, gradient.abs(), 0.0).amax(-1)
    if is_per_response(objective, mask):
        largest = largest / mask.sum(-1)  # the sum above counted the objective once per token
    constants = zip(lengths, largest[:number].tolist(), largest[number:].tolist(), strict=True)
    # if a constant is 0, every token was dropped
    return {length: (positive, negative) for length, positive, negative in constants if positive and negative}
