"""The alpha band against loops in float64: the sum of log-ratios, clamped to a width that grows with L ** alpha."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate, off_policy_inputs
from tests.plugins.closed_form import ClosedForm, assert_equals_closed_form, inputs_for


def alpha_band(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    alpha=0.5,
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
        total = math.fsum(log_probs[b, t] - old_log_probs[b, t] for t in tokens)
        centre, growth = drift * len(tokens), len(tokens) ** alpha
        clamped = total
        if advantage > 0:
            clamped = min(total, centre + width_high * growth)
        if advantage < 0:
            clamped = max(total, centre - width_low * growth)
            if width_ceiling is not None:
                clamped = min(clamped, centre + width_ceiling * growth)
        clipped[b, 0] = clamped != total
        objective[b, 0] = advantage * math.exp(min(max(clamped, -20.0), 20.0))
        if not clipped[b, 0] and abs(total) <= 20.0:
            for t in tokens:
                derivative[b, t] = objective[b, 0]
    return ClosedForm(objective, derivative, clipped)


def response(log_ratios, advantage):
    old = torch.full((1, len(log_ratios)), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor([log_ratios]), old, torch.tensor([[advantage]]), mask)


SETTINGS = [
    {},
    {"alpha": 0.0, "width_low": 0.2, "width_high": 0.1, "width_ceiling": None},
    {"alpha": 0.75, "width_low": 0.02, "width_high": 0.05, "drift": -0.002, "width_ceiling": 0.06},
    {"alpha": 1.0, "width_low": 0.01, "width_high": 0.02, "drift": 0.001},
]


@pytest.mark.parametrize("widen", [1.0, 6.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_value_gradient_and_clip_decisions_equal_the_closed_form(settings, seed, widen):
    _, expected = assert_equals_closed_form("alpha-band", alpha_band, settings, seed=seed, widen=widen)
    assert expected.clipped.any()


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "objective", "gradient", "clipped"),
    [
        # L = 4, alpha = 1/2: band +-0.03 * 2 = +-0.06, ceiling 0.09 * 2 = 0.18
        # S = 0.04, A = 2: 2 exp(0.04) = 2.0816215, as much a token
        ([0.03, -0.01, 0.02, 0.0], 2.0, 2.0816215, 2.0816215, False),
        # S = 0.08, A = 2: 2 exp(0.06) = 2.1236731, cut
        ([0.07, -0.01, 0.02, 0.0], 2.0, 2.1236731, 0.0, True),
        # S = -0.08, A = -2: -2 exp(-0.06) = -1.8835291, cut
        ([-0.07, 0.01, -0.02, 0.0], -2.0, -1.8835291, 0.0, True),
        # S = 0.08, A = -2: under the ceiling: -2 exp(0.08) = -2.1665741
        ([0.07, -0.01, 0.02, 0.0], -2.0, -2.1665741, -2.1665741, False),
        # S = 0.2, A = -2: over it: -2 exp(0.18) = -2.3944347, cut
        ([0.05, 0.05, 0.05, 0.05], -2.0, -2.3944347, 0.0, True),
    ],
)
def test_hand_worked_responses(log_ratios, advantage, objective, gradient, clipped):
    result, slope = evaluate(load_zoo()["alpha-band"](), response(log_ratios, advantage))
    assert result.objective.shape == (1, 1)
    assert result.objective.item() == pytest.approx(objective, rel=1e-6)
    assert slope.flatten().tolist() == pytest.approx([gradient] * 4, rel=1e-6)
    assert result.clipped.tolist() == [[clipped]]


def assert_same(policy, other, inputs):
    expected, expected_gradient = evaluate(other, inputs)
    result, gradient = evaluate(policy, inputs)
    torch.testing.assert_close(result.objective, expected.objective, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=2e-5, atol=1e-6)
    assert torch.equal(result.clipped, expected.clipped)
    assert expected.clipped.any()
    assert not expected.clipped.all()


@pytest.mark.parametrize("widen", [1.0, 6.0])
@pytest.mark.parametrize(
    "settings", [{}, {"width_low": 0.05, "width_high": 0.02, "drift": -0.001, "width_ceiling": None}], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_at_one_half_it_is_fspo(seed, settings, widen):
    other = load_zoo()["fspo"](**settings)
    assert_same(load_zoo()["alpha-band"](alpha=0.5, **settings), other, inputs_for(other, seed, widen))


@pytest.mark.parametrize("seed", range(3))
def test_at_zero_with_the_logarithms_of_its_bounds_it_is_rloo(seed):
    other = load_zoo()["rloo"]()
    policy = load_zoo()["alpha-band"](alpha=0.0, width_high=math.log(1.2), width_low=-math.log(0.8), width_ceiling=None)
    assert_same(policy, other, off_policy_inputs(other, seed=seed))


@pytest.mark.parametrize(("clip_low", "clip_high"), [(3e-4, 4e-4), (0.05, 0.02)])
@pytest.mark.parametrize("seed", range(3))
def test_at_one_it_cuts_the_responses_that_gspo_cuts_and_weighs_the_rest_by_their_whole_ratio(seed, clip_low, clip_high):
    other = load_zoo()["gspo"](clip_low=clip_low, clip_high=clip_high)
    widths = {"width_high": math.log(1 + clip_high), "width_low": -math.log(1 - clip_low), "width_ceiling": None}
    inputs = off_policy_inputs(other, seed=seed)
    expected, _ = evaluate(other, inputs)
    result, gradient = evaluate(load_zoo()["alpha-band"](alpha=1.0, **widths), inputs)
    assert torch.equal(result.clipped, expected.clipped)
    assert expected.clipped.any()
    mask = inputs.response_mask
    total = torch.where(mask, inputs.log_probs - inputs.old_log_probs, 0.0).sum(dim=1, keepdim=True)
    weight = torch.where(result.clipped, 0.0, inputs.advantages * total.exp())
    torch.testing.assert_close(gradient, weight * mask, rtol=2e-5, atol=1e-6)
    kept = ~result.clipped
    torch.testing.assert_close(result.objective.detach()[kept], weight[kept], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("length", [1, 16, 256])
def test_the_edge_is_the_width_times_the_length_to_the_alpha(length, alpha):
    edge = 0.03 * length**alpha
    policy = load_zoo()["alpha-band"](alpha=alpha)
    assert not policy(response([0.99 * edge / length] * length, 1.0)).clipped.item()
    over = policy(response([1.01 * edge / length] * length, 1.0))
    assert over.clipped.item()
    assert over.objective.item() == pytest.approx(math.exp(edge), rel=1e-5)


def test_beyond_the_limit_of_the_exponential_the_gradient_is_zero():
    # S = -30, A = 1: the band holds nothing back below
    result, gradient = evaluate(load_zoo()["alpha-band"](), response([-30.0], 1.0))
    assert result.objective.item() == pytest.approx(math.exp(-20), rel=1e-5)
    assert gradient.item() == 0.0
    assert not result.clipped.any()
