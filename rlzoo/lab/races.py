"""Compares several policies, based on finished runs that are read from their directories."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from rlzoo.config.run_config import SAME_CONTEST
from rlzoo.core.errors import UserError
from rlzoo.core.policy import NAMED
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import clip_fraction_of, match_by_sign, match_clip_fraction, replay
from rlzoo.lab.run_records import REPETITION, RunRecord, find_runs
from rlzoo.lab.study import Told, plain
from rlzoo.measure.comparison import Difference, Estimate, differences, estimate
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.response_table import ResponseTable, pooled_runs

NOT_COMPARABLE = "not comparable"
LONGEST_VALUE = 80  # maximum length of a setting in a label, in characters


@dataclass(frozen=True, slots=True)
class Contender:
    """The runs of one policy with the same settings."""

    label: str  # the policy, and the settings that differ between runs of this policy
    runs: tuple[RunRecord, ...]
    score: Estimate
    profile: LengthProfile | None  # pooled over the responses of all runs; None without recorded rollouts
    matched: Mapping[int, LengthProfile] = field(default_factory=dict)  # by seed, with widths scaled to the same clip fraction
    clips_parts: bool = False  # whether the rule clips tokens or turns, so that a part of a response may be clipped

    def mean(self, name: str, last_share: float = 1.0) -> float | None:
        """Return a metric's mean within each run, averaged over the runs."""
        values = [value for run in self.runs if (value := run.mean(name, last_share)) is not None]
        return fmean(values) if values else None

    @property
    def gain(self) -> float | None:
        """The final accuracy minus the accuracy before the first update, averaged over the runs."""
        values = [run.accuracies[-1] - run.accuracies[0] for run in self.runs if run.accuracies]
        return fmean(values) if values else None

    @property
    def errors(self) -> dict[int, float]:
        """The length error at the matched clip fraction, by seed."""
        return {seed: profile.lre_max for seed, profile in self.matched.items() if profile.lre_max is not None}

    @property
    def matched_lre_max(self) -> float | None:
        """The length error at the matched clip fraction, averaged over the runs."""
        return fmean(self.errors.values()) if self.errors else None

    @property
    def matched_noise(self) -> float | None:
        """The length error expected at the matched clip fraction if all lengths were clipped equally; averaged over runs."""
        noise = [profile.lre_noise for profile in self.matched.values() if profile.lre_noise is not None]
        return fmean(noise) if noise else None

    @property
    def sampling_share(self) -> float | None:
        """The share of the between-seed variance in accuracy that is due to sampling the evaluation responses."""
        errors = [error for run in self.runs if (error := run.accuracy_error) is not None]
        scores = [run.accuracies[-1] for run in self.runs if run.accuracies]
        if len(errors) < 2 or len(scores) < 2 or variance(scores) == 0:
            return None
        return min(1.0, fmean(error**2 for error in errors) / variance(scores))


