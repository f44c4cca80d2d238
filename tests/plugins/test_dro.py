"""DRO compared with loops in float64: a parabola in each token's log-ratio."""

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test


def dro(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, beta=0.05):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b, t in np.argwhere(mask):
        advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
        log_ratio = log_probs[b, t] - old_log_probs[b, t]
        objective[b, t] = advantage * log_probs[b, t] - beta / 2 * log_ratio**2
        derivative[b, t] = advantage - beta * log_ratio
        clipped[b, t] = derivative[b, t] * advantage < 0
    return ClosedForm(objective, derivative, clipped)


test_equals_the_closed_form = closed_form_test("dro", dro, [{}, {"beta": 2.0}], clips=False)


def test_hand_worked_tokens():
    # beta .5, old log pi -5. log r = 1, A = 2: 2 x -4 - .25 = -8.25, gradient 2 - .5 = 1.5.
    # log r = 3, A = 1: 1 x -2 - 2.25 = -4.25, gradient 1 - 1.5 = -.5: reversed. log r = -2, A = -3: 21 - 1 = 20,
    # gradient -3 + 1 = -2. log r = 2, A = 0: -1, gradient -1, not clipped.
    old = torch.full((1, 4), -5.0)
    advantages = torch.tensor([[2.0, 1.0, -3.0, 0.0]])
    inputs = ClipInputs(old + torch.tensor([[1.0, 3.0, -2.0, 2.0]]), old, advantages, torch.ones(1, 4, dtype=torch.bool))
    result, gradient = evaluate(load_zoo()["dro"](beta=0.5), inputs)
    assert result.objective[0].tolist() == pytest.approx([-8.25, -4.25, 20.0, -1.0])
    assert gradient[0].tolist() == pytest.approx([1.5, -0.5, -2.0, -1.0])
    assert result.clipped.tolist() == [[False, True, False, False]]
