"""CTPO compared with loops in float64: the cumulative ratio, clipped in a band that grows with the token's position."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test

OTHER = {"width_low": 0.3, "width_high": 0.2, "width_ceiling": 0.4, "power": 0.25}


def ctpo(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    width_low=0.025,
    width_high=0.05,
    width_ceiling=None,
    power=0.5,
):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b in range(len(mask)):
        total = 0.0
        for place, t in enumerate(np.flatnonzero(mask[b]), start=1):
            total += log_probs[b, t] - old_log_probs[b, t]
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            value = total
            if advantage > 0:
                value = min(total, width_high * place**power)
            if advantage < 0:
                value = max(total, -width_low * place**power)
                if width_ceiling is not None:
                    value = min(value, width_ceiling * place**power)
            objective[b, t] = math.exp(value) * advantage
            clipped[b, t] = value != total
            derivative[b, t] = 0.0 if clipped[b, t] else math.exp(total) * advantage  # only of token t
    return ClosedForm(objective, derivative, clipped)


test_equals_the_closed_form = closed_form_test("ctpo", ctpo, [{}, OTHER])


def test_hand_worked_response():
    # Sums of log-ratios .04, .07, .10 (with a token of an environment between); edges .05, .05 sqrt 2 = .0707 and
    # .05 sqrt 3 = .0866: only the last is above.
    # A = 2: 2 exp(.04) = 2.0816216, 2 exp(.07) = 2.1450164, 2 exp(.0866025) = 2.1809260.
    log_ratios = torch.tensor([[0.04, 0.03, 5.0, 0.03]])
    mask = torch.tensor([[True, True, False, True]])
    old = torch.full_like(log_ratios, -1.0)
    result, gradient = evaluate(load_zoo()["ctpo"](), ClipInputs(old + log_ratios, old, torch.tensor([[2.0]]), mask))
    assert result.objective[mask].tolist() == pytest.approx([2.0816216, 2.1450164, 2.1809260], rel=1e-5)
    assert gradient.tolist()[0] == pytest.approx([2.0816216, 2.1450164, 0.0, 0.0], rel=1e-5)
    assert result.clipped.tolist() == [[False, False, False, True]]


def test_the_gradient_of_a_token_does_not_reach_its_prefix():
    # the objective of the last token alone: its derivative by the tokens before it is 0
    old = torch.full((1, 3), -1.0)
    leaf = (old + 0.01).requires_grad_()
    inputs = ClipInputs(leaf, old, torch.tensor([[1.0]]), torch.ones(1, 3, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(load_zoo()["ctpo"]()(inputs).objective[0, 2], leaf)
    assert gradient.flatten().tolist() == pytest.approx([0.0, 0.0, math.exp(0.03)], rel=1e-5)
