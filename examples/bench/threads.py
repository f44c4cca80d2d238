"""Times steps with libgomp's default wait policy and with rlzoo's, alone and next to busy processes.

python -m examples.bench.threads                         # embedded, 5 M and SmolLM2, five pairs of each
python -m examples.bench.threads --case embedded --pairs 3

"old" uses libgomp's default, and "new" uses the wait policy of `rlzoo train`. Both processes use as many threads as there are
cores, stay loaded and take turns. A turn consists of several steps, and the order changes with every pair.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rlzoo.fast_cpu.waiting import SETTINGS as WAITING
from rlzoo.fast_cpu.waiting import prepare_waiting, waiting_by_load

BUSY = 2
STEPS = {"embedded": 10, "5m": 1, "smollm2": 5}
CASES = {"5m": "long-tail", "smollm2": "smollm2"}
OVERRIDES = {"smollm2": ("rollout.num_prompts=2", "rollout.max_new_tokens=32")}
SETTINGS, LOADS = ("old", "new"), ("alone", "busy")
PHASES = ("step", "rollout", "learner", "cpu")
SPIN = "while True: pass"


def main(cases: Sequence[str], pairs: int) -> None:
    """Print the medians of the times and of their ratios over all pairs."""
    for case in cases:
        found: dict[tuple[str, str], list[dict[str, float]]] = {(one, load): [] for one in SETTINGS for load in LOADS}
        with _workers(case) as workers:
            for pair in range(pairs):
                for load in LOADS[:: 1 if pair % 2 else -1]:
                    with _busy(BUSY if load == "busy" else 0):
                        for setting in SETTINGS[:: 1 if pair % 2 else -1]:
                            found[setting, load].append(_turn(workers[setting]))
        _print(case, found)


def _print(case: str, found: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    medians = {
        key: {phase: statistics.median(turn[phase] for turn in turns) for phase in PHASES} for key, turns in found.items()
    }
    print(f"{case}: {STEPS[case]} steps per turn, {len(found['old', 'alone'])} pairs, {os.cpu_count()} cores, seconds (median)")
    for (setting, load), phases in medians.items():
        print(f"  {setting} {load:5}  " + "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items()))
    for name, over, under in (
        ("new / old, alone", ("new", "alone"), ("old", "alone")),
        ("new / old, busy", ("new", "busy"), ("old", "busy")),
        ("busy / alone, old", ("old", "busy"), ("old", "alone")),
        ("busy / alone, new", ("new", "busy"), ("new", "alone")),
    ):
        ratios = {
            phase: [one[phase] / other[phase] for one, other in zip(found[over], found[under], strict=True)] for phase in PHASES
        }
        shown = "  ".join(
            f"{phase} {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for phase, each in ratios.items()
        )
        print(f"  {name:18}  {shown}", flush=True)


@contextmanager
def _workers(case: str) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start a process for each setting, and run an uncounted first turn."""
    taken = (*WAITING, "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in taken}
    command = [sys.executable, "-m", "examples.bench.threads", "--case", case, "--worker"]
    workers: dict[str, subprocess.Popen[str]] = {}
    try:
        for name in SETTINGS:
            workers[name] = subprocess.Popen(
                [*command, name], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            _turn(workers[name])
        yield workers
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


@contextmanager
def _busy(number: int) -> Iterator[None]:
    """Within the block, run processes that each keep one core busy."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(number)]
    try:
        if number:
            time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _turn(worker: subprocess.Popen[str]) -> dict[str, float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise SystemExit("a worker has exited")
    measured: dict[str, float] = json.loads(answer)
    return measured


def work(case: str, setting: str) -> None:
    """Run as a worker process: time some steps whenever the parent asks for it, until the parent ends."""
    if setting == "new":
        prepare_waiting()
    from examples.bench import turns
    from rlzoo.training.loop import steps

    turns.take_standard_output()
    taken = steps(_run(case))
    while True:
        turns.wait()
        started, before = time.perf_counter(), _cpu()
        with waiting_by_load(os.cpu_count() or 1) if setting == "new" else nullcontext():
            rows = [next(taken)[1] for _ in range(STEPS[case])]
        turns.report(
            step=time.perf_counter() - started,
            rollout=sum(row["time/rollout"] for row in rows),
            learner=sum(row["time/learner"] for row in rows),
            cpu=_cpu() - before,
        )


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _run(case: str) -> Any:
    """Create a run that is ready for its first step; for the embedded model, it is the default run of `rlzoo train`."""
    if case in CASES:
        from examples.bench.cases import CASES as BENCH_CASES
        from examples.bench.rlzoo_worker import make_run

        folder = Path(tempfile.gettempdir()) / "rlzoo-bench-models"
        return make_run(BENCH_CASES[CASES[case]], folder, *OVERRIDES.get(case, ()))
    from rlzoo import RunConfig
    from rlzoo.gate.enter import enter
    from rlzoo.training.run import Run

    output = Path(tempfile.mkdtemp(prefix="rlzoo-bench-")) / "run"
    settings = ["eval.num_problems=0", "tracking.mlflow=false"]
    config = RunConfig.compose(clip="grpo", overrides=settings, steps=100_000, output=output)
    return Run(enter(config, config.task.model_copy(update={"seed": config.seed})))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=STEPS, help="default: all cases")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.case[0], options.worker)
    else:
        main(options.case or list(STEPS), options.pairs)
