"""Part ``trl``: runs steps of rlzoo and of TRL's GRPOTrainer in alternation, as in `examples.bench.compare`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from examples.bench.cases import find
from examples.bench.compare import PHASES, compare
from examples.gpu.rows import AbsentError, Case, Outcome, Setting

GOAL = 1.5
"""The goal for TRL's time per step divided by rlzoo's time per step."""


def beside(setting: Setting, name: str) -> Outcome:
    """Run pairs of steps of a case and return TRL's time divided by rlzoo's time."""
    for library in ("trl", "datasets"):
        if find_spec(library) is None:
            raise AbsentError(f"{library.upper() if library == 'trl' else library} is not installed")
    case = find(f"{'small' if setting.quick else 'gpu'}-{name}")
    rows = {row["phase"]: row for row in compare(case, setting.models, case.pairs)}
    ratios = {phase: rows[phase]["ratio_median"] for phase in PHASES}
    step = rows["step"]
    num_pairs = step["pairs"]
    spread = f"({min(step['ratios']):.2f} to {max(step['ratios']):.2f}, {num_pairs} pairs)" if num_pairs > 1 else "(one pair)"
    text = f"TRL takes {ratios['step']:.2f} times as long {spread}"
    text += f"; sampling {ratios['rollout']:.2f}, learning {ratios['learner']:.2f}"
    if not setting.quick:
        text += f"; the goal of {GOAL} is {'' if ratios['step'] >= GOAL else 'not '}reached"
    peaks = {f"{library}_peak_bytes": step[f"{library}_learner_peak_bytes"] for library in ("rlzoo", "trl")}
    return Outcome(text, {**ratios, **peaks, "ratios": step["ratios"]})


CASES = [
    Case("trl-smollm2", "SmolLM2-135M, bfloat16 autocast, 64 x 128 tokens", "", partial(beside, name="smollm2")),
    Case("trl-shape", "shape of Qwen3-0.6B, bfloat16 autocast, 64 x 1,024 tokens", "", partial(beside, name="trl")),
]
