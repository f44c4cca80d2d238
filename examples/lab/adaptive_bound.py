"""Computes, for recorded runs, the terms of the bound on `fspo-adaptive`'s length error.

``python examples/lab/adaptive_bound.py RUN [RUN ...]`` replays the rule on every run. It prints maxima over both signs of
the advantage. ``knot`` is a knot's error: the weighted mean of its clip fraction minus the target. ``identity`` is the
difference between this error and the one computed from the offsets alone, and must be about 0. ``from range`` is the error that
the range of the offsets allows. ``bin`` is the error in one of six bins of the pooled lengths, and ``offsets`` and ``bridge``
are the two parts of that error. See docs/explanation/adaptive-bound.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import torch
from rlzoo_fspo_adaptive import ABOVE, BELOW, FSPOAdaptive, hats
from torch import Tensor

from rlzoo import ClipPolicy, ClipStats, ops
from rlzoo.config.run_config import RunConfig
from rlzoo.core.fairness import LengthWeights, bin_edges, bin_index, bin_sums
from rlzoo.lab.recorded import RecordedRun
from rlzoo.learner.judge import judge, updated

COLUMNS = ("identity", "knot", "from range", "bin", "offsets", "bridge", "lre_max")


class Ledger:
    """The rows and offsets of consecutive updates with the same number of knots, for one sign of the advantage."""

    def __init__(self, sign: int) -> None:
        """Start empty."""
        self.sign = sign
        self.clear()

    def clear(self) -> None:
        """Forget all updates."""
        self.offsets: list[Tensor] = []  # (K,) before each update
        self.weights: list[Tensor] = []  # (K,)
        self.length: list[Tensor] = []  # (n,) lengths of an update's rows
        self.excess: list[Tensor] = []  # (n,) clip decision minus target
        self.counted: list[Tensor] = []  # (n, K) weight of each row in each knot's error

    def add(self, policy: FSPOAdaptive, stats: ClipStats, length: Tensor, clipped: Tensor) -> None:
        """Add an update, given its policy (which must have knots), its statistics, and its rows with this advantage sign."""
        weight, _ = policy.errors(stats, self.sign)
        count, sums = stats.num_responses[:, self.sign], stats.length[:, self.sign]
        cell = bin_index(length, stats.bin_edges)
        share = hats((sums / count)[cell].clamp(min=1), policy.lengths)
        self.offsets.append(self.offsets_of(policy))
        self.weights.append(weight)
        self.length.append(length)
        self.excess.append(clipped.double() - policy.target_clip_fraction)
        self.counted.append(share * (weight / share.sum(0).clamp(min=1e-300)))

    def offsets_of(self, policy: FSPOAdaptive) -> Tensor:
        """Return the policy's offsets for this sign, ``(K,)``."""
        return torch.tensor(policy.offsets_high if self.sign == ABOVE else policy.offsets_low, dtype=torch.float64)

    def found(self, last: FSPOAdaptive, edges: Tensor) -> tuple[list[float], Tensor, Tensor]:
        """Return the maxima of all columns but the last, and the numbers of rows and clipped rows in each pooled bin."""
        offsets = torch.stack([*self.offsets, self.offsets_of(last)])
        weight, length, excess = (
            torch.stack(self.weights).sum(0).clamp(min=1e-9),
            torch.cat(self.length),
            torch.cat(self.excess),
        )
        counted = torch.cat(self.counted)  # (n, K)
        mean = counted.T @ excess / weight
        by_offsets = (offsets[-1] - offsets[0]) / last.rate / weight
        span = (offsets.amax(0) - offsets.amin(0)) / last.rate / weight
        index = bin_index(length, edges)
        bins = torch.nn.functional.one_hot(index, len(edges) - 1).double()
        share = bins.T @ counted / weight  # share of a knot's weight that comes from rows in a bin
        scale = len(length) / weight.sum()
        count = bins.sum(0)
        error = bins.T @ excess / count
        from_offsets = share @ (by_offsets * weight) * scale / count
        largest = (by_offsets - mean, mean, span, error, from_offsets, error - from_offsets)
        clipped = bin_sums(index, excess + last.target_clip_fraction, len(count))
        return [float(each.abs().max()) for each in largest], count, clipped


def replayed(run: RecordedRun, policy: ClipPolicy, skip: int) -> list[float]:
    """Return the columns for one run."""
    assert isinstance(policy, FSPOAdaptive)
    ledgers = {sign: Ledger(sign) for sign in (BELOW, ABOVE)}
    for update in run.updates:
        inputs = update.inputs
        result = judge(policy, inputs)
        rows = (inputs.advantages[:, 0] != 0) & inputs.response_mask.any(-1)
        length, advantage = ops.lengths(inputs.response_mask)[rows, 0], inputs.advantages[rows, 0]
        clipped = result.clipped[rows, 0]
        stats = ClipStats.of(update.edges, length, advantage, clipped.float(), result.log_ratio[rows, 0])
        if policy.lengths and update.step > skip and len(rows):
            for sign, ledger in ledgers.items():
                if ledger.offsets and len(ledger.offsets[-1]) != len(policy.lengths):
                    ledger.clear()  # the number of knots has changed
                mine = advantage > 0 if sign == ABOVE else advantage < 0
                ledger.add(policy, stats, length[mine], clipped[mine])
        policy = updated(policy, stats)
        assert isinstance(policy, FSPOAdaptive)
    edges = bin_edges(torch.cat([length for ledger in ledgers.values() for length in ledger.length]))
    below, above = (ledger.found(policy, edges) for ledger in ledgers.values())
    weights = LengthWeights.of(torch.stack([below[1], above[1]], -1), torch.stack([below[2], above[2]], -1))
    return [*map(max, below[0], above[0]), float((weights.conditional - 1).abs().max())]


def main() -> None:
    """Print a row for each run and the mean of the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--skip-steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = RunConfig.compose(clip="fspo-adaptive").clip
    print(f"{'':24}" + "".join(f"{name:>12}" for name in COLUMNS))
    table = []
    for path in options.runs:
        table.append(replayed(RecordedRun.read(path), policy, options.skip_steps))
        print(f"{path.name:24}{table[-1][0]:12.1e}" + "".join(f"{value:12.4f}" for value in table[-1][1:]), flush=True)
    mean = [fmean(column) for column in zip(*table, strict=True)]
    print(f"{'mean':24}{mean[0]:12.1e}" + "".join(f"{value:12.4f}" for value in mean[1:]))


if __name__ == "__main__":
    main()
