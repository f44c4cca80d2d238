"""DPPO compared with loops in float64: a token is dropped by how far its probability moved, not by its ratio."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, arrays_of, closed_form_test, inputs_for


def total_variation(p, q):
    return abs(p - q)


def binary_kl(p, q):
    """Return the KL from the behaviour policy to the current one, for the event that this token is drawn."""
    rest_p, rest_q = max(1.0 - p, 1e-8), max(1.0 - q, 1e-8)
    return q * math.log(q / p) + (1.0 - q) * math.log(rest_q / rest_p)


def dppo(divergence, log_probs, rollout_log_probs, advantages, mask, delta_low, delta_high, ratio_cap):
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        for t in range(columns):
            if not mask[b, t]:
                continue
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            p, q = math.exp(log_probs[b, t]), math.exp(rollout_log_probs[b, t])
            moved = divergence(p, q)
            clipped[b, t] = (advantage > 0 and p > q and moved > delta_high) or (advantage < 0 and p < q and moved > delta_low)
            if clipped[b, t]:
                continue
            weight = min(max(p / q, math.exp(-20.0)), ratio_cap or math.exp(20.0))
            objective[b, t] = weight * advantage * log_probs[b, t]
            derivative[b, t] = weight * advantage
    return ClosedForm(objective, derivative, clipped)


def dppo_tv(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, delta_low=0.15, delta_high=0.15, ratio_cap=20.0):
    return dppo(total_variation, log_probs, rollout_log_probs, advantages, mask, delta_low, delta_high, ratio_cap)


def dppo_kl(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, delta_low=0.05, delta_high=0.05, ratio_cap=20.0):
    return dppo(binary_kl, log_probs, rollout_log_probs, advantages, mask, delta_low, delta_high, ratio_cap)


NAMES = ["dppo-tv", "dppo-kl"]
over_settings = pytest.mark.parametrize(
    ("name", "rule", "settings"),
    [
        ("dppo-tv", dppo_tv, {}),
        ("dppo-tv", dppo_tv, {"delta_low": 0.05, "delta_high": 0.1}),
        ("dppo-tv", dppo_tv, {"ratio_cap": 1.5}),
        ("dppo-kl", dppo_kl, {}),
        ("dppo-kl", dppo_kl, {"delta_low": 0.01, "delta_high": 0.1}),
        ("dppo-kl", dppo_kl, {"ratio_cap": None}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)


def tokens(current, rollout, advantages, old=None):
    """Return one response with one token per probability; old is the rollout's unless given."""
    rollout = torch.tensor(rollout)[:, None].log()
    old = rollout if old is None else torch.tensor(old)[:, None].log()
    mask = torch.ones_like(rollout, dtype=torch.bool)
    return ClipInputs(torch.tensor(current)[:, None].log(), old, torch.tensor(advantages)[:, None], mask, rollout)