@dataclass(frozen=True, slots=True)
class Race:
    """The contenders, best first, and their pairwise differences."""

    contenders: tuple[Contender, ...]
    pairs: tuple[Difference, ...]
    metric: str  # used as the score: eval/accuracy, or reward/mean if not every run was evaluated
    match: float | None
    notes: tuple[str, ...]
    by_sign: bool = False  # whether each sign of the advantage was matched separately

    @property
    def scored(self) -> str:
        """What the evaluation measures: the accuracy, or the reward if any run has a custom reward."""
        runs = [run for contender in self.contenders for run in contender.runs]
        is_accuracy = self.metric == "eval/accuracy" and all(run.settings.get("task.reward") is None for run in runs)
        return "accuracy" if is_accuracy else "reward"

    @property
    def score(self) -> str:
        """A description of the score, as shown in tables and figures."""
        is_held_out = self.metric == "eval/accuracy"
        return f"held-out {self.scored} at the end" if is_held_out else "mean reward over the last quarter of the steps"

    @property
    def highlights(self) -> list[str]:
        """Sentences that say which rule scores best and which clips most evenly."""
        if len(self.contenders) < 2:
            return []
        best = self.contenders[0]
        verdicts = [pair.verdict for pair in self.pairs if best.label in (pair.first, pair.second)]
        beaten = [verdict.partition(" above ")[2] for verdict in verdicts if verdict.startswith(f"{best.label} above ")]
        shown = f"above {', '.join(beaten)}" if beaten else verdicts[0]
        found = [f"Best {self.scored}: {best.label}, {best.score.mean:.3f} ({shown})."]
        if any(note.startswith(NOT_COMPARABLE) for note in self.notes):
            found = ["No best rule is named, because the runs are not comparable."]
        # a rule that clips parts of responses averages over many decisions, so its error is smaller for that reason alone
        kinds = [[c for c in self.contenders if c.errors and c.clips_parts == parts] for parts in (False, True)]
        for parts, kind in zip((False, True), kinds, strict=True):
            if len(kind) > 1:
                which = "" if not all(kinds) else f" of the rules that clip {'tokens or turns' if parts else 'whole responses'}"
                found.append(f"Most even{which} at clip fraction {self.match:g}: {_most_even(kind)}.")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON; unknown numbers are null."""
        contenders = [
            {
                "label": contender.label,
                "score": contender.score,
                "runs": [
                    {"path": run.path, "seed": run.seed, **run.summary, "score": run.score(self.metric), "seconds": run.seconds}
                    for run in contender.runs
                ],
                "gain": contender.gain,
                "sampling_share": contender.sampling_share,
                "clip_fraction": contender.mean("clip/fraction"),
                "response_length": contender.mean("response/length_mean", 0.25),
                "tokens_per_second": contender.mean("throughput/tokens_per_second"),
                "grad_clipped": contender.mean("learner/grad_clipped"),
                "profile": contender.profile,
                "matched_lre_max": [profile.lre_max for profile in contender.matched.values()],
                "matched_lre": [profile.lre for profile in contender.matched.values()],
                "matched_clip_fraction": [profile.clip_fraction for profile in contender.matched.values()],
            }
            for contender in self.contenders
        ]
        about = {"score": self.score, "match": self.match, "match_by_sign": self.by_sign, "notes": self.notes}
        return plain({**about, "contenders": contenders, "pairs": self.pairs})


def _most_even(contenders: Sequence[Contender]) -> str:
    """Return the contender with the smallest length error, and the rules that it is shown to be more even than."""
    even = min(contenders, key=lambda contender: fmean(contender.errors.values()))
    # the negative error is a score, because a higher score is better
    scores = {contender.label: {seed: -error for seed, error in contender.errors.items()} for contender in contenders}
    verdicts = [pair.verdict for pair in differences(scores) if even.label in (pair.first, pair.second)]
    beaten = [verdict.partition(" above ")[2] for verdict in verdicts if verdict.startswith(f"{even.label} above ")]
    shown = f"more even than {', '.join(beaten)}" if beaten else verdicts[0]
    noise = "" if even.matched_noise is None else f"; noise {even.matched_noise:.3f}"
    return f"{even.label}, lre {even.matched_lre_max:.3f} ({shown}{noise})"


def race(
    paths: Sequence[Path],
    *,
    plugins: Sequence[str | Path] = (),
    match: float | None = None,
    by_sign: bool = False,
    skip_steps: int = 0,
    told: Told = lambda what, done, total: None,
) -> Race:
    """Compare the runs in the given folders.

    Args:
        paths: run directories, or folders that contain run directories, such as a sweep's folder.
        plugins: plugins of the rules that are neither bundled nor installed; the code that a run names is not loaded.
        match: clip fraction at which to compare length fairness, by replaying each run's own policy with scaled widths.
        by_sign: match negative and positive advantages separately.
        skip_steps: number of initial steps to exclude from the fairness measures.
        told: called to report progress.

    Raises:
        UserError: there is no finished run, two runs have the same policy and seed, or a plugin cannot be used.
    """
    records, notes = find_runs(paths, plugins)
    groups = labelled(records)
    notes += other_differences([record.settings for record in records])
    metric = "eval/accuracy" if all(record.accuracies for record in records) else "reward/mean"
    scored = {label: {run.seed: run.score(metric) for run in runs} for label, runs in groups.items()}
    done = itertools.count()
    contenders = []
    for label, runs in groups.items():
        tables: list[ResponseTable] = []
        matched: dict[int, LengthProfile] = {}
        problems: dict[str, list[str]] = {}  # why a length error is missing, with the seeds
        for run in runs:
            told(label, next(done), len(records))
            try:
                recorded = RecordedRun.read(run.path, plugins)
                policy = recorded.own_rule
                tables.append(replay(recorded, policy, skip_steps).table)
                if match is not None and by_sign:
                    matched[run.seed] = match_by_sign(recorded, policy, match, skip_steps).profile
                elif match is not None:
                    policy = match_clip_fraction(policy, match, clip_fraction_of(recorded, skip_steps))
                    matched[run.seed] = replay(recorded, policy, skip_steps).profile
            except UserError as error:
                problems.setdefault(str(error), []).append(str(run.seed))
        notes += [f"{label}: no length error for seed {', '.join(seeds)}: {why}" for why, seeds in problems.items()]
        pooled = pooled_runs(tables) if tables else None
        whole = None if pooled is None else LengthProfile.of(pooled)
        in_parts = pooled is not None and bool(((pooled.clipped > 0) & (pooled.clipped < 1)).any())
        contenders.append(Contender(label, tuple(runs), estimate(list(scored[label].values())), whole, matched, in_parts))
    contenders.sort(key=lambda contender: -contender.score.iqm)
    pairs = differences({contender.label: scored[contender.label] for contender in contenders})
    return Race(tuple(contenders), tuple(pairs), metric, match, tuple(notes), by_sign)


def labelled(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group runs by policy, and by the settings (other than the seed) that differ between runs of the same policy.

    Raises:
        UserError: two runs with the same label have the same seed.
    """
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        others = [other.settings for other in records if other.policy == record.policy]
        varied = [key for key in _varied(others) if key in record.settings]
        label = " ".join([_short(record.policy), *(f"{key}={_short(record.settings[key])}" for key in varied)])
        groups.setdefault(label, []).append(record)
    for label, runs in groups.items():
        runs.sort(key=lambda run: run.seed)
        for earlier, later in itertools.pairwise(runs):
            if earlier.seed == later.seed:
                raise UserError(f"{earlier.path} and {later.path} are both {label} with seed {later.seed}; pass only one")
    return groups


def _short(value: object) -> str:
    """Return the value as text, shortened to fit in a label."""
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _varied(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return settings that differ between runs, with their values. A setting missing from an older run does not count."""
    values: dict[str, dict[str, None]] = {}
    for given in settings:
        for key, value in given.items():
            if not key.startswith(REPETITION):
                values.setdefault(key, {})[str(value)] = None
    return {key: list(values[key]) for key in sorted(values) if len(values[key]) > 1}


def other_differences(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on how runs differ, apart from their policies; see `resolved_settings`."""
    notes = []
    for key, values in _varied(settings).items():
        if key.removeprefix("clip.") in NAMED:
            notes.append(f"the rules differ in {key} ({', '.join(values)})")
        elif not key.startswith("clip."):
            what = NOT_COMPARABLE if key.startswith(SAME_CONTEST) else "the policy is not the only difference"
            notes.append(f"{what}: {key} differs between the runs ({', '.join(values)})")
    return sorted(notes)
