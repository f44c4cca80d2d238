"""Runs all combinations of rules, settings and seeds in separate processes."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.core.settings import user_path
from rlzoo.gate.fingerprint import file_facts
from rlzoo.gate.settings import Start, check_settings
from rlzoo.journal.state import read_fingerprint
from rlzoo.journal.tracking.uploads import SWEEP
from rlzoo.lab.runs import REPETITION, changed_settings, read_mapping, resolved_settings
from rlzoo.models.machine import LAUNCHED, available_memory, cores
from rlzoo.support.parsing import parse_json, parse_yaml
from rlzoo.support.reading import read_text

PRELOADED = ("rlzoo.cli.app", "rlzoo.cli.progress", "rlzoo.training.train", "transformers.models.qwen3.modeling_qwen3")
"""Modules that are imported only once, in the process from which all runs are forked."""

POLL = 0.5  # seconds between polls of the children
SETTLED = 20.0  # seconds after which a child's memory use has roughly settled
SPARE = 1.2  # free memory required for another child, relative to the memory of the largest child so far


@dataclass(frozen=True, slots=True)
class Child:
    """One run of a sweep."""

    name: str
    path: Path  # the run directory
    config: RunConfig
    arguments: tuple[str, ...]  # arguments of `rlzoo train`

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its last step and still has the files that `find_runs` reads."""
        has_files = self.is_begun and (self.path / "metrics.jsonl").is_file()
        return has_files and bool(read_mapping(self.path / "summary.json").get("finished"))

    @property
    def is_begun(self) -> bool:
        """Whether there is a run to resume."""
        return (self.path / "config.yaml").is_file()

    def last_metrics(self) -> dict[str, float]:
        """Return the last row of the run's metrics, or {} before the first row and while a row is being written."""
        try:
            lines = read_text(self.path / "metrics.jsonl").splitlines()
            return dict(parse_json(lines[-1])) if lines else {}
        except (OSError, ValueError, TypeError):
            return {}


