"""GVPO compared with loops in float64: the squared error between a group's log-ratios and its rewards."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test


def gvpo(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, group_ids, rewards, beta=0.1):
    objective, derivative = np.zeros((len(mask), 1)), np.zeros(mask.shape)
    clipped = np.zeros((len(mask), 1), dtype=bool)
    total = [math.fsum((log_probs - old_log_probs)[b][mask[b]]) for b in range(len(mask))]
    for group in set(group_ids[:, 0]):
        own = [b for b in range(len(mask)) if group_ids[b, 0] == group]
        mean_total, mean_reward = (math.fsum(values) / len(own) for values in (np.take(total, own), rewards[own, 0]))
        for b in own:
            pull, gap = beta * (total[b] - mean_total), float(rewards[b, 0] - mean_reward)
            scale = len(own) / max(len(own) - 1, 1)
            objective[b, 0] = -scale / 2 * (pull - gap) ** 2
            derivative[b, mask[b]] = -scale * beta * (pull - gap)  # errors of a group sum to 0, so means contribute nothing
            clipped[b, 0] = advantages[b].any() and (0 < gap < pull or pull < gap < 0)
    return ClosedForm(objective, derivative, clipped)


def step(totals, rewards, groups):
    """Return one-token responses, one for each log-ratio."""
    old = torch.full((len(totals), 1), -20.0)
    column = torch.tensor(rewards)[:, None]
    ids, mask = torch.tensor(groups)[:, None], torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor(totals)[:, None], old, column - 0.5, mask, group_ids=ids, rewards=column)


test_equals_the_closed_form = closed_form_test("gvpo", gvpo, [{}, {"beta": 1.0}], clips=False)


def test_hand_worked_step():
    # Group 0: S = 3, -1, 1 (mean 1), R = 1, 0, .5 (mean .5): errors .1 x 2 - .5 = -.3, -.2 + .5 = .3, 0.
    # J = -3 / (2 x 2) x .09 = -.0675 twice and 0; gradients -3 / 2 x .1 x error = .045, -.045, 0.
    # Group 1, S = 9 and -9, R = 1 and 0: .9 - .5 = .4: -2 / 2 x .16 = -.16, gradient -2 x .1 x .4 = -.08: reversed.
    # Group 2 has one response: no loss.
    inputs = step([3.0, 9.0, -1.0, -9.0, 1.0, 7.0], [1.0, 1.0, 0.0, 0.0, 0.5, 1.0], [0, 1, 0, 1, 0, 2])
    result, gradient = evaluate(load_zoo()["gvpo"](), inputs)
    assert result.objective.flatten().tolist() == pytest.approx([-0.0675, -0.16, -0.0675, -0.16, 0.0, 0.0], rel=1e-5, abs=1e-7)
    assert gradient.flatten().tolist() == pytest.approx([0.045, -0.08, -0.045, 0.08, 0.0, 0.0], rel=1e-5, abs=1e-7)
    assert result.clipped.flatten().tolist() == [False, True, False, True, False, False]


def test_the_error_is_zero_where_log_ratios_differ_as_rewards_over_beta():
    result, gradient = evaluate(load_zoo()["gvpo"](beta=0.5), step([5.0, 3.0, 4.0], [1.0, 0.0, 0.5], [7, 7, 7]))
    assert result.objective.abs().max() < 1e-10
    assert gradient.abs().max() < 1e-6
