"""CPPO compared with loops in float64: the bound on a token's divergence shrinks if the prefix has overspent its budget."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test

OTHER = {"delta": 0.1, "budget": 0.01, "quantile": None, "weight_last": 0.5}


def cppo(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    delta=0.15,
    budget=0.02,
    quantile=0.9,
    weight_last=0.8,
):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b in range(len(mask)):
        tokens = np.flatnonzero(mask[b])
        moved = [abs(math.exp(log_probs[b, t]) - math.exp(rollout_log_probs[b, t])) for t in tokens]
        own = budget if quantile is None else min(max(np.quantile(moved, quantile), budget), 2 * budget)
        spent = weights = 0.0
        for place, t in enumerate(tokens):
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            weight = 1 - (1 - weight_last) * place / max(len(tokens) - 1, 1)
            room = min(delta, delta + own * weights - spent)
            log_ratio = log_probs[b, t] - rollout_log_probs[b, t]
            keep = advantage * (math.exp(log_ratio) - 1) <= 0 or weight * moved[place] <= room
            objective[b, t] = derivative[b, t] = math.exp(log_ratio) * advantage if keep else 0.0
            clipped[b, t] = not keep
            spent, weights = spent + weight * moved[place], weights + weight
    return ClosedForm(objective, derivative, clipped)


def response(before, now, advantage):
    before, now = torch.tensor([before]).log(), torch.tensor([now]).log()
    return ClipInputs(now, now, torch.tensor([[advantage]]), torch.ones_like(now, dtype=torch.bool), before)


test_equals_the_closed_form = closed_form_test("cppo", cppo, [{}, OTHER])


def test_hand_worked_response():
    # delta .15, b .02, weights 1, .9, .8. D = .10, .10, .10, all upwards, A = 1.
    # t = 1: .10 <= .15. t = 2: .09 <= min(.15, .15 + .02 - .10 = .07)? No: dropped.
    # t = 3: S = .19, W = 1.9: .08 <= .15 + .038 - .19 = -.002? No: dropped. A = -1 keeps all three: they moved against it.
    policy = load_zoo()["cppo"](quantile=None)
    result, gradient = evaluate(policy, response([0.4, 0.4, 0.4], [0.5, 0.5, 0.5], 1.0))
    assert result.clipped.tolist() == [[False, True, True]]
    assert gradient[0].tolist() == pytest.approx([1.25, 0.0, 0.0], rel=1e-5)
    result, gradient = evaluate(policy, response([0.4, 0.4, 0.4], [0.5, 0.5, 0.5], -1.0))
    assert gradient[0].tolist() == pytest.approx([-1.25, -1.25, -1.25], rel=1e-5)


def test_the_bound_of_a_token_grows_along_the_response():
    # D = .17 at the last of three tokens whose prefix did not move: .8 x .17 = .136 <= .15 is kept; as the first it is dropped
    policy = load_zoo()["cppo"]()
    assert policy(response([0.4, 0.4, 0.4], [0.4, 0.4, 0.57], 1.0)).clipped.tolist() == [[False, False, False]]
    assert policy(response([0.4, 0.4, 0.4], [0.57, 0.4, 0.4], 1.0)).clipped.tolist() == [[True, False, False]]


def test_the_quantile_widens_the_budget_up_to_twice():
    # D = .1 everywhere: the quantile is .1, the budget at most .04. t = 2: .09 <= .15 + .04 - .10 = .09, with .02 it is not
    moved = response([0.4, 0.4, 0.4], [0.499, 0.499, 0.499], 1.0)
    assert load_zoo()["cppo"]()(moved).clipped.tolist() == [[False, False, True]]
    assert load_zoo()["cppo"](quantile=None)(moved).clipped.tolist() == [[False, True, True]]
