"""CISPO against loops in float64: a capped, constant weight on log pi, so that no token loses its gradient."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate, off_policy_inputs
from tests.plugins.closed_form import ClosedForm, assert_equals_closed_form, inputs_for


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
            weight = min(ratio, 1 + clip_high)
            if clip_low is not None:
                weight = max(weight, 1 - clip_low)
            objective[b, t] = weight * advantage * log_probs[b, t]
            derivative[b, t] = weight * advantage  # the weight is a constant
            above = ratio > 1 + clip_high
            below = clip_low is not None and ratio < 1 - clip_low
            clipped[b, t] = (advantage > 0 and above) or (advantage < 0 and below)
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


def tokens(ratios, advantages):
    """One response of one token of log pi = -0.5 per ratio."""
    log_probs = torch.full((len(ratios), 1), -0.5)
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    return ClipInputs(log_probs, log_probs - torch.tensor(ratios).log()[:, None], torch.tensor(advantages)[:, None], mask)


# The probabilities of these data stay below 1, so no ratio reaches the default bound of 5: its cap is held by hand below.
REACHED = [("cispo", cispo, {"clip_low": 0.2, "clip_high": 0.28}), ("cispo", cispo, {"clip_high": 0.5})]
REACHED += [("cispo-absolute", cispo_absolute, {"cap": 1.3})]
UNREACHED = [("cispo", cispo, {}), ("cispo-absolute", cispo_absolute, {})]


@pytest.mark.parametrize("token_advantages", [False, True], ids=["A per response", "A per token"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "rule", "settings"), REACHED + UNREACHED)
def test_value_gradient_and_clip_decisions_equal_the_closed_form(name, rule, settings, seed, token_advantages):
    _, expected = assert_equals_closed_form(name, rule, settings, seed=seed, token_advantages=token_advantages)
    assert expected.clipped.any() == bool(settings)


@pytest.mark.parametrize("token_advantages", [False, True], ids=["A per response", "A per token"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "rule", "settings"), REACHED + UNREACHED)
def test_far_off_policy_equals_the_closed_form(name, rule, settings, seed, token_advantages):
    _, expected = assert_equals_closed_form(name, rule, settings, seed=seed, widen=6.0, token_advantages=token_advantages)
    assert expected.clipped.any() == bool(settings)


RATIOS, ADVANTAGES = [6.0, 2.0, 6.0, 0.1, 0.1, 6.0], [2.0, 2.0, -1.0, -1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["cispo", "cispo-absolute"])
def test_hand_worked_tokens(name):
    # log pi = -0.5; weight min(r, 5); gradient = weight * A, objective = gradient * -0.5
    # r = 6, A = 2: weight 5: gradient 10, objective -5, capped
    # r = 2, A = 2: gradient 4, objective -2
    # r = 6, A = -1: weight 5, but the advantage pushes down: gradient -5, objective 2.5, not clipped
    # r = 0.1, A = -1: no floor: gradient -0.1, objective 0.05; A = 1: the opposite
    result, gradient = evaluate(load_zoo()[name](), tokens(RATIOS, ADVANTAGES))
    assert gradient.flatten().tolist() == pytest.approx([10.0, 4.0, -5.0, -0.1, 0.1, 0.0], rel=1e-5)
    assert result.objective.flatten().tolist() == pytest.approx([-5.0, -2.0, 2.5, 0.05, -0.05, 0.0], rel=1e-5)
    assert result.clipped.flatten().tolist() == [True, False, False, False, False, False]


def test_hand_worked_tokens_with_a_floor():
    # weight between 0.8 and 1.5; at r = 0.1 it is 0.8 for either sign, clipped only where A pushes down
    result, gradient = evaluate(load_zoo()["cispo"](clip_low=0.2, clip_high=0.5), tokens(RATIOS, ADVANTAGES))
    assert gradient.flatten().tolist() == pytest.approx([3.0, 3.0, -1.5, -0.8, 0.8, 0.0], rel=1e-5)
    assert result.objective.flatten().tolist() == pytest.approx([-1.5, -1.5, 0.75, 0.4, -0.4, 0.0], rel=1e-5)
    assert result.clipped.flatten().tolist() == [True, True, False, True, False, False]


@pytest.mark.parametrize(
    ("name", "settings", "bound"),
    [
        ("cispo", {"clip_high": 0.28}, 1.28),
        ("cispo", {"clip_low": 0.3, "clip_high": 1.0}, 2.0),
        ("cispo-absolute", {"cap": 1.5}, 1.5),
    ],
)
def test_a_capped_token_keeps_the_gradient_of_its_bound(name, settings, bound):
    policy = load_zoo()[name](**settings)
    inputs = inputs_for(policy, seed=4, widen=2.0)
    result, gradient = evaluate(policy, inputs)
    advantages = inputs.advantages.expand_as(gradient)
    capped = inputs.response_mask & result.clipped & (advantages > 0)
    assert capped.any()
    torch.testing.assert_close(gradient[capped], bound * advantages[capped], rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_of_clip_high_4_is_cispo_absolute_of_cap_5(seed):
    relative, absolute = load_zoo()["cispo"](clip_high=4.0), load_zoo()["cispo-absolute"](cap=5.0)
    inputs = off_policy_inputs(relative, seed=seed)
    expected, expected_gradient = evaluate(relative, inputs)
    result, gradient = evaluate(absolute, inputs)
    mask = inputs.response_mask
    torch.testing.assert_close(result.objective[mask], expected.objective[mask], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    assert torch.equal(result.clipped[mask], expected.clipped[mask])
    assert expected.clipped[mask].any()


@pytest.mark.parametrize("name", ["cispo", "cispo-absolute"])
def test_the_weight_falls_to_the_limit_of_the_exponential(name):
    # log-ratios of -10, -20 and -30: weights e^-10, e^-20 and, limited, e^-20 again
    old = torch.full((3, 1), -1.0)
    shifted = old + torch.tensor([[-10.0], [-20.0], [-30.0]])
    _, gradient = evaluate(load_zoo()[name](), ClipInputs(shifted, old, torch.ones(3, 1), torch.ones(3, 1, dtype=torch.bool)))
    assert gradient.flatten().tolist() == pytest.approx([math.exp(-10), math.exp(-20), math.exp(-20)], rel=1e-5)
