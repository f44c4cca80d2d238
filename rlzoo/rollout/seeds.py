"""Derives a separate seed for every step and purpose so that random draws are independent of earlier draws."""

from __future__ import annotations

import numpy as np

ROLLOUT, LEARNER, EVALUATION = 0, 1, 2  # streams of random numbers


def step_seed(run_seed: int, stream: int, step: int, turn: int = 0) -> int:
    """Return the seed for one stream in one step. ``turn`` distinguishes repeated uses within a step."""
    return int(np.random.SeedSequence([run_seed, stream, step, turn]).generate_state(1)[0])
