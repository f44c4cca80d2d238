"""BAPO compared with loops in float64: the paper's search for a band, then GRPO's clip within it."""

import math

import numpy as np
import pytest
import torch
from rlzoo_bapo import grid

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test

OTHER = {"share": 0.6, "low_first": 0.5, "low_last": 0.7, "low_step": 0.1, "high_last": 1.5, "high_step": 0.1}


def search(tokens, share, low_first, low_last, low_step, high_first, high_last, high_step):
    """The algorithm as printed in the paper; ``tokens`` are triples of a probability, a ratio and an advantage."""

    def positive_share(low, high):
        good = math.fsum(p * min(r, high) * a for p, r, a in tokens if a > 0)
        bad = math.fsum(-p * max(r, low) * a for p, r, a in tokens if a < 0)
        return good / (good + bad) if good + bad else 1.0

    low, high = low_first, high_first
    while positive_share(low, high) < share and low < low_last - 1e-9:
        if high < high_last - 1e-9:
            high = min(high + high_step, high_last)
        else:
            low = min(low + low_step, low_last)
    return low, high, positive_share(low, high)


def bapo(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    share=0.4,
    low_first=0.6,
    low_last=0.9,
    low_step=0.02,
    high_first=1.2,
    high_last=3.0,
    high_step=0.05,
):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    ratios, credit = np.exp(log_probs - old_log_probs), np.broadcast_to(advantages, mask.shape)
    places = np.argwhere(mask)
    tokens = [(math.exp(rollout_log_probs[b, t]), ratios[b, t], credit[b, t]) for b, t in places]
    low, high, _ = search(tokens, share, low_first, low_last, low_step, high_first, high_last, high_step)
    for b, t in places:
        advantage, ratio = credit[b, t], ratios[b, t]
        bounded = min(ratio, high) if advantage > 0 else max(ratio, low) if advantage < 0 else ratio
        objective[b, t], clipped[b, t] = bounded * advantage, bounded != ratio
        derivative[b, t] = 0.0 if clipped[b, t] else objective[b, t]
    return ClosedForm(objective, derivative, clipped)


def step(ratios, advantages):
    """Return one-token responses that all had the same probability."""
    old = torch.full((len(ratios), 1), -1.0)
    now = old + torch.tensor(ratios)[:, None].log()
    return ClipInputs(now, old, torch.tensor(advantages)[:, None], torch.ones_like(old, dtype=torch.bool))


def found(policy, inputs):
    return [policy(inputs).metrics[name][0, 0].item() for name in ("bound_low", "bound_high", "positive_share")]


test_equals_the_closed_form = closed_form_test("bapo", bapo, [{}, OTHER, {"share": 0.9}], clips=False, by_token=True)


def test_hand_worked_step():
    # Good: ratio 2, A = 1. Bad: ratio 1, A = -2. At a ceiling of 1.2 the share is 1.2 / 3.2 = .375; of 1.3, 1.3 / 3.3 = .394;
    # of 1.35, 1.35 / 3.35 = .40299 >= .4. The floor stays at .6. The good token is clipped at 1.35, the bad one learns.
    inputs = step([2.0, 1.0], [1.0, -2.0])
    policy = load_zoo()["bapo"]()
    assert found(policy, inputs) == pytest.approx([0.6, 1.35, 1.35 / 3.35], rel=1e-5)
    result, gradient = evaluate(policy, inputs)
    assert result.objective.flatten().tolist() == pytest.approx([1.35, -2.0], rel=1e-5)
    assert gradient.flatten().tolist() == pytest.approx([0.0, -2.0], rel=1e-5)
    assert result.clipped.flatten().tolist() == [True, False]


def test_the_search_ends_at_the_edges_determined_by_the_signs_of_the_tokens():
    policy = load_zoo()["bapo"]()
    assert found(policy, step([1.5, 0.5], [1.0, 1.0])) == pytest.approx([0.6, 1.2, 1.0])  # no bad token: the band does not move
    # no good token: both edges move to their ends
    assert found(policy, step([1.5, 0.5], [-1.0, -1.0])) == pytest.approx([0.9, 3.0, 0.0])
    assert found(policy, step([1.5, 0.5], [0.0, 0.0])) == pytest.approx([0.6, 1.2, 1.0])
    assert found(policy, step([1.1, 1.0], [1.0, -9.0])) == pytest.approx([0.9, 3.0, 1.1 / 10.1])  # out of reach


def test_tokens_count_by_the_probability_with_which_they_were_sampled():
    # the share of the good token at ceiling 1.2: .1 x 1.2 / (.1 x 1.2 + .4 x 1) = .231 instead of 1.2 / 2.2 = .545
    before = torch.tensor([[0.1], [0.4]]).log()
    mask = torch.ones(2, 1, dtype=torch.bool)
    now = before + torch.tensor([[1.2], [1.0]]).log()
    inputs = ClipInputs(now, before, torch.tensor([[1.0], [-1.0]]), mask, before)
    assert found(load_zoo()["bapo"](share=0.2), inputs) == pytest.approx([0.6, 1.2, 0.12 / 0.52], rel=1e-5)
    assert found(load_zoo()["bapo"](share=0.4), inputs)[:2] == pytest.approx([0.9, 3.0])


def test_the_grid_includes_its_upper_end():
    assert grid(1.2, 3.0, 0.05)[-1] == 3.0
    assert len(grid(1.2, 3.0, 0.05)) == 37
    assert len(grid(0.6, 0.9, 0.02)) == 16
    assert grid(1.0, 1.25, 0.1) == pytest.approx([1.0, 1.1, 1.2, 1.25])
    assert grid(1.2, 1.1, 0.1) == [1.2]
