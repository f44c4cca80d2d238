"""Advantage estimators against the oracle's loops and numbers worked by hand."""

import numpy as np
import pytest
import torch

from rlzoo.advantages import compute_advantages
from rlzoo.errors import UserError
from tests import oracle

REWARDS = torch.tensor([1.0, 0.1, 0.0, 0.0, 0.1, 0.0, 0.1])
GROUPS = torch.tensor([7, 3, 7, 7, 3, 7, 3])


@pytest.mark.parametrize("advantage", ["group_norm", "group_mean", "leave_one_out"])
def test_estimators_equal_the_oracle(advantage):
    rng = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(40, generator=rng), torch.randint(0, 6, (40,), generator=rng)
    expected = getattr(oracle, advantage)(rewards.double().numpy(), groups.numpy())
    np.testing.assert_allclose(compute_advantages(rewards, groups, advantage).numpy(), expected, rtol=1e-5, atol=1e-7)


def test_hand_worked_group():
    # group 7 has rewards 1 0 0 0: mean 1/4, std 1/2; group 3 is constant at 0.1, a number whose mean rounds
    assert compute_advantages(REWARDS, GROUPS, "group_norm")[:3, 0].tolist() == pytest.approx([1.499997, 0.0, -0.499999])
    assert compute_advantages(REWARDS, GROUPS, "leave_one_out")[:3, 0].tolist() == pytest.approx([1.0, 0.0, -1 / 3])


@pytest.mark.parametrize("advantage", ["group_norm", "group_mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(advantage):
    assert (compute_advantages(torch.full((3,), 0.1), torch.zeros(3, dtype=torch.long), advantage) == 0).all()


def test_batch_norm_ignores_groups_and_raw_is_the_reward():
    # mean 1/2; deviations +-1/2; std with n - 1 = sqrt(4 * 1/4 / 3) = .57735
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    batch = compute_advantages(rewards, groups, "batch_norm")[:, 0]
    assert batch.tolist() == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-3)
    assert compute_advantages(rewards, groups, "raw").tolist() == [[1.0], [1.0], [0.0], [0.0]]


def test_leave_one_out_refuses_a_group_of_one():
    with pytest.raises(UserError, match=r"leave_one_out needs at least 2 responses per prompt; raise rollout\.group_size"):
        compute_advantages(torch.tensor([1.0]), torch.tensor([0]), "leave_one_out")