Look = Callable[[Sequence[Child]], None]
Ended = Callable[[Child, int], None]
Executor = Callable[[Sequence[Child], Look, Ended], list[Child]]
"""A function that runs the unfinished children, as `run_children` does."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs of every combination of rule, setting and seed, in one folder."""

    folder: Path
    clips: tuple[str, ...]
    seeds: tuple[int, ...]
    configs: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    grid: tuple[str, ...] = ()  # such as "learner.lr=1e-4,3e-4"; every value is combined with every rule and seed
    plugins: tuple[str, ...] = ()
    steps: int | None = None
    children: tuple[Child, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Compose and check every child so that any mistake raises a `UserError` before the first child starts."""
        object.__setattr__(self, "children", tuple(self._children()))
        if len({child.name for child in self.children}) < len(self.children):
            raise UserError("--grid: two runs would have the same name; use distinct values of distinct settings")
        compared = [_compared_settings(child.config) for child in self.children]
        if repeated := [child.name for place, child in enumerate(self.children) if compared[place] in compared[:place]]:
            raise UserError(
                f"--grid: run {repeated[0]!r} has the same settings as another run, apart from settings that a "
                "comparison ignores; use distinct values of settings that affect training"
            )
        for child in (child for child in self.children if not child.is_finished):
            check_settings(child.config, Start.of(child.config, resume=child.is_begun))

    def _children(self) -> Iterator[Child]:
        for seed, clip, setting in itertools.product(self.seeds, self.clips, _grid(self.grid, self.overrides)):
            words = [clip, *(f"{key.rpartition('.')[2]}={value}" for key, value in setting.items()), str(seed)]
            name = "-".join(words).replace("/", "_")  # a setting that contains a slash must not create subfolders
            path = user_path(self.folder) / name
            overrides = (*self.overrides, *(f"{key}={value}" for key, value in setting.items()))
            config = RunConfig.compose(
                self.configs, clip=clip, overrides=overrides, plugins=self.plugins, seed=seed, steps=self.steps, output=path
            )
            arguments = ["--clip", clip, "--seed", str(seed), "--output", str(path)]
            for option, values in (("--config", self.configs), ("--set", overrides), ("--plugin", self.plugins)):
                arguments += [word for value in values for word in (option, value)]
            arguments += [] if self.steps is None else ["--steps", str(self.steps)]
            child = Child(name, path, config, tuple(arguments))
            if child.is_begun:
                _check_same(child)
            yield child


def _compared_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that distinguish two runs of one sweep in a comparison."""
    settings = resolved_settings(config.model_dump(mode="json"), config.plugins.zoo)
    return {key: value for key, value in settings.items() if key == "seed" or not key.startswith(REPETITION)}


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds: ``"5"`` means seeds 0 to 4, ``"101,102"`` means seeds 101 and 102, and ``"5,"`` means only seed 5."""
    try:
        seeds = tuple(range(int(text))) if "," not in text else tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        seeds = ()
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(
            f"--seeds {text!r}: expected a number of seeds, such as 5 for seeds 0 to 4, or distinct seeds, such as 101,102"
        )
    return seeds


def _grid(axes: Sequence[str], overrides: Sequence[str]) -> list[dict[str, str]]:
    """Return all combinations of the axes' values; raise `UserError` for a key that occurs twice."""
    changed = {override.partition("=")[0].removesuffix(".name") for override in overrides}
    choices: dict[str, list[str]] = {}
    for axis in axes:
        key, _, values = axis.partition("=")
        if key.removesuffix(".name") in changed | {other.removesuffix(".name") for other in choices}:
            raise UserError(f"--grid {axis!r}: another --set or --grid sets {key}; list all of its values in one --grid")
        choices[key] = [word.strip() for word in values.split(",") if word.strip()]
        if not key or not choices[key]:
            raise UserError(f"--grid {axis!r}: expected KEY=VALUE,VALUE, such as learner.lr=1e-4,3e-4")
    return [dict(zip(choices, words, strict=True)) for words in itertools.product(*choices.values())]


def _check_same(child: Child) -> None:
    """Raise `UserError` if the child's directory contains a run with different settings."""
    before = read_mapping(child.path / "config.yaml", parse_yaml)
    if not before:
        raise UserError(f"{str(child.path)!r} is a run whose config.yaml cannot be read; choose another --output")
    asked = parse_yaml(child.config.to_yaml())
    free = ("output", "tracking", *(("plugins",) if child.is_finished else ()))  # a finished run allows more plugins
    if changed := changed_settings(before, asked | {key: before.get(key) for key in free}):
        raise UserError(
            f"{str(child.path)!r} has different settings: {', '.join(changed[:3])}; remove it or choose another --output"
        )
    facts, now = read_fingerprint(child.path), file_facts(child.config)
    names = [*(name for name in facts if name.startswith("plugin ")), *(now.keys() & facts if child.is_finished else now)]
    if edited := [name for name in names if facts.get(name) != now.get(name)]:
        raise UserError(f"{edited[0]} has changed since {str(child.path)!r} began; undo this or remove that run (runs remove)")


@dataclass(slots=True)
class SweepProcess:
    """A running child process."""

    child: Child
    environment: dict[str, str]
    process: Any  # a `multiprocessing.Process`, or one with its attributes
    started: float

    def memory(self) -> int:
        """Return the process's resident memory in bytes."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0


def run_children(
    children: Sequence[Child],
    look: Look,
    ended: Ended,
    jobs: int | None = None,
    start: Callable[[Child, dict[str, str]], SweepProcess] | None = None,
) -> list[Child]:
    """Run every child that is not finished and wait for all of them.

    Args:
        children: the runs, in the order in which to start them.
        look: called every half second with the children that are running.
        ended: called when a child ends, with the child and its exit code.
        jobs: number of children to run at once; None for one per GPU or, without GPUs, one per core if memory allows.
        start: starts a child with environment variables for its share of the machine; by default in a process forked here.

    Returns:
        The children that are not finished at the end because they failed or were deleted meanwhile. On Ctrl-C or SIGTERM, the
        running children are asked to save and exit, and the exception propagates.
    """
    waiting = [child for child in children if not child.is_finished]
    free = slots(jobs)
    running: list[SweepProcess] = []
    largest = 0  # largest memory use of a settled child, in bytes; 0 until a child has settled
    try:
        while waiting or running:
            if waiting and free and (jobs is not None or _has_room(running, largest)):
                running.append((start or _start)(waiting.pop(0), free.pop(0)))
                continue
            look([worker.child for worker in running])
            time.sleep(POLL)
            settled = [worker for worker in running if time.monotonic() - worker.started > SETTLED]
            largest = max([largest, *(worker.memory() for worker in settled)])
            for worker in [worker for worker in running if worker.process.exitcode is not None]:
                running.remove(worker)
                free.insert(0, worker.environment)
                ended(worker.child, worker.process.exitcode or 0)
    finally:
        for worker in running:
            worker.process.terminate()
        for worker in running:
            worker.process.join()
    return [child for child in children if not child.is_finished]


def slots(jobs: int | None) -> list[dict[str, str]]:
    """Return the environment variables that select the GPU and the share of the cores for each concurrent child."""
    import torch

    gpus = torch.cuda.device_count()
    number = jobs or gpus or cores()
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // number))}
    if not gpus:
        return [threads] * number
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = shown if len(shown) == gpus else [str(index) for index in range(gpus)]
    return [threads | {"CUDA_VISIBLE_DEVICES": names[index % gpus]} for index in range(number)]


def log_of(child: Child) -> Path:
    """Return the file for the output of a child, in a folder that is created if needed."""
    log = child.path.parent / "logs" / f"{child.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return log


def last_error(child: Child) -> str:
    """Return the message of rlzoo that ended a child's run, or an empty string if the run ended in another way."""
    log = log_of(child)
    lines = [line for line in read_text(log).splitlines() if not line.startswith("srun: ")] if log.is_file() else []
    return lines[-1].removeprefix("rlzoo: ") if lines and lines[-1].startswith("rlzoo: ") else ""


def _start(child: Child, environment: dict[str, str]) -> SweepProcess:
    """Start or resume a child, whose output goes to ``logs/``."""
    # some imports query the GPUs, and CUDA cannot be used in a process forked after such a query
    context: Any = mp.get_context("spawn" if "CUDA_VISIBLE_DEVICES" in environment else "forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    words = ["rlzoo", "train", *child.arguments, *(["--resume"] if child.is_begun else [])]
    # pass all variables, because the fork server keeps those with which it was started
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    variables |= {**environment, SWEEP: str(child.path.parent.resolve())}
    process = context.Process(target=_run, args=(words, variables, log_of(child)))
    process.start()
    return SweepProcess(child, environment, process, time.monotonic())


def _run(words: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
    """Run a command as if this process had not been forked. If the sweep is killed, the command saves and exits."""
    import torch

    os.setsid()  # Ctrl-C must reach only the sweep, which signals each child once
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))  # torch has already read the variable
    sys.argv = list(words)
    importlib.import_module("rlzoo.cli.main").entry()  # imported by name, because the lab must not depend on the command line


def _end_with_the_sweep() -> None:
    sweep = mp.parent_process()
    assert sweep is not None, "started by `_start`"
    wait([sweep.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _has_room(running: Sequence[SweepProcess], largest: int) -> bool:
    """Whether there is enough memory for another child if every child grows as large as the largest one so far."""
    missing = sum(max(0, largest - worker.memory()) for worker in running)
    return not running or 0 < SPARE * largest < available_memory() - missing
