"""GMPO compared with loops in float64: the geometric mean of token ratios, each of which is cut separately."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for

NARROW = {"width_low": 0.1, "width_high": 0.3}


def gmpo(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, width_low=0.4, width_high=0.4):
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, 1)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        advantage = advantages[b, 0]
        tokens = [t for t in range(columns) if mask[b, t]]
        pooled = 1.0
        for t in tokens:
            ratio = math.exp(log_probs[b, t] - old_log_probs[b, t])
            banded = ratio
            if advantage > 0:
                banded = min(ratio, math.exp(width_high))
            elif advantage < 0:
                banded = max(ratio, math.exp(-width_low))
            clipped[b, t] = banded != ratio
            pooled *= banded ** (1.0 / len(tokens))
        limited = min(max(pooled, math.exp(-20.0)), math.exp(20.0))
        objective[b, 0] = limited * advantage
        for t in tokens:
            if not clipped[b, t] and limited == pooled:
                derivative[b, t] = objective[b, 0] / len(tokens)
    return ClosedForm(objective, derivative, clipped)


def response(log_ratios, advantage):
    old = torch.full((1, len(log_ratios)), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor([log_ratios]), old, torch.tensor([[advantage]]), mask)


test_equals_the_closed_form = closed_form_test("gmpo", gmpo, [{}, NARROW])


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "objective", "gradient", "clipped"),
    [
        # 0.6 is cut to 0.4: mean (0.4 + 0.2) / 2 = 0.3, 2 e^0.3 = 2.6997176; half of it at the token not cut
        ([0.6, 0.2], 2.0, 2.6997176, [0.0, 1.3498588], [True, False]),
        # A = -1: nothing to cut above, mean 0.4: -e^0.4 = -1.4918247, half of it at each
        ([0.6, 0.2], -1.0, -1.4918247, [-0.7459123, -0.7459123], [False, False]),
        # A = -1: -0.9 is raised to -0.4: mean (-0.4 + 0.2 - 0.1) / 3 = -0.1, -e^-0.1 = -0.9048374, a third each
        ([-0.9, 0.2, -0.1], -1.0, -0.9048374, [0.0, -0.3016125, -0.3016125], [True, False, False]),
        # A = 1: nothing to cut below, mean -0.8 / 3: e^-0.2666667 = 0.7659283, a third each
        ([-0.9, 0.2, -0.1], 1.0, 0.7659283, [0.2553094, 0.2553094, 0.2553094], [False, False, False]),
        # every token cut: e^0.4 whatever their number, no gradient left
        ([0.5, 3.0], 1.0, 1.4918247, [0.0, 0.0], [True, True]),
        # A = 0 cuts nothing
        ([0.6, -0.9], 0.0, 0.0, [0.0, 0.0], [False, False]),
        # both at 30, A = -1: limited to -e^20 = -485165195.4, no gradient, and that is not clipping
        ([30.0, 30.0], -1.0, -485165195.4, [0.0, 0.0], [False, False]),
    ],
)
def test_hand_worked_responses(log_ratios, advantage, objective, gradient, clipped):
    result, slope = evaluate(load_zoo()["gmpo"](), response(log_ratios, advantage))
    assert result.objective.shape == (1, 1)
    assert result.objective.item() == pytest.approx(objective, rel=1e-5)
    assert slope.flatten().tolist() == pytest.approx(gradient, rel=1e-5)
    assert result.clipped.flatten().tolist() == clipped


@pytest.mark.parametrize(
    ("log_ratios", "objective", "gradient"),
    [
        # mean (30 - 0.4) / 2 = 14.8 is below 20: -e^14.8 = -2676445.0552, half of it at the token not cut
        ([30.0, -12.0], -2676445.0552, [-1338222.5276, 0.0]),
        # mean 30 is not: -e^20, no gradient at either token
        ([40.0, 20.0], -485165195.4, [0.0, 0.0]),
    ],
)
def test_the_mean_is_exponentiated_and_limited_not_the_tokens(log_ratios, objective, gradient):
    result, slope = evaluate(load_zoo()["gmpo"](), response(log_ratios, -1.0))
    assert result.objective.item() == pytest.approx(objective, rel=1e-5)
    assert slope.flatten().tolist() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize("widen", [1.0, 6.0])
def test_a_clipped_token_has_no_gradient_and_the_others_share_one(widen):
    policy = load_zoo()["gmpo"]()
    inputs = inputs_for(policy, seed=3, widen=widen)
    result, slope = evaluate(policy, inputs)
    mixed = 0
    for b in range(len(inputs.advantages)):
        mask = inputs.response_mask[b]
        cut, free = mask & result.clipped[b], mask & ~result.clipped[b]
        assert (slope[b][cut] == 0).all()
        share = result.objective[b].detach() / mask.sum()
        torch.testing.assert_close(slope[b][free], share.expand(int(free.sum())), rtol=1e-5, atol=1e-7)
        mixed += bool(cut.any() and free.any())
    assert mixed > 3


def test_moving_a_clipped_token_gains_nothing_but_an_unclipped_one_does():
    # log-ratios 0.6 and 0.2, A = 1: 0.6 may become 6 at no gain; 0.2 becoming 0.4 moves the mean from 0.3 to 0.4
    policy = load_zoo()["gmpo"]()
    values = [policy(response(pair, 1.0)).objective.item() for pair in ([0.6, 0.2], [6.0, 0.2], [0.6, 0.4])]
    assert values == pytest.approx([1.3498588, 1.3498588, 1.4918247], rel=1e-5)


def test_within_the_band_it_is_gspo_without_a_clip():
    inputs = inputs_for(load_zoo()["gmpo"](), seed=0, widen=0.5)
    wide = load_zoo()["gspo"](clip_low=0.999, clip_high=100.0)
    mean, mean_slope = evaluate(wide, inputs)
    result, slope = evaluate(load_zoo()["gmpo"](width_low=10.0, width_high=10.0), inputs)
    assert not mean.clipped.any()
    torch.testing.assert_close(result.objective, mean.objective, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(slope, mean_slope, rtol=1e-5, atol=1e-7)
