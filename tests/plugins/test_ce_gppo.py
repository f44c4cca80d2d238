"""CE-GPPO compared with loops in float64: GRPO's clip, with a bounded gradient outside the band."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for

OTHER = {"clip_low": 0.1, "clip_high": 0.3, "beta_low": 0.25, "beta_high": 1.5}


def ce_gppo(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.2,
    beta_low=0.5,
    beta_high=1.0,
):
    objective = np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b, t in np.argwhere(mask):
        advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
        ratio = weight = math.exp(log_probs[b, t] - old_log_probs[b, t])
        if advantage < 0 and ratio < 1 - clip_low:
            weight, clipped[b, t] = beta_low * (1 - clip_low), True
        if advantage > 0 and ratio > 1 + clip_high:
            weight, clipped[b, t] = beta_high * (1 + clip_high), True
        objective[b, t] = weight * advantage
    return ClosedForm(objective, objective, clipped)  # the gradient of w r / sg[r] is w, that of r is r


test_equals_the_closed_form = closed_form_test("ce-gppo", ce_gppo, [{}, OTHER])


def test_hand_worked_tokens():
    # A = 2: ratios .5, 1.1, 1.5 weigh .5, 1.1, 1 x 1.2. A = -2: .5, .9, 1.5 weigh .5 x .8 = .4, .9, 1.5.
    ratios = torch.tensor([[0.5, 1.1, 1.5], [0.5, 0.9, 1.5]])
    old = torch.full_like(ratios, -1.0)
    mask = torch.ones_like(ratios, dtype=torch.bool)
    inputs = ClipInputs(old + ratios.log(), old, torch.tensor([[2.0], [-2.0]]), mask)
    result, gradient = evaluate(load_zoo()["ce-gppo"](), inputs)
    for row, expected in enumerate([[1.0, 2.2, 2.4], [-0.8, -1.8, -3.0]]):
        assert result.objective[row].tolist() == pytest.approx(expected, rel=1e-5)
        assert gradient[row].tolist() == pytest.approx(expected, rel=1e-5)
    assert result.clipped.tolist() == [[False, False, True], [True, False, False]]


def test_without_betas_the_gradient_is_that_of_grpo():
    policy = load_zoo()["ce-gppo"](beta_low=0.0, beta_high=0.0)
    inputs = inputs_for(policy, seed=2)
    (ours, gradient), (theirs, expected) = evaluate(policy, inputs), evaluate(load_zoo()["grpo"](), inputs)
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(ours.clipped, theirs.clipped)
