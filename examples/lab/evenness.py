"""Measures how evenly rules clip across lengths in recorded runs and prints the parts of the length reweighting error as CSV.

``python -m examples.lab.evenness FOLDER [FOLDER ...] > evenness.csv`` replays every run under the folders with every rule. All
widths of a rule are scaled to clip a tenth of the responses, once by a single factor (``overall``) and once by a separate
factor for each sign of the advantage (``by sign``). Each row covers one rule on one run. Rows with ``seed`` "all" pool the runs
of one training rule. ``--by-update`` adds a row for each update of a batch. Update 2, for example, learns from responses one
update old.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from rlzoo.config.run_config import RunConfig
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.runs import FinishedRun, find_runs
from rlzoo.lab.study import replay
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.response_table import ResponseTable, pooled_runs

RULES = "fspo,fspo-adaptive,gspo,rloo"
FRACTION = 0.1
SETTLING = 10  # number of initial steps to skip, during which adaptive rules settle

Cell = tuple[str, str, str, str]
"""The training rule of a run, how the clip fraction was matched, the part of the run, and the rule that was applied."""


def tables(path: Path, names: Sequence[str], options: argparse.Namespace) -> dict[Cell, ResponseTable]:
    """Return one run's response table for each rule, way of matching the clip fraction, and part of the run."""
    torch.set_num_threads(1)
    run = RecordedRun.read(path)
    policies = [RunConfig.compose(options.config, clip=name).clip for name in names]
    made = run.trained_with
    found: dict[Cell, ResponseTable] = {}
    for part, some in parts(run, by_update=options.by_update):
        for matched, by_sign in (("overall", False), ("by sign", True)):
            study = replay(some, policies, match=options.fraction, by_sign=by_sign, skip_steps=options.skip_steps)
            for rule in study.rules:
                if not rule.note:
                    found[made, matched, part, rule.label] = rule.table
    return found


def parts(run: RecordedRun, *, by_update: bool) -> Iterator[tuple[str, RecordedRun]]:
    """Yield the whole run and each update of its batches except the first, which has ratio 1 and clips nothing."""
    yield "all", run
    for index in sorted({update.index for update in run.updates}) if by_update else ():
        if index > 0:
            chosen = tuple(update for update in run.updates if update.index == index)
            number = sum(len(update.rows) for update in chosen)
            yield f"update {index + 1}", dataclasses.replace(run, updates=chosen, num_responses=number)


def row(cell: Cell, seed: object, table: ResponseTable) -> dict[str, Any]:
    """Return the numbers for one cell."""
    profile, rows = LengthProfile.of(table), table.judged()
    assert profile is not None, "a replay has rows with an advantage"
    assert profile.lre is not None, "a tenth is clipped, not everything"
    conditional, negative = profile.lre.conditional.max, rows.advantage < 0
    low, high = conditional.interval or (None, None)
    return {
        **dict(zip(("rollouts_of", "matched", "part", "rule"), cell, strict=True)),
        "seed": seed,
        "responses": len(rows.length),
        "prompts": len(rows.group.unique()),
        "clip_fraction": profile.clip_fraction,
        "clip_negative": float(rows.clipped[negative].mean()),
        "clip_positive": float(rows.clipped[~negative].mean()),
        "share_negative": float(negative.double().mean()),
        "unmoved": profile.unmoved,
        "conditional": conditional.value,
        "conditional_low": low,
        "conditional_high": high,
        "corrected": conditional.corrected,
        "noise": conditional.noise,
        "composition": profile.lre.composition.max.value,
        "total": profile.lre.total.max.value,
        "ess": profile.ess,
        "clip_by_length": " ".join(f"{value:.3f}" for value in profile.both.fraction),
        "clip_negative_by_length": " ".join(f"{value:.3f}" for value in profile.below.fraction),
        "clip_positive_by_length": " ".join(f"{value:.3f}" for value in profile.above.fraction),
        "median_length": " ".join(f"{value:g}" for value in profile.median_length),
    }


def evenness(records: Sequence[FinishedRun], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of every run, then the pooled rows of all runs of each training rule."""
    pooled: dict[Cell, list[ResponseTable]] = {}
    names = [name for name in options.clip.split(",") if name]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        paths = [record.path for record in records]
        many = pool.map(tables, paths, itertools.repeat(names), itertools.repeat(options))
        for number, (record, found) in enumerate(zip(records, many, strict=True), 1):
            for cell, table in found.items():
                pooled.setdefault(cell, []).append(table)
                yield row(cell, record.seed, table)
            print(f"{number} of {len(records)} runs", file=sys.stderr, flush=True)
    for cell, runs in pooled.items():
        yield row(cell, "all", pooled_runs(runs))


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description="Measure how evenly rules clip across lengths in recorded runs.")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--clip", default=RULES, help="rules to replay on every run (default: %(default)s)")
    parser.add_argument("--config", action="append", default=[], help="config with the settings of the rules")
    parser.add_argument("--fraction", type=float, default=FRACTION)
    parser.add_argument("--skip-steps", type=int, default=SETTLING)
    parser.add_argument("--by-update", action="store_true")
    parser.add_argument("--jobs", type=int, default=None, help="number of runs to process in parallel (default: one per core)")
    options = parser.parse_args()
    records, notes = find_runs(options.folders)
    print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
    records.sort(key=lambda record: (record.policy, record.seed))
    writer = None
    for numbers in evenness(records, options):
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(numbers), lineterminator="\n")
            writer.writeheader()
        writer.writerow({key: f"{value:.5g}" if isinstance(value, float) else value for key, value in numbers.items()})


if __name__ == "__main__":
    main()
