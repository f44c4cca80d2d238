"""CISPO and its absolute cap compared with loops in float64: a token's weight is capped, its gradient is never cut."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, arrays_of, closed_form_test

CISPO = [{}, {"clip_low": 0.1, "clip_high": 0.3}, {"clip_low": None, "clip_high": 0.2}]
ABSOLUTE = [{}, {"cap": 1.5}]


def cispo(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, clip_low=None, clip_high=4.0):
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        for t in range(columns):
            if not mask[b, t]:
                continue
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            ratio = math.exp(min(max(log_probs[b, t] - old_log_probs[b, t], -20.0), 20.0))
            weight = ratio
            if ratio > 1.0 + clip_high:
                weight = 1.0 + clip_high
                clipped[b, t] = advantage > 0
            if clip_low is not None and ratio < 1.0 - clip_low:
                weight = 1.0 - clip_low
                clipped[b, t] = advantage < 0
            objective[b, t] = weight * advantage * log_probs[b, t]
            derivative[b, t] = weight * advantage  # the weight is a constant
    return ClosedForm(objective, derivative, clipped)


def cispo_absolute(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, cap=5.0):
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        for t in range(columns):
            if not mask[b, t]:
                continue
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            ratio = math.exp(min(max(log_probs[b, t] - old_log_probs[b, t], -20.0), 20.0))
            weight = min(ratio, cap)
            objective[b, t] = weight * advantage * log_probs[b, t]
            derivative[b, t] = weight * advantage
            clipped[b, t] = advantage > 0 and ratio > cap
    return ClosedForm(objective, derivative, clipped)


BOTH = [("cispo", cispo, settings) for settings in CISPO] + [
    ("cispo-absolute", cispo_absolute, settings) for settings in ABSOLUTE
]
over_both = pytest.mark.parametrize(
    ("name", "rule", "settings"), BOTH, ids=lambda value: getattr(value, "__name__", str(value))
)


def tokens(log_ratios, advantages):
    """Return one response with one token per log-ratio; every current log-probability is -1/2."""
    log_probs = torch.full((len(log_ratios), 1), -0.5)
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    return ClipInputs(log_probs, log_probs - torch.tensor(log_ratios)[:, None], torch.tensor(advantages)[:, None], mask)


def rare_tokens(seed):
    """Return ragged data with unlikely tokens, so that ratios go far beyond 5 and far below 1; A differs by token."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.arange(30) < torch.randint(1, 31, (12, 1), generator=rng)
    old = -8.0 * torch.rand(12, 30, generator=rng) - 0.05
    log_probs = (old + 2.0 * torch.randn(12, 30, generator=rng)).clamp(max=-1e-3)
    advantages = torch.randn(12, 30, generator=rng)
    advantages[:, ::5] = 0
    return ClipInputs(log_probs, old, advantages, mask, old)


test_cispo_equals_the_closed_form = closed_form_test("cispo", cispo, CISPO, clips=False)
test_cispo_absolute_equals_the_closed_form = closed_form_test("cispo-absolute", cispo_absolute, ABSOLUTE, clips=False)


