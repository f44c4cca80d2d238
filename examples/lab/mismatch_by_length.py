"""Shows how corrections for the mismatch between sampler and trainer depend on the response length.

    python examples/lab/mismatch_by_length.py                 # independent, normal token log-ratios
    python examples/lab/mismatch_by_length.py runs/mine       # the log-ratios of a recorded run

The script prints the share of the responses (or, for per-token masks, of their tokens) that each correction keeps.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from rlzoo_corrections import IcePop, LengthFair

from rlzoo import Correction, CorrectionInputs, ops
from rlzoo.core.fairness import bin_edges, bin_index
from rlzoo.journal.rollout_file import RolloutFile

SIGMA = 0.01
KEPT = 0.9  # share of a recorded run's responses that every correction keeps
LENGTHS = (64, 256, 1024, 4096, 16384)
CORRECTIONS: dict[str, Correction] = {
    "icepop, each token in .5 to 2": IcePop(),
    "mis, sum up to 2": IcePop(pool="sum", low=0.0),
    "icepop, sum in .5 to 2": IcePop(pool="sum"),
    "icepop, mean in .999 to 1.001": IcePop(pool="mean", low=0.999, high=1.001),
}


def kept(log_ratio: torch.Tensor, mask: torch.Tensor, correction: Correction) -> torch.Tensor:
    inputs = CorrectionInputs(log_ratio, torch.zeros_like(log_ratio), mask, torch.ones(len(mask), 1))
    share = (correction(inputs) > 0).float()
    return share[:, 0] if share.shape[-1] == 1 else ops.sequence_mean(share, mask)[:, 0]


def matched(log_ratio: torch.Tensor, mask: torch.Tensor, share: float) -> dict[str, Correction]:
    """Return bands on the sum, the mean, and the sum divided by sqrt(L) that each keep the given share of all responses."""
    total, length = log_ratio.sum(-1).abs(), mask.sum(-1)
    found = {name: float(values.quantile(share)) for name, values in
             (("sum", total), ("mean", total / length), ("root", total / length.sqrt()))}  # fmt: skip
    bands: dict[str, Correction] = {
        f"icepop, {pool} within +-{found[pool]:.4f}": IcePop(
            pool="sum" if pool == "sum" else "mean", low=math.exp(-found[pool]), high=math.exp(found[pool])
        )
        for pool in ("sum", "mean")
    }
    return bands | {f"length_fair, width {found['root']:.4f}": LengthFair(width=found["root"])}


def show(title: str, columns: list[str], rows: dict[str, list[float]]) -> None:
    print(f"| {title} | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |")


def simulated() -> None:
    rng = torch.Generator().manual_seed(0)
    drawn = {length: SIGMA * torch.randn(1000, length, generator=rng) for length in LENGTHS}
    masks = {length: torch.ones(1000, length, dtype=torch.bool) for length in LENGTHS}
    sums = torch.cat([(drawn[length].sum(-1).abs() / length**0.5) for length in LENGTHS])
    overall = torch.cat([kept(drawn[n], masks[n], CORRECTIONS["icepop, sum in .5 to 2"]) for n in LENGTHS]).mean()
    width = float(sums.quantile(float(overall)))
    corrections = {**CORRECTIONS, f"length_fair, width {width:.4f}": LengthFair(width=width)}
    rows = {name: [float(kept(drawn[n], masks[n], given).mean()) for n in LENGTHS] for name, given in corrections.items()}
    show(f"sigma {SIGMA}, length", [f"{length:,}" for length in LENGTHS], rows)


def recorded(run: Path) -> None:
    ratios, lengths = [], []
    for file in sorted((run / "rollouts").glob("*.safetensors")):
        step = RolloutFile.load(file)
        if step.old_log_probs is not None and step.rollout_log_probs is not None:
            ratios.append(step.old_log_probs - step.rollout_log_probs)
            lengths.append(step.lengths)
    length = torch.cat(lengths)
    mask = torch.arange(int(length.max())) < length[:, None]
    log_ratio = torch.zeros(mask.shape)
    log_ratio[mask] = torch.cat(ratios)
    edges = bin_edges(length)
    index = bin_index(length, edges)
    bins = [k for k in range(6) if bool((index == k).any())]
    sigma = float(torch.cat(ratios).std())
    rows = {}
    for name, given in matched(log_ratio, mask, KEPT).items():
        share = kept(log_ratio, mask, given)
        rows[name] = [float(share[index == k].mean()) for k in bins]
    show(f"sigma {sigma:.4f}, length up to", [f"{int(edges[k + 1])}" for k in bins], rows)


if __name__ == "__main__":
    recorded(Path(sys.argv[1])) if len(sys.argv) > 1 else simulated()
