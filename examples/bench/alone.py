"""Compares rlzoo's sampling methods and micro-batch sizes on one case, alternating between them.

python -m examples.bench.alone long-tail
python -m examples.bench.alone equal --profile          # the CPU time of a step, by operation
python -m examples.bench.alone equal --without onednn   # a step without `rlzoo.models.fast_cpu.cpu`
python -m examples.bench.alone equal --compile          # a step with a compiled learner model
python -m examples.bench.alone equal --cost             # the cost of a micro-batch: fixed part and tokens
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from examples.bench.cases import CASES, GROUP
from examples.bench.rlzoo_worker import make_run
from rlzoo.learner.batch import collate
from rlzoo.learner.micro_batches import ModelInputs
from rlzoo.models.fast_cpu import cpu as processor
from rlzoo.rollout.decode import Way
from rlzoo.training.loop import steps as train_steps
from rlzoo.training.run import Run

WAYS: tuple[Way, ...] = ("generate", "rows", "fused")
PARTS = {"onednn": "is_slow_with_mkl"}
SIZES = (512, 1024, 2048, 4096, 16384)
TURNS = 5


def main(name: str) -> None:
    """Print the median times, excluding the first turn."""
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
    runs = {size: train_steps(make_run(case, folder, f"learner.max_tokens_per_micro_batch={size}")) for size in SIZES}
    learning: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(TURNS + 1):
        for size, one in runs.items():
            learning[size].append(next(one)[1]["time/learner"])
    print(f"{name}, learning:", ", ".join(f"{size} {statistics.median(taken[1:]):.3f} s" for size, taken in learning.items()))


def steps(name: str, kind: str, *, compiles: bool) -> None:
    """Print the median times of a step, optionally with the learner's model compiled."""
    run = make_run(CASES[name], Path(tempfile.gettempdir()) / "rlzoo-bench-models")
    if compiles:
        run.learner.language_model.base_model.compile(dynamic=True)
    taken = [row for _, (_, row, _) in zip(range(TURNS + 1), train_steps(run), strict=False)]
    times = {phase: [step[f"time/{phase}"] for step in taken] for phase in ("rollout", "learner")}
    medians = ", ".join(f"{phase} {statistics.median(each[1:]):.3f} s" for phase, each in times.items())
    print(f"{name}, {kind}: {medians}; first step {times['rollout'][0] + times['learner'][0]:.1f} s")


def profile(name: str, kind: str) -> None:
    """Print the operations that take the most time in sampling and in learning, with their shares of the total."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    case = CASES[name]
    prompts = [case.prompt(index) for index in range(case.num_prompts)]
    run = make_run(case, Path(tempfile.gettempdir()) / "rlzoo-bench-models")
    next(train_steps(run))
    batch = collate(run.sample(2).groups, 2)
    ways: dict[str, Callable[[], object]] = {f"sampling, {way}": partial(_sample, run, prompts, way) for way in WAYS[1:]}
    for what, work in {**ways, "learning": lambda: run.learner.update(run.learner.score(batch))}.items():
        with recording(activities=[ProfilerActivity.CPU]) as recorded:
            work()
        operations = sorted(recorded.key_averages(), key=lambda one: -one.self_cpu_time_total)
        total = sum(one.self_cpu_time_total for one in operations)
        most = ", ".join(f"{one.key.removeprefix('aten::')} {one.self_cpu_time_total / total:.0%}" for one in operations[:8])
        print(f"{name}, {kind}, {what}: {total / 1e6:.2f} s of operations: {most}")


def cost(name: str) -> None:
    """Print the cost per token and the fixed cost of a forward and backward pass, and compare the latter with `overhead`."""
    run = make_run(CASES[name], Path(tempfile.gettempdir()) / "rlzoo-bench-models")
    sizes = run.learner.language_model.config.get_text_config()
    rows = (1, 2, 4, 8, 16, 24)
    taken: dict[int, list[float]] = {number: [] for number in rows}
    for _ in range(TURNS + 1):
        for number in rows:
            ids = torch.randint(sizes.vocab_size, (number, 64))
            inputs = ModelInputs(ids, None, None, torch.arange(64).expand(number, -1) < 63)
            started = time.perf_counter()
            log_probs, _ = run.learner.model(inputs)
            log_probs.sum().backward()
            taken[number].append(time.perf_counter() - started)
            run.learner.optimization.forget()
    medians = [statistics.median(taken[number][1:]) for number in rows]
    slope, fixed = np.polyfit([64 * number for number in rows], medians, 1)
    assumed = run.learner.micro_batches.overhead
    beside = f"fixed cost {fixed * 1e3:.1f} ms, as much as {fixed / slope:.0f} tokens (assumed: {assumed})"
    print(f"{name}: {slope * 1e6:.0f} microseconds per token, {beside}")


def _sample(run: Run, prompts: list[str], way: Way, seed: int = 0) -> None:
    run.rollouts.sampler.way = way  # type: ignore[attr-defined]
    with run.accelerator.autocast():
        run.rollouts.sampler.sample(prompts, GROUP, seed=seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--step", action="store_true", help="time an unmodified step")
    parser.add_argument("--without", action="append", choices=PARTS, default=[])
    options = parser.parse_args()
    for part in options.without:
        setattr(processor, PARTS[part], lambda *_: None)
    kind = ", ".join([*(f"without {part}" for part in options.without), *["compiled"] * options.compile]) or "as it is"
    if options.profile:
        profile(options.case, kind)
    elif options.cost:
        cost(options.case)
    elif options.step or options.without or options.compile:
        steps(options.case, kind, compiles=options.compile)
    else:
        main(options.case)
