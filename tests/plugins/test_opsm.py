"""Off-policy sequence masking compared with loops in float64: PPO's clip, without bad responses that became unlikely."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for

STRICT = {"clip_low": 0.1, "clip_high": 0.3, "delta": 0.01}


def opsm(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, clip_low=0.2, clip_high=0.2, delta=0.5):
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        tokens = [t for t in range(columns) if mask[b, t]]
        fallen = sum(rollout_log_probs[b, t] - log_probs[b, t] for t in tokens) / len(tokens)
        for t in tokens:
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            if advantage < 0 and fallen > delta:
                clipped[b, t] = True
                continue
            log_ratio = log_probs[b, t] - old_log_probs[b, t]
            ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
            banded = min(max(ratio, 1.0 - clip_low), 1.0 + clip_high)
            objective[b, t] = min(ratio * advantage, banded * advantage)
            clipped[b, t] = banded * advantage < ratio * advantage
            if not clipped[b, t] and abs(log_ratio) <= 20.0:
                derivative[b, t] = ratio * advantage
    return ClosedForm(objective, derivative, clipped)


def response(log_probs, old_log_probs, rollout_log_probs, advantage):
    tokens = torch.tensor([log_probs])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    reported = None if rollout_log_probs is None else torch.tensor([rollout_log_probs])
    return ClipInputs(tokens, torch.tensor([old_log_probs]), torch.tensor([[advantage]]), mask, reported)


def dropped_rows(inputs, delta):
    """Return responses with A < 0 whose mean log-probability fell by more than delta since they were sampled."""
    mask = inputs.response_mask
    fall = torch.where(mask, inputs.rollout_log_probs - inputs.log_probs, 0.0).sum(dim=1) / mask.sum(dim=1)
    return (fall > delta) & (inputs.advantages[:, 0] < 0)


test_equals_the_closed_form = closed_form_test("opsm", opsm, [{}, STRICT])


@pytest.mark.parametrize(
    ("log_probs", "old_log_probs", "rollout_log_probs", "advantage", "objective", "gradient", "clipped"),
    [
        # fallen by 0.8 and 0.4, mean 0.6 > 0.5, A = -1: dropped, also the token whose ratio e^0.1 PPO would keep
        ([-1.8, -1.4], [-1.8, -1.5], [-1.0, -1.0], -1.0, [0.0, 0.0], [0.0, 0.0], [True, True]),
        # A = 1: kept: e^0 = 1 and e^0.1 = 1.1051709
        ([-1.8, -1.4], [-1.8, -1.5], [-1.0, -1.0], 1.0, [1.0, 1.1051709], [1.0, 1.1051709], [False, False]),
        # fallen by 0.4 on average: kept, A = -1 flows
        ([-1.8, -1.0], [-1.8, -1.1], [-1.0, -1.0], -1.0, [-1.0, -1.1051709], [-1.0, -1.1051709], [False, False]),
        # the fall is relative to the rollout, the ratio to old: no fall, but r = e^-0.6 = 0.55 < 0.8
        ([-1.6], [-1.0], [-1.6], -1.0, [-0.8], [0.0], [True]),
        # and the reverse: r = 1, fallen by 0.6
        ([-1.6], [-1.6], [-1.0], -1.0, [0.0], [0.0], [True]),
        # a rise of 0.6 is not a fall: r = 1 flows
        ([-1.0], [-1.0], [-1.6], -1.0, [-1.0], [-1.0], [False]),
        # without sampler log-probs, old is used: fallen by 0.6
        ([-1.6], [-1.0], None, -1.0, [0.0], [0.0], [True]),
        # A = 1 and r = e^0.5 = 1.65: PPO's cut at 1.2
        ([-1.0], [-1.5], [-1.0], 1.0, [1.2], [0.0], [True]),
        # exactly 1/2 is not more than 1/2
        ([-1.5, -2.0], [-1.5, -2.0], [-1.0, -1.5], -2.0, [-2.0, -2.0], [-2.0, -2.0], [False, False]),
        # A = 0
        ([-3.0], [-3.0], [-1.0], 0.0, [0.0], [0.0], [False]),
    ],
)
def test_hand_worked_responses(log_probs, old_log_probs, rollout_log_probs, advantage, objective, gradient, clipped):
    result, slope = evaluate(load_zoo()["opsm"](), response(log_probs, old_log_probs, rollout_log_probs, advantage))
    assert result.objective.flatten().tolist() == pytest.approx(objective, rel=1e-5)
    assert slope.flatten().tolist() == pytest.approx(gradient, rel=1e-5)
    assert result.clipped.flatten().tolist() == clipped


@pytest.mark.parametrize(("delta", "widen"), [(0.5, 6.0), (0.02, 1.0)])
def test_a_dropped_response_has_no_gradient_and_a_positive_one_equals_ppo(delta, widen):
    policy = load_zoo()["opsm"](delta=delta)
    inputs = inputs_for(policy, seed=1, widen=widen)
    dropped = dropped_rows(inputs, delta)
    assert dropped.any()
    result, slope = evaluate(policy, inputs)
    mask = inputs.response_mask
    assert (slope[dropped] == 0).all()
    assert (result.objective.detach()[dropped][mask[dropped]] == 0).all()
    assert result.clipped[dropped][mask[dropped]].all()

    liked = dataclasses.replace(inputs, advantages=inputs.advantages.abs())
    result, slope = evaluate(policy, liked)
    token, token_slope = evaluate(load_zoo()["grpo"](), liked)
    torch.testing.assert_close(slope, token_slope, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(result.objective[mask], token.objective[mask], rtol=1e-6, atol=1e-7)
    assert torch.equal(result.clipped[mask], token.clipped[mask])
    assert (slope[dropped] != 0).any()


@pytest.mark.parametrize(("delta", "widen"), [(0.5, 6.0), (0.02, 1.0)])
def test_responses_that_are_not_dropped_equal_ppo(delta, widen):
    policy = load_zoo()["opsm"](delta=delta)
    inputs = inputs_for(policy, seed=2, widen=widen)
    kept = ~dropped_rows(inputs, delta)
    assert (kept & (inputs.advantages[:, 0] < 0)).any()
    mask = inputs.response_mask[kept]
    result, slope = evaluate(policy, inputs)
    token, token_slope = evaluate(load_zoo()["grpo"](), inputs)
    torch.testing.assert_close(slope[kept], token_slope[kept], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(result.objective[kept][mask], token.objective[kept][mask], rtol=1e-6, atol=1e-7)
    assert torch.equal(result.clipped[kept][mask], token.clipped[kept][mask])


def test_without_sampler_log_probs_the_old_ones_are_used():
    policy = load_zoo()["opsm"](delta=0.02)
    inputs = inputs_for(policy, seed=1)
    silent, silent_slope = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=None))
    same, same_slope = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs))
    mask = inputs.response_mask
    assert torch.equal(silent_slope, same_slope)
    assert torch.equal(silent.objective[mask], same.objective[mask])
    assert torch.equal(silent.clipped[mask], same.clipped[mask])
    assert dropped_rows(dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs), 0.02).any()


def test_with_advantages_by_token_only_those_below_zero_are_dropped():
    # fallen by 0.6 on average; A = 1, -1, 0: the first flows with r = 1, the second is dropped, the third has no gradient
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    advantages = torch.tensor([[1.0, -1.0, 0.0]])
    inputs = ClipInputs(old, old, advantages, torch.ones(1, 3, dtype=torch.bool), old + 0.6)
    result, slope = evaluate(load_zoo()["opsm"](), inputs)
    assert slope.tolist() == [[1.0, 0.0, 0.0]]
    assert result.clipped.tolist() == [[False, True, False]]
