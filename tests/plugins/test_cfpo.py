"""CFPO compared with loops in float64: a parabola in the ratio replaces the clip."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for


def cfpo(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, width=0.2):
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        for t in range(columns):
            if not mask[b, t]:
                continue
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            log_ratio = log_probs[b, t] - old_log_probs[b, t]
            ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
            objective[b, t] = ratio * advantage - abs(advantage) / (2 * width) * (ratio - 1) ** 2
            if abs(log_ratio) <= 20.0:
                derivative[b, t] = ratio * (advantage - abs(advantage) / width * (ratio - 1))
            clipped[b, t] = (advantage > 0 and ratio - 1 > width) or (advantage < 0 and ratio - 1 < -width)
    return ClosedForm(objective, derivative, clipped)


def tokens(ratios, advantages):
    """Return one response with one token per ratio."""
    old = torch.full((len(ratios), 1), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor(ratios).log()[:, None], old, torch.tensor(advantages)[:, None], mask)


test_equals_the_closed_form = closed_form_test("cfpo", cfpo, [{}, {"width": 0.5}])


def test_hand_worked_tokens():
    # |A| / (2 width) is 2.5 at A = 1 and 5 at A = -2.
    # r = 1.1, A = 1: 1.1 - 2.5 * 0.01 = 1.075, gradient 1.1 * (1 - 0.1 / 0.2) = 0.55
    # r = 1.5, A = 1: 1.5 - 2.5 * 0.25 = 0.875, gradient 1.5 * (1 - 2.5) = -2.25: reversed
    # r = 0.5, A = 1: 0.5 - 0.625 = -0.125, gradient 0.5 * (1 + 2.5) = 1.75
    # r = 0.5, A = -2: -1 - 5 * 0.25 = -2.25, gradient 0.5 * (-2 + 5) = 1.5: reversed
    # r = 1.5, A = -2: -3 - 1.25 = -4.25, gradient 1.5 * (-2 - 5) = -10.5
    result, gradient = evaluate(load_zoo()["cfpo"](), tokens([1.1, 1.5, 0.5, 0.5, 1.5], [1.0, 1.0, 1.0, -2.0, -2.0]))
    assert result.objective.flatten().tolist() == pytest.approx([1.075, 0.875, -0.125, -2.25, -4.25], rel=1e-5)
    assert gradient.flatten().tolist() == pytest.approx([0.55, -2.25, 1.75, 1.5, -10.5], rel=1e-5)
    assert result.clipped.flatten().tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("width", [0.1, 0.2, 1.5])
def test_the_gradient_at_ratio_one_is_the_advantage(width):
    advantages = [2.0, 0.0, -0.5]
    result, gradient = evaluate(load_zoo()["cfpo"](width=width), tokens([1.0, 1.0, 1.0], advantages))
    assert gradient.flatten().tolist() == advantages
    assert result.objective.flatten().tolist() == advantages


@pytest.mark.parametrize("widen", [1.0, 6.0])
@pytest.mark.parametrize("width", [0.2, 0.5])
def test_the_gradient_reverses_exactly_where_it_says_clipped(width, widen):
    policy = load_zoo()["cfpo"](width=width)
    inputs = inputs_for(policy, seed=3, widen=widen, token_advantages=True)
    result, gradient = evaluate(policy, inputs)
    inside = inputs.response_mask & ((inputs.log_probs - inputs.old_log_probs).abs() < 20)
    against = gradient * inputs.advantages < 0
    assert torch.equal(against & inside, result.clipped & inside)
    assert (against & inside).any()
    assert (~against & inside).any()


@pytest.mark.parametrize("width", [0.2, 0.5])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_the_objective_is_bounded_in_the_ratio_and_peaks_at_the_width(advantage, width):
    # A > 0: at r = 1 + width it is A (1 + width) - A width / 2 = A (1 + width / 2); A < 0: at r = 1 - width it is
    # -|A| (1 - width) - |A| width / 2 = -|A| (1 - width / 2)
    sign = math.copysign(1.0, advantage)
    peak = 1 + sign * width
    ratios = [peak, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, peak - 0.02, peak + 0.02, peak - 0.1, peak + 0.1]
    result, gradient = evaluate(load_zoo()["cfpo"](width=width), tokens(ratios, [advantage] * len(ratios)))
    values = result.objective.flatten().tolist()
    assert values[0] == pytest.approx(advantage * (1 + sign * width / 2), rel=1e-5)
    assert max(values[1:]) < values[0]
    assert gradient[0].item() == pytest.approx(0.0, abs=1e-5)
    assert values[6] < -10 * abs(advantage)  # r = 10


def test_beyond_the_limit_of_the_exponential_the_gradient_is_zero():
    # log-ratios of +-30 count as +-20; at A = 1 and -20: exp(-20) - 2.5 (1 - exp(-20))^2 = -2.5
    old = torch.full((2, 1), -1.0)
    shifted = old + torch.tensor([[-30.0], [30.0]])
    inputs = ClipInputs(shifted, old, torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool))
    result, gradient = evaluate(load_zoo()["cfpo"](), inputs)
    assert result.objective[0].item() == pytest.approx(-2.5, rel=1e-5)
    assert result.objective[1].item() == pytest.approx(-2.5 * math.exp(40), rel=1e-5)
    assert gradient.flatten().tolist() == [0.0, 0.0]
