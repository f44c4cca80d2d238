"""Computes the smallest difference between two rules that a comparison with a given number of seeds can detect."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.lab.compare import labelled
from rlzoo.lab.runs import FinishedRun
from rlzoo.measure.comparison import LEVEL, POWER, detectable, seeds_for

USUAL_DEVIATION = 0.01
"""Standard deviation over seeds of the difference between two rules in the default run, excluding evaluation noise. In
docs/explanation/which-rule-wins.md, where every gradient's norm is clipped, the measured values are 0.007 to 0.011."""
USUAL_ACCURACY = 0.75  # accuracy of the default run after training
DIFFERENCES = (0.01, 0.02, 0.05)


@dataclass(frozen=True, slots=True)
class Power:
    """The plan for a comparison, and what it can detect; all differences are in accuracy."""

    num_seeds: int
    num_pairs: int
    seed_deviation: float  # standard deviation over seeds of the difference between two rules, excluding evaluation noise
    source: str  # where `seed_deviation` comes from
    evaluation_error: float  # standard error of one run's accuracy due to sampling responses
    detects: float  # smallest true difference that is detected with probability `POWER`
    seeds_needed: Mapping[float, int | None]  # by difference
    level: float = LEVEL
    power: float = POWER


def plan(config: RunConfig, num_rules: int, num_seeds: int, runs: Sequence[FinishedRun] = ()) -> Power:
    """Plan a comparison.

    The evaluation errors of two rules are assumed to be independent. In practice, runs with the same seed are evaluated
    with the same random numbers, so the plan is conservative.

    Args:
        config: configuration of one of the runs.
        num_rules: number of rules, all pairs of which are compared.
        num_seeds: number of seeds per rule.
        runs: finished runs of such a comparison, with at least two rules and three common seeds; without them,
            `USUAL_DEVIATION` is used.

    Raises:
        UserError: there is no evaluation, there are fewer than two rules or seeds, or the recorded rules share too few seeds.
    """
    if config.eval.num_problems == 0:
        raise UserError("--power needs an evaluation, but eval.num_problems is 0; set it to 1000, for example")
    if num_rules < 2 or num_seeds < 2:
        raise UserError(
            f"--power compares rules across seeds; it needs at least 2 rules and 2 seeds, not {num_rules} and {num_seeds}"
        )
    deviation, response, source = USUAL_DEVIATION, math.sqrt(USUAL_ACCURACY * (1 - USUAL_ACCURACY)), "that of the default run"
    if runs:
        deviation, response = _measured(runs)
        source = f"measured on {len(runs)} finished runs"
    answers = config.eval.num_problems * config.eval.num_samples
    error = response / math.sqrt(answers)
    pairs = num_rules * (num_rules - 1) // 2
    total_deviation = math.hypot(deviation, math.sqrt(2) * error)
    return Power(
        num_seeds,
        pairs,
        deviation,
        source,
        error,
        detectable(total_deviation, num_seeds, pairs),
        {difference: seeds_for(difference, total_deviation, pairs) for difference in DIFFERENCES},
    )


def _measured(runs: Sequence[FinishedRun]) -> tuple[float, float]:
    """Return the standard deviations of paired differences, excluding evaluation noise, and of one response's reward."""
    scores = {
        label: {run.seed: run.accuracies[-1] for run in runs_of_rule if run.accuracies}
        for label, runs_of_rule in labelled(runs).items()
    }
    gaps = [
        np.array([ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()])
        for ours, theirs in itertools.combinations(scores.values(), 2)
    ]
    known = [gap for gap in gaps if len(gap) > 2]
    if not known:
        raise UserError("--power: no two rules among the finished runs have evaluations for three common seeds")
    errors = [error for run in runs if (error := run.accuracy_error) is not None]
    answers = runs[0].settings["eval.num_problems"] * runs[0].settings["eval.num_samples"]
    mean = fmean(score for by_seed in scores.values() for score in by_seed.values())
    error = fmean(errors) if errors else math.sqrt(max(mean * (1 - mean), 0.0) / answers)
    variance = fmean(gap.var(ddof=1) for gap in known)
    return math.sqrt(max(variance - 2 * error**2, 0.0)), error * math.sqrt(answers)
