"""Advantage estimators compared with the oracle's loops and numbers worked by hand."""

import numpy as np
import pytest
import torch

from rlzoo.core.errors import UserError
from tests import oracle
from tests.estimates import estimator

REWARDS = torch.tensor([1.0, 0.1, 0.0, 0.0, 0.1, 0.0, 0.1])
GROUPS = torch.tensor([7, 3, 7, 7, 3, 7, 3])


@pytest.mark.parametrize("advantage", ["group_norm", "group_mean", "leave_one_out"])
def test_estimators_equal_the_oracle(advantage):
    rng = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(40, generator=rng), torch.randint(0, 6, (40,), generator=rng)
    expected = getattr(oracle, advantage)(rewards.double().numpy(), groups.numpy())
    np.testing.assert_allclose(estimator(advantage)(rewards, groups).numpy(), expected, rtol=1e-5, atol=1e-7)


def test_hand_worked_group():
    # group 7 has rewards 1 0 0 0: mean 1/4, std 1/2; group 3 is constant at 0.1, a number whose mean rounds
    assert estimator("group_norm")(REWARDS, GROUPS)[:3, 0].tolist() == pytest.approx([1.499997, 0.0, -0.499999])
    assert estimator("leave_one_out")(REWARDS, GROUPS)[:3, 0].tolist() == pytest.approx([1.0, 0.0, -1 / 3])


@pytest.mark.parametrize("advantage", ["group_norm", "group_mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(advantage):
    assert (estimator(advantage)(torch.full((3,), 0.1), torch.zeros(3, dtype=torch.long)) == 0).all()


def test_batch_norm_ignores_groups_and_raw_is_the_reward():
    # mean 1/2; deviations +-1/2; std with n - 1 = sqrt(4 * 1/4 / 3) = .57735
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    batch = estimator("batch_norm")(rewards, groups)[:, 0]
    assert batch.tolist() == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-3)
    assert estimator("raw")(rewards, groups).tolist() == [[1.0], [1.0], [0.0], [0.0]]


def gdpo(parts, groups, weights=None):
    columns = {name: torch.tensor(values)[:, None] for name, values in parts.items()}
    rewards = torch.full((len(groups),), torch.nan)  # gdpo reads only the named rewards
    return estimator("gdpo")(rewards, groups, reward_parts=columns, reward_weights=weights or {})[:, 0]


def test_named_rewards_are_normalised_before_they_are_added():
    # in the first group, right is 1 0 (std .7071) and short is 0 .1 (std .07071): both become +-.7071 and cancel
    # in the second, right is equal and short is .3 .1: S = 0 0 .7071 -.7071, whose std is sqrt(1 / 3) = .57735
    parts, groups = {"right": [1.0, 0.0, 1.0, 1.0], "short": [0.0, 0.1, 0.3, 0.1]}, torch.tensor([0, 0, 1, 1])
    advantages = gdpo(parts, groups).tolist()
    assert advantages == pytest.approx([0.0, 0.0, 1.22474, -1.22474], abs=1e-4)
    # with weights 2 and 1, S = .7071 -.7071 .7071 -.7071, whose std is sqrt(2 / 3) = .81650
    weighted = gdpo(parts, groups, {"right": 2.0}).tolist()
    assert weighted == pytest.approx([0.86602, -0.86602, 0.86602, -0.86602], abs=1e-4)
    assert gdpo(parts, groups, {"right": -3.0, "short": 0.0}).tolist() == pytest.approx([-1.22474, 1.22474, 0, 0], abs=1e-4)


def test_named_rewards_that_cancel_give_exactly_zero():
    # means and deviations of sevenths round differently
    right = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.3, 0.9, 0.1]
    groups = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    advantages = gdpo({"right": right, "wrong": [0.7 - value for value in right], "other": [0.0] * 7 + [1.0, 0, 0]}, groups)
    assert (advantages[:7] == 0).all()
    assert (advantages[7:] != 0).all()


def with_kl(name, rewards, token_kl, mask, weight):
    """Return advantages per token, with the KL of each token subtracted from its reward."""
    return estimator(name)(rewards, torch.zeros(len(rewards), dtype=torch.long), -weight * token_kl, mask)


def ragged_kl(seed=0):
    rng = torch.Generator().manual_seed(seed)
    mask = torch.arange(7) < torch.randint(1, 8, (12, 1), generator=rng)
    token_kl = torch.where(mask, torch.randn(12, 7, generator=rng), torch.nan)
    return torch.randint(0, 2, (12,), generator=rng).float(), token_kl, mask


def test_token_returns_equal_the_explicit_loops():
    rewards, token_kl, mask = ragged_kl()
    arrays = rewards.numpy(), token_kl.double().numpy(), mask.numpy()
    returns = oracle.kl_returns(*arrays, 0.3)
    raw = with_kl("raw", rewards, token_kl, mask, 0.3)
    np.testing.assert_allclose(raw.numpy(), returns, rtol=1e-6, atol=1e-7)
    normed = with_kl("batch_norm", rewards, token_kl, mask, 0.3)
    np.testing.assert_allclose(normed.numpy(), oracle.token_norm(returns, mask.numpy()), rtol=1e-6, atol=1e-7)


def test_hand_worked_token_returns():
    # KL .5 1 -.5 and 2 under weight .1: returns 1 - .1, 1 - .05, 1 + .05 and 0 - .2; the padding's 9 is not read
    mask = torch.tensor([[True, True, True], [True, False, False]])
    token_kl = torch.tensor([[0.5, 1.0, -0.5], [2.0, 9.0, 9.0]])
    raw = with_kl("raw", torch.tensor([1.0, 0.0]), token_kl, mask, 0.1)
    assert raw.flatten().tolist() == pytest.approx([0.9, 0.95, 1.05, -0.2, 0.0, 0.0])
    # mean 2.7 / 4 = .675; deviations .225 .275 .375 -.875, their squares sum to 1.0325; std sqrt(1.0325 / 3) = .58666
    normed = with_kl("batch_norm", torch.tensor([1.0, 0.0]), token_kl, mask, 0.1)
    assert normed.flatten().tolist() == pytest.approx([0.38353, 0.46876, 0.63921, -1.49150, 0.0, 0.0], abs=1e-4)


def test_equal_returns_give_exactly_zero():
    mask = torch.tensor([[True, True], [True, False]])
    for rewards in (torch.full((2,), 0.1), torch.full((2,), 0.7)):
        assert (with_kl("batch_norm", rewards, torch.zeros(2, 2), mask, 0.1) == 0).all()
    lone = torch.tensor([[True]])
    assert with_kl("batch_norm", torch.ones(1), torch.ones(1, 1), lone, 0.1).tolist() == [[0.0]]


def test_group_estimators_refuse_per_token_rewards():
    with pytest.raises(UserError, match="'group_norm' does not accept per-token rewards, but this run has them"):
        with_kl("group_norm", *ragged_kl(), 0.1)
