"""Applies any rule to the rollouts and log-probs that a run recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from pydantic import ValidationError
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.errors import UserError
from rlzoo.core.policy import ClipPolicy
from rlzoo.lab.recorded import RecordedRun, RecordedUpdate
from rlzoo.learner.judge import Judgement, judge, judgement, updated
from rlzoo.learner.on_policy import on_policy_gradient
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.response_table import ResponseTable, group_keys

TOLERANCE = 0.1  # maximum relative difference between a matched clip fraction and its target


@dataclass(frozen=True, slots=True)
class Replayed:
    """The results of one rule on recorded data."""

    policy: ClipPolicy  # the rule before the first update
    table: ResponseTable
    profile: LengthProfile
    states: tuple[ClipPolicy, ...]  # the rule before each update and after the last; constant unless it is adaptive
    above: Replayed | None = None  # the results for A > 0 if each sign of the advantage has its own widths
    note: str = ""  # why the clip fraction was not matched, or how far it is from the target

    @property
    def label(self) -> str:
        """The name of the rule."""
        return self.policy.name

    @property
    def widths(self) -> str:
        """The widths as text, listed by sign of the advantage if the signs were matched separately."""
        if self.above is None:
            return widths_as_text(self.policy)
        return f"A < 0: {widths_as_text(self.policy)}; A > 0: {self.above.widths}"


def not_comparable(clips_parts: Mapping[str, bool]) -> list[str]:
    """Return a sentence if only some of the rules, which are listed by label, clip parts of responses."""
    labels = ", ".join(label for label, parts in clips_parts.items() if parts)
    sentence = f"Do not compare the length errors of rules that clip tokens or turns ({labels}) with the others."
    return [sentence] if labels and not all(clips_parts.values()) else []


def replay(run: RecordedRun, policy: ClipPolicy, skip_steps: int = 0) -> Replayed:
    """Apply a rule to all recorded updates in order. An adaptive rule adapts only to earlier updates.

    Args:
        run: the recording. The recorded advantages are used regardless of the estimator that the rule names. The run's mismatch
            correction weights the objective of every rule whose ratio is not relative to the sampler.
        policy: the rule to apply.
        skip_steps: number of initial steps to exclude from the result, so that adaptive rules can settle first.

    Raises:
        UserError: the rule does not support the recorded advantages or weights, or no advantage differs from 0.
    """
    if policy.scope == "sequence" and next(iter(run.updates)).inputs.advantages.shape[-1] != 1:
        raise UserError(f"{str(run.path)!r} has per-token advantages, but {policy.name} needs one per response")
    refuse_missing(run, policy)
    tables, states = [], [policy]
    for update in run.updates:
        current = states[-1]
        _, _, table = applied(run, update, current)
        states.append(updated(current, table.clip_stats(update.edges)) if current.is_adaptive else current)
        if not skip_steps or update.step > skip_steps:  # a trainer may count steps from 0
            tables.append(table)
    table_of_run = ResponseTable.concat(tables) if tables else None
    profile = None if table_of_run is None else LengthProfile.of(table_of_run)
    if table_of_run is None or profile is None:
        raise _nothing_left(run, skip_steps)
    return Replayed(policy, table_of_run, profile, tuple(states))


def applied(run: RecordedRun, update: RecordedUpdate, policy: ClipPolicy) -> tuple[Judgement, Tensor, ResponseTable]:
    """Apply a rule to one recorded update. Also return the rule's gradient at ratio 1 and the table of responses."""
    weights = None if policy.ratio_to_sampler else update.weights  # such a ratio already corrects for the sampler
    inputs, scale = update.inputs, (update.counts, run.max_length, weights)
    judged = judgement(policy, inputs, *scale)
    on_policy = on_policy_gradient(policy, inputs, judged.result, *scale)
    group = group_keys(update.step, update.batch.group_ids[update.rows])
    table = ResponseTable.measure(inputs, judged.result, judged.gradient, on_policy, group=group, turn_ids=inputs.turn_ids)
    return judged, on_policy, table


def replay_matched(
    run: RecordedRun, policy: ClipPolicy, target: float, *, by_sign: bool = False, skip_steps: int = 0
) -> Replayed:
    """Replay a rule with its widths scaled so that it clips the target share of the responses.

    With equal widths for both signs, a rule clips responses with A < 0 several times as often as responses with A > 0. The
    factor depends on the rule. ``by_sign`` scales the widths separately for A < 0 and A > 0, so that the rule clips the target
    share of each. A rule that adapts to a target share already adapts to each sign separately.

    Raises:
        UserError: `replay` fails, or no width reaches the target share; the message says which shares are possible.
    """
    if not by_sign or policy.targeting(target) is not None:
        replayed = replay(run, match_clip_fraction(run, policy, target, skip_steps), skip_steps)
        reached, number = replayed.profile.clip_fraction, sum(replayed.profile.both.count)
        is_missed = abs(reached - target) > max(TOLERANCE * target, 1 / number)
        note = f"clips {reached:.3g} instead of {target}; {replayed.widths}".removesuffix("; ")
        return replace(replayed, note=note) if is_missed else replayed
    sides = []
    for sign, condition in ((-1, "A < 0"), (1, "A > 0")):
        try:
            sides.append(replay(run, match_clip_fraction(run, policy, target, skip_steps, sign), skip_steps))
        except UserError as error:
            raise UserError(f"for {condition}: {error}") from error
    below, above = sides
    table = ResponseTable.concat([below.table.where(below.table.advantage <= 0), above.table.where(above.table.advantage > 0)])
    profile = LengthProfile.of(table)
    assert profile is not None, "both replays have rows with a nonzero advantage"
    return Replayed(below.policy, table, profile, below.states, above)


