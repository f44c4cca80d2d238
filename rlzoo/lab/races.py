"""A race: finished runs of several policies, read from their directories and compared."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from rlzoo.analysis.comparison import Difference, Estimate, differences, estimate
from rlzoo.analysis.profile import LengthProfile
from rlzoo.analysis.response_table import pooled
from rlzoo.errors import UserError
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import clip_fraction_of, match_clip_fraction, replay
from rlzoo.lab.study import plain
from rlzoo.tracking import flatten

NOT_A_VARIANT = {"seed", "output", "plugins"}  # what runs of one policy may differ in and still be repetitions


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A finished run.

    Example:
        ``record.metrics[-1]["eval/accuracy"]`` is the last evaluation.
    """

    path: Path
    settings: Mapping[str, Any]  # its config.yaml with dotted keys
    metrics: tuple[Mapping[str, float], ...]
    summary: Mapping[str, Any]

    @property
    def policy(self) -> str:
        """Its clip policy's name."""
        return str(self.settings["clip.name"])

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.settings["seed"])

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        return next((row[name] for row in reversed(self.metrics) if name in row), None)

    def mean(self, name: str, last_share: float = 1.0) -> float | None:
        """Mean of a metric over the run, or over the last part of its steps."""
        first = self.settings["steps"] * (1 - last_share)
        values = [row[name] for row in self.metrics if name in row and row["step"] > first]
        return fmean(values) if values else None

    def score(self) -> float:
        """Accuracy at the end on held-out problems, or without an evaluation the reward over the last quarter of the steps."""
        accuracy = self.last("eval/accuracy")
        reward = self.mean("reward/mean", 0.25)
        assert reward is not None, "a finished run has rewards"
        return reward if accuracy is None else accuracy


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy, with the settings that tell it from others of its name, over its seeds.

    Example:
        ``contender.score.mean`` over ``len(contender.runs)`` seeds.
    """

    label: str
    runs: tuple[RunRecord, ...]
    score: Estimate
    profile: LengthProfile | None  # of the responses of all its runs; None without recorded rollouts
    matched: tuple[LengthProfile, ...] = ()  # of each run, its widths scaled to one clip fraction

    def mean(self, name: str, last_share: float = 1.0) -> float | None:
        """Mean over its runs of a metric's mean."""
        values = [value for run in self.runs if (value := run.mean(name, last_share)) is not None]
        return fmean(values) if values else None


@dataclass(frozen=True, slots=True)
class Race:
    """Contenders, best first, and every pair of them.

    Example:
        ``race([Path("sweeps/mine")]).contenders[0].label``
    """

    contenders: tuple[Contender, ...]
    pairs: tuple[Difference, ...]
    score: str  # what the score is
    match: float | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        contenders = [
            {
                "label": contender.label,
                "score": asdict(contender.score),
                "runs": [
                    {"path": str(run.path), "seed": run.seed, "score": run.score(), **run.summary} for run in contender.runs
                ],
                "clip_fraction": contender.mean("clip/fraction"),
                "response_length": contender.mean("response/length_mean", 0.25),
                "profile": None if contender.profile is None else asdict(contender.profile),
                "matched_lre_max": [profile.lre_max for profile in contender.matched],
                "matched_clip_fraction": [profile.clip_fraction for profile in contender.matched],
            }
            for contender in self.contenders
        ]
        about = {"score": self.score, "match": self.match, "notes": list(self.notes)}
        return dict(plain({**about, "contenders": contenders, "pairs": [asdict(pair) for pair in self.pairs]}))


Told = Callable[[str, int, int], None]


