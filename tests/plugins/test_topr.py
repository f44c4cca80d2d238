"""TOPR compared with loops in float64: all of log pi for A >= 0, a weight of at most 1 for A < 0."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for


def topr(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    rows, columns = mask.shape
    objective, derivative, clipped = np.zeros((rows, 1)), np.zeros((rows, columns)), np.zeros((rows, 1), dtype=bool)
    for b in range(rows):
        advantage = advantages[b, 0]
        tokens = [t for t in range(columns) if mask[b, t]]
        total = math.fsum(log_probs[b, t] - old_log_probs[b, t] for t in tokens)
        weight = 1.0
        if advantage < 0:
            weight = min(math.exp(min(max(total, -20.0), 20.0)), 1.0)
            clipped[b, 0] = total > 0
        objective[b, 0] = weight * advantage * math.fsum(log_probs[b, t] for t in tokens)
        for t in tokens:
            derivative[b, t] = weight * advantage  # the weight is a constant
    return ClosedForm(objective, derivative, clipped)


def response(log_probs, old_log_probs, advantage):
    tokens = torch.tensor([log_probs])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return ClipInputs(tokens, torch.tensor([old_log_probs]), torch.tensor([[advantage]]), mask)


# How much of the data is capped does not depend on its spread, which seeds 0 and 1 therefore leave at 1e-6: widened to 0.1.
SPREAD = [(0, 1e5), (1, 1e5), (2, 1.0)]


test_equals_the_closed_form = closed_form_test("topr", topr)


@pytest.mark.parametrize(
    ("old_log_probs", "advantage", "objective", "gradient", "clipped"),
    [
        # log pi = -0.5 and -1.5, sum -2. A = 3: 3 * -2 = -6 and 3 per token, for S = 1 and for S = -2.
        ([-1.5, -1.5], 3.0, -6.0, 3.0, False),
        ([0.0, 0.0], 3.0, -6.0, 3.0, False),
        # A = -2, S = -2 + 3 = 1: the weight min(e, 1) = 1 is capped: -2 * -2 = 4, -2 per token
        ([-1.5, -1.5], -2.0, 4.0, -2.0, True),
        # A = -2, S = -ln 2: weight 1/2: 1/2 * 4 = 2, -1 per token
        ([-0.5, -1.5 + math.log(2)], -2.0, 2.0, -1.0, False),
        # A = 0
        ([-1.5, -1.5], 0.0, 0.0, 0.0, False),
    ],
)
def test_hand_worked_responses(old_log_probs, advantage, objective, gradient, clipped):
    result, slope = evaluate(load_zoo()["topr"](), response([-0.5, -1.5], old_log_probs, advantage))
    assert result.objective.shape == (1, 1)
    assert result.objective.item() == pytest.approx(objective, rel=1e-6)
    assert slope.flatten().tolist() == pytest.approx([gradient, gradient], rel=1e-6)
    assert result.clipped.tolist() == [[clipped]]


def test_a_good_response_gets_its_advantage_whatever_the_ratio_and_a_bad_one_at_most_that():
    policy = load_zoo()["topr"]()
    inputs = inputs_for(policy, seed=2, widen=3.0)
    _, gradient = evaluate(policy, inputs)
    full = (inputs.advantages * inputs.response_mask).numpy()
    good = (inputs.advantages[:, 0] >= 0).numpy()
    np.testing.assert_array_equal(gradient.numpy()[good], full[good])
    bad = ~good
    assert (np.abs(gradient.numpy()[bad]) <= np.abs(full[bad]) + 1e-7).all()
    assert (np.abs(gradient.numpy()[bad]) < np.abs(full[bad]) - 1e-3).any()


def test_the_weight_of_an_ever_less_likely_bad_response_falls_to_the_limit():
    # S = -1, -10, -20, -30: weights e^-1, e^-10, e^-20 and, limited, e^-20 again
    totals = [-1.0, -10.0, -20.0, -30.0]
    slopes = [evaluate(load_zoo()["topr"](), response([-1.0 + s], [-1.0], -1.0))[1].item() for s in totals]
    assert slopes == pytest.approx([-math.exp(-1), -math.exp(-10), -math.exp(-20), -math.exp(-20)], rel=1e-5)
