"""Replay: applies any rule to the rollouts and log-probs that a run recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from rlzoo.core import ops
from rlzoo.core.errors import UserError
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.types import ClipInputs
from rlzoo.lab.recorded import RecordedRun
from rlzoo.learner.judge import judge, judgement, updated
from rlzoo.learner.on_policy import on_policy_gradient
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.response_table import ResponseTable, prompt_ids

CELLS = 2**18
"""Maximum number of tokens, including padding, that are judged at once."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The results of one rule on recorded data."""

    policy: ClipPolicy  # before the first update
    last: ClipPolicy  # after the last update; differs from `policy` only if the rule is adaptive
    table: ResponseTable
    profile: LengthProfile
    states: tuple[ClipPolicy, ...]  # before each update
    # the policy for A > 0 if each sign of the advantage has its own widths; see `replay_by_sign`
    above: ClipPolicy | None = None


def replay(run: RecordedRun, policy: ClipPolicy, skip_steps: int = 0) -> Replayed:
    """Apply a rule to all recorded updates in order; an adaptive rule adapts only to earlier updates.

    Args:
        run: the recording. The recorded advantages are used, whatever estimator the policy names. The run's mismatch correction
            weights the objective of every rule whose ratio is not relative to the sampler.
        policy: the rule to apply.
        skip_steps: number of initial steps to exclude from the result, so that adaptive rules can settle first.

    Raises:
        UserError: the rule does not support the recorded advantages or weights, or no advantage differs from 0.
    """
    if policy.scope == "sequence" and run.updates[0].inputs.advantages.shape[-1] != 1:
        raise UserError(f"{str(run.path)!r} has per-token advantages, but {policy.name} needs one per response")
    refuse_missing(run, policy)
    tables, states, current = [], [], policy
    for update in run.updates:
        read, max_length = update.inputs, run.max_length
        given = (update.counts, max_length, update.weights_for(current))
        judged = judgement(current, read, *given)
        answered = (judged.result, judged.gradient, on_policy_gradient(current, read, judged.result, *given))
        table = ResponseTable.measure(read, *answered, group=prompt_ids(update.step, update.group), turn_ids=read.turn_ids)
        states.append(current)
        if current.is_adaptive:
            current = updated(current, table.clip_stats(update.edges))
        if not skip_steps or update.step > skip_steps:  # a trainer may count steps from 0
            tables.append(table)
    whole = ResponseTable.concat(tables) if tables else None
    profile = LengthProfile.of(whole) if whole is not None else None
    if whole is None or profile is None:
        raise _nothing_left(run, skip_steps)
    return Replayed(policy, current, whole, profile, tuple(states))


def replay_by_sign(run: RecordedRun, below: ClipPolicy, above: ClipPolicy, skip_steps: int = 0) -> Replayed:
    """Apply one policy to responses with A < 0 and another to responses with A > 0; they should differ only in their widths.

    Raises:
        UserError: for the same reasons as in `replay`.
    """
    negative, positive = replay(run, below, skip_steps), replay(run, above, skip_steps)
    table = ResponseTable.concat(
        [negative.table.where(negative.table.advantage <= 0), positive.table.where(positive.table.advantage > 0)]
    )
    profile = LengthProfile.of(table)
    assert profile is not None, "both replays have rows with a nonzero advantage"
    return Replayed(below, negative.last, table, profile, negative.states, above)


def refuse_missing(run: RecordedRun, policy: ClipPolicy) -> None:
    """Reject a rule if the run did not record all inputs that the rule needs.

    Raises:
        UserError: an input is missing; the message says which one, and how to record it.
    """
    missing = sorted(name for name in policy.needs if getattr(run.updates[0].inputs, name) is None)
    if missing:
        how = "record it (see docs/reference/rollout-files.md)"
        how = "replay a run whose rule also needs it" if run.is_run_directory else how
        raise UserError(f"{policy.name} needs {missing[0]}, which {str(run.path)!r} did not record; {how}")
    if "group_ids" in policy.needs and run.splits_prompts:
        raise UserError(
            f"{policy.name} compares the responses to a prompt, but the minibatches of {str(run.path)!r} split them; "
            "replay a run whose minibatches hold whole prompts (in rlzoo, learner.minibatch_by=prompts)"
        )


def _nothing_left(run: RecordedRun, skip_steps: int) -> UserError:
    where = f" after step {skip_steps}" if skip_steps else ""
    return UserError(f"{str(run.path)!r} has no response with tokens and a nonzero advantage{where}")


def clip_fraction_of(run: RecordedRun, skip_steps: int = 0, sign: int = 0) -> Callable[[ClipPolicy], float]:
    """Return a function that computes a policy's clip fraction on a run, much faster than `replay`.

    The first call for a rule evaluates the policy twice: on each update separately, and on stacks of several updates. If the
    decisions agree, later calls use only the stacks. The function is meant to be called with one rule at different widths.

    Args:
        run: the recording.
        skip_steps: number of initial steps to exclude.
        sign: responses to count: -1 for negative advantages, 1 for positive advantages, 0 for both.
    """
    updates = [update.inputs for update in run.updates if not skip_steps or update.step > skip_steps]
    stacks: dict[type[ClipPolicy], list[ClipInputs]] = {}  # inputs on which to evaluate each rule

    def fraction(policy: ClipPolicy) -> float:
        refuse_missing(run, policy)
        if policy.is_adaptive:
            rows = replay(run, policy, skip_steps).table.judged()
            return float(rows.clipped[(rows.advantage * sign > 0) | (sign == 0)].mean())
        if not updates:
            raise _nothing_left(run, skip_steps)
        rule = type(policy)
        clipped = _decisions(policy, stacks.get(rule, updates), sign)
        if rule not in stacks:
            together = [] if policy.scope == "batch" or "group_ids" in policy.needs else stacked(updates)
            same = bool(together) and torch.equal(clipped, _decisions(policy, together, sign))
            stacks[rule] = together if same else updates
        if not len(clipped):
            raise _nothing_left(run, skip_steps)
        return float(clipped.mean())

    return fraction


