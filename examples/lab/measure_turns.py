"""Measures the cost of turns by comparing episodes of eight turns with single turns of the same total length.

``python examples/lab/measure_turns.py [MODEL]`` repeatedly samples 64 responses of 256 tokens, both in one turn and in eight
turns of 32 tokens with 8 environment tokens between turns. MODEL is a value of ``model.path``. The script prints the median
ratio of the times per token, once with caches kept from turn to turn and once with the whole episode recomputed in each turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import torch

from rlzoo.config.sections import ModelConfig
from rlzoo.models.pretrained import load_named
from rlzoo.rollout.sampler import Draws, HFSampler, Sampler

ROWS, TOKENS, TURNS, OBSERVED, PAIRS = 64, 256, 8, 8, 7


def seconds(sampler: HFSampler, turns: int, *, keeps: bool = True) -> float:
    """Return the time to sample ``TOKENS`` tokens for each row, split into ``turns`` turns."""
    size = TOKENS // turns
    rng = torch.Generator().manual_seed(0)
    contexts = {row: tuple(torch.randint(3, 9, (12,), generator=rng).tolist()) for row in range(ROWS)}
    draw_turn, caches = sampler.draw_turn if keeps else partial(Sampler.draw_turn, sampler), None
    started = time.perf_counter()
    for turn in range(turns):
        drawn, caches = draw_turn(contexts, Draws(seed=1, rows=range(ROWS), limit=size, turn=turn), caches)
        contexts = {
            row: (*ids, *tokens, *[4] * OBSERVED) for (row, ids), (tokens, *_) in zip(contexts.items(), drawn, strict=True)
        }
    return time.perf_counter() - started


def main(path: str) -> None:
    """Measure the ratios and print them."""
    torch.set_num_threads(1)
    model, tokenizer = load_named(ModelConfig(path=path))
    sampler = HFSampler(model, tokenizer, end_ids=frozenset(), max_new_tokens=TOKENS)
    kinds = {"caches kept": True, "recomputed": False}
    ratios: dict[str, list[float]] = {name: [] for name in kinds}
    with torch.no_grad():
        for _ in range(PAIRS):
            one = seconds(sampler, 1)
            for name, keeps in kinds.items():
                ratios[name].append(seconds(sampler, TURNS, keeps=keeps) / one)
    for name, values in ratios.items():
        print(f"{name:14} {statistics.median(values):.2f} times one turn (from {min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "embedded")
