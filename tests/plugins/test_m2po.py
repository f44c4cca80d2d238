"""M2PO against a float64 brute force over every prefix of the step's sorted harmful second moments."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, arrays_of, assert_equals_closed_form, inputs_for

CASES = [{}, {"threshold": 0.005}, {"threshold": 0.2}]


def harmful_squares(log_probs, old_log_probs, advantages, mask):
    """(row, token) -> squared log-ratio, of the tokens that moved the way their advantage pushes."""
    squares = {}
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                log_ratio = log_probs[b, t] - old_log_probs[b, t]
                advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
                if (advantage > 0 and log_ratio > 0) or (advantage < 0 and log_ratio < 0):
                    squares[b, t] = log_ratio * log_ratio
    return squares


def m2po(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, threshold=0.04):
    rows, columns = mask.shape
    squares = harmful_squares(log_probs, old_log_probs, advantages, mask)
    kept = set()
    for largest in sorted(set(squares.values())):  # a prefix ends after the last of equal values
        prefix = {place for place, square in squares.items() if square <= largest}
        mean = math.fsum(squares[place] for place in prefix) / len(prefix)
        if mean <= threshold and len(prefix) > len(kept):
            kept = prefix
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    clipped = np.zeros((rows, columns), dtype=bool)
    for b in range(rows):
        for t in range(columns):
            if not mask[b, t]:
                continue
            if (b, t) in squares and (b, t) not in kept:
                clipped[b, t] = True
                continue
            log_ratio = log_probs[b, t] - old_log_probs[b, t]
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            objective[b, t] = math.exp(min(max(log_ratio, -20.0), 20.0)) * advantage
            derivative[b, t] = objective[b, t] if abs(log_ratio) <= 20.0 else 0.0
    return ClosedForm(objective, derivative, clipped)


def step(log_ratios, advantages):
    """Rows of token log-ratios on old log-probabilities of -1; multiples of 1/8 make the differences exact."""
    old = torch.full((len(log_ratios), len(log_ratios[0])), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor(log_ratios), old, torch.tensor(advantages)[:, None], mask)


@pytest.mark.parametrize("token_advantages", [False, True], ids=["A per response", "A per token"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_value_gradient_and_clip_decisions_equal_the_closed_form(settings, seed, token_advantages):
    _, expected = assert_equals_closed_form("m2po", m2po, settings, seed=seed, token_advantages=token_advantages)
    assert expected.clipped.any()


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_far_off_policy_equals_the_closed_form(settings):
    assert_equals_closed_form("m2po", m2po, settings, seed=5, widen=6.0, rtol=2e-4)


def test_hand_worked_step():
    # Harmful: A > 0 with 0.125 (square 0.015625) and 0.5 (0.25), A < 0 with -0.25 (0.0625).
    # Means of the prefixes 0.015625, 0.0390625, 0.109375: two fit under 0.04, so 0.5 is dropped. Moves against the
    # push, -0.5 at A > 0 and 0.5 at A < 0, stay: A r = 2 exp(-0.5) = 1.2130613 and -exp(0.5) = -1.6487213.
    # Kept: 2 exp(0.125) = 2.2662969, -exp(-0.25) = -0.7788008; ratio 1: 2 and -1.
    result, gradient = evaluate(load_zoo()["m2po"](), step([[0.125, 0.5, -0.5, 0.0], [-0.25, 0.5, 0.0, 0.0]], [2.0, -1.0]))
    expected = [[2.2662969, 0.0, 1.2130613, 2.0], [-0.7788008, -1.6487213, -1.0, -1.0]]
    np.testing.assert_allclose(result.objective.detach().numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6)
    assert result.clipped.tolist() == [[False, True, False, False], [False, False, False, False]]


def test_equal_second_moments_are_dropped_together():
    # 0.125, then 0.25 and -0.25: with one of the two the mean would be 0.0390625 <= 0.04, with both 0.0468750 > 0.04
    result, gradient = evaluate(load_zoo()["m2po"](), step([[0.125, 0.25], [-0.25, 0.0]], [1.0, -1.0]))
    assert result.clipped.tolist() == [[False, True], [True, False]]
    np.testing.assert_allclose(gradient.numpy(), [[math.exp(0.125), 0.0], [0.0, -1.0]], rtol=1e-6)


def test_a_mean_exactly_at_the_threshold_is_kept():
    # squares 0.0625 and 0.0625: mean 0.0625; the third, 0.25, would make it 0.125
    inputs = step([[0.25, 0.25, 0.5]], [1.0])
    assert load_zoo()["m2po"](threshold=0.0625)(inputs).clipped.tolist() == [[False, False, True]]
    assert load_zoo()["m2po"](threshold=0.0624)(inputs).clipped.tolist() == [[True, True, True]]
    assert load_zoo()["m2po"](threshold=0.125)(inputs).clipped.tolist() == [[False, False, False]]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_fits_the_threshold_and_no_more_would(seed):
    policy = load_zoo()["m2po"]()
    inputs = inputs_for(policy, seed=seed, widen=2.0)
    clipped = policy(inputs).clipped.numpy()
    log_probs, old, _, advantages, mask = arrays_of(inputs)
    squares = harmful_squares(log_probs, old, advantages, mask)
    kept = [square for place, square in squares.items() if not clipped[place]]
    dropped = sorted(square for place, square in squares.items() if clipped[place])
    assert len(dropped) == int(clipped[mask].sum()) > 0  # nothing but harmful tokens is dropped
    assert sum(kept) / len(kept) <= policy.threshold * (1 + 1e-6)
    assert (sum(kept) + dropped[0]) / (len(kept) + 1) > policy.threshold
    assert max(kept) < dropped[0]


def test_nothing_is_dropped_under_the_threshold():
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


def test_permuted_rows_get_the_permuted_answer():
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


def test_another_response_can_drop_a_token_here():
    # The mean is over the step. 0.25 (0.0625) alone is over 0.04; beside three of 0.125 (0.015625) the mean is 0.02734375.
    policy = load_zoo()["m2po"]()
    assert policy(step([[0.25, 0.0, 0.0]], [1.0])).clipped.tolist() == [[True, False, False]]
    assert not policy(step([[0.25, 0.0, 0.0], [0.125, 0.125, 0.125]], [1.0, 1.0])).clipped.any()


def test_beyond_the_limit_of_the_exponential_the_gradient_is_zero_and_not_clipped():
    # log-ratio 30 at A < 0 is not harmful: -exp(20), without gradient
    result, gradient = evaluate(load_zoo()["m2po"](), step([[30.0]], [-1.0]))
    assert result.objective.item() == pytest.approx(-math.exp(20), rel=1e-5)
    assert gradient.item() == 0
    assert not result.clipped.item()
