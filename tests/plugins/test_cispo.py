"""CISPO compared with loops in float64: a token's weight is capped, its gradient is never cut."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, arrays_of, closed_form_test

CISPO = [{}, {"clip_low": 0.1, "clip_high": 0.3}, {"clip_low": None, "clip_high": 0.2}]


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", CISPO, ids=str)
def test_tokens_that_were_rare_equal_the_closed_form(settings, seed):
    inputs = rare_tokens(seed)
    expected = cispo(*arrays_of(inputs), **settings)
    result, gradient = evaluate(load_zoo()["cispo"](**settings), inputs)
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


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_a_capped_token_keeps_the_gradient_of_the_cap_where_ppo_would_cut(advantage):
    # ratios 6, 60 and, beyond the limit of the exponential, e^30: cap * A at each; PPO stops for A > 0
    inputs = tokens([math.log(6), math.log(60), 30.0], [advantage] * 3)
    _, slope = evaluate(load_zoo()["cispo"](), inputs)
    assert slope.flatten().tolist() == pytest.approx([5 * advantage] * 3, rel=1e-6)
    if advantage > 0:
        assert evaluate(load_zoo()["grpo"](), inputs)[1].abs().max() == 0


def test_the_weight_is_not_differentiated():
    # J = w A log pi with w = 2 and A = 1: the slope is 2, not 2 + 2 log pi as if the ratio were differentiated too
    _, slope = evaluate(load_zoo()["cispo"](), tokens([math.log(2)], [1.0]))
    assert slope.item() == pytest.approx(2.0, rel=1e-6)
