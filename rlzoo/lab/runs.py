"""Reads the settings, metrics and summaries of finished runs from their directories."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import UserError, shown
from rlzoo.core.settings import flatten, user_path
from rlzoo.core.zoo import Zoo, load_zoo
from rlzoo.gate.fingerprint import FREE, SCORE, resume_command
from rlzoo.journal.run_directory import read_metrics
from rlzoo.journal.state import IDENTITY
from rlzoo.support.lock import is_locked
from rlzoo.support.parsing import parse_json, parse_yaml
from rlzoo.support.reading import read_text

REPETITION = ("seed", "output", "plugins", "tracking.", "checkpoint.")  # settings that may differ between repetitions


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run."""

    path: Path
    policy: str  # name of the run's clip policy
    seed: int
    settings: Mapping[str, Any]  # from its config.yaml; see `resolved_settings`
    metrics: tuple[Mapping[str, float], ...]
    summary: Mapping[str, Any]

    @property
    def accuracies(self) -> list[float]:
        """The accuracies of all evaluations, starting before the first update and ending after the last."""
        return [row["eval/accuracy"] for row in self.metrics if "eval/accuracy" in row]

    @property
    def ended(self) -> float:
        """The time at which the last step ended, in seconds since 1970, or 0 if it was not recorded."""
        return self.metrics[-1].get("time/clock", 0.0)

    def mean(self, name: str, last_share: float = 1.0) -> float | None:
        """Return the mean of a metric over the last steps of the run. ``last_share`` is the fraction of steps to include."""
        first = self.settings["steps"] * (1 - last_share)
        values = [row[name] for row in self.metrics if name in row and row["step"] > first]
        return fmean(values) if values else None

    def score(self, name: str) -> float:
        """Return the final accuracy on held-out problems, or the mean reward over the last quarter of the steps."""
        value = self.accuracies[-1] if name == "eval/accuracy" else self.mean(name, 0.25)
        assert value is not None, "a finished run has rewards"
        return value

    @property
    def seconds(self) -> float:
        """The run's duration in seconds, or the time spent on sampling and learning if no duration was recorded."""
        spent = sum(row.get("time/rollout", 0.0) + row.get("time/learner", 0.0) for row in self.metrics)
        seconds = self.summary.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) and 0 < seconds < math.inf else spent


