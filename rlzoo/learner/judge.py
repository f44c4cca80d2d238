"""Evaluates a rule and checks its result so that a faulty plugin stops the run before the weights change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlzoo.core.errors import PolicyError, UserError, located
from rlzoo.core.policy import ClipPolicy, ClipStats, form_problem, limited_to_needs
from rlzoo.core.reductions import StepCounts, reduce_objective
from rlzoo.core.types import ClipBand, ClipInputs, ClipResult


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of evaluating a rule on some responses."""

    inputs: ClipInputs  # the rule's inputs, detached
    result: ClipResult  # detached
    objective: Tensor  # scalar: these responses' share of the step's J
    gradient: Tensor  # (B, T) g = dJ/dlog_probs

    @classmethod
    def concat(cls, policy: ClipPolicy, judgements: Sequence[Judgement]) -> Judgement:
        """Join the judgements of one minibatch's micro-batches.

        Raises:
            PolicyError: the rule reported different metrics for different micro-batches.
        """
        first, *others = (sorted(one.result.metrics) for one in judgements)
        for other in others:
            if other != first:
                raise PolicyError(
                    policy.name,
                    f"returned metrics {other} for some responses and {first} for others; "
                    "return the same metrics for all responses",
                )
        if not others:
            return judgements[0]
        objective = torch.stack([one.objective for one in judgements]).sum()
        inputs, result = _concat([one.inputs for one in judgements]), _concat([_expanded(one.result) for one in judgements])
        return cls(inputs, result, objective, torch.cat([one.gradient for one in judgements]))


def judgement(
    policy: ClipPolicy,
    inputs: ClipInputs,
    counts: StepCounts,
    max_length: int | None = None,
    weights: Tensor | None = None,
) -> Judgement:
    """Evaluate a rule once and differentiate its objective with respect to the log-probs.

    Args:
        policy: the rule.
        inputs: inputs of the rule, for the whole step if its scope is "batch". No gradient flows into them.
        counts: denominators for the whole step.
        max_length: constant of the reduction ``constant_length``, in tokens.
        weights: factors for the objective: ``(B, 1)``, one per response, or ``(B, T)``, one per token.

    Raises:
        PolicyError: see `judge` and `gradient_of`.
    """
    with torch.enable_grad():
        leaf = replace(inputs, log_probs=inputs.log_probs.detach().requires_grad_())
        result = judge(policy, leaf)
        weighted = _weighted(policy, result.objective, weights)
        objective = reduce_objective(weighted, inputs.response_mask, policy.reduction, counts, max_length)
        gradient = gradient_of(policy, objective, leaf, result)
    detached = replace(result, objective=result.objective.detach())
    return Judgement(replace(inputs, log_probs=inputs.log_probs.detach()), detached, objective.detach(), gradient)


Record = TypeVar("Record", ClipInputs, ClipResult, ClipBand)


def _concat(records: Sequence[Record]) -> Record:
    """Concatenate the records of several micro-batches."""
    joined: dict[str, Any] = {}
    for field in fields(records[0]):
        values = [getattr(record, field.name) for record in records]
        if isinstance(values[0], Tensor):
            joined[field.name] = torch.cat(values)
        elif isinstance(values[0], Mapping):
            joined[field.name] = {name: torch.cat([value[name] for value in values]) for name in values[0]}
        elif isinstance(values[0], ClipBand):
            joined[field.name] = _concat(values)
        else:
            joined[field.name] = values[0]
    return replace(records[0], **joined)


def _expanded(result: ClipResult) -> ClipResult:
    """Expand a result's band to the shape of its log-ratio."""
    if result.band is None:
        return result
    shape, band = result.log_ratio.shape, result.band
    ceiling = None if band.ceiling is None else band.ceiling.expand(shape)
    return replace(result, band=ClipBand(band.low.expand(shape), band.high.expand(shape), ceiling))


def _weighted(policy: ClipPolicy, objective: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return objective
    if weights.shape[-1] > objective.shape[-1]:
        raise UserError(
            f"the correction has one weight per token, but {policy.name} has one objective per response; choose a "
            "correction with one weight per response"
        )
    return objective * weights.to(objective.device)


def judge(policy: ClipPolicy, inputs: ClipInputs) -> ClipResult:
    """Evaluate a policy and check the shapes and types of its result.

    Raises:
        PolicyError: the policy raised an exception, changed its inputs, read an input that it does not name in `needs`, or
            returned a result that breaks the contract.
    """
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    before = {name: value._version for name, value in values.items() if isinstance(value, Tensor)}
    try:
        result = policy(limited_to_needs(policy, inputs))
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(policy.name, f"raised {located(error)}") from error
    changed = [name for name, version in before.items() if values[name]._version != version]
    if changed:
        raise PolicyError(policy.name, f"modified its input {changed[0]}; work on a copy")
    if problem := form_problem(policy, inputs, result):
        raise PolicyError(policy.name, problem)
    return result


def gradient_of(policy: ClipPolicy, total: Tensor, inputs: ClipInputs, result: ClipResult) -> Tensor:
    """Compute ``d total / d log_probs``, ``(B, T)``, and check that it is finite for finite inputs.

    A policy must not return NaN or infinity for finite log-probabilities. If the model's log-probabilities are not finite,
    the returned gradient is not finite either, so the step is skipped.

    Raises:
        PolicyError: the objective does not depend on log_probs, or the objective or its gradient is not finite.
    """
    try:
        (gradient,) = torch.autograd.grad(total, inputs.log_probs)
    except RuntimeError as error:
        raise PolicyError(policy.name, "returned an objective without a gradient; it must depend on log_probs") from error
    mask = inputs.response_mask
    # check a single sum first, and search for the response only if the sum is not finite
    read = torch.where(mask, inputs.log_probs.detach(), 0.0).sum()
    if bool(torch.isfinite(read + total.detach() + gradient.sum())):
        return gradient
    if not bool(torch.isfinite(inputs.log_probs[mask]).all()):
        return torch.where(mask, torch.nan, gradient)
    objective = result.objective if result.objective.shape == mask.shape else result.objective.expand_as(mask)
    bad = ~(torch.isfinite(objective) & torch.isfinite(gradient)) & mask
    if not bool(bad.any()):  # finite values with an infinite sum are not the policy's fault
        return gradient
    row = int(bad.any(dim=-1).nonzero()[0])
    length, advantage = int(mask[row].sum()), float(inputs.advantages[row].sum())
    what = "an objective" if not bool(torch.isfinite(objective[row][mask[row]]).all()) else "an objective with a gradient"
    number = int(bad.any(dim=-1).sum())
    log_ratio = float((inputs.log_probs.detach() - inputs.old_log_probs)[row][mask[row]].sum())
    raise PolicyError(
        policy.name,
        f"returned {what} that is not finite for {number} of {len(mask)} responses; the first has {length} tokens, "
        f"advantage {advantage:g} and summed log-ratio {log_ratio:.4g}",
    )


def updated(policy: ClipPolicy, stats: ClipStats) -> ClipPolicy:
    """Return the policy for the next update.

    Raises:
        PolicyError: `ClipPolicy.updated` raised an exception or returned an object of another class.
    """
    try:
        following = policy.updated(stats)
    except Exception as error:
        raise PolicyError(policy.name, f"raised an error in updated: {located(error)}") from error
    if type(following) is not type(policy):
        raise PolicyError(policy.name, f"returned {following!r} from updated; expected a {type(policy).__name__}")
    return following
