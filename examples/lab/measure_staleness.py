"""Measures steps per hour, clip fraction and reward for several values of rollout.max_staleness, in alternating runs.

Usage: python examples/lab/measure_staleness.py --rounds 2 --steps 24 [--server http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean, median

import rlzoo
from rlzoo import RunConfig

ARMS = {
    "0": ("rollout.max_staleness=0",),
    "1": ("rollout.max_staleness=1",),
    "4": ("rollout.max_staleness=4",),
    "4, in flight": ("rollout.max_staleness=4", "rollout.vllm.in_flight=true"),
}
METRICS = ("rollout/staleness", "mismatch/log_ratio_abs_mean", "clip/fraction", "reward/mean")


def measured(arm: str, seed: int, steps: int, server: str | None, clip: str) -> dict[str, float]:
    """Train one run. Return its steps per hour and the means of its metrics over the second half of the steps."""
    engine = ["rollout.engine=vllm", f"rollout.vllm.server={server}"] if server else ["rollout.engine=hf"]
    overrides = [*engine, *ARMS[arm], "tracking.mlflow=false", "eval.num_problems=0", "checkpoint.every=0"]
    with tempfile.TemporaryDirectory() as folder:
        run = RunConfig.compose(clip=clip, overrides=overrides, steps=steps, seed=seed, output=Path(folder) / "run")
        rows = rlzoo.train(run).metrics
    seconds = rows[-1]["time/clock"] - rows[1]["time/clock"]  # the first step fills the queue
    half = rows[1 + steps // 2 :]
    means = {name: fmean(row[name] for row in half if name in row) for name in METRICS if any(name in row for row in half)}
    return {"steps per hour": 3600 * (steps - 1) / seconds, **means}


def main() -> None:
    """Run all settings in alternation and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--clip", default="grpo")
    parser.add_argument("--server")
    given = parser.parse_args()
    arms = [arm for arm in ARMS if given.server or "flight" not in arm]
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for seed in range(given.rounds):
        for arm in arms if seed % 2 == 0 else reversed(arms):
            found[arm].append(measured(arm, seed, given.steps, given.server, given.clip))
    speed = "steps per hour"
    print(f"| max_staleness | {speed} | ratio to 0: median (min to max) | {' | '.join(f'`{name}`' for name in METRICS)} |")
    print("|---" * (3 + len(METRICS)) + "|")
    for arm, rows in found.items():
        ratios = [row[speed] / base[speed] for row, base in zip(rows, found["0"], strict=True)]
        means = [f"{fmean(row.get(name, 0.0) for row in rows):.3g}" for name in METRICS]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {arm} | {median(row[speed] for row in rows):,.0f} | {spread} | {' | '.join(means)} |")


if __name__ == "__main__":
    main()
