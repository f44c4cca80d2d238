"""Asks a clip policy, and checks the answer: what a plugin may get wrong stops the run here, before it reaches the weights."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlzoo.errors import PolicyError, UserError
from rlzoo.policy import ClipPolicy, ClipStats
from rlzoo.reductions import StepCounts, reduce_objective
from rlzoo.types import ClipInputs, ClipResult

READ_ONLY = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "response_mask")


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a policy makes of some responses, reduced.

    Example:
        ``(judgement.gradient * log_probs).sum()`` has the gradient of J for the model's parameters.
    """

    result: ClipResult
    objective: float  # these responses' share of the step's J
    gradient: Tensor  # (B, T) g = dJ/dlog_probs
    on_policy_gradient: Tensor  # (B, T) what g would be at ratio 1, which tells by how much it is weighted


def judgement(
    policy: ClipPolicy,
    inputs: ClipInputs,
    counts: StepCounts,
    max_length: int | None = None,
    weights: Tensor | None = None,
) -> Judgement:
    """Ask a policy about some responses of a step, and differentiate its answer.

    Args:
        policy: any.
        inputs: for a rule of scope "batch", of the whole step; whatever gradient they carry is left alone.
        counts: denominators of the whole step.
        max_length: constant of the reduction ``constant_length``, in tokens.
        weights: factors of the objective, ``(B, 1)``, or ``(B, T)`` for one per token.

    Raises:
        PolicyError: as `judge` and `gradient_of`.
    """
    result, objective, gradient = differentiated(policy, inputs, counts, max_length, weights)
    at_ratio_1 = replace(inputs, log_probs=inputs.old_log_probs.to(inputs.log_probs.dtype))
    *_, on_policy_gradient = differentiated(policy, at_ratio_1, counts, max_length, weights)
    return Judgement(result, objective.item(), gradient, on_policy_gradient)


def differentiated(
    policy: ClipPolicy,
    inputs: ClipInputs,
    counts: StepCounts,
    max_length: int | None = None,
    weights: Tensor | None = None,
) -> tuple[ClipResult, Tensor, Tensor]:
    """What a policy answers, its share of J, and g = dJ/dlog_probs ``(B, T)``; see `judgement`."""
    with torch.enable_grad():
        leaf = replace(inputs, log_probs=inputs.log_probs.detach().requires_grad_())
        result = judge(policy, leaf)
        weighted = _weighted(policy, result.objective, weights)
        objective = reduce_objective(weighted, inputs.response_mask, policy.reduction, counts, max_length)
        return result, objective, gradient_of(policy, objective, leaf, result)


def _weighted(policy: ClipPolicy, objective: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return objective
    if weights.shape[-1] > objective.shape[-1]:
        raise UserError(
            f"mismatch.pool='token': {policy.name} has one objective per response, which has no weight for each token; "
            "use mismatch.pool=sum or mismatch.pool=mean"
        )
    return objective * weights


def judge(policy: ClipPolicy, inputs: ClipInputs) -> ClipResult:
    """The policy's result for these inputs, in the shapes and types of the contract.

    Raises:
        PolicyError: the policy raised, changed its inputs, or answered something else than the contract allows.
    """
    before = _versions(inputs)
    try:
        result = policy(inputs)
    except Exception as error:
        raise PolicyError(policy.name, f"raised {_told(error)}") from error
    changed = [name for name, version in before.items() if getattr(inputs, name)._version != version]
    if changed:
        raise PolicyError(policy.name, f"modified its input {changed[0]}; work on a copy")
    problem = _form_problem(policy, inputs, result)
    if problem:
        raise PolicyError(policy.name, problem)
    return result


def gradient_of(policy: ClipPolicy, total: Tensor, inputs: ClipInputs, result: ClipResult) -> Tensor:
    """``d total / d log_probs``, ``(B, T)``, given what the policy answered; finite wherever its inputs are.

    A policy may not answer finite log-probabilities with NaN or infinity. Where the model's own are not finite, neither is
    what is returned, so that the step is skipped whatever the policy made of them.

    Raises:
        PolicyError: the objective does not depend on log_probs, or it or its gradient is not finite.
    """
    try:
        (gradient,) = torch.autograd.grad(total, inputs.log_probs)
    except RuntimeError as error:
        raise PolicyError(policy.name, "gave an objective without a gradient: it must depend on log_probs") from error
    mask = inputs.response_mask
    # one number tells whether anything is wrong; which response it was is asked only then
    read = torch.where(mask, inputs.log_probs.detach(), 0.0).sum()
    if bool(torch.isfinite(read + total.detach() + gradient.sum())):
        return gradient
    if not bool(torch.isfinite(inputs.log_probs[mask]).all()):
        return torch.where(mask, torch.nan, gradient)
    objective = result.objective if result.objective.shape == mask.shape else result.objective.expand_as(mask)
    bad = ~(torch.isfinite(objective) & torch.isfinite(gradient)) & mask
    if not bool(bad.any()):  # finite numbers whose sum is not: nothing the policy did
        return gradient
    row = int(bad.any(dim=-1).nonzero()[0])
    length, advantage = int(mask[row].sum()), float(inputs.advantages[row].sum())
    what = "an objective" if not bool(torch.isfinite(objective[row][mask[row]]).all()) else "a gradient"
    number = int(bad.any(dim=-1).sum())
    raise PolicyError(
        policy.name,
        f"gave {what} that is not finite for {number} of {len(mask)} responses, the first of {length} tokens "
        f"with advantage {advantage:g} and summed log-ratio {_summed_log_ratio(inputs, row):.4g}",
    )


def updated(policy: ClipPolicy, stats: ClipStats) -> ClipPolicy:
    """The policy for the next update.

    Raises:
        PolicyError: it raised, or gave something that is not a policy of its kind.
    """
    try:
        following = policy.updated(stats)
    except Exception as error:
        raise PolicyError(policy.name, f"raised in updated: {_told(error)}") from error
    if type(following) is not type(policy):
        raise PolicyError(policy.name, f"gave {following!r} from updated, not a {type(policy).__name__}")
    return following


def _versions(inputs: ClipInputs) -> dict[str, int]:
    """How often each tensor was modified in place, as torch counts it."""
    return {name: getattr(inputs, name)._version for name in READ_ONLY if getattr(inputs, name) is not None}


def _form_problem(policy: ClipPolicy, inputs: ClipInputs, result: object) -> str | None:
    """What is wrong with the form of an answer, or None."""
    if not isinstance(result, ClipResult):
        return f"answered with a {type(result).__name__}, not a ClipResult"
    size, length = inputs.log_probs.shape
    either = ((size, 1), (size, length))
    allowed = {"token": either[1:], "sequence": either[:1], "batch": either}[policy.scope]
    for name, shapes in (("objective", allowed), ("log_ratio", either), ("clipped", either)):
        tensor = getattr(result, name)
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        if got not in shapes:
            return f"gave {name} of shape {got}, expected {' or '.join(map(str, shapes))}"
    if result.objective.dtype != torch.float32:
        return f"gave an objective of type {result.objective.dtype}, expected torch.float32"
    if result.clipped.dtype != torch.bool:
        return f"gave clipped of type {result.clipped.dtype}, expected torch.bool"
    return None


def _summed_log_ratio(inputs: ClipInputs, row: int) -> float:
    mask = inputs.response_mask[row]
    return float((inputs.log_probs.detach() - inputs.old_log_probs)[row][mask].sum())


def _told(error: Exception) -> str:
    """An exception in one line, with where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})".replace("\n", " ")
