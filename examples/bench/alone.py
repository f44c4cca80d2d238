"""rlzoo against itself on a case: the ways to sample, and sizes of a micro-batch, in turns.

python -m examples.bench.alone long-tail
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from examples.bench.cases import CASES, GROUP
from examples.bench.rlzoo_worker import make_run
from rlzoo.engine.decode import Way

WAYS: tuple[Way, ...] = ("generate", "rows", "fused")
SIZES = (512, 1024, 2048, 4096, 16384)
TURNS = 5


def main(name: str) -> None:
    """Print medians, after one turn that does not count."""
    case, folder = CASES[name], Path(tempfile.gettempdir()) / "rlzoo-bench-models"
    prompts = [case.prompt(index) for index in range(case.num_prompts)]
    run = make_run(case, folder)
    sampler = run.source.sampler
    sampling: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(TURNS + 1):
        for way in WAYS:
            sampler.way = way  # type: ignore[attr-defined]
            started = time.perf_counter()
            with run.accelerator.autocast():
                sampler.sample(prompts, GROUP, seed=turn)
            sampling[way].append(time.perf_counter() - started)
    print(f"{name}, sampling:", ", ".join(f"{way} {statistics.median(taken[1:]):.3f} s" for way, taken in sampling.items()))
    runs = {size: make_run(case, folder, f"learner.max_tokens_per_micro_batch={size}") for size in SIZES}
    learning: dict[int, list[float]] = {size: [] for size in SIZES}
    for step in range(1, TURNS + 2):
        for size, one in runs.items():
            learning[size].append(one.step(step)["time/learner"])
    print(f"{name}, learning:", ", ".join(f"{size} {statistics.median(taken[1:]):.3f} s" for size, taken in learning.items()))


if __name__ == "__main__":
    main(sys.argv[1])