def race(
    paths: Sequence[Path],
    *,
    match: float | None = None,
    skip_steps: int = 0,
    told: Told = lambda what, done, total: None,
) -> Race:
    """Compare the runs in some folders.

    Args:
        paths: run directories, or folders that hold some, such as a sweep's.
        match: clip fraction at which to compare length fairness; each run is replayed with its own policy's widths scaled.
        skip_steps: steps at the beginning that fairness leaves out.
        told: for progress.

    Raises:
        UserError: there is no finished run, or the same policy and seed twice.
    """
    records, notes = find_runs(paths)
    groups = labelled(records)
    notes += _not_comparable(records)
    scored = {label: {run.seed: run.score() for run in runs} for label, runs in groups.items()}
    done = 0
    contenders = []
    for label, runs in groups.items():
        profiles, matched = [], []
        for run in runs:
            told(label, done, len(records))
            done += 1
            found = _fairness(run, match, skip_steps)
            profiles += [found[0]] if found else []
            matched += [found[1]] if found and found[1] else []
        whole = LengthProfile.of(pooled(profiles)) if profiles else None
        contenders.append(Contender(label, tuple(runs), estimate(list(scored[label].values())), whole, tuple(matched)))
    contenders.sort(key=lambda contender: -contender.score.iqm)
    evaluated = any(record.last("eval/accuracy") is not None for record in records)
    score = "held-out accuracy at the end" if evaluated else "mean reward over the last quarter of the steps"
    pairs = differences({contender.label: scored[contender.label] for contender in contenders})
    return Race(tuple(contenders), tuple(pairs), score, match, tuple(notes))


def find_runs(paths: Sequence[Path]) -> tuple[list[RunRecord], list[str]]:
    """Every finished run in some folders, at any depth, and a note on each that is not finished.

    Raises:
        UserError: a path is no folder, or there is no finished run.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{str(path)!r} is not a folder; give run directories, or folders that hold some")
        found = [file.parent for file in sorted(path.rglob("config.yaml")) if (file.parent / "rollouts").is_dir()]
        folders |= dict.fromkeys(folder for folder in found if "interrupted" not in folder.relative_to(path).parts)
    records, notes = [], []
    for folder in folders:
        record = _read(folder)
        if record is None:
            notes.append(f"left out, not finished: {folder}")
        else:
            records.append(record)
    if not records:
        raise UserError(f"no finished run in {', '.join(map(str, paths))}; `rlzoo sweep` or `rlzoo train` make some")
    return records, notes


def _read(folder: Path) -> RunRecord | None:
    settings = flatten(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    metrics = tuple(_json_lines(folder / "metrics.jsonl"))
    summary = next(iter(_json_lines(folder / "summary.json", whole=True)), {})
    finished = summary.get("finished", bool(metrics) and metrics[-1]["step"] == settings["steps"])
    return RunRecord(folder, settings, metrics, summary) if finished and metrics else None


def _json_lines(file: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    """The objects in a file, one a line or the file itself; none if it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
        return [json.loads(part) for part in ([text] if whole else text.splitlines())]
    except (OSError, ValueError):
        return []


def labelled(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs by policy, and by what differs between the runs of one policy, if anything but the seed does.

    Raises:
        UserError: two runs of one label have the same seed.
    """
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        others = [other.settings for other in records if other.policy == record.policy]
        keys = sorted({key for settings in others for key in settings} - NOT_A_VARIANT)
        varied = [key for key in keys if len({str(settings.get(key)) for settings in others}) > 1]
        label = " ".join([record.policy, *(f"{key}={record.settings.get(key)}" for key in varied)])
        groups.setdefault(label, []).append(record)
    for label, runs in groups.items():
        runs.sort(key=lambda run: run.seed)
        for earlier, later in itertools.pairwise(runs):
            if earlier.seed == later.seed:
                raise UserError(f"{earlier.path} and {later.path} are both {label} with seed {later.seed}; give one of them")
    return groups


def _not_comparable(records: Sequence[RunRecord]) -> list[str]:
    """Notes on what should be equal in all runs and is not."""
    notes = []
    for key in ("model.path", "task.name", "steps", "rollout.num_prompts", "rollout.group_size", "eval.num_problems"):
        values = sorted({str(record.settings.get(key)) for record in records})
        if len(values) > 1:
            notes.append(f"not comparable: {key} differs between the runs ({', '.join(values)})")
    return notes


def _fairness(record: RunRecord, match: float | None, skip_steps: int) -> tuple[Any, LengthProfile | None] | None:
    """A run's rows as they were, and its profile at the matched fraction; None without recorded updates."""
    try:
        run = RecordedRun.read(record.path)
        rows = replay(run, run.config.clip, skip_steps).table
    except UserError:
        return None
    if match is None:
        return rows, None
    try:
        policy = match_clip_fraction(run.config.clip, match, clip_fraction_of(run, skip_steps))
    except UserError:
        return rows, None
    return rows, replay(run, policy, skip_steps).profile
