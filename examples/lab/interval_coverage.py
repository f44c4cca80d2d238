"""Measures how often the confidence intervals of clip metrics contain the truth, on windows of a recorded run.

``python examples/lab/interval_coverage.py RUN --steps 1,10,40`` takes all responses of the run as the population, and draws
windows that have as many prompts as 1, 10 or 40 steps. It counts how often the 95% intervals contain the population's clip
fraction by length and its length reweighting error, both in the window's own bins. The second table is for a clip that
treats all lengths equally: among responses of about the same length, it clips the responses with the largest log-ratios. In
that table, ``noise`` should equal ``lre_max``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rlzoo.core.fairness import NUM_BINS, LengthWeights, bin_edges, bin_index, length_reweighting_error
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay
from rlzoo.measure.intervals import Clusters, wilson
from rlzoo.measure.response_table import ResponseTable

BLOCK = 500  # responses of about the same length


def cut_alike(rows: ResponseTable) -> torch.Tensor:
    """Return clip decisions with the run's clip fraction at every length: the largest log-ratios of each block are clipped."""
    number, share = len(rows.length), float(rows.clipped.mean())
    rng = torch.Generator().manual_seed(0)
    order = (rows.length + torch.rand(number, generator=rng)).argsort()
    decided = torch.zeros(number)
    for block in order.split(BLOCK):
        furthest = (rows.log_ratio[block].abs() + 1e-12 * torch.rand(len(block), generator=rng)).argsort(descending=True)
        decided[block[furthest[: round(share * len(block))]]] = 1.0
    return decided


def clusters(rows: ResponseTable, index: torch.Tensor, clipped: torch.Tensor) -> Clusters:
    """Group clip decisions by prompt, length bin and sign of the advantage."""
    return Clusters.of(index.numpy(), clipped.double().numpy(), rows.group.numpy(), (rows.advantage > 0).numpy())


def coverage(rows: ResponseTable, clipped: torch.Tensor, num_prompts: int, num_windows: int) -> Sequence[float]:
    """Return the shares of intervals that contain the truth, and mean errors, over windows of ``num_prompts`` prompts."""
    rng = np.random.default_rng(0)
    names, index = np.unique(rows.group.numpy(), return_inverse=True)
    of_prompt = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    held, independent, errors = [], [], []
    for _ in range(num_windows):
        picked = [of_prompt[prompt] for prompt in rng.integers(0, len(names), num_prompts)]
        drawn = torch.from_numpy(np.concatenate(picked))
        prompts = np.repeat(np.arange(num_prompts), [len(part) for part in picked])
        edges = bin_edges(rows.length[drawn])
        everywhere, bins = bin_index(rows.length, edges), bin_index(rows.length[drawn], edges)
        population = clusters(rows, everywhere, clipped)
        count, total = population.count.sum(0), population.clipped.sum(0)
        truth = total.sum(1) / count.sum(1)
        weights = LengthWeights.of(torch.from_numpy(count), torch.from_numpy(total))
        error = float(length_reweighting_error(weights.conditional, weights.share)[0])
        positive = (rows.advantage[drawn] > 0).numpy()
        found = Clusters.of(bins.numpy(), clipped[drawn].double().numpy(), prompts, positive)
        filled = found.count.sum((0, 2)) > 0
        for holds, (low, high) in (
            (held, found.proportions()),
            (independent, wilson(found.clipped.sum((0, 2)), found.count.sum((0, 2)))),
        ):
            holds.append(((low <= truth) & (truth <= high))[filled].mean())
        known = found.reweighting()
        if known is not None and (interval := known.conditional.max.interval) is not None:
            worst = known.conditional.max
            errors.append((error, worst.value, worst.corrected, worst.noise, interval[0] <= error <= interval[1]))
    return [float(np.mean(held)), float(np.mean(independent)), *np.mean(errors, axis=0).tolist()]


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", default="1,10,40")
    parser.add_argument("--windows", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = RecordedRun.read(options.run)
    rows = replay(run, run.own_rule).table.judged()
    num_prompts, num_steps = len(rows.group.unique()), len({update.step for update in run.updates})
    print(f"{len(rows.length)} rows of {num_prompts} prompts with a nonzero advantage, {num_steps} steps, {NUM_BINS} bins")
    for title, clipped in (("as the run clipped", rows.clipped), ("every length alike", cut_alike(rows))):
        print(f"\n{title}: {float(clipped.mean()):.3f} of the responses")
        print("| steps | prompts | clip fraction held | by Wilson's | LRE | lre_max | corrected | noise | LRE held |")
        print("|---|---|---|---|---|---|---|---|---|")
        for steps in map(int, options.steps.split(",")):
            size = round(num_prompts / num_steps * steps)
            found = coverage(rows, clipped, size, options.windows)
            print(f"| {steps} | {size} | {' | '.join(f'{value:.3f}' for value in found)} |", flush=True)


if __name__ == "__main__":
    main()
