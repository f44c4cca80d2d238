"""Adaptive FSPO: its band in closed form, and that it finds drift, spread, level and growth of made-up data."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, ClipStats, load_zoo
from rlzoo.fairness import bin_edges
from rlzoo.testing import evaluate, off_policy_inputs
from tests.plugins.closed_form import ClosedForm, assert_equals_closed_form

ADAPTIVE = load_zoo()["fspo-adaptive"]
STATE = {
    "factor_low": 1.2, "factor_high": 0.7, "exponent_low": 0.8, "exponent_high": 0.6, "bend_low": 0.1, "bend_high": -0.2,
    "spread_low": 0.15, "spread_high": 0.1, "drift": -0.002, "reference_length": 20.0, "ceiling_factor": 1.5,
}  # fmt: skip


def rule(
    log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, factor_low=1.5, factor_high=1.5, exponent_low=0.5,
    exponent_high=0.5, bend_low=0.0, bend_high=0.0, spread_low=0.2, spread_high=0.2, drift=0.0, reference_length=100.0,
    ceiling_factor=3.0,
):  # fmt: skip
    """min(w A, clip(w) A) on ratios, and max(that, cap A) where A < 0, row by row."""
    rows, columns = mask.shape
    objective, clipped, derivative = np.zeros((rows, 1)), np.zeros((rows, 1), dtype=bool), np.zeros((rows, columns))
    for b in range(rows):
        tokens = [t for t in range(columns) if mask[b, t]]
        total = sum(log_probs[b, t] - old_log_probs[b, t] for t in tokens)
        relative = len(tokens) / reference_length
        low = factor_low * spread_low * relative ** (exponent_low + bend_low * math.log(relative))
        high = factor_high * spread_high * relative ** (exponent_high + bend_high * math.log(relative))
        centre, advantage = drift * len(tokens), advantages[b, 0]
        ratio = math.exp(total)
        edge = min(max(ratio, math.exp(min(centre - low, -1e-4))), math.exp(max(centre + high, 1e-4)))
        value = min(ratio * advantage, edge * advantage)
        cut = value < ratio * advantage
        if advantage < 0 and ceiling_factor is not None:
            cap = math.exp(max(centre + ceiling_factor * low, 1e-4))
            cut, value = cut or cap * advantage > value, max(value, cap * advantage)
        objective[b, 0], clipped[b, 0] = value, cut
        for t in tokens:
            derivative[b, t] = 0.0 if cut else ratio * advantage
    return ClosedForm(objective, derivative, clipped)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{}, STATE, {"ceiling_factor": None}], ids=["defaults", "another state", "no ceiling"])
def test_value_gradient_and_clip_decisions_equal_the_closed_form(settings, seed):
    result, _ = assert_equals_closed_form("fspo-adaptive", rule, settings, seed=seed)
    assert result.clipped.any()


def test_before_the_first_update_it_is_fspo():
    # 1.5 x 0.2 x sqrt(L / 100) = 0.03 sqrt(L), and the ceiling three times that
    inputs = off_policy_inputs(ADAPTIVE())
    result, gradient = evaluate(ADAPTIVE(), inputs)
    expected, expected_gradient = evaluate(load_zoo()["fspo"](), inputs)
    torch.testing.assert_close(result.objective, expected.objective)
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(result.clipped, expected.clipped)


def sampled(exponent, scale, drift, rng, number=128):
    """Responses of 10 to 400 tokens whose summed log-ratio has spread scale x (L / 60)^exponent about drift x L."""
    length = torch.exp(torch.empty(number).uniform_(math.log(10), math.log(400), generator=rng)).round()
    total = drift * length + scale * (length / 60) ** exponent * torch.randn(number, generator=rng)
    return length, total, torch.randn(number, generator=rng)


def decisions(policy, length, total, advantage):
    """What the policy clips, given the sums: each response is laid out as one value spread over its tokens."""
    mask = torch.arange(int(length.max())) < length[:, None]
    log_probs = torch.where(mask, (total / length)[:, None], 0.0)
    return policy(ClipInputs(log_probs, torch.zeros_like(log_probs), advantage[:, None], mask)).clipped[:, 0]


def trained(policy, exponent, scale, drift, updates, seed=0):
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(updates):
        length, total, advantage = sampled(exponent, scale, drift, rng)
        clipped = decisions(policy, length, total, advantage).float()
        rows.append(torch.stack([length, advantage, clipped], dim=1))
        policy = policy.updated(ClipStats.of(bin_edges(length), length, advantage, clipped, total))
    return policy, rows


@pytest.mark.parametrize(("exponent", "scale", "drift"), [(0.5, 0.2, 0.0), (0.95, 0.02, -0.0001), (0.8, 5.0, 0.02)])
def test_it_finds_level_growth_and_drift(exponent, scale, drift):
    policy, rows = trained(ADAPTIVE(), exponent, scale, drift, updates=300)
    settled = torch.cat(rows[150:])
    # 19,200 responses: a share of 0.1 has a standard error of 0.002, in a third of them of one sign 0.005
    assert float(settled[:, 2].mean()) == pytest.approx(0.1, abs=0.01)
    for sign in (settled[:, 1] > 0, settled[:, 1] < 0):
        for low, high in ((0, 35), (35, 115), (115, 500)):
            part = settled[sign & (settled[:, 0] >= low) & (settled[:, 0] < high)]
            assert float(part[:, 2].mean()) == pytest.approx(0.1, abs=0.025)
    for grown in (policy.exponent_low, policy.exponent_high):
        assert grown == pytest.approx(exponent, abs=0.25)
    assert policy.drift == pytest.approx(drift, abs=0.1 * scale / 60)


def test_another_target_is_reached_too():
    policy, rows = trained(ADAPTIVE(target_clip_fraction=0.25), 0.7, 0.1, 0.0, updates=200)
    assert float(torch.cat(rows[100:])[:, 2].mean()) == pytest.approx(0.25, abs=0.015)
    assert policy.num_updates == 200


def test_updates_at_ratio_one_narrow_the_band_and_leave_drift_and_spread():
    policy = ADAPTIVE()
    length, advantage = torch.tensor([10.0, 20.0, 40.0]), torch.tensor([1.0, -1.0, 1.0])
    stats = ClipStats.of(bin_edges(length), length, advantage, torch.zeros(3), torch.zeros(3))
    after = policy.updated(stats)
    assert (after.drift, after.spread_low, after.num_updates) == (policy.drift, policy.spread_low, 0)
    # nothing was clipped, a tenth was wanted: log factor -= 0.5 x 0.1
    assert after.factor_low == pytest.approx(1.5 * math.exp(-0.05))


def test_nothing_to_learn_from_changes_nothing():
    none = torch.zeros(0)
    assert ADAPTIVE().updated(ClipStats.of(torch.tensor([1.0, 2.0, 3.0]), none, none, none, none)) == ADAPTIVE()


@pytest.mark.parametrize("drift", [-0.5, 0.5])
def test_ratio_one_is_never_clipped_whatever_the_drift(drift):
    inputs = off_policy_inputs(ADAPTIVE())
    same = dataclasses.replace(inputs, log_probs=inputs.old_log_probs)
    result, gradient = evaluate(ADAPTIVE(drift=drift), same)
    assert not result.clipped.any()
    torch.testing.assert_close(gradient, torch.where(inputs.response_mask, inputs.advantages, 0.0))


def test_an_outlier_in_one_bin_moves_drift_and_spread_little():
    rng = torch.Generator().manual_seed(3)
    length, total, advantage = sampled(0.5, 0.1, 0.0, rng)
    calm = ADAPTIVE().updated(ClipStats.of(bin_edges(length), length, advantage, torch.zeros(len(length)), total))
    total[0] = 1000.0
    wild = ADAPTIVE().updated(ClipStats.of(bin_edges(length), length, advantage, torch.zeros(len(length)), total))
    assert wild.spread_low == pytest.approx(calm.spread_low, rel=0.35)
    assert wild.spread_high == pytest.approx(calm.spread_high, rel=0.35)
    assert abs(wild.drift - calm.drift) < 0.001
