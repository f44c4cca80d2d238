"""IPO compared with loops in float64: a token is dropped if its probability moved too far in either direction."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test


def ipo(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, eps=0.3):
    objective = np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b, t in np.argwhere(mask):
        advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
        dropped = abs(math.exp(log_probs[b, t]) - math.exp(rollout_log_probs[b, t])) > eps
        objective[b, t] = 0.0 if dropped else math.exp(log_probs[b, t] - rollout_log_probs[b, t]) * advantage
        clipped[b, t] = dropped and advantage != 0
    return ClosedForm(objective, objective, clipped)


def tokens(before, now, advantages):
    before, now = torch.tensor([before]).log(), torch.tensor([now]).log()
    return ClipInputs(now, now, torch.tensor(advantages)[None], torch.ones_like(now, dtype=torch.bool), before)


test_equals_the_closed_form = closed_form_test("ipo", ipo, [{}, {"eps": 0.1}])


def test_hand_worked_tokens():
    # .4 to .6 is .2: kept, ratio 1.5, A = 2. .4 to .8 is .4: dropped upwards, and for A < 0 also when it is pushed back.
    # .001 to .1: kept with a ratio of 100. .8 to .4: dropped. A = 0: dropped, which does not count as a clip.
    inputs = tokens([0.4, 0.4, 0.4, 0.001, 0.8, 0.8], [0.6, 0.8, 0.8, 0.1, 0.4, 0.4], [2.0, 2.0, -2.0, 1.0, 1.0, 0.0])
    result, gradient = evaluate(load_zoo()["ipo"](), inputs)
    assert result.objective[0].tolist() == pytest.approx([3.0, 0.0, 0.0, 100.0, 0.0, 0.0], rel=1e-4)
    assert gradient[0].tolist() == pytest.approx([3.0, 0.0, 0.0, 100.0, 0.0, 0.0], rel=1e-4)
    assert result.clipped.tolist() == [[False, True, True, False, True, False]]


def test_only_the_sampler_s_probability_counts():
    inputs = tokens([0.4], [0.8], [1.0])
    assert load_zoo()["ipo"]()(inputs).clipped.all()
    assert inputs.old_log_probs.equal(inputs.log_probs), "the old policy is where the current one is"
