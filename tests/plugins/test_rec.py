"""REC compared with loops in float64: the plain policy gradient within a band with one side, two sides, or a ring."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import check, evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for
from tests.rules import few

SETTINGS = [
    {},
    {"importance": True, "clip_low": 0.1},
    {"side": "two-side"},
    {"side": "two-side", "importance": True, "clip_high": 0.5},
    {"side": "ring", "ring_low": 0.3, "ring_high": 0.4},
    {"side": "ring", "importance": True, "ring_low": 0.4, "ring_high": 0.5},
]


def rec(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    side="one-side",
    importance=False,
    clip_low=0.2,
    clip_high=0.2,
    ring_low=0.6,
    ring_high=2.0,
):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b, t in np.argwhere(mask):
        advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
        if advantage == 0:
            continue
        ratio = math.exp(log_probs[b, t] - old_log_probs[b, t])
        inside = 1 - clip_low <= ratio <= 1 + clip_high
        if side == "one-side":
            keep = ratio <= 1 + clip_high if advantage > 0 else ratio >= 1 - clip_low
        elif side == "two-side":
            keep = inside
        else:
            keep = inside or (ratio <= 1 - ring_low if advantage > 0 else ratio >= 1 + ring_high)
        clipped[b, t] = not keep
        derivative[b, t] = advantage * (ratio if importance else 1.0) if keep else 0.0
        objective[b, t] = derivative[b, t] * log_probs[b, t]
    return ClosedForm(objective, derivative, clipped)


test_equals_the_closed_form = closed_form_test("rec", rec, SETTINGS)


@pytest.mark.parametrize("settings", few(SETTINGS[1:]), ids=str)
def test_every_side_keeps_the_laws(settings):
    assert [outcome.detail for outcome in check(load_zoo()["rec"](**settings)) if outcome.status == "fail"] == []


@pytest.mark.parametrize(
    ("side", "good", "bad"),
    [
        # ratios .3, .7, 1, 1.5, 4 with A = 2 and A = -3: the tokens with a gradient
        ("one-side", [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]),
        ("two-side", [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]),
        ("ring", [1, 0, 1, 0, 0], [0, 0, 1, 0, 1]),
    ],
)
def test_hand_worked_tokens(side, good, bad):
    ratios = torch.tensor([[0.3, 0.7, 1.0, 1.5, 4.0]]).repeat(2, 1)
    old = torch.full_like(ratios, -2.0)
    mask = torch.ones_like(ratios, dtype=torch.bool)
    inputs = ClipInputs(old + ratios.log(), old, torch.tensor([[2.0], [-3.0]]), mask)
    result, gradient = evaluate(load_zoo()["rec"](side=side), inputs)
    assert gradient.tolist() == [[2.0 * keep for keep in good], [-3.0 * keep for keep in bad]]
    assert result.clipped.tolist() == [[not keep for keep in good], [not keep for keep in bad]]
    assert result.objective[0, 2].item() == pytest.approx(2 * -2.0)
    _, weighted = evaluate(load_zoo()["rec"](side=side, importance=True), inputs)
    torch.testing.assert_close(weighted, gradient * ratios)


def test_the_one_sided_rule_with_importance_has_the_gradient_of_grpo():
    policy = load_zoo()["rec"](importance=True)
    inputs = inputs_for(policy, seed=2)
    (ours, gradient), (theirs, expected) = evaluate(policy, inputs), evaluate(load_zoo()["grpo"](), inputs)
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(ours.clipped, theirs.clipped)
