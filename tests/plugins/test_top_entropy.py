"""The top-entropy rule compared with loops in float64: GRPO's clip on the least certain tokens of the step."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for

OTHER = {"top_share": 0.5, "clip_low": 0.1, "clip_high": 0.05}


def top_entropy(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    old_entropy,
    top_share=0.2,
    clip_low=0.2,
    clip_high=0.28,
):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    ordered = sorted(old_entropy[mask], reverse=True)
    threshold = ordered[math.ceil(top_share * len(ordered)) - 1]
    top = [(b, t) for b, t in np.argwhere(mask) if old_entropy[b, t] >= threshold]
    for b, t in top:
        advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
        ratio = math.exp(log_probs[b, t] - old_log_probs[b, t])
        low, high = (advantage < 0 and ratio < 1 - clip_low), (advantage > 0 and ratio > 1 + clip_high)
        clipped[b, t] = low or high
        scale = len(ordered) / len(top)  # the reduction divides by all tokens
        objective[b, t] = scale * advantage * (1 - clip_low if low else 1 + clip_high if high else ratio)
        derivative[b, t] = 0.0 if clipped[b, t] else objective[b, t]
    return ClosedForm(objective, derivative, clipped)


test_equals_the_closed_form = closed_form_test("top-entropy", top_entropy, [{}, OTHER], clips=False, by_token=True)


def test_hand_worked_step():
    # 6 tokens, top share .3: the ceil(1.8) = 2 of 2.0 and 1.5 nats. Scale 6 / 2 = 3; ratios 1.1 and 2, A = 1 and 2.
    # 3 x 1.1 = 3.3 with its gradient; 3 x 2 x 1.28 = 7.68, clipped. A masked token of 9 nats does not count.
    ratios = torch.tensor([[1.1, 1.5, 0.5, 1.0], [2.0, 1.0, 1.0, 1.0]])
    entropy = torch.tensor([[1.5, 0.1, 0.2, 0.3], [2.0, 0.4, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    old = torch.full_like(ratios, -1.0)
    inputs = ClipInputs(old + ratios.log(), old, torch.tensor([[1.0], [2.0]]), mask, old_entropy=entropy)
    result, gradient = evaluate(load_zoo()["top-entropy"](top_share=0.3), inputs)
    assert result.objective[mask].tolist() == pytest.approx([3.3, 0.0, 0.0, 0.0, 7.68, 0.0], rel=1e-5)
    assert gradient[mask].tolist() == pytest.approx([3.3, 0.0, 0.0, 0.0, 0.0, 0.0], rel=1e-5)
    assert result.clipped.nonzero().tolist() == [[1, 0]]
    assert result.metrics["entropy_threshold"].tolist() == [[1.5], [1.5]]


def test_selecting_all_tokens_or_equal_entropies_gives_grpo():
    inputs = inputs_for(load_zoo()["top-entropy"](), seed=2)
    expected, expected_gradient = evaluate(load_zoo()["grpo"](clip_high=0.28), inputs)
    equal = dataclasses.replace(inputs, old_entropy=torch.ones_like(inputs.old_entropy))
    for policy, given in ((load_zoo()["top-entropy"](top_share=1.0), inputs), (load_zoo()["top-entropy"](), equal)):
        result, gradient = evaluate(policy, given)
        torch.testing.assert_close(gradient, expected_gradient)
        assert torch.equal(result.clipped, expected.clipped)
