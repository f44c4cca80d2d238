"""SAPO's gate compared with loops in float64 and numbers worked by hand."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test

OTHER = {"tau_positive": 2.0, "tau_negative": 3.0}


def sapo(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, tau_positive=1.0, tau_negative=1.05):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    for b, t in np.argwhere(mask):
        advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
        tau = tau_positive if advantage > 0 else tau_negative
        ratio = math.exp(log_probs[b, t] - old_log_probs[b, t])
        objective[b, t] = advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
        derivative[b, t] = advantage * ratio / math.cosh(tau * (ratio - 1) / 2) ** 2
    return ClosedForm(objective, derivative, np.zeros(mask.shape, dtype=bool))


def tokens(ratios, advantages):
    old = torch.full((len(ratios), 1), -1.0)
    now = old + torch.tensor(ratios)[:, None].log()
    return ClipInputs(now, old, torch.tensor(advantages)[:, None], torch.ones_like(old, dtype=torch.bool))


test_equals_the_closed_form = closed_form_test("sapo", sapo, [{}, OTHER], clips=False)


def test_hand_worked_tokens():
    # r = 1.5, A = 2, tau = 1: 8 sigmoid(.5) = 8 x .6224593 = 4.979675; gradient 8 x .6224593 x .3775407 x 1.5 = 2.8200446.
    # r = .5, A = -2, tau = 1.05: -8 / 1.05 x sigmoid(-.525) = -7.6190476 x .3716833 = -2.8318724;
    # gradient -8 x .3716833 x .6283167 x .5 = -.9341395
    result, gradient = evaluate(load_zoo()["sapo"](), tokens([1.5, 0.5], [2.0, -2.0]))
    assert result.objective.flatten().tolist() == pytest.approx([4.979675, -2.8318724], rel=1e-5)
    assert gradient.flatten().tolist() == pytest.approx([2.8200446, -0.9341395], rel=1e-5)
    assert not result.clipped.any()


def test_the_weight_is_one_at_ratio_one_and_fades_on_both_sides():
    ratios = [0.02, 0.1, 0.5, 1.0, 4.0, 9.0, 20.0]
    for sign in (1.0, -1.0):
        _, gradient = evaluate(load_zoo()["sapo"](), tokens(ratios, [sign] * len(ratios)))
        weights = (sign * gradient).flatten().tolist()
        assert weights[:4] == sorted(weights[:4])
        assert weights[3:] == sorted(weights[3:], reverse=True)
        assert weights[3] == pytest.approx(1.0, rel=1e-6)
        assert weights[-1] < 1e-5
