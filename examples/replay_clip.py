"""Replays the recorded rollouts of a run through other sequence rules, at one clip fraction, and compares them by length.

``python examples/replay_clip.py RUN [NAME ...]``: each policy judges the same recorded log-probs, update by update. Adaptive
rules adapt as they would have; the others are scaled, by bisection, to the clip fraction that the first one comes to. Rows of
the first ten steps are left out of what is printed, since adaptive rules are still settling there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlzoo import ClipInputs, ClipPolicy, ClipStats, load_zoo
from rlzoo.fairness import bin_edges, clip_by_length

SETTLING = 10  # steps
Update = tuple[Tensor, ClipInputs]  # bin edges of the rollout batch, and what the policy read


def recorded(run: Path) -> list[list[Update]]:
    """The updates of every step of a run, in order."""
    return [list(_updates(load_file(file))) for file in sorted((run / "rollouts").glob("*.safetensors"))]


def _updates(tensors: dict[str, Tensor]) -> Iterator[Update]:
    lengths = tensors["lengths"]
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    edges, number = bin_edges(lengths), 0
    while f"rows/{number}" in tensors:
        rows = tensors[f"rows/{number}"]
        log_probs, old_log_probs = torch.zeros(len(rows), mask.shape[1]), torch.zeros(mask.shape)
        log_probs[mask[rows]] = tensors[f"log_probs/{number}"]
        old_log_probs[mask] = tensors["old_log_probs"]
        yield edges, ClipInputs(log_probs, old_log_probs[rows], tensors["advantages"][rows], mask[rows])
        number += 1


def replay(steps: list[list[Update]], policy: ClipPolicy) -> Tensor:
    """Length, advantage and clip decision of every response with an advantage, ``(n, 3)``, after the settling steps."""
    kept = []
    for step, updates in enumerate(steps):
        for edges, inputs in updates:
            result = policy(inputs)
            length, advantage = inputs.response_mask.sum(-1).float(), inputs.advantages[:, 0]
            rows = advantage != 0
            columns = [column[rows] for column in (length, advantage, result.clipped[:, 0].float(), result.log_ratio[:, 0])]
            policy = policy.updated(ClipStats.of(edges, *columns))
            if step >= SETTLING:
                kept.append(torch.stack(columns[:3], dim=1))
    return torch.cat(kept)


def matched(steps: list[list[Update]], policy: ClipPolicy, fraction: float) -> ClipPolicy:
    """The policy with its widths scaled to a clip fraction."""
    low, high = 1e-3, 1e3
    for _ in range(30):
        factor = (low * high) ** 0.5
        wide = float(replay(steps, policy.scaled(factor))[:, 2].mean()) <= fraction
        low, high = (low, factor) if wide else (factor, high)
    return policy.scaled(high)


def main() -> None:
    """One line per policy."""
    torch.set_num_threads(1)
    steps, names = recorded(Path(sys.argv[1])), sys.argv[2:] or ["fspo-adaptive", "fspo", "gspo", "rloo"]
    fraction = None
    for name in names:
        policy = load_zoo()[name]()
        rows = replay(steps, policy if fraction is None else matched(steps, policy, fraction))
        clipped, below = rows[:, 2], rows[:, 1] < 0
        fraction = float(clipped.mean()) if fraction is None else fraction
        by_length = clip_by_length(rows[:, 0], clipped)
        bins = " ".join(f"{value:.3f}" for value in by_length.fraction.tolist())
        by_sign = f"A < 0 {clipped[below].mean():.3f}, A > 0 {clipped[~below].mean():.3f}"
        print(f"{name:14} clip fraction {clipped.mean():.3f} ({by_sign})  by length {bins}  lre_max {by_length.lre_max:.3f}")


if __name__ == "__main__":
    main()
