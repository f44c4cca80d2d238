"""The results of races, including the records of a rule's runs on a track and the table of all rules."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from pydantic import ValidationError

from rlzoo.core.errors import UserError, first_mistake
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.settings import Settings
from rlzoo.lab.track import Track
from rlzoo.measure.comparison import Difference, against, best_rules, detectable
from rlzoo.measure.intervals import Interval
from rlzoo.measure.report import Row, Table
from rlzoo.support.parsing import UnreadableError, parse_json
from rlzoo.support.reading import read_text

PACKAGE = Path(str(resources.files("rlzoo")))
CLONE = PACKAGE.parent / "docs" / "results"  # folder of the results in a clone
SHIPPED = (PACKAGE / "results", CLONE)  # only one exists, which is the first in an installed wheel
CONDITIONS = ("loss_beside", "clip_fraction", "entropy", "length", "relative_step_time")
COLLAPSED = 0.5  # a run has collapsed if it failed or its reward fell below this share of its initial value


class Record(Settings):
    """One run of a race."""

    seed: int
    learning_rate: float
    num_samples: int = 1  # number of responses to each held-out problem
    start: float | None = None  # mean reward on the held-out problems before training
    right: str = ""  # one digit per problem: number of right responses after training; empty for other rewards
    rewards: tuple[float, ...] = ()  # the mean reward of each problem, if rewards are not 0 or 1
    curve: tuple[float, ...] = ()  # mean reward of each step
    tokens: int = 0  # number of tokens in the responses sampled for training
    clip_fraction: float | None = None  # mean over all steps; the next three fields are means over the last quarter
    entropy: float | None = None  # entropy in nats per token
    length: float | None = None  # response length in tokens
    truncated: float | None = None  # share of truncated responses
    seconds: float | None = None
    failure: str = ""  # why the run failed; a failed run has score 0

    @property
    def score(self) -> float:
        """The mean reward on the held-out problems after the last step, or 0 if the run failed."""
        if self.failure:
            return 0.0
        return sum(map(int, self.right)) / len(self.right) / self.num_samples if self.right else fmean(self.rewards)


class Evenness(Settings):
    """How evenly a rule clips the track's common recording at widths that clip the track's share for each sign of A."""

    clip_fraction: float | None = None
    length_error: float | None = None  # largest length reweighting error for a given sign of the advantage
    interval: Interval | None = None
    note: str = ""  # why there is no length error, or how far the rule is from the share


class Result(Settings):
    """The result of one rule on one track."""

    track: str
    track_digest: str
    rule: str
    rule_hash: str  # SHA-256 of the code in the file that defines the rule's class
    widths: dict[str, Any]  # calibrated settings of the rule; empty if it has no widths
    learning_rate: float
    tuning: tuple[Record, ...]
    runs: tuple[Record, ...]
    evenness: Evenness
    step_seconds: tuple[float, ...]  # mean time per step of each short run, in alternation with the reference rule
    reference_step_seconds: tuple[float, ...]
    facts: dict[str, Any]  # settings, hashes and versions of a reported run
    processor: str
    date: str
    command: str

    @classmethod
    def read(cls, file: Path) -> Result:
        """Read a result; raise `UserError` if it is damaged or its summary does not follow from its records."""
        try:
            content = parse_json(read_text(file))
            summary = content.pop("summary")
            result = cls.model_validate(content)
            asked = result.summary()
        except ValidationError as error:
            raise UserError(f"{str(file)!r} is not a result of `rlzoo race`: {first_mistake(error)}") from error
        except (OSError, UnreadableError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{str(file)!r} is not a result of `rlzoo race`: {error}") from error
        if wrong := [name for name, value in asked.items() if summary.get(name) != value]:
            name = wrong[0]
            raise UserError(f"{str(file)!r}: {name} is {summary.get(name)}, but its records give {asked[name]}")
        return result

    def summary(self) -> dict[str, float | int | None]:
        """Return the numbers in the table that follow from this rule's records alone."""
        runs, ended = self.runs, [run for run in self.runs if not run.failure]
        solved = [np.mean([digit != "0" for digit in run.right]) if run.right else 0.0 for run in runs]
        rates = sorted({record.learning_rate for record in self.tuning})
        means = {rate: fmean(one.score for one in self.tuning if one.learning_rate == rate) for rate in rates}
        place = rates.index(best_rate(self.tuning))
        beside = [means[rate] for rate in rates[max(0, place - 1) : place + 2]]
        summary = {
            "reward": fmean(run.score for run in runs),
            "start": fmean(run.start or 0.0 for run in runs),
            "solved": fmean(map(float, solved)) if any(run.right for run in runs) else None,
            "below_start": sum(run.score < (run.start or 0.0) for run in runs),
            "collapsed": sum(bool(run.failure) or run.score < COLLAPSED * (run.start or 0.0) for run in runs),
            "learning_rate": rates[place],
            "at_edge": int(place in (0, len(rates) - 1)),
            "loss_beside": max(beside) - min(beside),
            "tokens": round(fmean(run.tokens for run in runs)),
            "relative_step_time": median(self.step_seconds) / median(self.reference_step_seconds),
        }
        for name in ("clip_fraction", "entropy", "length"):
            values = [value for run in ended if (value := getattr(run, name)) is not None]
            summary[name] = fmean(values) if values else None
        return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in summary.items()}

    def to_json(self) -> str:
        """Format the result with one line for each field and each record."""
        lines, fields = [], self.model_dump(mode="json", exclude_defaults=True)
        for name, value in {**fields, "summary": self.summary()}.items():
            records = ",\n  ".join(map(json.dumps, value)) if name in ("tuning", "runs") else ""
            lines.append(f'"{name}": ' + (f"[\n  {records}\n]" if records else json.dumps(value)))
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def check(self, track: Track) -> None:
        """Raise `UserError` if the result is for another version of the track or if runs are missing."""
        if self.track_digest != track.digest:
            raise UserError(f"{self.rule}: the track {track.name} has changed since this result was made; race the rule again")
        if missing := {*track.seeds} ^ {run.seed for run in self.runs}:
            raise UserError(f"{self.rule}: expected one run for each of the seeds {track.seeds}; see seed {min(missing)}")
        pairs = [(record.learning_rate, record.seed) for record in self.tuning]
        if lost := {(rate, seed) for rate in track.learning_rates for seed in track.tuning_seeds} - {*pairs}:
            raise UserError(f"{self.rule}: no tuning run with learning rate {min(lost)[0]:g} and seed {min(lost)[1]}")
        if len({*pairs}) < len(pairs) or len(self.runs) > len(track.seeds):
            raise UserError(f"{self.rule}: two runs have the same learning rate and seed")
        rates = {self.learning_rate, best_rate(self.tuning), *(run.learning_rate for run in self.runs)}
        if len(rates) > 1:
            raise UserError(f"{self.rule}: the runs must use the best learning rate of the tuning, {best_rate(self.tuning):g}")


