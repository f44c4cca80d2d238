"""Measures the shares of a learner step's time that the plugin interface takes to call the policy and check its result.

``python examples/lab/measure_boundary.py [NAME ...]`` times optimizer steps with the model and batch of the default run. For
each step, it also times the policy call alone and everything that depends on the policy: the call, the checks, the
reduction and the gradient with respect to the log-probs, all of which are repeated at ratio 1 for the metrics. The script uses
one thread and prints the median shares.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rlzoo import RunConfig, load_zoo
from rlzoo.core.reductions import StepCounts
from rlzoo.gate.enter import enter
from rlzoo.learner.batch import collate
from rlzoo.learner.judge import judgement
from rlzoo.training.run import Run

PAIRS = 30


def timed(work: Callable[[], object]) -> float:
    """Return the duration of one call in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def shares(name: str) -> tuple[float, float, float]:
    """Return the median time of a step and the median shares of the policy call and of all work that depends on the policy."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.compose(clip=name, overrides=["eval.num_problems=0"], steps=1, output=Path(folder) / "run")
        task = config.task.model_copy(update={"seed": 0})
        run = Run(enter(config, task))
        learner = run.learner
        batch = learner.score(collate(run.sample(1).groups))
    rows = learner.minibatches(batch, 0)[1]
    mask = batch.response_mask[rows]
    noise = 0.01 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    leaf = (learner.log_probs(batch)[rows] + noise).requires_grad_()
    limit = config.rollout.max_new_tokens
    inputs = learner.clip_inputs(batch, rows, leaf, torch.zeros_like(noise))
    counts = StepCounts.of(mask)

    def boundary() -> None:
        judgement(config.clip, inputs, counts, limit)

    def step() -> None:
        learner.apply(learner.accumulate(batch, rows))

    for _ in range(3):
        step()
        boundary()
    steps, bare, whole = [], [], []
    for _ in range(PAIRS):
        steps.append(timed(step))
        bare.append(timed(lambda: config.clip(inputs)))
        whole.append(timed(boundary))
    ratios = [[part / step for part, step in zip(parts, steps, strict=True)] for parts in (bare, whole)]
    return statistics.median(steps), statistics.median(ratios[0]), statistics.median(ratios[1])


def main() -> None:
    """Print one line per policy."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or list(load_zoo()):
        step, bare, whole = shares(name)
        print(
            f"{name:16} step {1e3 * step:6.1f} ms   policy call {bare:.2%}   with checks, reduction and gradients {whole:.2%}"
        )


if __name__ == "__main__":
    main()
