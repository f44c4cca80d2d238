"""MaxRL and pass@k advantages compared with an enumeration of every subset and numbers worked by hand."""

import itertools
import math

import numpy as np
import pytest
import torch

from rlzoo import UserError
from tests.estimates import estimator


def members(group_ids, row):
    return [i for i in range(len(group_ids)) if group_ids[i] == group_ids[row]]


def max_rl(rewards, group_ids):
    """(R - mean) / mean of the group if the mean is positive, else 0."""
    advantages = np.zeros((len(rewards), 1))
    for b in range(len(rewards)):
        values = [float(rewards[i]) for i in members(group_ids, b)]
        mean = math.fsum(values) / len(values)
        if mean > 0 and min(values) < max(values):
            advantages[b, 0] = (float(rewards[b]) - mean) / mean
    return advantages


def pass_at(k, rewards, group_ids):
    """Deviation of the mean of the best of k, over the k-subsets that contain the response, in standard deviations."""
    advantages = np.zeros((len(rewards), 1))
    for group in set(group_ids):
        rows = [i for i in range(len(group_ids)) if group_ids[i] == group]
        subsets = list(itertools.combinations(rows, k))
        best = [max(float(rewards[i]) for i in subset) for subset in subsets]
        if min(best) == max(best):
            continue
        mean = math.fsum(best) / len(best)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in best) / len(best))
        for row in rows:
            own = [value for subset, value in zip(subsets, best, strict=True) if row in subset]
            advantages[row, 0] = (math.fsum(own) / len(own) - mean) / deviation
    return advantages


def shuffled_groups(sizes, seed):
    """Group ids of these sizes, neither sorted nor consecutive."""
    ids = torch.cat([torch.full((size,), 7 * index + 3) for index, size in enumerate(sizes)])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]


def rewards_of(kind, count, seed):
    rng = torch.Generator().manual_seed(100 + seed)
    if kind == "binary":
        return (torch.rand(count, generator=rng) < 0.3).float()
    if kind == "levels":
        return torch.randint(0, 4, (count,), generator=rng) / 10
    return torch.randn(count, generator=rng)


SIZES = {2: [2, 3, 5, 8], 4: [4, 5, 7, 10], 8: [8, 9, 11], 16: [16, 17, 18], 32: [32, 33, 34]}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["binary", "levels", "normal"])
def test_max_rl_equals_the_loops(kind, seed):
    groups = shuffled_groups([1, 2, 5, 8, 12], seed)
    rewards = rewards_of(kind, len(groups), seed)
    expected = max_rl(rewards.double().numpy(), groups.tolist())
    np.testing.assert_allclose(estimator("max_rl")(rewards, groups).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["binary", "levels", "normal"])
@pytest.mark.parametrize("k", SIZES)
def test_pass_at_k_equals_the_enumeration_of_subsets(k, kind, seed):
    groups = shuffled_groups(SIZES[k], seed)
    rewards = rewards_of(kind, len(groups), seed)
    expected = pass_at(k, rewards.double().numpy(), groups.tolist())
    got = estimator(f"pass@{k}")(rewards, groups)
    assert got.shape == (len(groups), 1)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("advantage", "rewards", "expected"),
    [
        # mean 1/4: 3/4 and -1/4 over 1/4
        ("max_rl", [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        # mean 1/2
        ("max_rl", [0.25, 0.75, 0.0, 1.0], [-0.5, 0.5, -1.0, 1.0]),
        # mean 0 and mean -1/2: there is no positive mean to divide by
        ("max_rl", [0.0, 0.0], [0.0, 0.0]),
        ("max_rl", [-1.0, 1.0], [0.0, 0.0]),
        ("max_rl", [-2.0, 1.0], [0.0, 0.0]),
        # 3 of 6 pairs hold the right one: E = sd = 1/2; it is in pairs of 1, the others in 1 of 3: (1/3 - 1/2) / (1/2)
        ("pass@2", [1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # 5 of 6 pairs: E = 5/6, sd = sqrt(5)/6; (1 - 5/6) / sd = 1/sqrt(5) and (2/3 - 5/6) / sd = -1/sqrt(5)
        ("pass@2", [1.0, 0.0, 0.0, 1.0], [5**-0.5, -(5**-0.5), -(5**-0.5), 5**-0.5]),
        # pairs 1, 2, 2: E = 5/3, sd = sqrt(3 - 25/9) = sqrt(2)/3; 3/2, 3/2 and 2 minus 5/3, over sd
        ("pass@2", [0.0, 1.0, 2.0], [-(8**-0.5), -(8**-0.5), 2**-0.5]),
        # 4 of 5 quadruples hold the right one: E = 4/5, sd = 2/5; 1/5 over 2/5, and (3/4 - 4/5) / (2/5) = -1/8
        ("pass@4", [0.0, 0.0, 1.0, 0.0, 0.0], [-0.125, -0.125, 0.5, -0.125, -0.125]),
    ],
)
def test_hand_worked_groups(advantage, rewards, expected):
    got = estimator(advantage)(torch.tensor(rewards), torch.full((len(rewards),), 5))
    assert got[:, 0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("best", [0.1, 1.0, 0.7, 1e-3])
def test_pass_at_k_is_exactly_zero_if_every_subset_contains_a_best_response(best):
    # three of the best and one other: every pair has the best in it, so the standard deviation is 0
    rewards = torch.tensor([best, best, 0.0, best])
    assert (estimator("pass@2")(rewards, torch.zeros(4, dtype=torch.long)) == 0).all()


@pytest.mark.parametrize("advantage", ["pass@1", "pass@3", "pass@64", "pass@k", "maxrl"])
def test_an_estimator_that_does_not_exist_is_refused(advantage):
    with pytest.raises(UserError, match="unknown advantage estimator"):
        estimator(advantage)(torch.zeros(64), torch.zeros(64, dtype=torch.long))
