"""DCPO: a band per token, from the token's old probability."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test


def rule(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, eps_low=0.16, eps_high=0.2, cap=10.0):
    """PPO's minimum on ratios, token by token, with edges for each token."""
    objective, derivative, clipped = np.zeros(mask.shape), np.zeros(mask.shape), np.zeros(mask.shape, dtype=bool)
    for b, t in np.argwhere(mask):
        advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
        ratio, before = math.exp(log_probs[b, t] - old_log_probs[b, t]), math.exp(old_log_probs[b, t])
        low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * eps_low / before, 0))
        high = min(0.5 + 0.5 * math.sqrt(1 + 4 * eps_high / before), cap)
        edge = min(max(ratio, low), high)
        objective[b, t] = min(ratio * advantage, edge * advantage)
        clipped[b, t] = edge * advantage < ratio * advantage
        derivative[b, t] = 0 if clipped[b, t] else ratio * advantage
    return ClosedForm(objective, derivative, clipped)


test_equals_the_closed_form = closed_form_test("dcpo", rule, [{}, {"eps_low": 0.05, "eps_high": 0.4, "cap": 1.5}], clips=False)


def one_token(before, ratio, advantage):
    old = torch.tensor([[math.log(before)]])
    return ClipInputs(old + math.log(ratio), old, torch.tensor([[advantage]]), torch.tensor([[True]]))


def test_edges_worked_by_hand():
    # q = 0.05: high = 1/2 + 1/2 sqrt(1 + 0.8 / 0.05) = 1/2 + 1/2 sqrt(17) = 2.561553; a ratio of 3 with A = 1 is cut there
    result, gradient = evaluate(load_zoo()["dcpo"](), one_token(0.05, 3.0, 1.0))
    assert result.objective.item() == pytest.approx(2.561553, rel=1e-5)
    assert gradient.item() == 0
    # q = 0.8: low = 1/2 + 1/2 sqrt(1 - 0.64 / 0.8) = 1/2 + 1/2 sqrt(0.2) = 0.723607; a ratio of 0.7 with A = -2 is cut there
    result, gradient = evaluate(load_zoo()["dcpo"](), one_token(0.8, 0.7, -2.0))
    assert result.objective.item() == pytest.approx(-2 * 0.723607, rel=1e-5)
    assert gradient.item() == 0


def test_a_rare_token_keeps_a_gradient_that_a_fixed_band_would_clip():
    inputs = one_token(0.01, 2.0, 1.0)  # high = 1/2 + 1/2 sqrt(81) = 5
    assert evaluate(load_zoo()["dcpo"](), inputs)[1].item() == pytest.approx(2.0, rel=1e-5)
    assert evaluate(load_zoo()["grpo"](), inputs)[1].item() == 0
