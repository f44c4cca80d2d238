"""The configuration luspo compared with a loop in float64: GSPO's objective times the response's length."""

import math

import torch

from rlzoo import RunConfig
from rlzoo.core.reductions import StepCounts, reduce_objective
from tests.plugins.closed_form import inputs_for

LOW, HIGH = 2e-3, 2.5e-3


def test_the_gradient_is_that_of_gspo_times_the_length():
    rule = RunConfig.compose(["luspo"]).clip
    inputs = inputs_for(rule, seed=1, widen=1.0)
    mask, log_probs = inputs.response_mask, inputs.log_probs.requires_grad_()
    loss = reduce_objective(rule(inputs).objective, mask, rule.reduction, StepCounts.of(mask))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    expected, cut = torch.zeros(mask.shape, dtype=torch.float64), 0
    for row in mask.any(dim=1).nonzero()[:, 0].tolist():
        tokens, advantage = mask[row].nonzero()[:, 0].tolist(), float(inputs.advantages[row, 0])
        log_ratios = [float(log_probs[row, t].detach()) - float(inputs.old_log_probs[row, t]) for t in tokens]
        ratio = math.exp(sum(log_ratios) / len(tokens))
        if (advantage > 0 and ratio > 1 + HIGH) or (advantage < 0 and ratio < 1 - LOW):
            cut += 1
        else:
            expected[row, tokens] = ratio * advantage  # L times 1/L of the mean's slope
    expected /= int(mask.any(dim=1).sum())
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)
    assert 0 < cut < len(mask)
