"""Reductions use the step's counts, regardless of the micro-batch; KL estimators match hand-worked numbers."""

import math

import pytest
import torch

from rlzoo.core.errors import UserError
from rlzoo.core.reductions import StepCounts, kl_estimate, reduce_objective

# rows (1, 2), (6, masked), (masked, masked): 3 tokens, 2 responses with tokens
OBJECTIVE = torch.tensor([[1.0, 2.0], [6.0, float("nan")], [float("nan"), float("nan")]])
MASK = OBJECTIVE.isfinite()
COUNTS = StepCounts(num_responses=2, num_tokens=3)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    # 9 / 3; (1.5 + 6) / 2; (3 + 6) / 2; 9 / (2 * 10)
    [("token_mean", 3.0), ("sequence_mean", 3.75), ("sequence_mean_token_sum", 4.5), ("constant_length", 0.45)],
)
def test_token_objectives(reduction, expected):
    assert reduce_objective(OBJECTIVE, MASK, reduction, COUNTS, 10).item() == pytest.approx(expected)
    shares = [reduce_objective(OBJECTIVE[i : i + 1], MASK[i : i + 1], reduction, COUNTS, 10) for i in range(3)]
    assert sum(shares).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sequence_mean", 3.5), ("sequence_mean_token_sum", 3.5), ("constant_length", 0.35)]
)
def test_response_objectives(reduction, expected):
    column = torch.tensor([[1.0], [6.0], [float("nan")]])
    assert reduce_objective(column, MASK, reduction, COUNTS, 10).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("groups", "expected"),
    # 9 / 3 for the only prompt with tokens; (3 / 2 + 6 / 1) / 2; (3 / 2 + 6 / 1) / 2, where an empty row shares a prompt
    [((7, 7, 2), 3.0), ((7, 2, 5), 3.75), ((7, 2, 7), 3.75)],
)
def test_the_mean_of_prompts(groups, expected):
    ids = torch.tensor(groups)[:, None]
    counts = StepCounts.of(MASK, ids)
    assert reduce_objective(OBJECTIVE, MASK, "prompt_mean", counts).item() == pytest.approx(expected)
    shares = [reduce_objective(OBJECTIVE[[i]], MASK[[i]], "prompt_mean", counts.select(torch.tensor([i]))) for i in range(3)]
    assert sum(shares).item() == pytest.approx(expected)


def test_a_mean_of_tokens_refuses_a_response_objective_and_a_mean_of_prompts_unknown_prompts():
    for reduction in ("token_mean", "prompt_mean"):
        with pytest.raises(UserError, match=f"'{reduction}' needs a per-token objective"):
            reduce_objective(torch.ones(3, 1), MASK, reduction, COUNTS)
    with pytest.raises(UserError, match=r"needs to know which responses have the same prompt \(group_ids\)"):
        reduce_objective(OBJECTIVE, MASK, "prompt_mean", COUNTS)


def test_constant_length_needs_its_constant():
    with pytest.raises(UserError, match="needs max_length"):
        reduce_objective(OBJECTIVE, MASK, "constant_length", COUNTS)


def test_kl_estimators():
    # pi/pi_ref = e^0.5: k1 = 0.5, k2 = 0.125, k3 = e^-0.5 - 1 + 0.5 = 0.10653
    log_probs, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_estimate(log_probs, ref, "k1").item() == pytest.approx(0.5)
    assert kl_estimate(log_probs, ref, "k2").item() == pytest.approx(0.125)
    assert kl_estimate(log_probs, ref, "k3").item() == pytest.approx(math.exp(-0.5) - 0.5, abs=1e-6)
    # pi/pi_old = e^0.2
    old = torch.tensor([-1.2])
    expected = math.exp(0.2) * (math.exp(-0.5) - 0.5)
    assert kl_estimate(log_probs, ref, "unbiased_k3", old).item() == pytest.approx(expected, abs=1e-6)


def test_unbiased_k3_has_the_expected_value_and_gradient_of_the_kl():
    rng = torch.Generator().manual_seed(0)
    logits, old, ref = torch.randn(3, 7, generator=rng, dtype=torch.float64)
    old, ref = old.log_softmax(0), ref.log_softmax(0)
    logits.requires_grad_()
    exact = (logits.softmax(0) * (logits.log_softmax(0) - ref)).sum()
    (expected,) = torch.autograd.grad(exact, logits)
    for estimator, is_unbiased in (("unbiased_k3", True), ("k3", False)):
        # over all tokens that may be drawn
        estimate = (old.exp() * kl_estimate(logits.log_softmax(0), ref, estimator, old)).sum()
        (gradient,) = torch.autograd.grad(estimate, logits)
        assert torch.allclose(estimate, exact) is is_unbiased
        assert torch.allclose(gradient, expected) is is_unbiased


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased_k3"])
def test_a_token_far_from_the_reference_does_not_affect_other_gradients(estimator):
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -90.0], requires_grad=True)
    # the first token is ordinary; the others are infinitely far from the reference, 49.5 nats above it, and 85 nats below it
    ref = torch.tensor([-1.5, -math.inf, -50.0, -5.0])
    old = torch.tensor([-1.2, -2.0, -0.5, -90.0])
    kl = kl_estimate(log_probs, ref, estimator, old)
    (gradient,) = torch.autograd.grad(kl.sum(), log_probs)
    alone = log_probs[:1].detach().requires_grad_()
    (expected,) = torch.autograd.grad(kl_estimate(alone, ref[:1], estimator, old[:1]).sum(), alone)
    assert gradient.tolist() == [expected.item(), 0.0, 0.0, 0.0]
    # at log-ratios of +20 and -20: k2 = 200, k3 = e^-20 + 19 and e^20 - 21
    limits = {"k1": (20.0, -20.0), "k2": (200.0, 200.0)}.get(estimator, (math.exp(-20) + 19, math.exp(20) - 21))
    assert kl[1:].tolist() == pytest.approx([limits[0], limits[0], limits[1]], rel=1e-6)
