"""VESPO's soft weight exp(lambda + k S - lambda exp(S)) compared with loops in float64 and numbers worked by hand."""

import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test

OTHER = {"k_positive": 1.0, "lambda_positive": 1.5, "k_negative": 2.0, "lambda_negative": 4.0}


def weight(total, k, rate):
    limited = min(max(total, -20.0), 20.0)
    return math.exp(rate + k * limited - rate * math.exp(limited))


def vespo(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    k_positive=2.0,
    lambda_positive=3.0,
    k_negative=3.0,
    lambda_negative=2.0,
):
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    for b in range(rows):
        tokens = [t for t in range(columns) if mask[b, t]]
        total = math.fsum(log_probs[b, t] - old_log_probs[b, t] for t in tokens)
        for t in tokens:
            advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
            k, rate = (k_positive, lambda_positive) if advantage >= 0 else (k_negative, lambda_negative)
            phi = weight(total, k, rate)
            objective[b, t] = phi * advantage * log_probs[b, t]
            derivative[b, t] = phi * advantage  # phi is a constant
    return ClosedForm(objective, derivative, np.zeros((rows, 1), dtype=bool))


def responses(log_ratios, advantages):
    """Return one row per list of token log-ratios, with old log-probabilities of -1."""
    old = torch.full((len(log_ratios), len(log_ratios[0])), -1.0)
    mask = torch.ones_like(old, dtype=torch.bool)
    return ClipInputs(old + torch.tensor(log_ratios), old, torch.tensor(advantages)[:, None], mask)


def weights(policy, ratios, advantage):
    """Return the policy's weight at each ratio of a one-token response."""
    _, gradient = evaluate(policy, responses([[math.log(ratio)] for ratio in ratios], [advantage] * len(ratios)))
    return (gradient[:, 0] / advantage).tolist()


test_equals_the_closed_form = closed_form_test("vespo", vespo, [{}, OTHER], clips=False)


def test_hand_worked_responses():
    # Two tokens of log-ratio ln 2 and 0: w = 2, log pi = -1 + ln 2 and -1.
    # A = 1: phi = exp(3 + 2 ln 2 - 6) = 4 exp(-3) = 0.1991483, objective 0.1991483 * -0.3068528 = -0.0611092 and -0.1991483.
    # A = -1: phi = exp(2 + 3 ln 2 - 4) = 8 exp(-2) = 1.0826823, objective 0.3322242 and 1.0826823.
    # Two tokens of -ln 2 and 0: w = 1/2, A = 1: phi = exp(3 - 2 ln 2 - 1.5) = exp(1.5) / 4 = 1.1204223;
    # A = -3: phi = exp(2 - 3 ln 2 - 1) = e / 8 = 0.3397852, times -3 is -1.0193557.
    log2 = math.log(2)
    result, gradient = evaluate(
        load_zoo()["vespo"](), responses([[log2, 0.0], [log2, 0.0], [-log2, 0.0], [-log2, 0.0]], [1.0, -1.0, 1.0, -3.0])
    )
    assert result.objective[0].tolist() == pytest.approx([-0.0611092, -0.1991483], rel=1e-5)
    assert result.objective[1].tolist() == pytest.approx([0.3322242, 1.0826823], rel=1e-5)
    for row, expected in enumerate([0.1991483, -1.0826823, 1.1204223, -1.0193557]):
        assert gradient[row].tolist() == pytest.approx([expected, expected], rel=1e-5)
    assert not result.clipped.any()


@pytest.mark.parametrize("settings", [{}, OTHER], ids=["defaults", "other"])
def test_the_weight_is_one_on_policy(settings):
    policy = load_zoo()["vespo"](**settings)
    assert weights(policy, [1.0], 2.0) + weights(policy, [1.0], -2.0) == pytest.approx([1.0, 1.0], rel=1e-6)


@pytest.mark.parametrize("settings", [{}, OTHER], ids=["defaults", "other"])
@pytest.mark.parametrize(("advantage", "side"), [(1.0, "positive"), (-1.0, "negative")])
def test_the_weight_peaks_at_k_over_lambda_and_decays_on_both_sides(advantage, side, settings):
    # d/dw (k ln w - lambda w) = k / w - lambda is 0 at w = k / lambda, positive before and negative after
    policy = load_zoo()["vespo"](**settings)
    k, rate = getattr(policy, f"k_{side}"), getattr(policy, f"lambda_{side}")
    phi = weights(policy, [k / rate * factor for factor in (0.05, 0.2, 0.5, 0.9, 1.0, 1.1, 2.0, 4.0, 6.0)], advantage)
    assert phi[:5] == sorted(phi[:5])
    assert phi[4:] == sorted(phi[4:], reverse=True)
    assert phi[4] == pytest.approx((k / rate) ** k * math.exp(rate - k), rel=1e-5)
    assert phi[0] < 0.02 * phi[4] or k < 2
    assert phi[-1] < 0.1 * phi[4]


def test_peaks_of_the_default_weights():
    # A > 0: w = 2/3, phi = (2/3)^2 exp(3 - 2) = 4 e / 9 = 1.2081253. A < 0: w = 3/2, phi = 1.5^3 exp(2 - 3) = 1.2415931.
    policy = load_zoo()["vespo"]()
    assert weights(policy, [2 / 3], 1.0) == pytest.approx([1.2081253], rel=1e-5)
    assert weights(policy, [3 / 2], -1.0) == pytest.approx([1.2415931], rel=1e-5)


def test_the_weight_is_the_ratio_of_the_response():
    # tokens of +1 and -1 cancel: S = 0, so the weight is 1 although each token is far from its old probability
    _, gradient = evaluate(load_zoo()["vespo"](), responses([[1.0, -1.0]], [0.5]))
    assert gradient.flatten().tolist() == pytest.approx([0.5, 0.5], rel=1e-5)


def test_the_sum_is_limited_before_it_is_exponentiated():
    # S = -30 counts as -20: phi = exp(3 - 40 - 3 exp(-20)) = exp(-37) at A = 1e16 is 0.8533048; S = 30: exp(-3 exp(20)) = 0
    _, gradient = evaluate(load_zoo()["vespo"](), responses([[-30.0], [30.0]], [1e16, 1e16]))
    assert gradient.flatten().tolist() == pytest.approx([1e16 * math.exp(-37), 0.0], rel=1e-5)
