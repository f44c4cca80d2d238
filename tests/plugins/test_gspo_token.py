"""GSPO-token compared with loops in float64: the value is the response's ratio, the gradient goes to the token's log pi."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for

WIDE = {"clip_low": 0.05, "clip_high": 0.1}


def gspo_token(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, clip_low=3e-4, clip_high=4e-4):
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        tokens = [t for t in range(columns) if mask[b, t]]
        ratio = 1.0
        for t in tokens:
            ratio *= math.exp(log_probs[b, t] - old_log_probs[b, t]) ** (1.0 / len(tokens))
        limited = min(max(ratio, math.exp(-20.0)), math.exp(20.0))
        banded = min(max(limited, 1.0 - clip_low), 1.0 + clip_high)
        for t in tokens:
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            objective[b, t] = min(limited * advantage, banded * advantage)
            clipped[b, t] = banded * advantage < limited * advantage
            if not clipped[b, t] and limited == ratio:
                derivative[b, t] = ratio * advantage  # pi_t / sg[pi_t] is 1, its slope in log pi_t is 1
    return ClosedForm(objective, derivative, clipped)


def response(log_ratios, advantages):
    """Return one response with old log-probabilities of -1, and one advantage or one per token."""
    old = torch.full((1, len(log_ratios)), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor([log_ratios]), old, torch.tensor([advantages]), mask)


test_equals_the_closed_form = closed_form_test("gspo-token", gspo_token, [{}, WIDE])


@pytest.mark.parametrize(
    ("log_ratios", "advantages", "objective", "gradient", "clipped"),
    [
        # mean log-ratio 0.2, ratio e^0.2 = 1.2214 > 1.1: A = 2 is cut at 1.1 * 2 = 2.2
        ([0.3, 0.1], [2.0], [2.2, 2.2], [0.0, 0.0], [True, True]),
        # A = -1 flows: -1.2214028 at both tokens, though their own ratios are 1.35 and 1.11
        ([0.3, 0.1], [-1.0], [-1.2214028, -1.2214028], [-1.2214028, -1.2214028], [False, False]),
        # A = 2 and -1 token by token: the first is cut, the second flows
        ([0.3, 0.1], [2.0, -1.0], [2.2, -1.2214028], [0.0, -1.2214028], [True, False]),
        # mean -0.2, ratio 0.8187308 < 0.95: A = -2 is cut at -1.9, A = 3 flows with 2.4561923, A = 0 is neither
        ([-0.5, -0.1, 0.0], [-2.0, 3.0, 0.0], [-1.9, 2.4561923, 0.0], [0.0, 2.4561923, 0.0], [True, False, False]),
        # mean 0 from +-0.5: ratio 1, nothing is cut
        ([0.5, -0.5], [1.0], [1.0, 1.0], [1.0, 1.0], [False, False]),
        # mean 30, A = -1: limited to e^20 = 485165195.4, no gradient, and that is not clipping
        ([40.0, 20.0], [-1.0], [-485165195.4, -485165195.4], [0.0, 0.0], [False, False]),
    ],
)
def test_hand_worked_responses(log_ratios, advantages, objective, gradient, clipped):
    result, slope = evaluate(load_zoo()["gspo-token"](**WIDE), response(log_ratios, advantages))
    assert result.objective.flatten().tolist() == pytest.approx(objective, rel=1e-5, abs=1e-7)
    assert slope.flatten().tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-7)
    assert result.clipped.flatten().tolist() == clipped


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(3.9e-4, 1.0, False), (4.1e-4, 1.0, True), (-2.9e-4, -1.0, False), (-3.1e-4, -1.0, True), (-9e-4, 1.0, False)],
)
def test_the_default_band_is_a_few_ten_thousandths(log_ratio, advantage, clipped):
    # log(1 + 4e-4) = 3.9992e-4 and log(1 - 3e-4) = -3.0005e-4
    result, slope = evaluate(load_zoo()["gspo-token"](), response([log_ratio, log_ratio], [advantage]))
    assert result.clipped.tolist() == [[clipped, clipped]]
    assert (slope == 0).tolist() == [[clipped, clipped]]


@pytest.mark.parametrize("widen", [1.0, 6.0])
@pytest.mark.parametrize("settings", [{}, WIDE], ids=str)
def test_with_one_advantage_a_response_the_mean_over_its_tokens_is_gspo(settings, widen):
    inputs = inputs_for(load_zoo()["gspo"](**settings), seed=1, widen=widen)
    whole, whole_slope = evaluate(load_zoo()["gspo"](**settings), inputs)
    result, slope = evaluate(load_zoo()["gspo-token"](**settings), inputs)
    mask = inputs.response_mask
    length = mask.sum(dim=1, keepdim=True)
    mean = torch.where(mask, result.objective, 0.0).sum(dim=1, keepdim=True) / length
    torch.testing.assert_close(mean, whole.objective, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(slope / length, whole_slope, rtol=1e-5, atol=1e-7)
    assert torch.equal(result.clipped & mask, whole.clipped & mask)
    assert whole.clipped.any()


def test_a_token_advantage_affects_only_that_token():
    inputs = response([0.02, -0.01, 0.03], [1.0, 1.0, 1.0])
    _, before = evaluate(load_zoo()["gspo-token"](**WIDE), inputs)
    _, after = evaluate(load_zoo()["gspo-token"](**WIDE), response([0.02, -0.01, 0.03], [1.0, 4.0, 1.0]))
    # ratio exp(0.04 / 3) = 1.0134226: 1, 1, 1 times it becomes 1, 4, 1 times it
    assert before.flatten().tolist() == pytest.approx([1.0134226] * 3, rel=1e-5)
    assert after.flatten().tolist() == pytest.approx([1.0134226, 4.0536905, 1.0134226], rel=1e-5)
