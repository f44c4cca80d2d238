"""A replay study: applies rules to a run's rollouts at their own widths or at a matched clip fraction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from rlzoo.core.errors import UserError
from rlzoo.core.fairness import NUM_BINS
from rlzoo.core.policy import ClipPolicy
from rlzoo.lab.cosine import cosines, has_weights
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import Replayed, replay, replay_matched
from rlzoo.measure.profile import labels
from rlzoo.measure.report import Row, Table
from rlzoo.measure.turns import TurnProfile

Progress = Callable[[str, int, int], None]
"""Called with the current activity, the number of finished items and the total number."""


@dataclass(frozen=True, slots=True)
class Study:
    """The results of several rules on one run."""

    run: RecordedRun
    rules: tuple[Replayed, ...]
    match: float | None
    skip_steps: int
    by_sign: bool = False  # whether each sign of the advantage was matched separately

    @property
    def goal(self) -> str:
        """The clip fraction to match, with the rules that miss it."""
        missed = ", ".join(f"{rule.label} ({rule.profile.clip_fraction:.3g})" for rule in self.rules if rule.note)
        signs = " for each sign of the advantage" if self.by_sign else ""
        return f"{self.match}{signs}{f', except {missed}' if missed else ''}"

    def as_dict(self) -> dict[str, Any]:
        """Return the study as plain JSON; unknown numbers are null."""
        rules = [
            {
                "rule": rule.label,
                "settings": rule.policy,
                "settings_above": rule.above,
                "note": rule.note,
                "profile": rule.profile,
                "turns": TurnProfile.of(rule.table),
                "cosine": rule.cosine,
            }
            for rule in self.rules
        ]
        return plain(
            {
                "run": str(self.run.path),
                "run_rule": self.run.rule.name if self.run.rule else None,
                "num_responses": self.run.num_responses,
                "matched_clip_fraction": self.match,
                "matched_by_sign": self.by_sign,
                "skip_steps": self.skip_steps,
                "rules": rules,
            }
        )

    def tables(self) -> Iterator[Table]:
        """Yield tables of what each rule clipped: in total, by length and for episodes by turn."""
        totals: list[Row] = []
        errors: list[Row] = []
        for rule in self.rules:
            profile, judged = rule.profile, rule.table.judged()
            by_sign = [float(judged.clipped[judged.advantage * sign > 0].mean()) for sign in (-1, 1)]
            error = (profile.lre_max, profile.lre_max_interval, profile.lre_noise)
            cosine = None if rule.cosine is None else rule.cosine.mean
            totals.append([rule.label, profile.clip_fraction, *by_sign, *error, profile.ess, cosine])
            corrected = profile.lre.conditional.max.corrected if profile.lre else None
            errors.append([rule.label, profile.lre_max, corrected, *profile.other_errors])
        columns = ["rule", "clipped", "A < 0", "A > 0", "lre_max", "95 %", "noise", "ess", "cosine"]
        yield Table("", columns, totals)
        yield Table("parts of the length reweighting error", ["rule", "given sign", "corrected", "by signs", "total"], errors)
        by_length: list[Row] = [[rule.label, *rule.profile.both.fraction] for rule in self.rules]
        lengths = self.rules[0].profile.bin_labels()
        yield Table("clip fraction by length in tokens", ["rule", *lengths], by_length)
        episodes = [(rule.label, turn_profile) for rule in self.rules if (turn_profile := TurnProfile.of(rule.table))]
        if episodes:
            turns = [*map(str, range(1, NUM_BINS)), f"{NUM_BINS} and later"]
            numbers = labels(episodes[0][1].edges)
            for kind, bins in (("turn", turns), ("number of turns", numbers)):
                rows: list[Row] = []
                for label, turn_profile in episodes:
                    evenness = turn_profile.by_turn if kind == "turn" else turn_profile.by_number
                    worst = evenness.lre.max if evenness.lre else None
                    error = (worst.value, worst.interval, worst.noise) if worst else (None, None, None)
                    rows.append([label, *evenness.fraction, *error])
                yield Table(f"clip fraction by {kind}", ["rule", *bins, "lre_max", "95 %", "noise"], rows)


def study(
    run: RecordedRun,
    policies: Sequence[ClipPolicy],
    *,
    match: float | None = None,
    by_sign: bool = False,
    skip_steps: int = 0,
    with_cosine: bool = True,
    progress: Progress = lambda activity, done, total: None,
) -> Study:
    """Replay several rules on a recorded run.

    Args:
        run: the recording.
        policies: the rules with their settings; names must differ.
        match: clip fraction to match by scaling the rules' widths; a rule without a width stays unchanged and gets a note.
        by_sign: match negative and positive advantages separately. Cosines are then unavailable.
        skip_steps: number of initial steps to exclude from the results.
        with_cosine: also measure the cosine between each rule's gradient and the unclipped gradient, if the run kept weights.
        progress: called to report progress.
    """
    rules = []
    for number, policy in enumerate(policies):
        progress("matching" if match else "replaying", number, len(policies))
        try:
            matched = None if match is None else replay_matched(run, policy, match, by_sign=by_sign, skip_steps=skip_steps)
            rules.append(matched or replay(run, policy, skip_steps))
        except UserError as error:
            if match is None:
                raise
            rules.append(replace(replay(run, policy, skip_steps), note=str(error)))
    if with_cosine and not by_sign and has_weights(run):
        states = {rule.label: rule.states for rule in rules}
        measured = cosines(run, states, rules[0].profile.edges, lambda done, total: progress("cosine", done, total))
        rules = [replace(rule, cosine=measured[rule.label]) for rule in rules]
    return Study(run, tuple(rules), match, skip_steps, by_sign)


def plain(value: Any) -> dict[str, Any]:
    """Convert dataclasses, models and paths to plain JSON; NaN becomes null, because JSON has no NaN."""
    return dict(json.loads(TypeAdapter(Any).dump_json(value)))
