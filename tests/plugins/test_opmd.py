"""OPMD compared with loops in float64: a parabola in the response's log-ratio to its old policy, with strength tau."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for


def opmd(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, tau=0.1):
    rows, columns = mask.shape
    objective, derivative, clipped = np.zeros((rows, 1)), np.zeros((rows, columns)), np.zeros((rows, 1), dtype=bool)
    for b in range(rows):
        advantage = advantages[b, 0]
        tokens = [t for t in range(columns) if mask[b, t]]
        total = math.fsum(log_probs[b, t] - old_log_probs[b, t] for t in tokens)
        objective[b, 0] = advantage * total - tau / 2 * total * total
        clipped[b, 0] = (advantage > 0 and tau * total > advantage) or (advantage < 0 and tau * total < advantage)
        for t in tokens:
            derivative[b, t] = advantage - tau * total
    return ClosedForm(objective, derivative, clipped)


def response(log_ratios, advantage):
    old = torch.full((1, len(log_ratios)), -20.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor([log_ratios]), old, torch.tensor([[advantage]]), mask)


test_equals_the_closed_form = closed_form_test("opmd", opmd, [{}, {"tau": 1.0}, {"tau": 0.02}], clips=False)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "objective", "gradient", "clipped"),
    [
        # S = 4, A = 1: 4 - 0.05 * 16 = 3.2, gradient 1 - 0.4 = 0.6
        ([1.0, 3.0], 1.0, 3.2, 0.6, False),
        # S = 12, A = 1: 12 - 0.05 * 144 = 4.8, gradient 1 - 1.2 = -0.2: reversed; and its mirror image
        ([5.0, 7.0], 1.0, 4.8, -0.2, True),
        ([-5.0, -7.0], -1.0, 4.8, 0.2, True),
        # S = 4, A = -1: -4 - 0.8 = -4.8, gradient -1 - 0.4 = -1.4: larger, because it moved in the wrong direction
        ([1.0, 3.0], -1.0, -4.8, -1.4, False),
        # S = 2, A = 0: -0.05 * 4 = -0.2, gradient -0.2: pulled back, but there was no push to reverse
        ([-1.0, 3.0], 0.0, -0.2, -0.2, False),
    ],
)
def test_hand_worked_responses(log_ratios, advantage, objective, gradient, clipped):
    result, slope = evaluate(load_zoo()["opmd"](), response(log_ratios, advantage))
    assert result.objective.shape == (1, 1)
    assert result.objective.item() == pytest.approx(objective, rel=1e-5)
    assert slope.flatten().tolist() == pytest.approx([gradient, gradient], rel=1e-5)
    assert result.clipped.tolist() == [[clipped]]


@pytest.mark.parametrize("widen", [1.0, 6.0])
@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_the_gradient_reverses_exactly_where_it_says_clipped(tau, widen):
    policy = load_zoo()["opmd"](tau=tau)
    inputs = inputs_for(policy, seed=2, widen=widen)
    result, gradient = evaluate(policy, inputs)
    against = (gradient * inputs.advantages < 0) & inputs.response_mask
    assert torch.equal(against, result.clipped & inputs.response_mask)
    assert against.any()
    assert (inputs.response_mask & ~against).any()


@pytest.mark.parametrize("advantage", [0.7, -1.3])
def test_the_objective_peaks_at_the_advantage_over_tau(advantage):
    # A S - tau/2 S^2 is largest at S = A / tau, where it is A^2 / (2 tau); the gradient is 0 there
    policy, peak = load_zoo()["opmd"](), advantage / 0.1
    values = [evaluate(policy, response([s / 2, s / 2], advantage))[0].objective.item() for s in (peak - 1, peak, peak + 1)]
    assert values[1] == pytest.approx(advantage**2 / 0.2, rel=1e-5)
    assert max(values[0], values[2]) < values[1]


def test_the_log_ratio_is_not_limited_as_nothing_is_exponentiated():
    # S = -60 at A = 1: -60 - 0.05 * 3600 = -240, gradient 1 + 6 = 7
    result, gradient = evaluate(load_zoo()["opmd"](), response([-30.0, -30.0], 1.0))
    assert result.objective.item() == pytest.approx(-240.0, rel=1e-5)
    assert gradient.flatten().tolist() == pytest.approx([7.0, 7.0], rel=1e-5)
