"""A replay study: applies rules to a run's rollouts at their own widths, at a matched clip fraction, or at several widths."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlzoo.core.errors import UserError
from rlzoo.core.policy import ClipPolicy
from rlzoo.lab.cosine import Cosine, cosines, has_weights
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import Replayed, clip_fraction_of, match_by_sign, match_clip_fraction, replay, widths_of
from rlzoo.measure.turns import TurnProfile

FACTORS = tuple(2.0**power for power in range(-4, 5))  # widths of a sweep, relative to the rule's own width


@dataclass(frozen=True, slots=True)
class Rule:
    """The results of one rule on the recorded rollouts."""

    label: str
    replayed: Replayed
    cosine: Cosine | None  # None if the run kept no weights
    note: str = ""  # why the clip fraction was not matched

    @property
    def widths(self) -> str:
        """The widths as text, listed by sign of the advantage if the signs were matched separately."""
        above = self.replayed.above
        if above is None:
            return _widths(self.replayed.policy)
        return f"A < 0: {_widths(self.replayed.policy)}; A > 0: {_widths(above)}"

    @property
    def measures(self) -> dict[str, float | None]:
        """The measures that are compared across widths."""
        found = self.replayed.profile
        measures = {"clip_fraction": found.clip_fraction, "lre_max": found.lre_max, "lre_noise": found.lre_noise}
        return {**measures, "ess": found.ess, "cosine": None if self.cosine is None else self.cosine.mean}


@dataclass(frozen=True, slots=True)
class Study:
    """The results of several rules on one run."""

    run: RecordedRun
    rules: tuple[Rule, ...]
    match: float | None
    skip_steps: int
    sweep: Mapping[str, Mapping[float, Rule]]  # by policy and width factor
    by_sign: bool = False  # whether each sign of the advantage was matched separately

    def as_dict(self) -> dict[str, Any]:
        """Return the study as plain JSON; unknown numbers are null."""
        rules = [
            {
                "policy": rule.label,
                "settings": rule.replayed.policy,
                "settings_above": rule.replayed.above,
                "note": rule.note,
                "profile": rule.replayed.profile,
                "turns": TurnProfile.of(rule.replayed.table),
                "cosine": rule.cosine,
            }
            for rule in self.rules
        ]
        sweep = {
            label: [
                {"factor": factor, "widths": widths_of(rule.replayed.policy), **rule.measures} for factor, rule in rules.items()
            ]
            for label, rules in self.sweep.items()
        }
        return plain(
            {
                "run": str(self.run.path),
                "run_policy": self.run.rule.name if self.run.rule else None,
                "num_responses": self.run.num_responses,
                "matched_clip_fraction": self.match,
                "matched_by_sign": self.by_sign,
                "skip_steps": self.skip_steps,
                "rules": rules,
                "sweep": sweep,
            }
        )


Told = Callable[[str, int, int], None]
"""Called with the current activity, the number of finished items and the total number."""


def study(
    run: RecordedRun,
    policies: Sequence[ClipPolicy],
    *,
    match: float | None = None,
    by_sign: bool = False,
    skip_steps: int = 0,
    sweep_width: bool = False,
    with_cosine: bool = True,
    told: Told = lambda what, done, total: None,
) -> Study:
    """Replay several rules on a recorded run.

    Args:
        run: the recording.
        policies: the rules with their settings; names must differ.
        match: clip fraction to match by scaling the rules' widths; a rule without a width stays unchanged and gets a note.
        by_sign: match negative and positive advantages separately. Width sweeps and cosines are then unavailable.
        skip_steps: number of initial steps to exclude from the results.
        sweep_width: for every rule with a width, also replay the rule with its width multiplied by each of `FACTORS`.
        with_cosine: also measure the cosine between each rule's gradient and the unclipped gradient, if the run kept weights.
        told: called to report progress.
    """
    sweep_width, with_cosine = sweep_width and not by_sign, with_cosine and not by_sign
    candidates: dict[str, Replayed] = {}
    notes: dict[str, str] = {}
    for number, policy in enumerate(policies):
        told("matching" if match else "replaying", number, len(policies))
        candidates[policy.name], notes[policy.name] = _matched(run, policy, match, by_sign=by_sign, skip_steps=skip_steps)
    edges = next(iter(candidates.values())).profile.edges

    def measured(replayed: Mapping[str, Replayed]) -> dict[str, Cosine]:
        if not (with_cosine and has_weights(run)):
            return {}
        return cosines(run, replayed, edges, lambda done, total: told("cosine", done, total))

    sweep: dict[str, dict[float, Rule]] = {}
    for number, (name, candidate) in enumerate(candidates.items()):
        if not sweep_width or not candidate.policy.width_fields() or candidate.policy.is_adaptive:
            continue
        told("replaying widths", number, len(candidates))
        scaled: dict[str, Replayed] = {}
        for factor in FACTORS:
            with suppress(ValidationError):  # a scaled width may be out of its field's bounds
                scaled[str(factor)] = replay(run, candidate.policy.scaled(factor), skip_steps)
        found = measured(scaled)
        sweep[name] = {float(factor): Rule(name, one, found.get(factor)) for factor, one in scaled.items()}
    found = measured(candidates)
    rules = tuple(Rule(name, one, found.get(name), notes[name]) for name, one in candidates.items())
    return Study(run, rules, match, skip_steps, sweep, by_sign)


def _widths(policy: ClipPolicy) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in widths_of(policy).items())


def _matched(
    run: RecordedRun, policy: ClipPolicy, match: float | None, *, by_sign: bool, skip_steps: int
) -> tuple[Replayed, str]:
    """Replay the rule at the matched clip fraction; if that is impossible, replay it unchanged and say why in the note."""
    note = ""
    if match is not None:
        try:
            if by_sign:
                return match_by_sign(run, policy, match, skip_steps), note
            policy = match_clip_fraction(policy, match, clip_fraction_of(run, skip_steps))
        except UserError as error:
            note = str(error)
    return replay(run, policy, skip_steps), note


def plain(value: Any) -> dict[str, Any]:
    """Convert dataclasses, models and paths to plain JSON; NaN becomes null, because JSON has no NaN."""
    return dict(json.loads(TypeAdapter(Any).dump_json(value)))