def tokens_of_every_probability(seed):
    """Return ragged data with tokens from nearly certain to rare; the rollout differs from old, and A differs by token."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.arange(30) < torch.randint(1, 31, (12, 1), generator=rng)
    old = (-8.0 * torch.rand(12, 30, generator=rng) ** 2).clamp(max=-1e-3)
    rollout = (old + 0.1 * torch.randn(12, 30, generator=rng)).clamp(max=-1e-3)
    log_probs = (old + 0.7 * torch.randn(12, 30, generator=rng)).clamp(max=-1e-3)
    advantages = torch.randn(12, 30, generator=rng)
    advantages[:, ::5] = 0
    return ClipInputs(log_probs, old, advantages, mask, rollout)


test_dppo_tv_equals_the_closed_form = closed_form_test("dppo-tv", dppo_tv, [{}, {"delta_low": 0.05, "delta_high": 0.1}])
test_dppo_kl_equals_the_closed_form = closed_form_test("dppo-kl", dppo_kl, [{}, {"delta_low": 0.01, "delta_high": 0.1}])


@pytest.mark.parametrize("seed", range(3))
@over_settings
def test_tokens_of_every_probability_equal_the_closed_form(name, rule, settings, seed):
    inputs = tokens_of_every_probability(seed)
    expected = rule(*arrays_of(inputs), **settings)
    result, gradient = evaluate(load_zoo()[name](**settings), inputs)
    mask = inputs.response_mask.numpy()
    np.testing.assert_allclose(result.objective.detach().numpy()[mask], expected.objective[mask], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient.numpy(), expected.derivative, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(result.clipped.numpy()[mask], expected.clipped[mask])
    advantages = inputs.advantages.numpy()
    assert expected.clipped[mask & (advantages > 0)].any()
    assert expected.clipped[mask & (advantages < 0)].any()


# One token, from probability q under the rollout to p now.
@pytest.mark.parametrize(
    ("q", "p", "advantage", "total_variation_drops", "kl_drops"),
    [
        # 0.4 to 0.6: TV 0.2; KL 0.4 ln(2/3) + 0.6 ln(3/2) = 0.2 ln 1.5 = 0.0811
        (0.4, 0.6, 1.0, True, True),
        # the same token coming back is kept, and so is A = 0
        (0.4, 0.6, -1.0, False, False),
        (0.4, 0.6, 0.0, False, False),
        # 0.6 to 0.4, mirrored
        (0.6, 0.4, -1.0, True, True),
        (0.6, 0.4, 1.0, False, False),
        # 0.5 to 0.6: TV 0.1; KL 0.5 ln(5/6) + 0.5 ln(5/4) = 0.5 ln(25/24) = 0.0204
        (0.5, 0.6, 1.0, False, False),
        # 0.01 to 0.08: TV 0.07; KL 0.01 ln(1/8) + 0.99 ln(0.99 / 0.92) = -0.0207944 + 0.0725985 = 0.0518
        (0.01, 0.08, 1.0, False, True),
        # 0.42 to 0.575: TV 0.155; KL 0.42 ln(0.7304348) + 0.58 ln(1.3647059) = -0.1319430 + 0.1803460 = 0.0484
        (0.42, 0.575, 1.0, True, False),
    ],
)
def test_hand_worked_tokens(q, p, advantage, total_variation_drops, kl_drops):
    for name, dropped in zip(NAMES, (total_variation_drops, kl_drops), strict=True):
        result, slope = evaluate(load_zoo()[name](), tokens([p], [q], [advantage]))
        kept = 0.0 if dropped else p / q * advantage
        assert result.clipped.tolist() == [[dropped]], name
        assert result.objective.item() == pytest.approx(kept * math.log(p), rel=1e-5), name
        assert slope.item() == pytest.approx(kept, rel=1e-5), name


def test_a_rare_token_may_change_its_ratio_tenfold_where_grpo_clips():
    # 0.001 to 0.01 and 0.01 to 0.001: TV 0.009; KL -0.0023026 + 0.0090408 = 0.0067 and 0.0230259 - 0.0089597 = 0.0141
    inputs = tokens([0.01, 0.001], [0.001, 0.01], [1.0, -1.0])
    for name in NAMES:
        result, slope = evaluate(load_zoo()[name](), inputs)
        assert not result.clipped.any()
        assert slope.flatten().tolist() == pytest.approx([10.0, -0.1], rel=1e-5)
    grpo, grpo_slope = evaluate(load_zoo()["grpo"](), inputs)
    assert grpo.clipped.all()
    assert not grpo_slope.any()


def test_a_likely_token_is_dropped_after_a_change_of_ratio_that_grpo_keeps():
    # 0.8 to 0.955: ratio 1.194 < 1.2, TV 0.155, KL 0.8 ln(0.8 / 0.955) + 0.2 ln(0.2 / 0.045) = -0.1417 + 0.2983 = 0.157
    # 0.95 to 0.78: ratio 0.821 > 0.8, TV 0.17, KL 0.95 ln(0.95 / 0.78) + 0.05 ln(0.05 / 0.22) = 0.1873 - 0.0741 = 0.113
    inputs = tokens([0.955, 0.78], [0.8, 0.95], [1.0, -1.0])
    for name in NAMES:
        result, slope = evaluate(load_zoo()[name](), inputs)
        assert result.clipped.all()
        assert not slope.any()
    assert not evaluate(load_zoo()["grpo"](), inputs)[0].clipped.any()


@pytest.mark.parametrize("name", NAMES)
def test_the_divergence_uses_only_the_rollout_log_probs(name):
    # rollout 0.4, old 0.6, now 0.6: dropped with A = 1, although nothing moved since old; now 0.4: ratio 1, not 2/3
    result, slope = evaluate(load_zoo()[name](), tokens([0.6, 0.4], [0.4, 0.4], [1.0, 1.0], old=[0.6, 0.6]))
    assert result.clipped.flatten().tolist() == [True, False]
    assert slope.flatten().tolist() == pytest.approx([0.0, 1.0], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_without_sampler_log_probs_the_old_ones_are_used(name):
    policy = load_zoo()[name]()
    inputs = inputs_for(policy, seed=1, widen=2.0)
    silent, silent_slope = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=None))
    same, same_slope = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs))
    mask = inputs.response_mask
    assert torch.equal(silent_slope, same_slope)
    assert torch.equal(silent.objective[mask], same.objective[mask])
    assert torch.equal(silent.clipped[mask], same.clipped[mask])
    assert same.clipped[mask].any()


@pytest.mark.parametrize("name", NAMES)
def test_certain_tokens_stay_finite(name):
    # p = q = 1: nothing moved, the slope is A. 0.8 to 1: TV 0.2; KL 0.8 ln 0.8 + 0.2 ln(0.2 / 1e-8) = 3.18: dropped.
    # 1 to 0.8: TV 0.2; KL ln(1 / 0.8) + 0 = 0.223: dropped. 1 to 0.98: TV 0.02, KL ln(1 / 0.98) = 0.0202: kept.
    inputs = tokens([1.0, 1.0, 0.8, 0.98], [1.0, 0.8, 1.0, 1.0], [2.0, 1.0, -1.0, -1.0])
    result, slope = evaluate(load_zoo()[name](), inputs)
    assert result.clipped.flatten().tolist() == [False, True, True, False]
    assert slope.flatten().tolist() == pytest.approx([2.0, 0.0, 0.0, -0.98], rel=1e-5)
    assert torch.isfinite(result.objective).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_divergence_has_no_gradient_and_drops_are_per_token(name):
    # a response of 0.5 to 0.55 (kept, ratio 1.1) and 0.4 to 0.6 (dropped): the first keeps its full slope of 1.1
    log_probs, rollout = torch.tensor([[0.55, 0.6]]).log(), torch.tensor([[0.5, 0.4]]).log()
    inputs = ClipInputs(log_probs, rollout, torch.tensor([[1.0]]), torch.ones(1, 2, dtype=torch.bool), rollout)
    result, slope = evaluate(load_zoo()[name](), inputs)
    assert slope.flatten().tolist() == pytest.approx([1.1, 0.0], rel=1e-5)
    assert result.clipped.tolist() == [[False, True]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("ratio_cap", "weights"),
    # log-ratios from 0.0001 to 0.003 and from e^-31 to e^-1: ratios 30 and e^30, the second limited to e^20 = 485165195.4
    [(20.0, [20.0, 20.0]), (25.0, [25.0, 25.0]), (40.0, [30.0, 40.0]), (None, [30.0, 485165195.4])],
)
def test_a_capped_token_keeps_its_gradient_weighted_by_the_cap(name, ratio_cap, weights):
    # A < 0, and the probability rose: neither token is outside the trust region
    inputs = tokens([0.003, math.exp(-1)], [0.0001, math.exp(-31)], [-1.0, -1.0])
    result, slope = evaluate(load_zoo()[name](ratio_cap=ratio_cap), inputs)
    assert slope.flatten().tolist() == pytest.approx([-weight for weight in weights], rel=1e-4)
    expected = [-weights[0] * math.log(0.003), weights[1]]  # -w log(0.003) and -w * -1
    assert result.objective.flatten().tolist() == pytest.approx(expected, rel=1e-4)
    assert not result.clipped.any()
