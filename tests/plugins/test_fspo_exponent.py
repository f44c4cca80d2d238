"""FSPO with other exponents compared with loops in float64: a band that grows as a power of the length."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate, off_policy_inputs
from tests.plugins.closed_form import ClosedForm, closed_form_test

SETTINGS = [
    {},
    {"exponent": 0.0, "width_low": 0.2, "width_high": 0.15, "width_ceiling": 0.5},
    {"exponent": 1.0, "width_low": 0.004, "width_high": 0.006, "width_ceiling": None},
    {"exponent": 0.75, "width_low": 0.02, "width_high": 0.03, "drift": -0.002, "width_ceiling": 0.06},
]


def fspo(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    exponent=0.5,
    width_low=0.03,
    width_high=0.03,
    drift=0.0,
    width_ceiling=0.09,
):
    rows, columns = mask.shape
    objective, derivative, clipped = np.zeros((rows, 1)), np.zeros((rows, columns)), np.zeros((rows, 1), dtype=bool)
    for b in range(rows):
        advantage = advantages[b, 0]
        tokens = [t for t in range(columns) if mask[b, t]]
        total = sum(log_probs[b, t] - old_log_probs[b, t] for t in tokens)
        centre, scale = drift * len(tokens), len(tokens) ** exponent
        clamped = total
        if advantage > 0:
            clamped = min(total, centre + width_high * scale)
        if advantage < 0:
            clamped = max(total, centre - width_low * scale)
            if width_ceiling is not None:
                clamped = min(clamped, centre + width_ceiling * scale)
        clipped[b, 0] = clamped != total
        objective[b, 0] = math.exp(min(max(clamped, -20.0), 20.0)) * advantage
        if not clipped[b, 0] and abs(total) <= 20.0:
            for t in tokens:
                derivative[b, t] = objective[b, 0]
    return ClosedForm(objective, derivative, clipped)


def response(log_ratios, advantage):
    old = torch.full((1, len(log_ratios)), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor([log_ratios]), old, torch.tensor([[advantage]]), mask)


def assert_same(first, second, inputs, rtol=1e-5):
    """Check that two policies give the same results, and clip something."""
    left, left_slope = evaluate(first, inputs)
    right, right_slope = evaluate(second, inputs)
    torch.testing.assert_close(left.objective, right.objective, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(left_slope, right_slope, rtol=rtol, atol=1e-6)
    assert torch.equal(left.clipped, right.clipped)
    assert right.clipped.any()
    assert not right.clipped.all()


test_equals_the_closed_form = closed_form_test("fspo", fspo, SETTINGS)


@pytest.mark.parametrize(
    ("settings", "log_ratios", "advantage", "objective", "gradient", "clipped"),
    [
        # four tokens, exponent 1/2: the band is +-0.03 * 2 = 0.06, the ceiling 0.18. S = 0.08: cut at e^0.06 = 1.0618365
        ({}, [0.02] * 4, 1.0, 1.0618365, 0.0, True),
        # A = -1 flows below the ceiling: -e^0.08 = -1.0832871, at every token
        ({}, [0.02] * 4, -1.0, -1.0832871, -1.0832871, False),
        # S = 0.2 > 0.18: -e^0.18 = -1.1972174
        ({}, [0.05] * 4, -1.0, -1.1972174, 0.0, True),
        # S = -0.08: -e^-0.06 = -0.9417645, and A = 2 flows: 2 e^-0.08 = 1.8462327
        ({}, [-0.02] * 4, -1.0, -0.9417645, 0.0, True),
        ({}, [-0.02] * 4, 2.0, 1.8462327, 1.8462327, False),
        # exponent 1/4, sixteen tokens: 16^(1/4) = 2, the band is again 0.06. S = 0.08 is cut, S = 0.048 flows: 1.0491707
        ({"exponent": 0.25}, [0.005] * 16, 1.0, 1.0618365, 0.0, True),
        ({"exponent": 0.25}, [0.003] * 16, 1.0, 1.0491707, 1.0491707, False),
        # exponent 1, four tokens: 0.12. S = 0.08 flows, S = 0.16 is cut at e^0.12 = 1.1274969
        ({"exponent": 1.0}, [0.02] * 4, 1.0, 1.0832871, 1.0832871, False),
        ({"exponent": 1.0}, [0.04] * 4, 1.0, 1.1274969, 0.0, True),
        # exponent 0: 0.03 at any length. S = 0.04: e^0.03 = 1.0304545
        ({"exponent": 0.0}, [0.01] * 4, 1.0, 1.0304545, 0.0, True),
        # drift -0.01, four tokens: band [-0.04 - 0.06, -0.04 + 0.06] = [-0.1, 0.02], ceiling -0.04 + 0.18 = 0.14
        ({"drift": -0.01}, [0.02] * 4, 1.0, 1.0202013, 0.0, True),
        ({"drift": -0.01}, [-0.02] * 4, -1.0, -0.9231163, -0.9231163, False),
        ({"drift": -0.01}, [0.04] * 4, -1.0, -1.1502738, 0.0, True),
        # no ceiling: S = 0.2 flows with -e^0.2 = -1.2214028; S = 40 counts as 20, without gradient and without a clip
        ({"width_ceiling": None}, [0.05] * 4, -1.0, -1.2214028, -1.2214028, False),
        ({"width_ceiling": None}, [10.0] * 4, -1.0, -485165195.4, 0.0, False),
        ({}, [0.5] * 4, 0.0, 0.0, 0.0, False),
    ],
)
def test_hand_worked_responses(settings, log_ratios, advantage, objective, gradient, clipped):
    result, slope = evaluate(load_zoo()["fspo"](**settings), response(log_ratios, advantage))
    assert result.objective.shape == (1, 1)
    assert result.objective.item() == pytest.approx(objective, rel=1e-5)
    assert slope.flatten().tolist() == pytest.approx([gradient] * len(log_ratios), rel=1e-5)
    assert result.clipped.tolist() == [[clipped]]


@pytest.mark.parametrize("seed", range(3))
def test_a_constant_band_equals_rloo(seed):
    policy = load_zoo()["fspo"](exponent=0.0, width_high=math.log(1.2), width_low=-math.log(0.8), width_ceiling=None)
    inputs = off_policy_inputs(load_zoo()["rloo"](), seed=seed)
    assert_same(policy, load_zoo()["rloo"](), inputs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("clip_low", "clip_high"), [(3e-4, 4e-4), (0.01, 0.02)])
def test_a_linear_band_clips_like_gspo_but_weights_by_the_response_ratio(clip_low, clip_high, seed):
    gspo = load_zoo()["gspo"](clip_low=clip_low, clip_high=clip_high)
    widths = {"width_high": math.log(1 + clip_high), "width_low": -math.log(1 - clip_low), "width_ceiling": None}
    inputs = off_policy_inputs(gspo, seed=seed)
    result, slope = evaluate(load_zoo()["fspo"](exponent=1.0, **widths), inputs)
    mean, mean_slope = evaluate(gspo, inputs)
    assert torch.equal(result.clipped, mean.clipped)
    assert mean.clipped.any()
    mask = inputs.response_mask
    total = torch.where(mask, inputs.log_probs - inputs.old_log_probs, 0.0).sum(dim=1, keepdim=True)
    free = ~mean.clipped[:, 0]
    weighed = (total.exp() * inputs.advantages)[free]
    torch.testing.assert_close(result.objective[free], weighed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope[free], weighed * mask[free], rtol=1e-5, atol=1e-6)
    assert torch.equal(slope == 0, mean_slope == 0)


def test_the_allowed_movement_grows_with_the_given_power_of_the_length():
    # at width 0.03 a sum of 0.1 is inside from L^exponent = 3.33 on: exponent 1/2 at 16 tokens (4), not at 9 (3)
    for length, clipped in ((9, True), (16, False)):
        result = load_zoo()["fspo"]()(response([0.1 / length] * length, 1.0))
        assert result.clipped.tolist() == [[clipped]]
    # exponent 1: inside from 4 tokens on; exponent 0: never
    assert not load_zoo()["fspo"](exponent=1.0)(response([0.1 / 4] * 4, 1.0)).clipped.item()
    assert load_zoo()["fspo"](exponent=0.0)(response([0.1 / 100] * 100, 1.0)).clipped.item()
