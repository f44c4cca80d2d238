"""Compares a critic with a group baseline at equal numbers of responses, and SAO with GRPO at several values of max_staleness.

Usage: python examples/lab/critic_worth.py --seeds 8 --records docs/explanation/critic-worth.csv
Each of the ten arms takes one to two minutes per seed on an idle core, so eight seeds take about two hours. Finished runs are
kept in the records file and are not repeated. Several processes can share the work, for example with ``--share 0/2`` and
``--share 1/2``.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import numpy as np
from scipy import stats

import rlzoo
from rlzoo import RunConfig
from rlzoo.core.errors import RunError

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


def accuracy(arm: str, seed: int) -> float:
    """Train one run and return the accuracy of its last evaluation, or 0 if the run failed."""
    configs, settings = ARMS[arm]
    overrides = [*settings, "tracking.mlflow=false", "eval.every=0", "checkpoint.every=0"]
    with tempfile.TemporaryDirectory(prefix="rlzoo-critic-") as folder:
        run = RunConfig.compose(configs, overrides=overrides, seed=seed, output=Path(folder, "run"))
        try:
            return rlzoo.train(run).metrics[-1]["eval/accuracy"]
        except RunError as error:
            print(f"{arm}, seed {seed}: {error}", flush=True)
            return 0.0


def read(file: Path) -> dict[tuple[str, int], float]:
    """Return the recorded accuracies by arm and seed."""
    if not file.exists():
        file.write_text("arm,seed,accuracy\n")
    return {(row["arm"], int(row["seed"])): float(row["accuracy"]) for row in csv.DictReader(file.open())}


def main() -> None:
    """Train the missing runs and print the mean accuracy of each arm with its 95% interval over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--records", type=Path, default=Path("critic-worth.csv"))
    parser.add_argument("--share", default="0/1", help="which share of the missing runs to do, such as 0/2")
    given = parser.parse_args()
    part, parts = map(int, given.share.split("/"))
    missing = [(arm, seed) for seed in range(given.seeds) for arm in ARMS if (arm, seed) not in read(given.records)]
    for arm, seed in missing[part::parts]:
        line = f'"{arm}",{seed},{accuracy(arm, seed):.4f}\n'
        with given.records.open("a") as file:
            file.write(line)
    print("| arm | seeds | accuracy after the last step, 95% interval over seeds | standard deviation |\n|---|---|---|---|")
    for arm in ARMS:
        values = np.array([value for (name, _), value in read(given.records).items() if name == arm])
        half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)) if len(values) > 1 else float("nan")
        spread = values.std(ddof=1) if len(values) > 1 else 0.0
        print(f"| {arm} | {len(values)} | {values.mean() if len(values) else 0.0:.3f} +- {half:.3f} | {spread:.3f} |")


if __name__ == "__main__":
    main()
