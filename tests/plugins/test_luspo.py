"""LUSPO compared with loops in float64: GSPO's objective times the response's length."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for

DEFAULTS = {"clip_low": 2e-3, "clip_high": 2.5e-3}
WIDE = {"clip_low": 0.1, "clip_high": 0.25}


def luspo(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, clip_low=2e-3, clip_high=2.5e-3):
    rows, columns = mask.shape
    objective, derivative, clipped = np.zeros((rows, 1)), np.zeros((rows, columns)), np.zeros((rows, 1), dtype=bool)
    for b in range(rows):
        advantage = advantages[b, 0]
        tokens = [t for t in range(columns) if mask[b, t]]
        ratio = 1.0
        for t in tokens:
            ratio *= math.exp(log_probs[b, t] - old_log_probs[b, t]) ** (1.0 / len(tokens))
        limited = min(max(ratio, math.exp(-20.0)), math.exp(20.0))
        banded = min(max(limited, 1.0 - clip_low), 1.0 + clip_high)
        objective[b, 0] = len(tokens) * min(limited * advantage, banded * advantage)
        clipped[b, 0] = banded * advantage < limited * advantage
        if not clipped[b, 0] and limited == ratio:
            for t in tokens:
                derivative[b, t] = ratio * advantage  # L times 1/L of the mean's slope
    return ClosedForm(objective, derivative, clipped)


def response(log_ratios, advantage):
    old = torch.full((1, len(log_ratios)), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor([log_ratios]), old, torch.tensor([[advantage]]), mask)


test_equals_the_closed_form = closed_form_test("luspo", luspo, [{}, WIDE])


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "objective", "gradient", "clipped"),
    [
        # three tokens, mean 0.1: 3 * 2 * e^0.1 = 6.6310255, and 2 e^0.1 = 2.2103418 per token
        ([0.3, 0.1, -0.1], 2.0, 6.6310255, 2.2103418, False),
        # two tokens, mean 0.3, e^0.3 = 1.35 > 1.25: 2 * 1.25 = 2.5, cut
        ([0.4, 0.2], 1.0, 2.5, 0.0, True),
        # the same with A = -1 flows: -2 e^0.3 = -2.6997176, -e^0.3 = -1.3498588 per token
        ([0.4, 0.2], -1.0, -2.6997176, -1.3498588, False),
        # four tokens, mean -0.2, e^-0.2 = 0.8187 < 0.9: A = -1 is cut at 4 * -0.9 = -3.6
        ([-0.2, -0.2, -0.4, 0.0], -1.0, -3.6, 0.0, True),
        ([-0.2, -0.2, -0.4, 0.0], 0.0, 0.0, 0.0, False),
        # mean 30, A = -1: -2 e^20 = -970330390.8, no gradient, and that is not clipping
        ([30.0, 30.0], -1.0, -970330390.8, 0.0, False),
    ],
)
def test_hand_worked_responses(log_ratios, advantage, objective, gradient, clipped):
    result, slope = evaluate(load_zoo()["luspo"](**WIDE), response(log_ratios, advantage))
    assert result.objective.shape == (1, 1)
    assert result.objective.item() == pytest.approx(objective, rel=1e-5)
    assert slope.flatten().tolist() == pytest.approx([gradient] * len(log_ratios), rel=1e-5)
    assert result.clipped.tolist() == [[clipped]]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(2.4e-3, 1.0, False), (2.6e-3, 1.0, True), (-1.9e-3, -1.0, False), (-2.1e-3, -1.0, True), (-9e-3, 1.0, False)],
)
def test_the_default_band_is_a_few_thousandths(log_ratio, advantage, clipped):
    # log(1 + 2.5e-3) = 2.4969e-3 and log(1 - 2e-3) = -2.0020e-3
    result, slope = evaluate(load_zoo()["luspo"](), response([log_ratio, log_ratio], advantage))
    assert result.clipped.tolist() == [[clipped]]
    assert (slope == 0).tolist() == [[clipped, clipped]]


@pytest.mark.parametrize("widen", [1.0, 6.0])
@pytest.mark.parametrize("settings", [{}, WIDE], ids=str)
def test_it_is_the_length_times_gspo_with_the_same_widths(settings, widen):
    inputs = inputs_for(load_zoo()["luspo"](**settings), seed=1, widen=widen)
    mean, mean_slope = evaluate(load_zoo()["gspo"](**(settings or DEFAULTS)), inputs)
    result, slope = evaluate(load_zoo()["luspo"](**settings), inputs)
    length = inputs.response_mask.sum(dim=1, keepdim=True)
    torch.testing.assert_close(result.objective, length * mean.objective, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope, length * mean_slope, rtol=1e-5, atol=1e-6)
    assert torch.equal(result.clipped, mean.clipped)
    assert mean.clipped.any()


def test_a_token_counts_the_same_in_a_short_response_as_in_a_long_one():
    # on the old policy the gradient of every token is A, at length 1 and at length 50
    for length in (1, 50):
        result, slope = evaluate(load_zoo()["luspo"](), response([0.0] * length, 1.5))
        assert slope.flatten().tolist() == pytest.approx([1.5] * length, rel=1e-6)
        assert result.objective.item() == pytest.approx(1.5 * length, rel=1e-6)