@pytest.mark.parametrize("seed", range(3))
@over_both
def test_tokens_that_were_rare_equal_the_closed_form(name, rule, settings, seed):
    inputs = rare_tokens(seed)
    expected = rule(*arrays_of(inputs), **settings)
    result, gradient = evaluate(load_zoo()[name](**settings), inputs)
    mask = inputs.response_mask.numpy()
    np.testing.assert_allclose(result.objective.detach().numpy()[mask], expected.objective[mask], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient.numpy(), expected.derivative, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(result.clipped.numpy()[mask], expected.clipped[mask])
    assert expected.clipped.any()


# A token at log pi = -1/2, its log-ratio the logarithm of 8, 1/2 or 1: weight * A and half of that, negated.
@pytest.mark.parametrize(
    ("settings", "ratio", "advantage", "gradient", "clipped"),
    [
        # 8 > 5: weight 5, of A = 2 that is 10, and an objective of 10 * -1/2 = -5
        ({}, 8.0, 2.0, 10.0, True),
        # A = -2: the weight is also 5, but the cap did not stop the advantage, which pushes down
        ({}, 8.0, -2.0, -10.0, False),
        # no floor: weight 1/2 for both signs
        ({}, 0.5, 2.0, 1.0, False),
        ({}, 0.5, -2.0, -1.0, False),
        # a floor of 0.9: weight 0.9 for both signs, clipped if A < 0
        ({"clip_low": 0.1, "clip_high": 0.3}, 0.5, 2.0, 1.8, False),
        ({"clip_low": 0.1, "clip_high": 0.3}, 0.5, -2.0, -1.8, True),
        # a cap of 1.3
        ({"clip_low": 0.1, "clip_high": 0.3}, 8.0, 2.0, 2.6, True),
        ({"clip_low": 0.1, "clip_high": 0.3}, 8.0, -2.0, -2.6, False),
        ({"clip_low": 0.1, "clip_high": 0.3}, 1.0, -2.0, -2.0, False),
        ({}, 8.0, 0.0, 0.0, False),
    ],
)
def test_hand_worked_tokens(settings, ratio, advantage, gradient, clipped):
    result, slope = evaluate(load_zoo()["cispo"](**settings), tokens([math.log(ratio)], [advantage]))
    assert slope.item() == pytest.approx(gradient, rel=1e-6)
    assert result.objective.item() == pytest.approx(-gradient / 2, rel=1e-6)
    assert result.clipped.tolist() == [[clipped]]


def test_hand_worked_tokens_of_the_absolute_cap():
    # cap 5 on ratios 8, 8, 4, 1/2 with A = 2, -2, 2, -2: 5 * 2, 5 * -2, 4 * 2, 1/2 * -2; only the first is clipped
    inputs = tokens([math.log(8), math.log(8), math.log(4), -math.log(2)], [2.0, -2.0, 2.0, -2.0])
    result, slope = evaluate(load_zoo()["cispo-absolute"](), inputs)
    assert slope.flatten().tolist() == pytest.approx([10.0, -10.0, 8.0, -1.0], rel=1e-6)
    assert result.objective.flatten().tolist() == pytest.approx([-5.0, 5.0, -4.0, 0.5], rel=1e-6)
    assert result.clipped.flatten().tolist() == [True, False, False, False]


@pytest.mark.parametrize("name", ["cispo", "cispo-absolute"])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_a_capped_token_keeps_the_gradient_of_the_cap_where_ppo_would_cut(name, advantage):
    # ratios 6, 60 and, beyond the limit of the exponential, e^30: cap * A at each; PPO stops for A > 0
    inputs = tokens([math.log(6), math.log(60), 30.0], [advantage] * 3)
    _, slope = evaluate(load_zoo()[name](), inputs)
    assert slope.flatten().tolist() == pytest.approx([5 * advantage] * 3, rel=1e-6)
    if advantage > 0:
        assert evaluate(load_zoo()["grpo"](), inputs)[1].abs().max() == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_width_of_4_above_is_an_absolute_cap_of_5_whatever_the_sign_of_the_advantage(seed):
    inputs = rare_tokens(seed)
    relative, relative_slope = evaluate(load_zoo()["cispo"](clip_high=4.0), inputs)
    absolute, absolute_slope = evaluate(load_zoo()["cispo-absolute"](cap=5.0), inputs)
    mask = inputs.response_mask
    torch.testing.assert_close(relative.objective[mask], absolute.objective[mask], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(relative_slope, absolute_slope, rtol=1e-6, atol=1e-6)
    assert torch.equal(relative.clipped[mask], absolute.clipped[mask])
    beyond = mask & (inputs.log_probs - inputs.old_log_probs > math.log(5.0))
    for side in (inputs.advantages > 0, inputs.advantages < 0):
        here = beyond & side
        assert here.any()
        torch.testing.assert_close(absolute_slope[here], 5.0 * inputs.advantages[here], rtol=1e-6, atol=1e-6)


def test_the_weight_is_not_differentiated():
    # J = w A log pi with w = 2 and A = 1: the slope is 2, not 2 + 2 log pi as if the ratio were differentiated too
    _, slope = evaluate(load_zoo()["cispo"](), tokens([math.log(2)], [1.0]))
    assert slope.item() == pytest.approx(2.0, rel=1e-6)
