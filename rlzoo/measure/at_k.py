"""Computes mean@k, pass@j and maj@k with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Annotated

import numpy as np
from pydantic import Field
from scipy.special import stdtrit

from rlzoo.measure.intervals import TAIL, Array, Interval, mean_interval


@dataclass(frozen=True, slots=True)
class Completion:
    """One graded response."""

    response: str
    reward: Annotated[float, Field(allow_inf_nan=False)] | None  # 1 for a right response, otherwise 0; None without a grade
    answer_group: Annotated[int, Field(ge=0)] | None  # index of the first response with the same answer; None without an answer
    length: Annotated[int, Field(ge=0)]  # length in tokens, including the end token
    finished: bool  # False if the response was cut off at the length limit


Completions = tuple[Completion, ...]  # the k responses to one problem


@dataclass(frozen=True, slots=True)
class AtK:
    """A mean over problems, with its 95% interval."""

    value: float
    interval: Interval


def pass_at(num_samples: int, num_right: int, j: int) -> float:
    """Return an unbiased estimate of pass@j, the chance that j of n responses include a right one (arXiv 2107.03374).

    Formula:
        1 - C(n - c, j) / C(n, j)

    Example:
        >>> pass_at(4, 1, 2)  # 3 of the 6 pairs contain the right one
        0.5
    """
    assert 1 <= j <= num_samples, "pass@j needs at least j responses"
    return 1 - comb(num_samples - num_right, j) / comb(num_samples, j)


def majority(completions: Completions) -> float:
    """Compute maj@k for one problem: whether the most frequent answer is right.

    Responses without an answer do not vote. Without any votes, the result is 0. A tie counts as the share of right answers
    among the tied answers, which is the expected result of a random choice: 0.5 if one of two is right.
    """
    votes = Counter(completion.answer_group for completion in completions if completion.answer_group is not None)
    most = max(votes.values(), default=0)
    right = {completion.answer_group: completion.reward or 0.0 for completion in completions}
    tied = [right[group] for group, count in votes.items() if count == most]
    return sum(tied) / len(tied) if tied else 0.0


def passes(k: int) -> list[int]:
    """Return the values of j for which pass@j is reported: 1, 2, 4, ... and k."""
    return sorted({2**power for power in range(k.bit_length())} | {k})


def estimates(problems: Sequence[Completions], *, votes: bool = True) -> dict[str, AtK]:
    """Estimate ``mean@k``, ``pass@1``, ``pass@2``, ``pass@4``, ..., ``pass@k`` and ``maj@k``. All problems have the same k.

    If a grade is missing or is neither 0 nor 1, only ``mean@k`` is estimated, using the graded responses. ``votes`` says
    whether the answer groups are known. If they are not, ``maj@k`` is omitted.
    """
    return {name: _estimate(sums, counts) for name, (sums, counts) in _measures(problems, votes).items()}


def differences(before: Sequence[Completions], after: Sequence[Completions], *, votes: bool = True) -> dict[str, AtK]:
    """Estimate ``after`` minus ``before``, two sets of responses to the same problems, for the measures that both have.

    The interval combines those of both means according to the correlation between them over problems (method 10 of Newcombe,
    Statistics in Medicine 17 (1998), 2635; Zou and Donner, Statistics in Medicine 27 (2008), 1693).
    """
    pairs = zip(before, after, strict=True)
    kept = [pair for pair in pairs if all(any(one.reward is not None for one in side) for side in pair)]
    old, new = (_measures(side, votes) for side in zip(*kept, strict=True)) if kept else ({}, {})
    return {name: _difference(old[name], values) for name, values in new.items() if name in old}


def _difference(before: tuple[Array, Array], after: tuple[Array, Array]) -> AtK:
    old, new = _estimate(*before), _estimate(*after)
    first, second = (sums / counts - sums.sum() / counts.sum() for sums, counts in (before, after))
    scale = np.sqrt(np.square(first).sum() * np.square(second).sum())
    correlation = (first * second).sum() / scale if scale else 0.0
    (down, up), (low, high) = (np.abs(np.array(one.interval) - one.value) for one in (old, new))
    below, above = (np.sqrt(a * a - 2 * correlation * a * b + b * b) for a, b in ((low, up), (high, down)))
    value = new.value - old.value
    return AtK(value, (float(value - below), float(value + above)))


def means(problems: Sequence[Completions], *, votes: bool = True) -> dict[str, float]:
    """Compute the same measures as `estimates`, but without intervals, which are slow to compute."""
    return {name: float(sums.sum() / counts.sum()) for name, (sums, counts) in _measures(problems, votes).items()}


def _estimate(sums: Array, counts: Array) -> AtK:
    """Compute the mean over all problems and its interval (a t interval if values are outside [0, 1]) from sums and counts."""
    mean, n = sums.sum() / counts.sum(), (counts > 0).sum()
    if ((sums >= 0) & (sums <= counts)).all():
        return AtK(float(mean), mean_interval(sums, counts))
    error = np.sqrt(np.square(sums - mean * counts).sum() * n / (n - 1)) / counts.sum() if n > 1 else np.nan
    half = stdtrit(n - 1, 1 - TAIL) * error
    return AtK(float(mean), (float(mean - half), float(mean + half)))


def _measures(problems: Sequence[Completions], votes: bool) -> dict[str, tuple[Array, Array]]:
    """Return a sum and a number of values for every measure and problem, where the sum is the mean times the number.

    A problem with at least one grade counts as k values, as in training. A problem without a grade is left out.
    """
    k = len(problems[0])
    rewards = [[one.reward for one in completions if one.reward is not None] for completions in problems]
    counts = np.array([k if graded else 0 for graded in rewards])
    if not counts.any():
        return {}
    of_responses = np.array([sum(graded) / max(len(graded), 1) for graded in rewards]) * counts, counts
    measures = {f"mean@{k}": of_responses}
    if all(len(graded) == k and {0.0, 1.0}.issuperset(graded) for graded in rewards):
        of_problems = {f"pass@{j}": np.array([pass_at(k, round(sum(graded)), j) for graded in rewards]) for j in passes(k)}
        of_problems |= {f"maj@{k}": np.array([majority(completions) for completions in problems])} if votes else {}
        measures |= {name: (values, np.ones(len(problems))) for name, values in of_problems.items()}
        measures["pass@1"] = of_responses
    return measures