def best_rate(records: Sequence[Record]) -> float:
    """Return the learning rate with the best mean score, or the lowest of them if several tie."""
    rates = sorted({record.learning_rate for record in records})
    return max(rates, key=lambda rate: fmean(record.score for record in records if record.learning_rate == rate))


def right_or_rewards(rewards: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Return an evaluation as `Record` stores it, given all rewards by problem. A missing grade counts as 0."""
    known = [[reward or 0.0 for reward in row] for row in rewards]
    if len(known[0]) <= 9 and all({0.0, 1.0}.issuperset(row) for row in known):
        return {"right": "".join(f"{round(sum(row))}" for row in known), "num_samples": len(known[0])}
    return {"rewards": tuple(round(fmean(row), 6) for row in known), "num_samples": len(known[0])}


def rule_hash(rule: type[ClipPolicy]) -> str:
    """Return the SHA-256 of the code in the file that defines the rule's class, without comments and docstrings."""
    tree = ast.parse(read_text(Path(sys.modules[rule.__module__].__file__ or "")))
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [ast.Expr(ast.Constant(str())), *code]:
                node.body = code or [ast.Pass()]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def processor() -> str:
    """Return the name of the processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


@dataclass(frozen=True)
class Standings:
    """All results on a track."""

    track: Track
    results: tuple[Result, ...]  # sorted from best to worst

    @classmethod
    def of(cls, track: Track, folders: Iterable[Path]) -> Standings:
        """Read and check all results in ``FOLDER/TRACK/*.json``. If a rule is in several folders, the last one counts."""
        results = {}
        for file in (file for folder in folders for file in sorted((folder / track.name).glob("*.json"))):
            result = Result.read(file)
            result.check(track)
            results[result.rule] = result
        return cls(track, tuple(sorted(results.values(), key=lambda result: -fmean(run.score for run in result.runs))))

    @cached_property
    def scores(self) -> dict[str, dict[int, float]]:
        """The mean reward of each rule's runs by seed."""
        return {result.rule: {run.seed: run.score for run in result.runs} for result in self.results}

    @cached_property
    def pairs(self) -> dict[str, Difference]:
        """The differences of the other rules from the reference rule. Empty if the reference rule has no result."""
        return against(self.track.reference, self.scores) if self.track.reference in self.scores else {}

    def line(self, rule: str) -> str | None:
        """Return one rule's result in words, or None if there is no result."""
        one = next((result.summary() for result in self.results if result.rule == rule), None)
        if one is None:
            return None
        line = f"{self.track.name}: mean reward {one['reward']:.3f} with learning rate {one['learning_rate']:g}"
        if (pair := self.pairs.get(rule)) and pair.interval:
            line += f"; minus {self.track.reference}: {pair.mean:+.3f} [{pair.interval[0]:+.3f}, {pair.interval[1]:+.3f}]"
        return line

    def sentences(self) -> list[str]:
        """Return sentences about what the table shows and about the smallest difference that it can detect."""
        number, control, pairs = len(self.results), self.track.reference, self.pairs
        if not pairs:
            return [f"A comparison needs results of {control} and of at least one other rule."]
        best = best_rules(self.scores)
        verdicts = [pair.verdict.partition(" above ")[0] for pair in pairs.values()]
        below = verdicts.count(control)
        above = sum(verdict in pairs for verdict in verdicts)
        spread = median(
            stdev(self.scores[name][seed] - self.scores[control][seed] for seed in self.track.seeds) for name in pairs
        )
        return [
            f"{len(best)} of {number} rules cannot be distinguished from the best one: {', '.join(best)}.",
            f"Compared with {control}, shown to be better: {above}; shown to be worse: {below} (paired t-tests, Holm's "
            "correction).",
            f"Such a table detects a difference from {control} of "
            f"{detectable(spread, len(self.track.seeds), len(pairs)):.3f} with a probability of 80%.",
        ]

    def tables(self) -> list[Table]:
        """Return a table of the scores and a table of the conditions under which they were reached."""
        control, scores, conditions = self.track.reference, list[Row](), list[Row]()
        for result in self.results:
            one, pair = result.summary(), self.pairs.get(result.rule)
            gap = (pair.mean, pair.interval) if pair else (None, None)
            rate = f"{one['learning_rate']:g}{' (edge)' if one['at_edge'] else ''}"
            scores.append([result.rule, one["reward"], *gap, one["solved"], one["below_start"], one["collapsed"]])
            conditions.append([result.rule, rate, *(one[name] for name in CONDITIONS), result.evenness.length_error])
        columns = ["rule", "reward", f"minus {control}", "simultaneous 95%", "solved", "below start", "collapsed"]
        return [
            Table(f"{self.track.name}: {self.track.about}", columns, scores),
            Table("", ["rule", "best lr", "loss beside", "clipped", "entropy", "length", "time", "length error"], conditions),
        ]
