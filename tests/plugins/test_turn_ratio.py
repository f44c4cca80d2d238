"""The ratio by turn compared with loops in float64: the mean log-ratio of each turn, clipped for the turn as a whole."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test

OTHER = {"clip_low": 0.05, "clip_high": 0.1}


def turn_ratio(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, turn_ids, clip_low=0.2, clip_high=0.2):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b in range(len(mask)):
        for turn in set(turn_ids[b][mask[b]]):
            tokens = [t for t in np.flatnonzero(mask[b]) if turn_ids[b, t] == turn]
            ratio = math.exp(math.fsum(log_probs[b, t] - old_log_probs[b, t] for t in tokens) / len(tokens))
            for t in tokens:
                advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
                low, high = (advantage < 0 and ratio < 1 - clip_low), (advantage > 0 and ratio > 1 + clip_high)
                clipped[b, t] = low or high
                objective[b, t] = advantage * (1 - clip_low if low else 1 + clip_high if high else ratio)
                derivative[b, t] = 0.0 if clipped[b, t] else advantage * ratio
    return ClosedForm(objective, derivative, clipped)


test_equals_the_closed_form = closed_form_test("turn-ratio", turn_ratio, [{}, OTHER])


def test_hand_worked_turns():
    # Turn 0: ratios 1.21 and 1, geometric mean 1.1. Turn 1, after an environment's token: 1.44 and 1.69, mean 1.56 > 1.2.
    # A = 2: 2.2 twice, then 2.4 twice, without a gradient.
    ratios = torch.tensor([[1.21, 1.0, 9.0, 1.44, 1.69]])
    mask = torch.tensor([[True, True, False, True, True]])
    turns = torch.tensor([[0, 0, -1, 1, 1]])
    old = torch.full_like(ratios, -2.0)
    inputs = ClipInputs(old + ratios.log(), old, torch.tensor([[2.0]]), mask, turn_ids=turns)
    result, gradient = evaluate(load_zoo()["turn-ratio"](), inputs)
    assert result.objective[mask].tolist() == pytest.approx([2.2, 2.2, 2.4, 2.4], rel=1e-5)
    assert gradient[0].tolist() == pytest.approx([2.2, 2.2, 0.0, 0.0, 0.0], rel=1e-5)
    assert result.clipped.tolist() == [[False, False, False, True, True]]


def test_two_adjacent_turns_have_separate_ratios():
    old = torch.full((1, 2), -2.0)
    mask, turns = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[0, 1]])
    inputs = ClipInputs(old + torch.tensor([[0.5, -0.5]]), old, torch.tensor([[1.0]]), mask, turn_ids=turns)
    assert load_zoo()["turn-ratio"]()(inputs).clipped.tolist() == [[True, False]]