@torch.no_grad()
def _decisions(policy: ClipPolicy, pieces: Sequence[ClipInputs], sign: int) -> Tensor:
    """Return the clip decisions (for a token rule, shares of clipped tokens) of the responses whose advantage has this sign."""
    decisions = []
    for inputs in pieces:
        mask = inputs.response_mask
        share = ops.per_response(judge(policy, inputs).clipped.float(), mask)
        advantages = inputs.advantages.expand(mask.shape).masked_fill(~mask, 0.0)
        counted = (advantages != 0).any(-1)
        decisions.append(share[counted & (advantages.sum(-1) * sign > 0) if sign else counted].double())
    return torch.cat(decisions)


def stacked(updates: Sequence[ClipInputs]) -> list[ClipInputs]:
    """Concatenate the rows of consecutive updates, padded to a common width, into stacks of up to `CELLS` tokens.

    A rule that judges each response independently makes the same decisions on a stack as on the separate updates, but needs
    fewer operations. A stack takes its seed and progress from its first update.
    """
    stacks: list[list[ClipInputs]] = []
    for inputs in updates:
        both = [*stacks[-1], inputs] if stacks else [inputs]
        cells = sum(len(each.response_mask) for each in both) * max(each.response_mask.shape[1] for each in both)
        if stacks and cells <= CELLS and _given(inputs) == _given(both[0]):
            stacks[-1].append(inputs)
        else:
            stacks.append([inputs])
    return [_stack(each) for each in stacks]


def _given(inputs: ClipInputs) -> list[str]:
    return [field.name for field in fields(inputs) if isinstance(getattr(inputs, field.name), Tensor)]


def _stack(updates: Sequence[ClipInputs]) -> ClipInputs:
    width = max(each.response_mask.shape[1] for each in updates)
    joined: dict[str, Any] = {}
    for name in _given(updates[0]):
        values: list[Tensor] = [getattr(each, name) for each in updates]
        if any(value.shape[1] > 1 for value in values):  # one value per token; otherwise one per response
            pad = -1 if name == "turn_ids" else 0
            values = [functional.pad(value, (0, width - value.shape[1]), value=pad) for value in values]
        joined[name] = torch.cat(values)
    return replace(updates[0], **joined)


def match_clip_fraction(policy: ClipPolicy, target: float, fraction: Callable[[ClipPolicy], float]) -> ClipPolicy:
    """Scale all widths of a policy by one factor, found by bisection, so that the policy clips the target share of responses.

    Args:
        policy: a rule with a width, or one that adapts to a target share of clipped responses.
        target: target clip fraction among the responses with a nonzero advantage; between 0 and 1.
        fraction: function that computes a policy's clip fraction, which falls as the widths grow.

    Raises:
        UserError: no width gives this share; the message says which shares are possible.
    """
    if (told := policy.targeting(target)) is not None:
        return told
    if not policy.width_fields():
        raise UserError(f"rule {policy.name!r} has no width that could be scaled to match a clip fraction")
    narrow, wide = _bracket(policy, target, fraction)
    while wide / narrow >= 1 + 1e-4:
        middle = (narrow * wide) ** 0.5
        if fraction(policy.scaled(middle)) <= target:
            wide = middle
        else:
            narrow = middle
    # the clip fraction is a step function: return the side of the jump that is nearer to the target
    return min(policy.scaled(narrow), policy.scaled(wide), key=lambda side: abs(fraction(side) - target))


def match_by_sign(run: RecordedRun, policy: ClipPolicy, target: float, skip_steps: int = 0) -> Replayed:
    """Replay a policy with its widths scaled separately for A < 0 and for A > 0, so that it clips the target share of each.

    With equal widths for both signs, a rule clips responses with A < 0 several times as often as responses with A > 0; how many
    times depends on the rule. A rule that adapts to a target share already adapts for each sign separately.

    Raises:
        UserError: no width gives this share for one of the signs; the message says which shares are possible.
    """
    if (told := policy.targeting(target)) is not None:
        return replay(run, told, skip_steps)
    sides = []
    for sign, named in ((-1, "A < 0"), (1, "A > 0")):
        try:
            sides.append(match_clip_fraction(policy, target, clip_fraction_of(run, skip_steps, sign)))
        except UserError as error:
            raise UserError(f"for {named}: {error}") from error
    below, above = sides
    return replay_by_sign(run, below, above, skip_steps)


def _bracket(policy: ClipPolicy, target: float, fraction: Callable[[ClipPolicy], float]) -> tuple[float, float]:
    """Return two width factors: with the first, the policy clips more than the target; with the second, at most the target."""
    seen = [fraction(policy)]
    step = 4.0 if seen[0] > target else 0.25
    with suppress(ValidationError):  # a scaled width may be out of its field's bounds
        for power in range(20):
            seen.append(fraction(policy.scaled(step ** (power + 1))))
            if (seen[-1] > target) != (seen[0] > target):
                ends = sorted((step**power, step ** (power + 1)))
                return ends[0], ends[1]
    raise UserError(
        f"no width makes rule {policy.name!r} clip a share of {target} of these responses (possible: {min(seen):.3g} to "
        f"{max(seen):.3g})"
    )


def widths_of(policy: ClipPolicy) -> dict[str, float]:
    """Return a policy's widths by field name, omitting widths that are None."""
    return {name: value for name in policy.width_fields() if (value := getattr(policy, name)) is not None}