def find_runs(paths: Sequence[Path], plugins: Sequence[str | Path] = ()) -> tuple[list[FinishedRun], list[str]]:
    """Return every finished run in the given folders, at any depth, and a note on each run that was skipped.

    Only rules that are installed or in ``plugins`` are known. A run's own plugins are not loaded.

    Raises:
        UserError: a path is not a folder, there is no finished run, or a plugin cannot be used.
    """
    folders: dict[Path, Path] = {}  # maps each resolved path to the path as given
    for folder in (folder for path in paths for folder in _folders_with("config.yaml", path)):
        if (folder / "rollouts").is_dir() or (folder / "metrics.jsonl").is_file():  # otherwise, it is not a run
            folders.setdefault(folder.resolve(), folder)
    runs, notes, zoo = [], [], load_zoo(plugins)
    for folder in folders.values():
        try:
            if run := _read(folder, zoo):
                runs.append(run)
                facts = read_mapping(folder / IDENTITY).get("fingerprint") or {}
                settings = {key: value for key, value in facts.items() if value is not None and not key.startswith(FREE)}
                if changed := [key for key, value in settings.items() if run.settings.get(key, value) != value]:
                    notes.append(f"{folder}: {', '.join(changed)} changed when the run was resumed (--allow-changed)")
            else:
                notes.append(f"skipped because it is not finished: {folder}")
        except UserError as error:
            notes.append(f"skipped because it is damaged: {error}")
    if not runs:
        why = f" ({notes[0]})" if notes else ""
        raise UserError(
            f"no finished run in {', '.join(map(str, paths))}{why}; create runs with `rlzoo sweep` or `rlzoo train`"
        )
    return runs, notes


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return facts about each run in a folder, at any depth. ``reward`` is the mean over the last quarter of the steps so far.

    Raises:
        UserError: the path is not a folder.
    """
    return [_facts(path) for path in _folders_with(IDENTITY, folder) if (path / "rollouts").is_dir()]


def _folders_with(name: str, path: Path) -> list[Path]:
    """Return the folders, at any depth, that contain a file with this name, skipping any that are removed in the meantime."""
    if not os.path.isdir(path := user_path(path)):  # noqa: PTH112 - Path.is_dir raises an error for a name that is too long
        raise UserError(f"{shown(str(path))} is not a folder; pass run directories, or folders that contain them")
    return sorted(Path(parent) for parent, _, names in os.walk(path) if name in names)


def _facts(path: Path) -> dict[str, Any]:
    metrics: list[dict[str, float]] = [{"step": 0}]
    with suppress(UserError):  # `rlzoo train --resume` reports the error
        metrics = read_metrics(path / "metrics.jsonl") or metrics
    summary, settings = read_mapping(path / "summary.json"), flatten(read_mapping(path / "config.yaml", parse_yaml))
    run = FinishedRun(path, settings.get("clip.name", ""), 0, {"steps": metrics[-1]["step"]}, tuple(metrics), {})
    is_over = settings and summary.get("finished")
    state = "running" if is_locked(path) else "finished" if is_over else "unfinished"
    size = 0
    for file in (Path(parent, name) for parent, _, names in os.walk(path) for name in names):
        with suppress(OSError):  # the file was removed meanwhile
            size += file.lstat().st_size
    facts, last = read_mapping(path / IDENTITY).get("fingerprint"), run.accuracies[-1] if run.accuracies else None
    is_reward = isinstance(facts, dict) and facts.get(SCORE) == "reward"
    removes = f"rlzoo runs remove {shlex.quote(str(path))}"  # which deletes config.yaml first
    command = resume_command(path, facts if isinstance(facts, dict) else {}) if settings else removes
    return {
        "run": str(path),
        "rule": run.policy,
        "seed": settings.get("seed"),
        "state": state,
        "step": run.settings["steps"],
        "steps": summary.get("steps") if is_over else settings.get("steps"),
        "seconds": run.seconds,
        "accuracy": None if is_reward else last,
        "held-out reward": last if is_reward else None,
        "reward": run.mean("reward/mean", 0.25),
        "bytes": size,
        "command": command if state == "unfinished" else "",
    }


def read_mapping(file: Path, parse: Callable[[str], Any] = parse_json) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file, or {} if the file is missing or cannot be read."""
    try:
        content = parse(read_text(file))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def changed_settings(before: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ, such as ``"learner.lr (was 0.0003, now 5e-05)"``."""
    old, new = flatten(before), flatten(asked)
    return [f"{key} (was {old.get(key)}, now {new.get(key)})" for key in sorted(old | new) if old.get(key) != new.get(key)]


def resolved_settings(config: Mapping[str, Any], zoo: Zoo) -> dict[str, Any]:
    """Return a run's settings with dotted keys. If the rule or another setting determines a null setting, fill in its value.

    A setting that depends on an unknown rule is omitted. A field that takes a name or a mapping, such as ``correction``,
    remains a single value, so that every run has the same keys.
    """
    settings = flatten(config, section=RunConfig)
    if settings.get("learner.minibatch_by", "") is None:
        del settings["learner.minibatch_by"]
        for rule in (rule for name, rule in zoo.items() if name == settings.get("clip.name")):
            by_prompts = "group_ids" in rule.needs or settings.get("clip.reduction") == "prompt_mean"
            settings["learner.minibatch_by"] = "prompts" if by_prompts else "responses"
    usual = {"learner.lora.alpha": ("learner.lora.rank", 2.0), "rollout.max_turn_tokens": ("rollout.max_new_tokens", 1)}
    for key, (other, factor) in usual.items():
        if settings.get(key, "") is None and isinstance(settings.get(other), int):
            settings[key] = factor * settings[other]
    return settings


def _read(folder: Path, zoo: Zoo) -> FinishedRun | None:
    """Read the run in a folder, or return None if it is not finished. Raise `UserError` if its metrics are damaged."""
    summary = read_mapping(folder / "summary.json")
    settings = resolved_settings(read_mapping(folder / "config.yaml", parse_yaml), zoo)
    facts, names = read_mapping(folder / "run.json").get("fingerprint"), {str(value) for value in settings.values()}
    names |= {f"{name.partition(':')[0]}.py" for name in names}  # such as the module of the reward
    if isinstance(facts, dict):
        names = {SCORE, *(f"file {name}" for name in names)}
        settings |= {key: value for key, value in facts.items() if key in names}
    clip, seed, steps = (settings.get(key) for key in ("clip.name", "seed", "steps"))
    if not (isinstance(clip, str) and type(seed) is type(steps) is int and (folder / "metrics.jsonl").is_file()):
        return None
    if type(summary.get("steps")) is int:
        settings["steps"] = steps = summary["steps"]  # the run may have been resumed with another number of steps
    metrics = tuple(read_metrics(folder / "metrics.jsonl"))
    if not metrics or metrics[-1]["step"] != steps or not summary.get("finished", True):
        return None
    if not any("reward/mean" in row and row["step"] > steps * 0.75 for row in metrics):
        raise UserError(f"{str(folder / 'metrics.jsonl')!r} has no reward/mean in the last quarter of its steps")
    return FinishedRun(folder, clip, seed, settings, metrics, summary)
