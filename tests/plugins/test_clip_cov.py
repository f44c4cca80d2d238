"""Clip-Cov compared with loops in float64: the candidates are known; the draw must match its count and its seed."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, arrays_of, assert_equals_closed_form, inputs_for

MANY = {"fraction": 0.2, "cov_low": -10.0, "cov_high": 10.0}
NARROW = {"clip_low": 0.1, "clip_high": 0.3, "fraction": 0.05, "cov_low": -0.2, "cov_high": 0.3}


def ppo(log_probs, old_log_probs, advantages, mask, clip_low, clip_high):
    """Return the textbook min(r A, clip(r) A) of every response token."""
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if not mask[b, t]:
                continue
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            log_ratio = log_probs[b, t] - old_log_probs[b, t]
            ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
            banded = min(max(ratio, 1 - clip_low), 1 + clip_high)
            objective[b, t] = min(ratio * advantage, banded * advantage)
            clipped[b, t] = banded * advantage < ratio * advantage
            derivative[b, t] = 0.0 if clipped[b, t] or abs(log_ratio) > 20.0 else ratio * advantage
    return ClosedForm(objective, derivative, clipped)


def candidates(log_probs, old_log_probs, advantages, mask, clip_low, clip_high, cov_low, cov_high):
    """Return tokens that may be dropped: their covariance is inside its band, PPO does not clip them, and A != 0."""
    places = [(b, t) for b in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[b, t]]
    credit = {(b, t): advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t] for b, t in places}
    mean_credit = math.fsum(credit.values()) / len(places)
    mean_log_prob = math.fsum(log_probs[place] for place in places) / len(places)
    clipped = ppo(log_probs, old_log_probs, advantages, mask, clip_low, clip_high).clipped
    found = np.zeros(mask.shape, dtype=bool)
    for place in places:
        cov = (credit[place] - mean_credit) * (log_probs[place] - mean_log_prob)
        found[place] = cov_low < cov < cov_high and not clipped[place] and credit[place] != 0
    return found


def draw_size(found, mask, fraction):
    return min(int(found.sum()), max(1, int(fraction * int(mask.sum()))))


def clip_cov(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.2,
    fraction=2e-4,
    cov_low=1.0,
    cov_high=5.0,
):
    """Closed form if every candidate is dropped, which makes the result deterministic."""
    free = ppo(log_probs, old_log_probs, advantages, mask, clip_low, clip_high)
    found = candidates(log_probs, old_log_probs, advantages, mask, clip_low, clip_high, cov_low, cov_high)
    if draw_size(found, mask, fraction) < found.sum():
        raise ValueError("the draw is random")
    return ClosedForm(np.where(found, 0.0, free.objective), np.where(found, 0.0, free.derivative), free.clipped | found)


def assert_a_draw_of_the_right_size(settings, inputs, rtol=2e-5):
    """Check the number of dropped candidates, and that other tokens are PPO's; returns the dropped ones and the candidates."""
    policy = load_zoo()["clip-cov"](**settings)
    edges = {name: getattr(policy, name) for name in ("clip_low", "clip_high")}
    bounds = {name: getattr(policy, name) for name in ("cov_low", "cov_high")}
    log_probs, old, _, advantages, mask = arrays_of(inputs)
    free = ppo(log_probs, old, advantages, mask, **edges)
    found = candidates(log_probs, old, advantages, mask, **edges, **bounds)
    result, gradient = evaluate(policy, inputs)
    objective, gradient, clipped = result.objective.detach().numpy(), gradient.numpy(), result.clipped.numpy() & mask
    dropped = clipped & ~free.clipped
    assert (free.clipped <= clipped).all()
    assert (dropped <= found).all()
    assert dropped.sum() == draw_size(found, mask, policy.fraction)
    assert (objective[dropped] == 0).all()
    assert (gradient[dropped] == 0).all()
    others = mask & ~dropped
    np.testing.assert_allclose(objective[others], free.objective[others], rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(gradient[others], free.derivative[others], rtol=rtol, atol=1e-6)
    assert (gradient[~mask] == 0).all()
    return dropped, found


def step(log_ratios=((0.0, 0.0), (0.0, 0.0)), seed=0):
    """Covariances 0.9, 0.5, 0.4 and 1.0: A = 1 and -1 with mean 0; log pi has mean -1."""
    tokens = torch.tensor([[-0.1, -0.5], [-1.4, -2.0]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    old = tokens - torch.tensor(log_ratios)
    return ClipInputs(tokens, old, torch.tensor([[1.0], [-1.0]]), mask, rollout_log_probs=old, seed=seed)


@pytest.mark.parametrize("token_advantages", [False, True], ids=["A per response", "A per token"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{}, MANY, NARROW], ids=["defaults", "many", "narrow"])
def test_a_draw_of_the_candidates_is_dropped_and_the_rest_is_ppo(settings, seed, token_advantages):
    inputs = inputs_for(load_zoo()["clip-cov"](**settings), seed, token_advantages=token_advantages)
    dropped, found = assert_a_draw_of_the_right_size(settings, inputs)
    if settings:
        assert 0 < dropped.sum() < found.sum()


@pytest.mark.parametrize("settings", [{}, MANY, NARROW], ids=["defaults", "many", "narrow"])
def test_far_off_policy_a_draw_of_the_candidates_is_dropped(settings):
    inputs = inputs_for(load_zoo()["clip-cov"](**settings), seed=5, widen=6.0)
    assert_a_draw_of_the_right_size(settings, inputs, rtol=2e-4)


@pytest.mark.parametrize("token_advantages", [False, True], ids=["A per response", "A per token"])
@pytest.mark.parametrize("seed", range(3))
def test_where_every_candidate_is_dropped_it_equals_the_closed_form(seed, token_advantages):
    settings = {"fraction": 1.0, "cov_low": 0.02, "cov_high": 0.2, "clip_high": 0.28}
    _, expected = assert_equals_closed_form("clip-cov", clip_cov, settings, seed=seed, token_advantages=token_advantages)
    assert expected.clipped.any()


def test_where_every_candidate_is_dropped_far_off_policy_it_equals_the_closed_form():
    settings = {"fraction": 1.0, "cov_low": 0.02, "cov_high": 0.2}
    assert_equals_closed_form("clip-cov", clip_cov, settings, seed=5, widen=6.0, rtol=2e-4)


@pytest.mark.parametrize("seed", range(3))
def test_without_candidates_it_is_grpo(seed):
    settings = {"cov_low": 400.0, "cov_high": 500.0}
    assert_equals_closed_form("clip-cov", clip_cov, settings, seed=seed)
    inputs = inputs_for(load_zoo()["clip-cov"](**settings), seed)
    (result, gradient), (grpo, grpo_gradient) = (
        evaluate(policy, inputs) for policy in (load_zoo()["clip-cov"](**settings), load_zoo()["grpo"]())
    )
    mask = inputs.response_mask
    assert torch.equal(gradient, grpo_gradient)
    assert torch.equal(result.objective[mask], grpo.objective[mask])
    assert torch.equal(result.clipped[mask], grpo.clipped[mask])


def test_hand_worked_step_with_every_candidate_dropped():
    # 0.9 and 0.5 are inside (0.45, 0.95). The ratio is 1 everywhere: the first row is dropped, the second keeps A = -1.
    settings = {"fraction": 1.0, "cov_low": 0.45, "cov_high": 0.95}
    result, gradient = evaluate(load_zoo()["clip-cov"](**settings), step())
    assert result.objective.tolist() == [[0.0, 0.0], [-1.0, -1.0]]
    assert gradient.tolist() == [[0.0, 0.0], [-1.0, -1.0]]
    assert result.clipped.tolist() == [[True, True], [False, False]]


def test_a_token_that_ppo_clips_is_no_candidate():
    # The first token has ratio 1.5 > 1.2 at A = 1: PPO's 1.2 is kept, not replaced by 0; the second is dropped.
    settings = {"fraction": 1.0, "cov_low": 0.45, "cov_high": 0.95}
    result, gradient = evaluate(load_zoo()["clip-cov"](**settings), step([[math.log(1.5), 0.0], [math.log(1.5), 0.0]]))
    assert result.objective.flatten().tolist() == pytest.approx([1.2, 0.0, -1.5, -1.0], rel=1e-6)
    assert gradient.flatten().tolist() == pytest.approx([0.0, 0.0, -1.5, -1.0], rel=1e-6)
    assert result.clipped.tolist() == [[True, True], [False, False]]


def test_at_least_one_candidate_is_dropped():
    # 4 tokens * 2e-4 rounds down to 0; one of 0.9, 0.5, 0.4 and 1.0 is dropped nevertheless
    dropped, found = assert_a_draw_of_the_right_size({"cov_low": 0.3, "cov_high": 2.0}, step())
    assert (dropped.sum(), found.sum()) == (1, 4)


def test_equal_inputs_give_equal_draws_and_the_global_generator_is_unchanged():
    policy = load_zoo()["clip-cov"](**MANY)
    inputs = inputs_for(policy, seed=1)
    torch.manual_seed(0)
    first, state = policy(inputs).clipped, torch.get_rng_state()
    torch.manual_seed(99)
    assert torch.equal(policy(inputs).clipped, first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_seed_gives_another_draw():
    inputs = inputs_for(load_zoo()["clip-cov"](**MANY), seed=1)
    draws = [assert_a_draw_of_the_right_size(MANY, dataclasses.replace(inputs, seed=seed))[0] for seed in range(4)]
    for first in range(4):
        for second in range(first):
            assert (draws[first] != draws[second]).any()


def test_across_seeds_all_candidates_are_drawn_equally_often():
    # one of 4 in 400 draws gives 100 each; four standard deviations sqrt(400 * 1/4 * 3/4) = 8.7 are 35
    policy = load_zoo()["clip-cov"](cov_low=0.3, cov_high=2.0)
    counts = sum(policy(step(seed=seed)).clipped.flatten().int() for seed in range(400))
    assert int(counts.sum()) == 400
    assert ((counts - 100).abs() <= 35).all()


def test_means_are_over_response_tokens_only():
    # the third token is masked and NaN; if its row's A counted for it, the mean of A would not be 0
    hole = torch.tensor([[torch.nan], [torch.nan]])
    whole = step()
    mask = torch.tensor([[True, True, False], [True, True, False]])
    inputs = ClipInputs(
        torch.cat([whole.log_probs, hole], 1), torch.cat([whole.old_log_probs, hole], 1), whole.advantages, mask
    )
    result, gradient = evaluate(load_zoo()["clip-cov"](fraction=1.0, cov_low=0.45, cov_high=0.95), inputs)
    assert result.clipped[:, :2].tolist() == [[True, True], [False, False]]
    assert gradient.tolist() == [[0.0, 0.0, 0.0], [-1.0, -1.0, 0.0]]
