"""Compares several rules using the directories of finished runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rlzoo.core.errors import UserError
from rlzoo.core.policy import NAMED
from rlzoo.gate.fingerprint import SCORE
from rlzoo.journal.tracking.uploads import run_id_of
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import not_comparable, replay, replay_matched
from rlzoo.lab.runs import REPETITION, FinishedRun, find_runs
from rlzoo.lab.study import Progress, plain
from rlzoo.measure.comparison import MIN_SEEDS, Difference, Estimate, differences, estimate
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.report import Row, Table, Tabular
from rlzoo.measure.response_table import ResponseTable, pooled_runs

SAME_CONTEST = ("task.", "model.path", "model.dtype", "model.chat_template", "eval.", "steps")
"""Prefixes of the settings that must be equal for the scores of runs to be comparable."""
NOT_COMPARABLE = "not comparable"
LONGEST_VALUE = 80  # maximum length of a setting in a label, in characters
MATCHED = ("lre_max, matched", "lowest and highest", "noise", "by signs", "total")  # columns at the same clip fraction
TABLES = {
    "": ("rule", "seeds", "mean", "95 %", "gain", "IQM", "95 %", "clip fraction", "response length"),
    "Every pair": ("first", "second", "seeds", "difference", "95 %", "p, Holm", "verdict"),
    "Length fairness": ("rule", "clipped", "lre_max", *MATCHED, "ess"),
    "Means over runs": ("rule", "seconds", "tokens/s", "peak memory, MiB", "updates with norm clipping"),
    "The runs": ("rule", "seed", "folder", "MLflow run"),
}
"""The titles and columns of a comparison's tables. The first table's title is the name of the score."""


@dataclass(frozen=True, slots=True)
class ComparedRule:
    """The runs of one rule with the same settings."""

    label: str  # the rule, and the settings that differ between runs of this rule
    runs: tuple[FinishedRun, ...]
    score: Estimate
    profile: LengthProfile | None  # pooled over all runs' responses; None without recorded rollouts
    matched: Mapping[int, LengthProfile] = field(default_factory=dict)  # by seed; widths are scaled to the same clip fraction
    clips_parts: bool = False  # whether the rule clips tokens or turns, so that only part of a response may be clipped

    def mean(self, name: str, last_share: float = 1.0) -> float | None:
        """Return a metric's mean within each run, averaged over the runs."""
        return _mean(run.mean(name, last_share) for run in self.runs)

    @property
    def gain(self) -> float | None:
        """The final accuracy minus the accuracy before the first update, averaged over the runs."""
        return _mean(run.accuracies[-1] - run.accuracies[0] for run in self.runs if run.accuracies)

    @property
    def errors(self) -> dict[int, float]:
        """Each seed's length error at the matched clip fraction."""
        return {seed: profile.lre_max for seed, profile in self.matched.items() if profile.lre_max is not None}

    @property
    def matched_lre_max(self) -> float | None:
        """The length error at the matched clip fraction, averaged over the runs."""
        return _mean(self.errors.values())

    @property
    def matched_noise(self) -> float | None:
        """The mean length error expected at the matched clip fraction if all lengths were clipped equally."""
        return _mean(profile.lre_noise for profile in self.matched.values())


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Tabular):
    """The compared rules, best first, and their pairwise differences."""

    rules: tuple[ComparedRule, ...]
    pairs: tuple[Difference, ...]
    metric: str  # the metric used as the score: eval/accuracy, or reward/mean if not every run was evaluated
    match: float | None
    notes: tuple[str, ...]
    by_sign: bool = False  # whether each sign of the advantage was matched separately
    labels: tuple[str, ...] = ()  # in the order of the runs

    @property
    def scored(self) -> str:
        """The quantity that the score measures: accuracy, or reward if the evaluations of any run measured rewards."""
        scores = {run.settings.get(SCORE) for rule in self.rules for run in rule.runs}
        return "accuracy" if self.metric == "eval/accuracy" and "reward" not in scores else "reward"

    @property
    def score(self) -> str:
        """A description of the score, as shown in tables and figures."""
        is_held_out = self.metric == "eval/accuracy"
        return f"held-out {self.scored} at the end" if is_held_out else "mean reward over the last quarter of the steps"

    @property
    def highlights(self) -> list[str]:
        """Sentences that say which rule scores best and which clips most evenly."""
        if len(self.rules) < 2:
            return []
        if any(note.startswith(NOT_COMPARABLE) for note in self.notes):
            return ["No best rule is named, because the runs are not comparable."]
        best = self.rules[0]
        sentences = [f"Best {self.scored}: {best.label}, {best.score.mean:.3f} ({_shown(best.label, self.pairs, 'above')})."]
        limited = {rule.label: rule.mean("learner/grad_clipped") or 0.0 for rule in self.rules}
        if max(limited.values()) - min(limited.values()) > 0.2:
            shares = ", ".join(f"{share:.0%} ({label})" for label, share in limited.items())
            sentences.append(f"The rules differ in more than their clipping: norm clipping acted on {shares} of the updates.")
        # a rule that clips parts of responses has a smaller error simply because it averages over more decisions
        kinds = {parts: [rule for rule in self.rules if rule.errors and rule.clips_parts == parts] for parts in (False, True)}
        for parts, kind in kinds.items():
            if min((len(rule.errors) for rule in kind), default=0) >= MIN_SEEDS and len(kind) > 1:
                unit = "tokens or turns" if parts else "whole responses"
                which = f" of the rules that clip {unit}" if all(kinds.values()) else ""
                sentences.append(f"Most even{which} at clip fraction {self.match:g}: {_most_even(kind)}.")
        return sentences + not_comparable({rule.label: rule.clips_parts for rule in self.rules if rule.errors})

    def tables(self) -> list[Table]:
        """Return the scores, the pairs, the length errors, the mean costs, and the runs."""
        scores, pairs, errors, costs, runs = (list[Row]() for _ in range(5))
        for rule in self.rules:
            score, clipped, length = rule.score, rule.mean("clip/fraction"), rule.mean("response/length_mean", 0.25)
            seeds = (score.num_seeds, score.mean, score.mean_interval, rule.gain, score.iqm, score.iqm_interval)
            scores.append([rule.label, *seeds, clipped, length])
            if (profile := rule.profile) is not None:
                lowest = (min(rule.errors.values()), max(rule.errors.values())) if rule.errors else None
                others = [one.other_errors for one in rule.matched.values() if None not in one.other_errors]
                parts = [fmean(values) for values in zip(*others, strict=True)] if others else [None] * 2
                matched = (rule.matched_lre_max, lowest, rule.matched_noise, *parts)
                errors.append([rule.label, profile.clip_fraction, profile.lre_max, *matched, profile.ess])
            memory = [run.summary["peak_memory_bytes"] / 2**20 for run in rule.runs if run.summary.get("peak_memory_bytes")]
            speed, limited = rule.mean("throughput/tokens_per_second"), rule.mean("learner/grad_clipped")
            seconds = fmean(run.seconds for run in rule.runs)
            costs.append([rule.label, seconds, speed, fmean(memory) if memory else None, limited])
            runs += [[rule.label, run.seed, str(run.path), run_id_of(run.path) or ""] for run in rule.runs]
        for pair in self.pairs:
            numbers = (pair.mean, pair.interval, pair.adjusted_p_value)
            pairs.append([pair.first, pair.second, pair.num_seeds, *numbers, pair.verdict])
        notes = (
            "the mean has a Student's t interval over the seeds, the IQM that of a trimmed mean",
            "paired by seed; each interval is for one pair, without correction; p: paired t-test after Holm's correction",
            f"matched: at clip fraction {self.match}{' for each sign' * self.by_sign}; lowest and highest: over the seeds",
        )
        contents = zip(TABLES.items(), (*notes, "", ""), (scores, pairs, errors, costs, runs), strict=True)
        return [Table(title or self.score, columns, rows, note) for (title, columns), note, rows in contents]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-serialisable data. Unknown numbers are None."""
        rules = [
            {
                "label": rule.label,
                "score": rule.score,
                "runs": [
                    {"path": run.path, "seed": run.seed, **run.summary, "score": run.score(self.metric), "seconds": run.seconds}
                    for run in rule.runs
                ],
                "gain": rule.gain,
                "profile": rule.profile,
                "matched_lre_max": [profile.lre_max for profile in rule.matched.values()],
                "matched_lre": [profile.lre for profile in rule.matched.values()],
                "matched_clip_fraction": [profile.clip_fraction for profile in rule.matched.values()],
            }
            for rule in self.rules
        ]
        about = {"score": self.score, "match": self.match, "match_by_sign": self.by_sign, "notes": self.notes}
        return plain({**about, "contenders": rules, "pairs": self.pairs})


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _shown(label: str, pairs: Sequence[Difference], word: str) -> str:
    """Name the rules that a rule was shown to outperform."""
    verdicts = [pair.verdict for pair in pairs if label in (pair.first, pair.second)]
    beaten = [verdict.partition(" above ")[2] for verdict in verdicts if verdict.startswith(f"{label} above ")]
    return f"{word} {', '.join(beaten)}" if beaten else verdicts[0]


def _most_even(rules: Sequence[ComparedRule]) -> str:
    """Name the rule with the smallest length error and the rules that were shown to clip less evenly."""
    even = min(rules, key=lambda rule: fmean(rule.errors.values()))
    # use negated errors as scores, because a higher score is better
    pairs = differences({rule.label: {seed: -error for seed, error in rule.errors.items()} for rule in rules})
    noise = "" if even.matched_noise is None else f"; noise {even.matched_noise:.3f}"
    return f"{even.label}, lre {even.matched_lre_max:.3f} ({_shown(even.label, pairs, 'more even than')}{noise})"


def compare(
    paths: str | Path | Sequence[str | Path],
    *,
    plugins: Sequence[str | Path] = (),
    match: float | None = None,
    by_sign: bool = False,
    progress: Progress = lambda activity, done, total: None,
) -> Comparison:
    """Compare the rules of the runs in the given folders.

    Args:
        paths: run directories, or folders that contain run directories, such as a sweep's folder.
        plugins: plugins with the rules that are neither bundled nor installed. The runs' own plugins are not loaded.
        match: clip fraction at which to compare length fairness by replaying each run's own rule with scaled widths.
        by_sign: match negative and positive advantages separately.
        progress: called to report progress.

    Raises:
        UserError: there is no finished run, or a plugin cannot be used.
    """
    folders = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    all_runs, notes = find_runs(folders, plugins)
    groups = labelled(all_runs)
    notes += drop_older(groups)
    all_runs = [run for run in all_runs if any(run is kept for group in groups.values() for kept in group)]
    notes += other_differences([run.settings for run in all_runs])
    metric = "eval/accuracy" if all(run.accuracies for run in all_runs) else "reward/mean"
    scored = {label: {run.seed: run.score(metric) for run in runs} for label, runs in groups.items()}
    done = itertools.count()
    rules = []
    for label, runs in groups.items():
        tables: list[ResponseTable] = []
        matched, clips_parts = dict[int, LengthProfile](), False
        problems: dict[str, list[str]] = {}  # reasons why length errors are missing, with the seeds
        for run in runs:
            progress(label, next(done), len(all_runs))
            try:
                recorded = RecordedRun.read(run.path, plugins)
                policy = recorded.own_rule
                tables.append(replay(recorded, policy).table)
                clips_parts |= tables[-1].clips_parts
                if match is not None:
                    replayed = replay_matched(recorded, policy, match, by_sign=by_sign)
                    matched[run.seed] = replayed.profile
                    clips_parts |= replayed.table.clips_parts
                    notes += [f"{label}, seed {run.seed}: {replayed.note}"] if replayed.note else []
            except UserError as error:
                problems.setdefault(str(error), []).append(str(run.seed))
        notes += [f"{label}: no length error for seed {', '.join(seeds)}: {why}" for why, seeds in problems.items()]
        profile = LengthProfile.of(pooled_runs(tables)) if tables else None
        rules.append(ComparedRule(label, tuple(runs), estimate(list(scored[label].values())), profile, matched, clips_parts))
    rules.sort(key=lambda rule: -rule.score.iqm)
    pairs = differences({rule.label: scored[rule.label] for rule in rules})
    return Comparison(tuple(rules), tuple(pairs), metric, match, tuple(notes), by_sign, tuple(groups))


def labelled(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Group runs by rule and by the settings (other than the seed) that differ between runs of the same rule."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        varied = _varied([other.settings for other in runs if other.policy == run.policy])
        settings = [f"{key}={_short(run.settings[key])}" for key in varied if key in run.settings]
        groups.setdefault(" ".join([_short(run.policy), *settings]), []).append(run)
    for group in groups.values():
        group.sort(key=lambda run: (run.seed, run.ended))
    return groups


def drop_older(groups: Mapping[str, list[FinishedRun]]) -> list[str]:
    """Keep only the newest run for each label and seed in the groups of `labelled`. Return a note on each removed run."""
    notes = list[str]()
    for label, group in groups.items():
        for earlier, later in itertools.combinations(tuple(group), 2):
            if earlier.seed == later.seed and earlier in group:
                notes.append(f"left out {earlier.path}: {later.path} is a newer run of {label} with seed {later.seed}")
                group.remove(earlier)
    return notes


def _short(value: object) -> str:
    """Return the value as text, shortened to fit in a label."""
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _varied(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with their values. A setting that an older run lacks does not count."""
    values: dict[str, dict[str, None]] = {}
    for key, value in (item for settings_of_run in settings for item in settings_of_run.items()):
        if not key.startswith(REPETITION):
            values.setdefault(key, {})[str(value)] = None
    return {key: list(values[key]) for key in sorted(values) if len(values[key]) > 1}


def other_differences(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on how the runs differ, apart from their rules; see `resolved_settings`."""
    notes = []
    for key, values in _varied(settings).items():
        if key.removeprefix("clip.") in NAMED:
            notes.append(f"the rules differ in {key} ({', '.join(values)})")
        elif not key.startswith("clip."):
            what = NOT_COMPARABLE if key.startswith(SAME_CONTEST) else "the rule is not the only difference"
            notes.append(f"{what}: {key} differs between the runs ({', '.join(values)})")
    return sorted(notes)
