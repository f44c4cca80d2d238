"""OPSM against loops in float64: PPO per token, without the bad responses that drifted too far from their sampler."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, arrays_of, assert_equals_closed_form, inputs_for


def opsm(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, clip_low=0.2, clip_high=0.2, delta=0.5):
    if rollout_log_probs is None:
        rollout_log_probs = old_log_probs
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        tokens = [t for t in range(columns) if mask[b, t]]
        distance = math.fsum(rollout_log_probs[b, t] - log_probs[b, t] for t in tokens) / len(tokens)
        for t in tokens:
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            if advantage < 0 and distance > delta:
                clipped[b, t] = True
                continue
            log_ratio = log_probs[b, t] - old_log_probs[b, t]
            ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
            bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
            objective[b, t] = min(ratio * advantage, bounded * advantage)
            clipped[b, t] = (advantage > 0 and ratio > 1 + clip_high) or (advantage < 0 and ratio < 1 - clip_low)
            if not clipped[b, t] and abs(log_ratio) <= 20.0:
                derivative[b, t] = ratio * advantage
    return ClosedForm(objective, derivative, clipped)


def response(log_ratios, rollout_log_ratios, advantage):
    """log pi = -1 a token, the other two by their log-ratios."""
    log_probs = torch.full((1, len(log_ratios)), -1.0)
    old = log_probs - torch.tensor([log_ratios])
    rollout = None if rollout_log_ratios is None else log_probs - torch.tensor([rollout_log_ratios])
    return ClipInputs(log_probs, old, torch.tensor([[advantage]]), torch.ones_like(old, dtype=torch.bool), rollout)


SETTINGS = [{}, {"delta": 0.01}, {"clip_low": 0.3, "clip_high": 0.1, "delta": 0.1}]


@pytest.mark.parametrize("token_advantages", [False, True], ids=["A per response", "A per token"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_value_gradient_and_clip_decisions_equal_the_closed_form(settings, seed, token_advantages):
    _, expected = assert_equals_closed_form("opsm", opsm, settings, seed=seed, token_advantages=token_advantages)
    assert expected.clipped.any()


@pytest.mark.parametrize("token_advantages", [False, True], ids=["A per response", "A per token"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_far_off_policy_equals_the_closed_form(settings, seed, token_advantages):
    _, expected = assert_equals_closed_form("opsm", opsm, settings, seed=seed, widen=6.0, token_advantages=token_advantages)
    assert (expected.clipped & (expected.objective == 0)).any()  # some are dropped


@pytest.mark.parametrize(
    ("log_ratios", "rollout_log_ratios", "advantage", "objective", "gradient", "clipped"),
    [
        # ratios 1.5 and 1.1, A = 2: 2 * 1.2 = 2.4, cut, and 2.2, which flows; far from the sampler, but A > 0
        ([math.log(1.5), math.log(1.1)], [-0.8, -0.8], 2.0, [2.4, 2.2], [0.0, 2.2], [True, False]),
        # ratios 0.5 and 1.1, A = -2, mean of -m = (1.2 - 0.4) / 2 = 0.4 <= 0.5, kept: -2 * 0.8, cut, and -2.2
        ([math.log(0.5), math.log(1.1)], [-1.2, 0.4], -2.0, [-1.6, -2.2], [0.0, -2.2], [True, False]),
        # the same with mean of -m = (1.2 - 0.0) / 2 = 0.6 > 0.5: dropped
        ([math.log(0.5), math.log(1.1)], [-1.2, 0.0], -2.0, [0.0, 0.0], [0.0, 0.0], [True, True]),
        # A = 0
        ([math.log(0.5), math.log(1.1)], [-1.2, 0.0], 0.0, [0.0, 0.0], [0.0, 0.0], [False, False]),
        # more likely than under the sampler: mean of -m = -0.8, kept
        ([0.0, 0.0], [0.8, 0.8], -2.0, [-2.0, -2.0], [-2.0, -2.0], [False, False]),
    ],
)
def test_hand_worked_responses(log_ratios, rollout_log_ratios, advantage, objective, gradient, clipped):
    result, slope = evaluate(load_zoo()["opsm"](), response(log_ratios, rollout_log_ratios, advantage))
    assert result.objective.flatten().tolist() == pytest.approx(objective, rel=1e-5)
    assert slope.flatten().tolist() == pytest.approx(gradient, rel=1e-5)
    assert result.clipped.flatten().tolist() == clipped


def test_a_dropped_response_has_no_gradient_and_with_a_positive_advantage_it_is_kept():
    # no token is outside PPO's band; the sampler was 0.6 a token away
    log_ratios, far = [0.1, -0.1, 0.0], [-0.6, -0.6, -0.6]
    dropped, gradient = evaluate(load_zoo()["opsm"](), response(log_ratios, far, -1.0))
    assert gradient.flatten().tolist() == [0.0, 0.0, 0.0]
    assert dropped.objective.flatten().tolist() == [0.0, 0.0, 0.0]
    assert dropped.clipped.all()
    kept, gradient = evaluate(load_zoo()["opsm"](), response(log_ratios, far, 1.0))
    ratios = [math.exp(value) for value in log_ratios]
    assert gradient.flatten().tolist() == pytest.approx(ratios, rel=1e-5)
    assert kept.objective.flatten().tolist() == pytest.approx(ratios, rel=1e-5)
    assert not kept.clipped.any()


@pytest.mark.parametrize("widen", [1.0, 6.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_response_that_is_not_dropped_is_grpo_token_by_token(seed, widen):
    policy = load_zoo()["opsm"](delta=0.05)
    inputs = inputs_for(policy, seed, widen)
    base, base_gradient = evaluate(load_zoo()["grpo"](), inputs)
    result, gradient = evaluate(policy, inputs)
    mask = inputs.response_mask
    distance = torch.where(mask, inputs.rollout_log_probs - inputs.log_probs, 0.0).sum(dim=1) / mask.sum(dim=1)
    dropped = (inputs.advantages[:, 0] < 0) & (distance > 0.05)
    assert dropped.any()
    assert not dropped.all()
    kept = mask & ~dropped[:, None]
    torch.testing.assert_close(result.objective[kept], base.objective[kept], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient[kept], base_gradient[kept], rtol=1e-6, atol=1e-7)
    assert torch.equal(result.clipped[kept], base.clipped[kept])
    assert (gradient[dropped] == 0).all()
    assert result.clipped[mask & dropped[:, None]].all()


def test_without_the_samplers_log_probs_the_distance_is_to_the_old_policy():
    log_ratios = [-0.15, -0.15]  # inside PPO's band
    assert not load_zoo()["opsm"]()(response(log_ratios, None, -1.0)).clipped.any()
    assert load_zoo()["opsm"](delta=0.1)(response(log_ratios, None, -1.0)).clipped.all()
    assert load_zoo()["opsm"](delta=0.1)(response(log_ratios, [0.0, 0.0], -1.0)).clipped.sum() == 0


@pytest.mark.parametrize("seed", range(3))
def test_without_the_samplers_log_probs_it_equals_the_closed_form(seed):
    policy = load_zoo()["opsm"](delta=0.1)
    inputs = inputs_for(policy, seed, widen=6.0)
    log_probs, old, _, advantages, mask = arrays_of(inputs)
    expected = opsm(log_probs, old, None, advantages, mask, delta=0.1)
    result, gradient = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=None))
    np.testing.assert_allclose(result.objective.detach().numpy()[mask], expected.objective[mask], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient.numpy(), expected.derivative, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(result.clipped.numpy()[mask], expected.clipped[mask])


def test_beyond_the_limit_of_the_exponential_the_gradient_is_zero():
    result, gradient = evaluate(load_zoo()["opsm"](), response([30.0], [30.0], -1.0))
    assert result.objective.item() == pytest.approx(-math.exp(20), rel=1e-5)
    assert gradient.item() == 0.0
    assert not result.clipped.any()
