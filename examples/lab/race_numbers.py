"""The raw numbers behind docs/explanation/which-rule-wins.md: one CSV row for each finished run and rule.

``python examples/lab/race_numbers.py FOLDER [FOLDER ...] > numbers.csv``: what every run came to, and its own rule replayed
on its rollouts with widths scaled to clip a tenth of the responses. With ``--clip a,b,...`` these rules are replayed on every
run instead, with the settings that ``--config`` has for them. The first ten steps are left out (``--skip-steps``).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from rlzoo.config.run_config import RunConfig
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.run_records import RunRecord, find_runs
from rlzoo.lab.study import study


def trained(record: RunRecord) -> dict[str, Any]:
    """What a run came to."""
    accuracies = record.accuracies
    return {
        "run": str(record.path),
        "trained_with": record.policy,
        "seed": record.seed,
        "learner.lr": record.settings["learner.lr"],
        "accuracy": accuracies[-1] if accuracies else None,
        "gain": accuracies[-1] - accuracies[0] if accuracies else None,
        "reward_last_quarter": record.mean("reward/mean", 0.25),
        "length_last_quarter": record.mean("response/length_mean", 0.25),
        "clip_fraction": record.mean("clip/fraction"),
        "norm_clipped": record.mean("learner/grad_clipped"),
    }


def numbers(record: RunRecord, names: list[str], configs: list[str], fraction: float, skip_steps: int) -> list[dict[str, Any]]:
    """The rows of one run; its own rule with its own settings if no rule is named."""
    torch.set_num_threads(1)
    run = RecordedRun.read(record.path)
    policies = [RunConfig.compose(configs, clip=name).clip for name in names] or [run.own_rule]
    rows = []
    for rule in study(run, policies, match=fraction, skip_steps=skip_steps).rules:
        profile, cosine = rule.replayed.profile, rule.cosine
        bins = [] if cosine is None else [f"{value:.3f}" for value in cosine.by_length]
        row = {
            "rule": rule.label,
            "matched_clip_fraction": profile.clip_fraction,
            "lre_max": profile.lre_max,
            "lre_max_corrected": profile.lre_max_corrected,
            "lre_mean": profile.lre_mean,
            "lre_noise": profile.lre_noise,
            "ess": profile.ess,
            "cosine": None if cosine is None else cosine.mean,
            "cosine_by_length": " ".join(bins),
            "clip_fraction_by_length": " ".join(f"{value:.3f}" for value in profile.both.fraction),
        }
        rows.append(trained(record) | row)
    return rows


def main() -> None:
    """Several runs at once, rows in order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--clip", default="", help="rules to replay on every run; without it each run's own")
    parser.add_argument("--config", action="append", default=[], help="config that the rules take their settings from")
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--skip-steps", type=int, default=10)
    options = parser.parse_args()
    records, notes = find_runs(options.folders)
    print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
    records.sort(key=lambda record: (record.policy, record.seed))
    names = [name for name in options.clip.split(",") if name]
    writer = None
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        same = (names, options.config, options.fraction, options.skip_steps)
        many = pool.map(numbers, records, *map(itertools.repeat, same))
        for done, rows in enumerate(many, 1):
            if writer is None:
                writer = csv.DictWriter(sys.stdout, list(rows[0]))
                writer.writeheader()
            for row in rows:
                writer.writerow({key: f"{value:.5g}" if isinstance(value, float) else value for key, value in row.items()})
            print(f"{done} of {len(records)} runs", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
