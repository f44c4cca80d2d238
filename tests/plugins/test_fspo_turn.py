"""FSPO by turn compared with loops in float64: each turn's sum in a band that grows with the root of its length."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.core.reductions import StepCounts, reduce_objective
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test

OTHER = {"width_low": 0.05, "width_high": 0.02, "drift": 0.01, "width_ceiling": None}


def fspo_turn(
    log_probs, old, rollout, advantages, mask, *, turn_ids, width_low=0.03, width_high=0.03, drift=0.0, width_ceiling=0.09
):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b in range(len(mask)):
        for turn in set(turn_ids[b][mask[b]]):
            tokens = [t for t in np.flatnonzero(mask[b]) if turn_ids[b, t] == turn]
            length = len(tokens)
            total = math.fsum(log_probs[b, t] - old[b, t] for t in tokens)
            for t in tokens:
                advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
                value = total
                if advantage > 0:
                    value = min(value, drift * length + width_high * math.sqrt(length))
                elif advantage < 0:
                    value = max(value, drift * length - width_low * math.sqrt(length))
                    if width_ceiling is not None:
                        value = min(value, drift * length + width_ceiling * math.sqrt(length))
                clipped[b, t] = value != total
                objective[b, t] = advantage * math.exp(value)
                derivative[b, t] = 0.0 if clipped[b, t] else objective[b, t]
    return ClosedForm(objective, derivative, clipped)


test_equals_the_closed_form = closed_form_test("fspo-turn", fspo_turn, [{}, OTHER])


def test_hand_worked_turns():
    # Turn 0, L = 1: S = 0.02 in 0.03. Then a token of an environment. Turn 1, L = 4: S = 0.08 over 0.06. A = 2.
    mask = torch.tensor([[True, False, True, True, True, True]])
    turns = torch.tensor([[0, -1, 1, 1, 1, 1]])
    old = torch.full((1, 6), -2.0)
    moved = torch.tensor([[0.02, 5.0, 0.05, 0.01, 0.01, 0.01]])
    result, gradient = evaluate(
        load_zoo()["fspo-turn"](), ClipInputs(old + moved, old, torch.tensor([[2.0]]), mask, turn_ids=turns)
    )
    kept, cut = 2 * math.exp(0.02), 2 * math.exp(0.06)
    assert result.objective[mask].tolist() == pytest.approx([kept, cut, cut, cut, cut], rel=1e-5)
    assert gradient[0].tolist() == pytest.approx([kept, 0, 0, 0, 0, 0], rel=1e-5)
    assert result.clipped.tolist() == [[False, False, True, True, True, True]]


def reduced_gradient(name, inputs):
    policy = load_zoo()[name]()
    log_probs = inputs.log_probs.clone().requires_grad_()
    result = policy(dataclasses.replace(inputs, log_probs=log_probs))
    counts = StepCounts.of(inputs.response_mask)
    reduce_objective(result.objective, inputs.response_mask, policy.reduction, counts).backward()
    return log_probs.grad, result.clipped.expand_as(inputs.response_mask) & inputs.response_mask


def responses_of_one_turn():
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(12)[None] < torch.tensor([1, 4, 7, 12, 12, 9])[:, None]
    old = torch.full((6, 12), -1.0)
    moved = old + 0.02 * torch.randn(6, 12, generator=generator)
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [-0.5], [2.0], [-2.0]])
    return ClipInputs(moved, old, advantages, mask, turn_ids=torch.where(mask, 0, -1))


def test_responses_of_one_turn_have_the_clip_and_the_gradient_of_fspo():
    inputs = responses_of_one_turn()
    gradient, clipped = reduced_gradient("fspo-turn", inputs)
    expected, expected_clipped = reduced_gradient("fspo", inputs)
    assert 0 < expected_clipped.any(-1).sum() < 6
    assert clipped.equal(expected_clipped)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_at_ratio_one_the_gradient_is_that_of_fspo_for_any_turns():
    inputs = responses_of_one_turn()
    turns = torch.where(inputs.response_mask, torch.arange(12)[None] // 3, -1)
    still = ClipInputs(inputs.old_log_probs, inputs.old_log_probs, inputs.advantages, inputs.response_mask, turn_ids=turns)
    gradient, _ = reduced_gradient("fspo-turn", still)
    expected, _ = reduced_gradient("fspo", still)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_turns_of_every_length_are_clipped_equally_often():
    # Token log-ratios from N(0, 0.02): a width of 0.03 is 1.5 sigma at every length, clipped with probability 0.0668.
    lengths = torch.tensor([1, 3, 9, 40, 147])
    rows = 4000
    turn = torch.repeat_interleave(torch.arange(5), lengths)[None].expand(rows, -1)
    mask = torch.ones_like(turn, dtype=torch.bool)
    old = torch.full(turn.shape, -1.0)
    moved = old + 0.02 * torch.randn(turn.shape, generator=torch.Generator().manual_seed(0))
    clipped = load_zoo()["fspo-turn"]()(ClipInputs(moved, old, torch.ones(rows, 1), mask, turn_ids=turn)).clipped
    first = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    shares = clipped[:, first].double().mean(0)
    # one standard error of a share is 0.0039
    torch.testing.assert_close(shares, torch.full((5,), 0.0668, dtype=torch.double), atol=0.016, rtol=0)
