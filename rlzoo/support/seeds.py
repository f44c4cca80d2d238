"""Seeds of a run's random draws: one of its own for every step and use, so that no draw depends on what was drawn before."""

from __future__ import annotations

import numpy as np

ROLLOUT, LEARNER, EVALUATION = 0, 1, 2  # streams


def step_seed(run_seed: int, stream: int, step: int, turn: int = 0) -> int:
    """The seed of one use in one step; ``turn`` tells repeated uses of a step apart."""
    turns = [turn] if turn else []
    return int(np.random.SeedSequence([run_seed, stream, step, *turns]).generate_state(1)[0])
