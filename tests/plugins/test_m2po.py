"""M2PO compared with a float64 brute force over every capped sum of the step's squared log-ratios."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, arrays_of, closed_form_test, inputs_for

CASES = [{}, {"threshold": 0.005}, {"threshold": 0.2}]


def harmful_squares(log_probs, old_log_probs, advantages, mask):
    """Return (row, token) -> squared log-ratio for tokens that moved in the direction of their advantage."""
    squares = {}
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                log_ratio = log_probs[b, t] - old_log_probs[b, t]
                advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
                if (advantage > 0 and log_ratio > 0) or (advantage < 0 and log_ratio < 0):
                    squares[b, t] = log_ratio * log_ratio
    return squares


def edge_of(squares, threshold):
    """Return the largest distance whose square caps the sum of all squares within the bound, by trying each one."""
    edge = 0.0
    for cap in squares:
        if math.fsum(min(square, cap) for square in squares) <= threshold * len(squares):
            edge = max(edge, math.sqrt(cap))
    return edge


def m2po(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, threshold=0.04):
    rows, columns = mask.shape
    squares = harmful_squares(log_probs, old_log_probs, advantages, mask)
    edge = edge_of(list(squares.values()), threshold)
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        for t in range(columns):
            if not mask[b, t]:
                continue
            log_ratio = log_probs[b, t] - old_log_probs[b, t]
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            if (b, t) in squares and abs(log_ratio) > edge:
                clipped[b, t] = True
                objective[b, t] = math.exp(math.copysign(min(edge, 20.0), log_ratio)) * advantage
                continue
            objective[b, t] = math.exp(min(max(log_ratio, -20.0), 20.0)) * advantage
            derivative[b, t] = objective[b, t] if abs(log_ratio) <= 20.0 else 0.0
    return ClosedForm(objective, derivative, clipped)


def authors_edge(squares, budget):
    """The clip of the authors' training code, as a search in Python floats: github.com/Infini-AI-Lab/M2PO, core_algos.py.

    It walks up the sorted squares and returns the square root of the last one that does not exhaust the budget.
    """
    ascending, number = sorted(squares), len(squares)
    if math.fsum(ascending) <= budget * number:
        return math.inf
    before = 0.0
    for place, square in enumerate(ascending):
        if math.fsum(ascending[: place + 1]) + square * (number - place - 1) >= budget * number:
            return math.sqrt(before)
        before = square
    raise AssertionError("the last one exhausts it")


def step(log_ratios, advantages):
    """Return rows of token log-ratios relative to old log-probabilities of -1; multiples of 1/8 make the differences exact."""
    old = torch.full((len(log_ratios), len(log_ratios[0])), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor(log_ratios), old, torch.tensor(advantages)[:, None], mask)


test_equals_the_closed_form = closed_form_test("m2po", m2po, CASES, by_token=True)


@pytest.mark.parametrize("budget", [0.005, 0.04, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_it_clips_the_same_tokens_as_the_code_of_the_authors(seed, budget):
    policy = load_zoo()["m2po"](threshold=budget)
    inputs = inputs_for(policy, seed=seed, widen=1.5)
    log_probs, old, _, advantages, mask = arrays_of(inputs)
    squares = harmful_squares(log_probs, old, advantages, mask)
    edge = authors_edge(squares.values(), budget)
    clipped = policy(inputs).clipped.numpy()
    expected = np.zeros_like(clipped)
    for place, square in squares.items():
        expected[place] = math.sqrt(square) > edge
    assert (clipped & mask == expected).all()
    assert expected.any()


def test_the_capped_second_moment_clips_more_than_that_of_the_kept_tokens():
    # Squares 1/64, 1/16 and 1/4. Capped at 1/16 their mean is 0.046875: within 0.08, and not within 0.04, although the mean of
    # the first two alone is 0.039.
    inputs = step([[0.125, 0.25, 0.5]], [1.0])
    assert load_zoo()["m2po"](threshold=0.08)(inputs).clipped.tolist() == [[False, False, True]]
    assert load_zoo()["m2po"](threshold=0.04)(inputs).clipped.tolist() == [[False, True, True]]


def test_hand_worked_step():
    # Pushed outwards: A > 0 with 0.125 (square 0.015625) and 0.5 (0.25), A < 0 with -0.25 (0.0625). All capped at each of them,
    # the means are 0.015625, (0.015625 + 2 * 0.0625) / 3 = 0.046875 and 0.109375: only the first is within 0.04: tau = 0.125.
    # Clipped at tau: 2 exp(0.125) = 2.2662969 and -exp(-0.125) = -0.8824969. Moves against the push, -0.5 at A > 0 and 0.5
    # at A < 0, stay: 2 exp(-0.5) = 1.2130613 and -exp(0.5) = -1.6487213. Ratio 1: 2 and -1.
    result, gradient = evaluate(load_zoo()["m2po"](), step([[0.125, 0.5, -0.5, 0.0], [-0.25, 0.5, 0.0, 0.0]], [2.0, -1.0]))
    expected = [[2.2662969, 2.2662969, 1.2130613, 2.0], [-0.8824969, -1.6487213, -1.0, -1.0]]
    np.testing.assert_allclose(result.objective.detach().numpy(), expected, rtol=1e-6)
    expected[0][1] = expected[1][0] = 0.0
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6)
    assert result.clipped.tolist() == [[False, True, False, False], [True, False, False, False]]


def test_equal_second_moments_are_clipped_together():
    # 0.125, then 0.25 and -0.25: capped at 0.25 the mean is 0.0468750 > 0.04
    result, gradient = evaluate(load_zoo()["m2po"](), step([[0.125, 0.25], [-0.25, 0.0]], [1.0, -1.0]))
    assert result.clipped.tolist() == [[False, True], [True, False]]
    np.testing.assert_allclose(gradient.numpy(), [[math.exp(0.125), 0.0], [0.0, -1.0]], rtol=1e-6)


def test_a_mean_exactly_at_the_threshold_is_kept():
    # squares 0.0625, 0.0625 and 0.25: capped at 0.0625 the mean is 0.0625, uncapped 0.125
    inputs = step([[0.25, 0.25, 0.5]], [1.0])
    assert load_zoo()["m2po"](threshold=0.0625)(inputs).clipped.tolist() == [[False, False, True]]
    assert load_zoo()["m2po"](threshold=0.0624)(inputs).clipped.tolist() == [[True, True, True]]
    assert load_zoo()["m2po"](threshold=0.125)(inputs).clipped.tolist() == [[False, False, False]]


@pytest.mark.parametrize("seed", range(3))
def test_the_capped_mean_fits_the_threshold_and_no_wider_clip_would(seed):
    policy = load_zoo()["m2po"]()
    inputs = inputs_for(policy, seed=seed, widen=2.0)
    clipped = policy(inputs).clipped.numpy()
    log_probs, old, _, advantages, mask = arrays_of(inputs)
    squares = harmful_squares(log_probs, old, advantages, mask)
    kept = [square for place, square in squares.items() if not clipped[place]]
    cut = sorted(square for place, square in squares.items() if clipped[place])
    assert len(cut) == int(clipped[mask].sum()) > 0  # only tokens that are pushed outwards are clipped
    assert max(kept) < cut[0]
    assert sum(kept) + max(kept) * len(cut) <= policy.threshold * len(squares) * (1 + 1e-6)
    assert sum(kept) + cut[0] * len(cut) > policy.threshold * len(squares)


def test_nothing_is_clipped_under_the_threshold():
    policy = load_zoo()["m2po"]()
    inputs = inputs_for(policy, seed=2)
    log_probs, old, _, advantages, mask = arrays_of(inputs)
    squares = list(harmful_squares(log_probs, old, advantages, mask).values())
    shrink = math.sqrt(0.95 * policy.threshold / (sum(squares) / len(squares)))
    assert policy(inputs).clipped[inputs.response_mask].any()
    moved = inputs.old_log_probs + shrink * (inputs.log_probs - inputs.old_log_probs)
    result, gradient = evaluate(policy, dataclasses.replace(inputs, log_probs=moved))
    assert not result.clipped[inputs.response_mask].any()
    ratio = (moved - inputs.old_log_probs).exp()
    free = torch.where(inputs.response_mask, ratio * inputs.advantages, 0.0)
    np.testing.assert_allclose(gradient.numpy(), free.numpy(), rtol=2e-5, atol=1e-6)


def test_permuted_rows_give_permuted_results():
    policy = load_zoo()["m2po"]()
    inputs = inputs_for(policy, seed=4)
    order = torch.randperm(len(inputs.advantages), generator=torch.Generator().manual_seed(0))
    fields = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "response_mask")
    permuted = dataclasses.replace(inputs, **{name: getattr(inputs, name)[order] for name in fields})
    (result, gradient), (moved, moved_gradient) = evaluate(policy, inputs), evaluate(policy, permuted)
    mask = permuted.response_mask
    assert torch.equal(moved.clipped[mask], result.clipped[order][mask])
    assert torch.equal(moved.objective[mask], result.objective[order][mask])
    assert torch.equal(moved_gradient, gradient[order])


def test_other_responses_can_change_whether_a_token_is_clipped():
    # The mean is over the step. 0.25 (0.0625) alone is above 0.04; with three of 0.125 (0.015625) the mean is 0.02734375.
    policy = load_zoo()["m2po"]()
    assert policy(step([[0.25, 0.0, 0.0]], [1.0])).clipped.tolist() == [[True, False, False]]
    assert not policy(step([[0.25, 0.0, 0.0], [0.125, 0.125, 0.125]], [1.0, 1.0])).clipped.any()


def test_beyond_the_limit_of_the_exponential_the_gradient_is_zero_and_not_clipped():
    # log-ratio 30 at A < 0 is not harmful: -exp(20), without gradient
    result, gradient = evaluate(load_zoo()["m2po"](), step([[30.0]], [-1.0]))
    assert result.objective.item() == pytest.approx(-math.exp(20), rel=1e-5)
    assert gradient.item() == 0
    assert not result.clipped.item()
