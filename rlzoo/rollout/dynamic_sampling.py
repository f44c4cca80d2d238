"""Collects the groups of one step, and samples again for those that teach nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlzoo.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class Sampled:
    """The groups of one step, and what it took to find them.

    Example:
        Two groups of a first round had equal rewards, and a second round replaced them: ``num_rounds=2, num_dropped=2``.
    """

    groups: list[RolloutGroup]
    num_rounds: int  # of sampling
    num_dropped: int  # groups of equal rewards that were left out
    failed: float = 0.0  # share of all responses sampled whose grading failed


def collect(sample_round: Callable[[int], list[RolloutGroup]], num_groups: int, extra_rounds: int) -> Sampled:
    """Sample until ``num_groups`` groups have rewards that differ (dynamic sampling, arXiv 2503.14476).

    Args:
        sample_round: graded groups to fresh prompts, ``num_groups`` of them at least; called with 0, 1, ...
        num_groups: size of the batch, in groups.
        extra_rounds: rounds after the first, at most; with 0 the batch is the first round, whatever its rewards.
    """
    first = sample_round(0)
    if extra_rounds == 0:
        return Sampled(first, 1, 0)
    mixed = [group for group in first if group.is_mixed]
    equal = [group for group in first if not group.is_mixed]
    rounds = 1
    while len(mixed) < num_groups and rounds <= extra_rounds:
        fresh = sample_round(rounds)
        mixed += [group for group in fresh if group.is_mixed]
        equal += [group for group in fresh if not group.is_mixed]
        rounds += 1
    # groups of equal rewards make up the number, so that a step's minibatches, and with them its learning rate and its
    # gradient noise, are the same size whether or not the task has become too easy or is still too hard
    kept = (mixed + equal)[:num_groups]
    filling = max(0, num_groups - len(mixed))
    return Sampled(kept, rounds, len(equal) - filling)
