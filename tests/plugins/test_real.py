"""REAL compared with loops in float64: a classification of a group's mean log-ratios, with rewards as labels."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test


def real(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, group_ids, rewards, tau=0.5, threshold=0.5):
    objective, derivative = np.zeros((len(mask), 1)), np.zeros(mask.shape)
    score = [math.fsum((log_probs - old_log_probs)[b][mask[b]]) / max(mask[b].sum(), 1) for b in range(len(mask))]
    for group in set(group_ids[:, 0]):
        own = [b for b in range(len(mask)) if group_ids[b, 0] == group]
        good, bad = [b for b in own if rewards[b, 0] > threshold], [b for b in own if rewards[b, 0] <= threshold]
        if not good or not bad:
            continue
        value = 0.0
        for kind, sign in ((good, -1.0), (bad, 1.0)):
            exponentials = {b: math.exp(sign * score[b] / tau) for b in kind}
            total = 1 + math.fsum(exponentials.values())
            value -= math.log(total)
            for b in kind:  # each of the group's responses has the group's objective
                derivative[b, mask[b]] = -sign * len(own) * exponentials[b] / total / tau / mask[b].sum()
        objective[own, 0] = value
    return ClosedForm(objective, derivative, np.zeros((len(mask), 1), dtype=bool))


def step(log_ratios, rewards, groups):
    """Return two-token responses, one for each mean log-ratio."""
    old = torch.full((len(log_ratios), 2), -20.0)
    column = torch.tensor(rewards)[:, None]
    ids, mask = torch.tensor(groups)[:, None], torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor(log_ratios)[:, None], old, column - 0.5, mask, group_ids=ids, rewards=column)


test_equals_the_closed_form = closed_form_test("real", real, [{}, {"tau": 0.1, "threshold": -0.5}], clips=False)


def test_hand_worked_step():
    # Group 0, tau .5: one good of s = 0, two bad of s = .5 ln 2 and 0: exp(s / tau) = 2 and 1.
    # J = -ln(1 + 1) - ln(1 + 2 + 1) = -3 ln 2 = -2.0794415. Weights 1/2, 2/4, 1/4, times 1 / tau = 2, and a group of 3:
    # 3, -3, -1.5 per response, and half of that per token. Group 1 has no bad response: 0.
    s = 0.5 * math.log(2)
    result, gradient = evaluate(load_zoo()["real"](), step([0.0, 9.0, s, 0.0], [1.0, 1.0, 0.0, 0.0], [4, 1, 4, 4]))
    assert result.objective.flatten().tolist() == pytest.approx([-2.0794415, 0.0, -2.0794415, -2.0794415], rel=1e-5)
    for row, expected in enumerate([1.5, 0.0, -1.5, -0.75]):
        assert gradient[row].tolist() == pytest.approx([expected, expected], rel=1e-5)
    assert not result.clipped.any()


def test_the_weight_vanishes_once_a_response_is_on_the_right_side():
    weights = [evaluate(load_zoo()["real"](), step([s, 0.0], [1.0, 0.0], [0, 0]))[1][0].sum().item() for s in (-5, -1, 0, 1, 5)]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] == pytest.approx(2 / 0.5, rel=1e-3)  # 1 / tau, in a group of two
    assert weights[-1] < 1e-3
