"""rlzoo against itself on a case: the ways to sample, and sizes of a micro-batch, in turns.

python -m examples.bench.alone long-tail
python -m examples.bench.alone equal --profile   # where a step's processor time goes, by operation
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from examples.bench.cases import CASES, GROUP
from examples.bench.rlzoo_worker import make_run
from rlzoo.engine.decode import Way
from rlzoo.engine.experience import Experience
from rlzoo.engine.loop import Run

WAYS: tuple[Way, ...] = ("generate", "rows", "fused")
SIZES = (512, 1024, 2048, 4096, 16384)
TURNS = 5


def main(name: str) -> None:
    """Print medians, after one turn that does not count."""
    case, folder = CASES[name], Path(tempfile.gettempdir()) / "rlzoo-bench-models"
    prompts = [case.prompt(index) for index in range(case.num_prompts)]
    run = make_run(case, folder)
    sampling: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(TURNS + 1):
        for way in WAYS:
            started = time.perf_counter()
            _sample(run, prompts, way, turn)
            sampling[way].append(time.perf_counter() - started)
    print(f"{name}, sampling:", ", ".join(f"{way} {statistics.median(taken[1:]):.3f} s" for way, taken in sampling.items()))
    runs = {size: make_run(case, folder, f"learner.max_tokens_per_micro_batch={size}") for size in SIZES}
    learning: dict[int, list[float]] = {size: [] for size in SIZES}
    for step in range(1, TURNS + 2):
        for size, one in runs.items():
            learning[size].append(one.step(step)["time/learner"])
    print(f"{name}, learning:", ", ".join(f"{size} {statistics.median(taken[1:]):.3f} s" for size, taken in learning.items()))


def profile(name: str) -> None:
    """Print the operations that take most of sampling and of learning, as shares of their sum."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    case = CASES[name]
    prompts = [case.prompt(index) for index in range(case.num_prompts)]
    run = make_run(case, Path(tempfile.gettempdir()) / "rlzoo-bench-models")
    run.step(1)
    experience = Experience.from_groups(run.source.take(2, 0).groups, "group_norm", max_length=case.max_new_tokens)
    ways: dict[str, Callable[[], object]] = {f"sampling, {way}": partial(_sample, run, prompts, way) for way in WAYS[1:]}
    for what, work in {**ways, "learning": lambda: run.learner.update(experience, 0)}.items():
        with recording(activities=[ProfilerActivity.CPU]) as recorded:
            work()
        operations = sorted(recorded.key_averages(), key=lambda one: -one.self_cpu_time_total)
        total = sum(one.self_cpu_time_total for one in operations)
        most = ", ".join(f"{one.key.removeprefix('aten::')} {one.self_cpu_time_total / total:.0%}" for one in operations[:8])
        print(f"{name}, {what}: {total / 1e6:.2f} s of operations: {most}")


def _sample(run: Run, prompts: list[str], way: Way, seed: int = 0) -> None:
    run.source.sampler.way = way  # type: ignore[attr-defined]
    with run.accelerator.autocast():
        run.source.sampler.sample(prompts, GROUP, seed=seed)


if __name__ == "__main__":
    (profile if "--profile" in sys.argv else main)(sys.argv[1])
