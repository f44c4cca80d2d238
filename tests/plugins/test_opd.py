"""OPD and reverse_kl compared with loops in float64, with numbers worked by hand, and with the KL over the whole vocabulary."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import AdvantageInputs, ClipInputs, UserError, load_zoo
from rlzoo.testing import evaluate
from tests.estimates import estimator
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for


def opd(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    for b in range(rows):
        for t in range(columns):
            if mask[b, t]:
                advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
                objective[b, t] = derivative[b, t] = math.exp(log_probs[b, t] - old_log_probs[b, t]) * advantage
    return ClosedForm(objective, derivative, np.zeros((rows, columns), dtype=bool))


test_equals_the_closed_form = closed_form_test("opd", opd, clips=False)


def test_hand_worked_response():
    # ratios 1/2 and 2, advantages 3 and -1 by token: objectives 1.5 and -2, which are also the gradients
    log_probs = torch.tensor([[-1.0 - math.log(2), -1.0 + math.log(2), -9.0]])
    mask = torch.tensor([[True, True, False]])
    result, gradient = evaluate(
        load_zoo()["opd"](), ClipInputs(log_probs, torch.full_like(log_probs, -1.0), torch.tensor([[3.0, -1.0, 7.0]]), mask)
    )
    torch.testing.assert_close(result.objective[:, :2], torch.tensor([[1.5, -2.0]]))
    torch.testing.assert_close(gradient, torch.tensor([[1.5, -2.0, 0.0]]))
    assert not result.clipped.any()


def test_the_sampler_does_not_move_the_gradient():
    policy = load_zoo()["opd"]()
    inputs = inputs_for(policy, seed=3)
    expected = evaluate(policy, inputs)[1]
    shifted = dataclasses.replace(inputs, rollout_log_probs=inputs.rollout_log_probs - 3)
    assert torch.equal(evaluate(policy, shifted)[1], expected)


def test_advantages_worked_by_hand():
    old = torch.tensor([[-1.0, -2.0, -0.5], [-0.25, -3.0, -9.0]])
    teacher = torch.tensor([[-1.5, -0.5, -0.5], [-1e6, -40.0, -9.5]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    estimate = estimator("reverse_kl")
    got = estimate(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), None, mask, old_log_probs=old, ref_log_probs=teacher)
    # a token that the teacher never generates, and one 37 nats below: both at the limit of 20
    assert got.tolist() == [[-0.5, 1.5, 0.0], [-20.0, -20.0, 0.0]]


def test_advantages_equal_loops_in_float64_and_ignore_the_rewards():
    rng = torch.Generator().manual_seed(0)
    old, teacher = -5 * torch.rand(2, 6, 9, generator=rng, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [1], [4], [7], [2], [9]])
    groups, rewards = torch.arange(6), torch.randn(6, 2, generator=rng)
    first, second = (
        estimator("reverse_kl")(rewards[:, i], groups, None, mask, old_log_probs=old, ref_log_probs=teacher) for i in (0, 1)
    )
    assert torch.equal(first, second)
    for b in range(6):
        for t in range(9):
            expected = teacher[b, t].item() - old[b, t].item() if mask[b, t] else 0.0
            assert first[b, t].item() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_the_teacher_is_required():
    inputs = AdvantageInputs(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(UserError, match="advantage 'reverse_kl' needs old_log_probs"):
        load_zoo().advantages.build("here", "reverse_kl")(inputs)
    with pytest.raises(UserError, match="advantage 'reverse_kl' needs ref_log_probs"):
        load_zoo().advantages.build("here", "reverse_kl")(dataclasses.replace(inputs, old_log_probs=torch.zeros(1, 2)))


def test_in_expectation_the_gradient_is_that_of_the_kl_over_the_whole_vocabulary():
    # every token of a vocabulary of 7 once, weighted by its probability: the sum over what the model may draw
    logits = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    kl = (log_probs.exp() * (log_probs - teacher)).sum()
    (expected,) = torch.autograd.grad(-kl, logits, retain_graph=True)
    old = log_probs.detach()
    mask, groups = torch.ones(7, 1, dtype=torch.bool), torch.arange(7)
    estimate = estimator("reverse_kl")
    advantages = estimate(torch.zeros(7), groups, None, mask, old_log_probs=old[:, None], ref_log_probs=teacher[:, None])
    result = load_zoo()["opd"]()(ClipInputs(log_probs[:, None].float(), old[:, None].float(), advantages, mask))
    (gradient,) = torch.autograd.grad((old.exp()[:, None] * result.objective).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    assert (old.exp() * advantages[:, 0]).sum().item() == pytest.approx(-kl.item(), rel=1e-6)
