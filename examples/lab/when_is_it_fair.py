"""Which rule clips lengths most evenly, and on which part of the data: runs replayed part by part at one clip fraction.

``python examples/lab/when_is_it_fair.py RUN [RUN ...] --clip fspo,gspo,rloo``: every part of every run is replayed with
every rule's widths scaled to clip a tenth of it. Printed are the mean ``lre_max`` over the runs with a 95 % bootstrap interval
over them, the noise floor of so many responses, and the exponent a with which the 90 % quantile of the absolute summed
log-ratio grows with length. The first ten steps are left out of everything but the part that is named for them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.fairness import bin_edges, bin_index
from rlzoo.lab.recorded import RecordedRun, RecordedUpdate
from rlzoo.lab.replay import clip_fraction_of, match_clip_fraction, replay
from rlzoo.measure.comparison import estimate
from rlzoo.measure.profile import MOVED
from rlzoo.measure.response_table import ResponseTable

SETTLING = 10  # steps
Part = Callable[[RecordedUpdate, float], torch.Tensor]  # which rows of an update belong to it, given the median length


def everything(update: RecordedUpdate, median: float) -> torch.Tensor:
    """All rows after the first steps."""
    return torch.full_like(update.group, update.step > SETTLING, dtype=torch.bool)


def lengths(update: RecordedUpdate) -> torch.Tensor:
    """Response lengths in tokens."""
    return update.inputs.response_mask.sum(-1)


PARTS: dict[str, Part] = {
    "everything": everything,
    "first 10 steps": lambda update, median: ~everything(update, median),
    "second update of a batch": lambda update, median: everything(update, median) & (update.index == 1),
    "third update": lambda update, median: everything(update, median) & (update.index == 2),
    "fourth update": lambda update, median: everything(update, median) & (update.index == 3),
    "shorter half": lambda update, median: everything(update, median) & (lengths(update) <= median),
    "longer half": lambda update, median: everything(update, median) & (lengths(update) > median),
    "A < 0": lambda update, median: everything(update, median) & (update.inputs.advantages[:, 0] < 0),
    "A > 0": lambda update, median: everything(update, median) & (update.inputs.advantages[:, 0] > 0),
}


def part_of(run: RecordedRun, part: Part) -> RecordedRun:
    """The run with some of its rows only."""
    median = float(torch.cat([lengths(update) for update in run.updates]).float().median())
    kept = []
    for update in run.updates:
        rows = part(update, median)
        if bool((update.inputs.advantages[rows] != 0).any()):
            inputs = {
                field.name: value[rows] if isinstance(value := getattr(update.inputs, field.name), torch.Tensor) else value
                for field in dataclasses.fields(update.inputs)
            }
            sequences = tuple(sequence for sequence, keep in zip(update.sequences, rows.tolist(), strict=True) if keep)
            changed = {"inputs": type(update.inputs)(**inputs), "group": update.group[rows], "sequences": sequences}
            changed["weights"] = None if update.weights is None else update.weights[rows]
            kept.append(dataclasses.replace(update, **changed))
    return dataclasses.replace(run, updates=tuple(kept))


def growth(table: ResponseTable) -> float:
    """The exponent a of |S| ~ L^a: a line through the logarithms of the 90 % quantiles of |S| in six length bins."""
    rows = table.judged()
    rows = rows.where(rows.token_log_ratio_squared > MOVED**2 * rows.length)
    bins = bin_index(rows.length, bin_edges(rows.length))
    points = [
        (float(rows.length[bins == k].log().mean()), float(rows.token_log_ratio_sum[bins == k].abs().quantile(0.9).log()))
        for k in bins.unique().tolist()
    ]
    if len(points) < 2:
        return float("nan")
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1)[0])


def main() -> None:
    """A row for each part, a column for each rule."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--clip", default="fspo,gspo,rloo")
    parser.add_argument("--fraction", type=float, default=0.1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    policies = {name: RunConfig.compose(clip=name).clip for name in options.clip.split(",")}
    names = list(policies)
    runs = [RecordedRun.read(path) for path in options.runs]
    print(f"{'':26}" + "".join(f"{name:>24}" for name in names) + f"{'noise':>8}{'a':>7}")
    for label, part in PARTS.items():
        found: dict[str, list[float]] = {name: [] for name in names}
        noise, exponents = [], []
        for run in runs:
            some = part_of(run, part)
            fraction = clip_fraction_of(some)
            for name in names:
                try:
                    replayed = replay(some, match_clip_fraction(policies[name], options.fraction, fraction))
                except UserError:  # this rule cannot clip that much of it
                    continue
                found[name].append(replayed.profile.lre_max or 0.0)
            noise.append(replayed.profile.lre_noise or 0.0)
            exponents.append(growth(replayed.table))
        cells = []
        for name in names:
            score = estimate(found[name]) if found[name] else None
            low, high = (score.mean_interval if score else None) or (float("nan"), float("nan"))
            cells.append(f"{score.mean:.3f} [{low:.3f}, {high:.3f}]" if score else "-")
        print(
            f"{label:26}" + "".join(f"{cell:>24}" for cell in cells) + f"{fmean(noise):8.3f}{fmean(exponents):7.2f}", flush=True
        )


if __name__ == "__main__":
    main()
