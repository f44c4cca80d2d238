"""ASPO compared with loops in float64: the ratio of good tokens is inverted, below a cap."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test

OTHER = {"clip_low": 0.3, "clip_high": 0.1, "cap": 1.1}


def aspo(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, clip_low=0.2, clip_high=0.2, cap=3.0):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b, t in np.argwhere(mask):
        advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
        ratio = math.exp(log_probs[b, t] - old_log_probs[b, t])
        if advantage > 0:
            clipped[b, t] = ratio > 1 + clip_high
            weight = min(1 / min(ratio, 1 + clip_high), cap)
        else:
            clipped[b, t] = advantage < 0 and ratio < 1 - clip_low
            weight = min(max(ratio, 1 - clip_low), cap)
        objective[b, t] = weight * advantage
        derivative[b, t] = 0.0 if clipped[b, t] else weight * advantage
    return ClosedForm(objective, derivative, clipped)


test_equals_the_closed_form = closed_form_test("aspo", aspo, [{}, OTHER])


def test_hand_worked_tokens():
    # A = 2, ratios .2, .5, 1.1, 1.5: weights min(5, 3) = 3, 2, 1 / 1.1 = .9090909, and 1 / 1.2 = .8333333 without a gradient.
    # A = -2, ratios .5, .9, 1.5, 4: .8 without a gradient, .9, 1.5, min(4, 3) = 3.
    ratios = torch.tensor([[0.2, 0.5, 1.1, 1.5], [0.5, 0.9, 1.5, 4.0]])
    old = torch.full_like(ratios, -2.0)
    mask = torch.ones_like(ratios, dtype=torch.bool)
    inputs = ClipInputs(old + ratios.log(), old, torch.tensor([[2.0], [-2.0]]), mask)
    result, gradient = evaluate(load_zoo()["aspo"](), inputs)
    assert result.objective[0].tolist() == pytest.approx([6.0, 4.0, 1.8181818, 1.6666667], rel=1e-5)
    assert result.objective[1].tolist() == pytest.approx([-1.6, -1.8, -3.0, -6.0], rel=1e-5)
    assert gradient[0].tolist() == pytest.approx([6.0, 4.0, 1.8181818, 0.0], rel=1e-5)
    assert gradient[1].tolist() == pytest.approx([0.0, -1.8, -3.0, -6.0], rel=1e-5)
    assert result.clipped.tolist() == [[False, False, False, True], [True, False, False, False]]
