"""Applies rules to a run's rollouts, either at their own widths or at a matched clip fraction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlzoo.config.composition import build_rule, clip_name, for_clip, merge, named_settings, parse_overrides, read_config
from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.core.fairness import NUM_BINS
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.settings import user_path
from rlzoo.core.zoo import load_zoo
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import Replayed, not_comparable, replay_matched
from rlzoo.lab.replay import replay as replay_rule
from rlzoo.measure.profile import labels
from rlzoo.measure.report import Row, Table, Tabular
from rlzoo.measure.turns import TurnProfile

Progress = Callable[[str, int, int], None]
"""A callback that receives the current activity, the number of finished items and the total number of items."""


@dataclass(frozen=True, slots=True, repr=False)
class Study(Tabular):
    """The results of several rules on one run."""

    run: RecordedRun
    rules: tuple[Replayed, ...]
    match: float | None
    skip_steps: int
    by_sign: bool = False  # whether each sign of the advantage was matched separately

    @property
    def goal(self) -> str:
        """The clip fraction to match, and the rules that miss it, in words."""
        missed = ", ".join(f"{rule.label} ({rule.profile.clip_fraction:.3g})" for rule in self.rules if rule.note)
        signs = " for each sign of the advantage" if self.by_sign else ""
        return f"{self.match}{signs}{f', except {missed}' if missed else ''}"

    @property
    def about(self) -> str:
        """The recorded responses, and how the rules were applied to them."""
        matched = f", every rule at a clip fraction of {self.goal}" if self.match else ""
        steps = f" after step {self.skip_steps}" if self.skip_steps else ""
        return f"{self.run.num_responses:,} recorded responses in {self.run.path}{steps}{matched}"

    @property
    def notes(self) -> list[str]:
        """The widths of each rule, and which length errors must not be compared."""
        widths = [f"{rule.label}: {rule.note or rule.widths or 'no width'}" for rule in self.rules]
        return widths + not_comparable({rule.label: rule.table.clips_parts for rule in self.rules})

    def as_dict(self) -> dict[str, Any]:
        """Return the study as JSON-serialisable data. Unknown numbers are None."""
        rules = [
            {
                "rule": rule.label,
                "settings": rule.policy,
                "settings_above": rule.above and rule.above.policy,
                "note": rule.note,
                "profile": rule.profile,
                "turns": TurnProfile.of(rule.table),
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
        """Yield tables that show what each rule clipped in total, by length and, for episodes, by turn."""
        totals: list[Row] = []
        errors: list[Row] = []
        for rule in self.rules:
            profile, judged = rule.profile, rule.table.judged()
            by_sign = [float(judged.clipped[judged.advantage * sign > 0].mean()) for sign in (-1, 1)]
            error = (profile.lre_max, profile.lre_max_interval, profile.lre_noise)
            totals.append([rule.label, profile.clip_fraction, *by_sign, *error, profile.ess])
            corrected = profile.lre.conditional.max.corrected if profile.lre else None
            errors.append([rule.label, profile.lre_max, corrected, *profile.other_errors])
        columns = ["rule", "clipped", "A < 0", "A > 0", "lre_max", "95 %", "noise", "ess"]
        yield Table("", columns, totals, self.about)
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


def policy_for(
    run: RecordedRun, name: str, configs: Sequence[str], overrides: Sequence[str], plugins: Sequence[str | Path]
) -> ClipPolicy:
    """Return a rule with its settings for a recorded run. Configs and overrides take precedence.

    The rule that trained the run keeps its recorded settings. If the run is from rlzoo, any other rule has the settings that
    `rlzoo train` would compose. Otherwise, it has its default settings.
    """
    changed = parse_overrides(overrides)
    if odd := sorted(changed.keys() - {"clip", "per_clip"}):
        raise UserError(f"--set {odd[0]}: a replay has only the settings of rules, such as clip.width_low")
    if (other := clip_name(changed)) not in (None, name):
        raise UserError(f"--set clip={other}: --clip already sets clip to {name}; use only one of the two")
    is_own = run.rule is not None and name == run.rule.name
    plugins = [*(run.config.plugins if run.config else ()), *plugins]
    if run.is_run_directory and not is_own:
        return RunConfig.compose(configs, clip=name, overrides=overrides, plugins=plugins).clip
    settings: dict[str, Any] = {"clip": {"name": name, **run.rule.model_dump()}} if run.rule and is_own else {}
    for layer in (*map(read_config, configs), changed):
        settings = merge(settings, for_clip(layer, name))
    return build_rule(load_zoo(plugins), {**named_settings("clip", settings.get("clip")), "name": name})


def replay(
    run: RecordedRun | str | Path,
    policies: Sequence[ClipPolicy | str],
    *,
    configs: Sequence[str] = (),
    overrides: Sequence[str] = (),
    plugins: Sequence[str | Path] = (),
    match: float | None = None,
    by_sign: bool = False,
    skip_steps: int = 0,
    progress: Progress = lambda activity, done, total: None,
) -> Study:
    """Replay several rules on a recorded run, as ``rlzoo replay`` does.

    Args:
        run: the recording, or the path of a run directory or of rollout files.
        policies: rules or names of rules. No two rules may have the same name.
        configs: configs with settings for the rules that are given by name.
        overrides: ``"clip.key=value"`` strings for the rules that are given by name.
        plugins: plugin files and folders, in addition to those of the run.
        match: clip fraction to match by scaling the rules' widths. A rule without a width is not scaled, and a note says so.
        by_sign: match negative and positive advantages separately.
        skip_steps: number of initial steps to exclude from the results.
        progress: called to report progress.
    """
    if not isinstance(run, RecordedRun):
        path = user_path(run)
        try:
            run = RecordedRun.read(path, plugins, own_code=True)
        except UserError:  # the rule of the run may be a class that no plugin provides
            run = RecordedRun.read(path, plugins)
    chosen = [policy_for(run, rule, configs, overrides, plugins) if isinstance(rule, str) else rule for rule in policies]
    rules = []
    for number, policy in enumerate(chosen):
        progress("matching" if match else "replaying", number, len(policies))
        try:
            matched = None if match is None else replay_matched(run, policy, match, by_sign=by_sign, skip_steps=skip_steps)
            rules.append(matched or replay_rule(run, policy, skip_steps))
        except UserError as error:
            if match is None:
                raise
            rules.append(replace(replay_rule(run, policy, skip_steps), note=str(error)))
    return Study(run, tuple(rules), match, skip_steps, by_sign)


def plain(value: Any) -> dict[str, Any]:
    """Convert dataclasses, models and paths to JSON-serialisable data. NaN becomes None, because JSON has no NaN."""
    return dict(json.loads(TypeAdapter(Any).dump_json(value)))