def refuse_missing(run: RecordedRun, policy: ClipPolicy) -> None:
    """Reject a rule if the run did not record all inputs that the rule needs.

    Raises:
        UserError: an input is missing; the message names the input and says how to record it.
    """
    inputs = next(iter(run.updates)).inputs
    missing = sorted(name for name in policy.needs if getattr(inputs, name) is None)
    if missing:
        is_run = run.is_run_directory
        how = "replay a run whose rule also needs it" if is_run else "record it (see docs/reference/rollout-files.md)"
        raise UserError(f"{policy.name} needs {missing[0]}, which {str(run.path)!r} did not record; {how}")
    if policy.needs_whole_prompts and run.splits_prompts:
        raise UserError(
            f"{policy.name} needs all responses to a prompt together, but the minibatches of {str(run.path)!r} split them; "
            "replay a run whose minibatches hold whole prompts (in rlzoo, learner.minibatch_by=prompts)"
        )


def _nothing_left(run: RecordedRun, skip_steps: int) -> UserError:
    where = f" after step {skip_steps}" if skip_steps else ""
    return UserError(f"{str(run.path)!r} has no response with tokens and a nonzero advantage{where}")


@torch.no_grad()
def clip_fraction(run: RecordedRun, policy: ClipPolicy, skip_steps: int = 0, sign: int = 0) -> float:
    """Compute a rule's clip fraction on a run, without the gradients that `replay` computes.

    Args:
        run: the recording.
        policy: the rule.
        skip_steps: number of initial steps to exclude.
        sign: sign of the advantages to count: -1 for negative, 1 for positive, 0 for both.
    """
    refuse_missing(run, policy)
    if policy.is_adaptive:
        rows = replay(run, policy, skip_steps).table.judged()
        return float(rows.clipped[(rows.advantage * sign > 0) | (sign == 0)].mean())
    decisions = [torch.empty(0, dtype=torch.float64)]
    for inputs in (update.inputs for update in run.updates if not skip_steps or update.step > skip_steps):
        mask = inputs.response_mask
        share = ops.per_response(judge(policy, inputs).clipped.float(), mask)
        advantages = inputs.advantages.expand(mask.shape).masked_fill(~mask, 0.0)
        counted = (advantages != 0).any(-1)
        decisions.append(share[counted & (advantages.sum(-1) * sign > 0) if sign else counted].double())
    clipped = torch.cat(decisions)
    if not len(clipped):
        raise _nothing_left(run, skip_steps)
    return float(clipped.mean())


def match_clip_fraction(run: RecordedRun, policy: ClipPolicy, target: float, skip_steps: int = 0, sign: int = 0) -> ClipPolicy:
    """Scale all widths of a rule by one factor, found by bisection, so that the rule clips the target share of responses.

    Args:
        run: the recording.
        policy: a rule with a width, or one that adapts to a target share of clipped responses.
        target: target clip fraction, between 0 and 1, among the responses with a nonzero advantage.
        skip_steps: number of initial steps to exclude.
        sign: sign of the advantages to count; see `clip_fraction`.

    Raises:
        UserError: no width reaches the target share; the message says which shares are possible.
    """
    if (adaptive := policy.targeting(target)) is not None:
        return adaptive
    if not policy.width_fields():
        raise UserError(f"rule {policy.name!r} has no width that could be scaled to match a clip fraction")

    def fraction(factor: float) -> float:
        return clip_fraction(run, policy.scaled(factor), skip_steps, sign)

    narrow, wide = _bracket(policy.name, target, fraction)
    while wide / narrow >= 1 + 1e-4:
        middle = (narrow * wide) ** 0.5
        if fraction(middle) <= target:
            wide = middle
        else:
            narrow = middle
    # the clip fraction is a step function, so return the side of the jump that is nearer to the target
    return policy.scaled(min(narrow, wide, key=lambda factor: abs(fraction(factor) - target)))


def _bracket(name: str, target: float, fraction: Callable[[float], float]) -> tuple[float, float]:
    """Return two width factors. The rule clips more than the target with the first and at most the target with the second."""
    seen = [fraction(1.0)]
    step = 4.0 if seen[0] > target else 0.25
    with suppress(ValidationError):  # a scaled width may be outside its field's bounds
        for power in range(20):
            seen.append(fraction(step ** (power + 1)))
            if (seen[-1] > target) != (seen[0] > target):
                narrow, wide = sorted((step**power, step ** (power + 1)))
                return narrow, wide
    raise UserError(
        f"no width makes rule {name!r} clip a share of {target} of these responses (possible: {min(seen):.3g} to "
        f"{max(seen):.3g})"
    )


def widths_of(policy: ClipPolicy) -> dict[str, float]:
    """Return a rule's widths by field name, omitting widths that are None."""
    return {name: value for name in policy.width_fields() if (value := getattr(policy, name)) is not None}


def widths_as_text(policy: ClipPolicy) -> str:
    """Return a rule's widths, such as ``"width_low 0.01, width_high 0.02"``, or the changed settings of an adaptive rule."""
    values = policy.model_dump(exclude_defaults=True) if policy.is_adaptive else widths_of(policy)
    return ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items())
