"""KL-Cov compared with loops in float64: a penalty on |log-ratio| at the tokens with the largest covariance."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, arrays_of, closed_form_test, inputs_for

CASES = [{}, {"fraction": 0.17}, {"fraction": 0.25, "kl_coef": 0.3}, {"fraction": 1.0, "kl_coef": 2.0}]


def penalised_tokens(log_probs, advantages, mask, fraction):
    """Return the n response tokens of the largest covariance, and n; rejects data where a tie would decide."""
    places = [(b, t) for b in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[b, t]]
    credit = {(b, t): advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t] for b, t in places}
    mean_credit = math.fsum(credit.values()) / len(places)
    mean_log_prob = math.fsum(log_probs[place] for place in places) / len(places)
    cov = {place: (credit[place] - mean_credit) * (log_probs[place] - mean_log_prob) for place in places}
    ranked = sorted(places, key=lambda place: -cov[place])
    n = max(1, int(fraction * len(places)))
    if n < len(ranked) and cov[ranked[n - 1]] - cov[ranked[n]] < 1e-6:
        raise ValueError("a tie decides which tokens are penalised")
    return set(ranked[:n])


def kl_cov(log_probs, old_log_probs, rollout_log_probs, advantages, mask, *, fraction=2e-3, kl_coef=1.0):
    penalised = penalised_tokens(log_probs, advantages, mask, fraction)
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if not mask[b, t]:
                continue
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            log_ratio = log_probs[b, t] - old_log_probs[b, t]
            objective[b, t] = math.exp(min(max(log_ratio, -20.0), 20.0)) * advantage
            derivative[b, t] = objective[b, t] if abs(log_ratio) <= 20.0 else 0.0
            if (b, t) in penalised:
                objective[b, t] -= kl_coef * abs(log_ratio)
                derivative[b, t] -= kl_coef * np.sign(log_ratio)
                clipped[b, t] = advantage != 0 and log_ratio != 0
    return ClosedForm(objective, derivative, clipped)


def step(log_ratios):
    """Covariances 0.9, 0.5, 0.4 and 1.0: A = 1 and -1 with mean 0; log pi has mean -1."""
    tokens = torch.tensor([[-0.1, -0.5], [-1.4, -2.0]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return ClipInputs(tokens, tokens - torch.tensor(log_ratios), torch.tensor([[1.0], [-1.0]]), mask)


test_equals_the_closed_form = closed_form_test("kl-cov", kl_cov, CASES, by_token=True)


def test_hand_worked_step():
    # Ratios 1.5 and 1 at A = 1, 2 and 1/2 at A = -1. One token is penalised, the last: -1/2 - ln 2 = -1.1931472 with
    # gradient -1/2 + 1 = 1/2. The others keep r A: 1.5, 1, -2.
    log15, log2 = math.log(1.5), math.log(2)
    inputs = step([[log15, 0.0], [log2, -log2]])
    result, gradient = evaluate(load_zoo()["kl-cov"](), inputs)
    assert result.objective.flatten().tolist() == pytest.approx([1.5, 1.0, -2.0, -1.1931472], rel=1e-6)
    assert gradient.flatten().tolist() == pytest.approx([1.5, 1.0, -2.0, 0.5], rel=1e-6)
    assert result.clipped.tolist() == [[False, False], [False, True]]
    # Half of the 4 tokens, coefficient 2: the first too: 1.5 - 2 ln 1.5 = 0.6890698, gradient 1.5 - 2 = -0.5; and the
    # last is -1/2 - 2 ln 2 = -1.8862944 with gradient -1/2 + 2 = 1.5.
    result, gradient = evaluate(load_zoo()["kl-cov"](fraction=0.5, kl_coef=2.0), inputs)
    assert result.objective.flatten().tolist() == pytest.approx([0.6890698, 1.0, -2.0, -1.8862944], rel=1e-6)
    assert gradient.flatten().tolist() == pytest.approx([-0.5, 1.0, -2.0, 1.5], rel=1e-6)
    assert result.clipped.tolist() == [[True, False], [False, True]]


def test_a_penalised_token_that_has_not_moved_keeps_the_full_gradient():
    # log-ratio 0: d|l| is 0 there, so nothing reduces the gradient
    result, gradient = evaluate(load_zoo()["kl-cov"](fraction=1.0), step([[0.0, 0.0], [0.0, 0.0]]))
    assert gradient.tolist() == [[1.0, 1.0], [-1.0, -1.0]]
    assert result.objective.tolist() == [[1.0, 1.0], [-1.0, -1.0]]
    assert not result.clipped.any()


def test_a_penalised_token_without_advantage_is_pulled_back_and_does_not_count_as_clipped():
    # A = 2 and 0, mean 1; log pi -1 -1 and -1 -3, mean -1.5: covariances 0.5 0.5 -0.5 1.5. The last has A = 0 and
    # log-ratio -0.25: objective -0.25, gradient +1.
    tokens = torch.tensor([[-1.0, -1.0], [-1.0, -3.0]])
    old = tokens + torch.tensor([[0.0, 0.0], [0.0, 0.25]])
    inputs = ClipInputs(tokens, old, torch.tensor([[2.0], [0.0]]), torch.ones_like(tokens, dtype=torch.bool))
    result, gradient = evaluate(load_zoo()["kl-cov"](), inputs)
    assert result.objective.tolist() == [[2.0, 2.0], [0.0, -0.25]]
    assert gradient.tolist() == [[2.0, 2.0], [0.0, 1.0]]
    assert not result.clipped.any()


@pytest.mark.parametrize(("fraction", "seed"), [(2e-3, 0), (0.1, 1), (0.1, 2)])
def test_exactly_the_tokens_of_the_largest_covariance_differ_from_the_plain_ratio(fraction, seed):
    policy = load_zoo()["kl-cov"](fraction=fraction)
    inputs = inputs_for(policy, seed, token_advantages=True)
    log_probs, _, _, advantages, mask = arrays_of(inputs)
    result, gradient = evaluate(policy, inputs)
    plain = (inputs.log_probs - inputs.old_log_probs).exp() * inputs.advantages
    pulled = ((gradient - plain).abs() > 0.5).numpy() & mask
    expected = penalised_tokens(log_probs, advantages, mask, fraction)
    assert {(int(b), int(t)) for b, t in zip(*np.nonzero(pulled), strict=True)} == expected
    assert len(expected) == max(1, int(fraction * mask.sum()))
    assert (result.objective.detach()[inputs.response_mask] <= plain[inputs.response_mask] + 1e-6).all()


def test_the_penalty_grows_beyond_the_limit_of_the_exponential():
    # the last token's log-ratio is -30 at A = -1: -exp(-20) - 30 = -30 with gradient 0 + 1
    result, gradient = evaluate(load_zoo()["kl-cov"](), step([[0.0, 0.0], [0.0, -30.0]]))
    assert result.objective[1, 1].item() == pytest.approx(-30.0, rel=1e-6)
    assert gradient[1, 1].item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("tokens", [3, 1000])
def test_tokens_of_one_covariance_are_penalised_all_or_none(tokens):
    # one advantage for all: every covariance is 0, so there are no largest few
    old = torch.full((1, tokens), -1.0)
    log_probs = old + 0.1 * torch.linspace(-1, 1, tokens)
    inputs = ClipInputs(log_probs, old, torch.tensor([[0.37]]), torch.ones(1, tokens, dtype=torch.bool))
    assert not load_zoo()["kl-cov"]()(inputs).clipped.any()


def test_ties_never_penalise_more_than_the_fraction():
    # 300 certain tokens in the good row share the largest covariance, and 2e-3 x 2000 = 4 may be penalised
    old = torch.full((2, 1000), -1.0)
    old[0, :300] = 0.0
    inputs = ClipInputs(old - 0.01, old, torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1000, dtype=torch.bool))
    assert int(load_zoo()["kl-cov"]()(inputs).clipped.sum()) <= 4
