"""Compares a critic with a group baseline at equal numbers of responses, and SAO with GRPO at several values of max_staleness.

Usage: python examples/lab/critic_worth.py --seeds 8 --output runs/critic-worth
Each of the ten arms takes one to three minutes per seed on two idle CPU cores, so that eight seeds take about three hours. If
interrupted, rerun the same command; finished runs are kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from scipy import stats

import rlzoo
from rlzoo import RunConfig
from rlzoo.journal.run_directory import read_metrics

GROUPS, CRITIC = ["clip.name=grpo"], ["clip.name=grpo", "clip.advantage=gae", "critic.lr=1e-3"]
SINGLE = ["clip.name=sao", "clip.advantage=gae", "clip.advantage.lam_alpha=0.5", "clip.advantage.lam_returns=1"]
SINGLE += ["critic.lr=1e-3", "critic.updates=2", "critic.frozen=[attn]", "rollout.num_prompts=256", "rollout.group_size=1"]
ARMS: dict[str, tuple[list[str], list[str]]] = {
    "sums, group baseline": ([], GROUPS),
    "sums, critic": ([], CRITIC),
    "guess, group baseline": (["guess"], GROUPS),
    "guess, critic": (["guess"], CRITIC),
}
for _steps in (0, 4, 16):
    _alike = [f"rollout.max_staleness={_steps}", "learner.lr=1.5e-4"]
    ARMS[f"sums, staleness {_steps}, GRPO"] = ([], [*GROUPS, *_alike])
    ARMS[f"sums, staleness {_steps}, SAO"] = ([], [*SINGLE, *_alike])


def accuracy(arm: str, seed: int, output: Path) -> float:
    """Train one run, unless it has ended before, and return the accuracy of its last evaluation."""
    configs, settings = ARMS[arm]
    folder = output / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
    overrides = [*settings, "tracking.mlflow=false", "eval.every=0", "checkpoint.every=0"]
    run, file = RunConfig.compose(configs, overrides=overrides, seed=seed, output=folder), folder / "metrics.jsonl"
    if not file.is_file() or read_metrics(file)[-1]["step"] < run.steps:
        rlzoo.train(run, resume=(folder / "config.yaml").is_file())
    return read_metrics(file)[-1]["eval/accuracy"]


def main() -> None:
    """Run all arms, and print the mean accuracy with its 95% interval over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("runs/critic-worth"))
    given = parser.parse_args()
    print("| arm | accuracy after the last step, 95% interval over seeds | standard deviation |\n|---|---|---|", flush=True)
    for arm in ARMS:
        values = np.array([accuracy(arm, seed, given.output) for seed in range(given.seeds)])
        half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)) if len(values) > 1 else float("nan")
        print(f"| {arm} | {values.mean():.3f} +- {half:.3f} | {values.std(ddof=min(1, len(values) - 1)):.3f} |", flush=True)


if __name__ == "__main__":
    main()
