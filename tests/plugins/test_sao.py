"""SAO's rule compared with loops in float64: the policy gradient inside the band, and nothing outside."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test


def sao(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, clip_low=0.8, clip_high=3.0):
    objective = np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b, t in np.argwhere(mask):
        advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
        ratio = math.exp(log_probs[b, t] - rollout_log_probs[b, t])
        inside = 1 - clip_low < ratio < 1 + clip_high
        objective[b, t] = ratio * advantage if inside else 0.0
        clipped[b, t] = not inside and advantage != 0
    return ClosedForm(objective, objective, clipped)


test_equals_the_closed_form = closed_form_test("sao", sao, [{}, {"clip_low": 0.1, "clip_high": 0.2}])


def test_hand_worked_tokens():
    # ratios 2, 5, 5, .1, .1 and 5; the band reaches from .2 to 4. A token outside is dropped for either sign of its advantage,
    # and A = 0 does not count as a clip
    before = torch.tensor([[0.2, 0.1, 0.1, 0.5, 0.5, 0.1]]).log()
    now = torch.tensor([[0.4, 0.5, 0.5, 0.05, 0.05, 0.5]]).log()
    advantages = torch.tensor([[-3.0, 1.0, -1.0, 1.0, -1.0, 0.0]])
    inputs = ClipInputs(now, now, advantages, torch.ones_like(now, dtype=torch.bool), before)
    result, gradient = evaluate(load_zoo()["sao"](), inputs)
    assert result.objective[0].tolist() == pytest.approx([-6.0, 0.0, 0.0, 0.0, 0.0, 0.0], rel=1e-5)
    assert gradient[0].tolist() == pytest.approx([-6.0, 0.0, 0.0, 0.0, 0.0, 0.0], rel=1e-5)
    assert result.clipped.tolist() == [[False, True, True, True, True, False]]
