"""DPPO against loops in float64: a token is dropped by how far its probability moved, not by its ratio."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, arrays_of, assert_equals_closed_form, inputs_for


def total_variation(now, before):
    return abs(now - before)


def binary_kl(now, before):
    """KL from the behaviour to the current policy, of the token against all others."""
    rest = (1 - before) * (math.log(max(1 - before, 1e-8)) - math.log(max(1 - now, 1e-8)))
    return before * math.log(before / now) + rest


def dppo(log_probs, old_log_probs, rollout_log_probs, advantages, mask, divergence, delta_low, delta_high):
    behaviour = old_log_probs if rollout_log_probs is None else rollout_log_probs
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        for t in range(columns):
            if not mask[b, t]:
                continue
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            now, before = math.exp(log_probs[b, t]), math.exp(behaviour[b, t])
            distance = divergence(now, before)
            up = advantage > 0 and now > before and distance > delta_high
            down = advantage < 0 and now < before and distance > delta_low
            clipped[b, t] = up or down
            if clipped[b, t]:
                continue
            log_ratio = log_probs[b, t] - behaviour[b, t]
            objective[b, t] = math.exp(min(max(log_ratio, -20.0), 20.0)) * advantage
            if abs(log_ratio) <= 20.0:
                derivative[b, t] = objective[b, t]
    return ClosedForm(objective, derivative, clipped)


def dppo_tv(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, delta_low=0.15, delta_high=0.15):
    data = (log_probs, old_log_probs, rollout_log_probs, advantages, mask)
    return dppo(*data, total_variation, delta_low, delta_high)


def dppo_kl(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, delta_low=0.05, delta_high=0.05):
    data = (log_probs, old_log_probs, rollout_log_probs, advantages, mask)
    return dppo(*data, binary_kl, delta_low, delta_high)


def token(now, before, advantage, rollout=True):
    """One token whose probability went from ``before`` to ``now``; the old policy is the sampler."""
    old = torch.tensor([[before]]).log()
    mask = torch.ones(1, 1, dtype=torch.bool)
    return ClipInputs(torch.tensor([[now]]).log(), old, torch.tensor([[advantage]]), mask, old if rollout else None)


RULES = [("dppo-tv", dppo_tv), ("dppo-kl", dppo_kl)]
SETTINGS = [{}, {"delta_low": 0.02, "delta_high": 0.1}, {"delta_low": 0.25, "delta_high": 0.01}]


@pytest.mark.parametrize("token_advantages", [False, True], ids=["A per response", "A per token"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("name", "rule"), RULES)
def test_value_gradient_and_drops_equal_the_closed_form(name, rule, settings, seed, token_advantages):
    _, expected = assert_equals_closed_form(name, rule, settings, seed=seed, token_advantages=token_advantages)
    assert expected.clipped.any()


@pytest.mark.parametrize("token_advantages", [False, True], ids=["A per response", "A per token"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("name", "rule"), RULES)
def test_far_off_policy_equals_the_closed_form(name, rule, settings, seed, token_advantages):
    _, expected = assert_equals_closed_form(name, rule, settings, seed=seed, widen=6.0, token_advantages=token_advantages)
    assert expected.clipped.any()


@pytest.mark.parametrize(
    ("name", "now", "before", "advantage", "objective", "clipped"),
    [
        # |0.6 - 0.5| = 0.1: r A = 1.2 * 2
        ("dppo-tv", 0.6, 0.5, 2.0, 2.4, False),
        # |0.7 - 0.5| = 0.2 > 0.15, and up: dropped; with A < 0 the same move is kept: 1.4 * -2
        ("dppo-tv", 0.7, 0.5, 2.0, 0.0, True),
        ("dppo-tv", 0.7, 0.5, -2.0, -2.8, False),
        # down by 0.2: dropped where A < 0, kept where A > 0: 0.6 * 2
        ("dppo-tv", 0.3, 0.5, -2.0, 0.0, True),
        ("dppo-tv", 0.3, 0.5, 2.0, 1.2, False),
        ("dppo-tv", 0.3, 0.5, 0.0, 0.0, False),
        # D = 0.5 log(0.5 / 0.6) + 0.5 log(0.5 / 0.4) = 0.5 (-0.18232 + 0.22314) = 0.02041: kept
        ("dppo-kl", 0.6, 0.5, 2.0, 2.4, False),
        # D = 0.5 log(0.5 / 0.7) + 0.5 log(0.5 / 0.3) = 0.5 (-0.33647 + 0.51083) = 0.08718 > 0.05: dropped
        ("dppo-kl", 0.7, 0.5, 2.0, 0.0, True),
        ("dppo-kl", 0.7, 0.5, -2.0, -2.8, False),
        # D = 0.5 log(0.5 / 0.3) + 0.5 log(0.5 / 0.7) = 0.08718
        ("dppo-kl", 0.3, 0.5, -2.0, 0.0, True),
        ("dppo-kl", 0.3, 0.5, 2.0, 1.2, False),
        ("dppo-kl", 0.3, 0.5, 0.0, 0.0, False),
    ],
)
def test_hand_worked_tokens(name, now, before, advantage, objective, clipped):
    result, gradient = evaluate(load_zoo()[name](), token(now, before, advantage))
    assert result.objective.item() == pytest.approx(objective, rel=1e-5)
    assert gradient.item() == pytest.approx(objective, rel=1e-5)  # d(r A)/d log pi = r A
    assert result.clipped.tolist() == [[clipped]]


def test_the_divergence_is_from_the_behaviour_to_the_current_policy():
    # q = 0.01, p = 0.1. From q to p: 0.01 log(0.1) + 0.99 log(0.99 / 0.9) = -0.02303 + 0.09436 = 0.07133;
    # the other way: 0.1 log(10) + 0.9 log(0.9 / 0.99) = 0.23026 - 0.08578 = 0.14448
    inputs = token(0.1, 0.01, 1.0)
    assert not load_zoo()["dppo-kl"](delta_high=0.1)(inputs).clipped.any()
    assert load_zoo()["dppo-kl"](delta_high=0.07)(inputs).clipped.all()


def test_a_rare_token_with_a_huge_ratio_is_kept_where_grpo_would_clip_it():
    inputs = token(0.05, 0.001, 1.0)  # ratio 50, moved by 0.049
    result, gradient = evaluate(load_zoo()["dppo-tv"](), inputs)
    assert not result.clipped.any()
    assert result.objective.item() == pytest.approx(50.0, rel=1e-5)
    assert gradient.item() == pytest.approx(50.0, rel=1e-5)
    clipped, gradient = evaluate(load_zoo()["grpo"](), inputs)
    assert clipped.clipped.all()
    assert gradient.item() == 0.0


@pytest.mark.parametrize("name", ["dppo-tv", "dppo-kl"])
@pytest.mark.parametrize(("now", "before", "advantage"), [(0.985, 0.83, 1.0), (0.8, 0.97, -1.0)])
def test_a_frequent_token_with_a_small_ratio_change_is_dropped_where_grpo_would_keep_it(name, now, before, advantage):
    # ratio 1.187, moved by 0.155; ratio 0.825, moved by 0.17
    inputs = token(now, before, advantage)
    result, gradient = evaluate(load_zoo()[name](), inputs)
    assert result.clipped.all()
    assert result.objective.item() == 0.0
    assert gradient.item() == 0.0
    kept, gradient = evaluate(load_zoo()["grpo"](), inputs)
    assert not kept.clipped.any()
    assert gradient.item() == pytest.approx(advantage * now / before, rel=1e-5)


@pytest.mark.parametrize(("name", "rule"), RULES)
@pytest.mark.parametrize("seed", range(3))
def test_without_the_samplers_log_probs_the_old_policy_takes_their_place(name, rule, seed):
    policy = load_zoo()[name]()
    inputs = inputs_for(policy, seed, widen=2.0)
    log_probs, old, _, advantages, mask = arrays_of(inputs)
    expected = rule(log_probs, old, None, advantages, mask)
    result, gradient = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=None))
    np.testing.assert_allclose(result.objective.detach().numpy()[mask], expected.objective[mask], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient.numpy(), expected.derivative, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(result.clipped.numpy()[mask], expected.clipped[mask])
    assert expected.clipped.any()


@pytest.mark.parametrize("name", ["dppo-tv", "dppo-kl"])
def test_the_samplers_log_probs_take_the_place_of_the_old_policy(name):
    inputs = token(0.5, 0.5, 1.0)
    far = dataclasses.replace(inputs, old_log_probs=torch.tensor([[0.1]]).log())
    result, gradient = evaluate(load_zoo()[name](), far)
    assert result.objective.item() == pytest.approx(1.0)
    assert gradient.item() == pytest.approx(1.0)
    assert not result.clipped.any()


@pytest.mark.parametrize("name", ["dppo-tv", "dppo-kl"])
def test_certain_tokens_stay_finite(name):
    # p = q = 1: nothing moved. p = 1, q = 0.8: D = 0.2, or 0.8 log(0.8) + 0.2 log(0.2 / 1e-8) = 3.18: dropped
    still, gradient = evaluate(load_zoo()[name](), token(1.0, 1.0, 1.0))
    assert (still.objective.item(), gradient.item(), still.clipped.item()) == (1.0, 1.0, False)
    moved, gradient = evaluate(load_zoo()[name](), token(1.0, 0.8, 1.0))
    assert (moved.objective.item(), gradient.item(), moved.clipped.item()) == (0.0, 0.0, True)
    # 3.18 and not more: the floor is 1e-8
    if name == "dppo-kl":
        assert load_zoo()[name](delta_high=3.15)(token(1.0, 0.8, 1.0)).clipped.item()
        assert not load_zoo()[name](delta_high=3.21)(token(1.0, 0.8, 1.0)).clipped.item()


@pytest.mark.parametrize("name", ["dppo-tv", "dppo-kl"])
def test_beyond_the_limit_of_the_exponential_the_gradient_is_zero(name):
    # a log-ratio of 30, with A < 0: never dropped
    low = torch.tensor([[-31.0]])
    inputs = ClipInputs(low + 30, low, torch.tensor([[-1.0]]), torch.ones(1, 1, dtype=torch.bool), low)
    result, gradient = evaluate(load_zoo()[name](), inputs)
    assert result.objective.item() == pytest.approx(-math.exp(20), rel=1e-5)
    assert gradient.item() == 0.0
    assert not result.clipped.any()
