"""UP compared with loops in float64: the plain policy gradient where A > 0, and GRPO's clip elsewhere."""

import dataclasses

import numpy as np
import pytest
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests import oracle
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for


def up(log_probs, old_log_probs, rollout_log_probs, advantages, mask, clip_low=0.2, dual_clip=3.0):
    clipped = oracle.grpo(log_probs, old_log_probs, advantages, mask, clip_low=clip_low, dual_clip=dual_clip)
    objective, derivative = clipped.objective.copy(), clipped.derivative.copy()
    cut = np.broadcast_to(clipped.clipped, mask.shape).copy()
    for b, t in np.argwhere(mask):
        advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
        if advantage > 0:
            objective[b, t], derivative[b, t], cut[b, t] = advantage, advantage, False
    return ClosedForm(objective, derivative, cut)


test_equals_the_closed_form = closed_form_test("up", up, [{}, {"clip_low": 0.1, "dual_clip": 1.2}, {"dual_clip": None}])


def test_hand_worked_tokens():
    # ratios 4, 1/2, 4 and 2, with A = 2, -2, -2 and -2: 2; min(-1, -1.6), cut; dual clip at 3: -6, cut; -4
    ratios, advantages = torch.tensor([[4.0, 0.5, 4.0, 2.0]]), torch.tensor([[2.0, -2.0, -2.0, -2.0]])
    old = torch.full_like(ratios, -3.0)
    mask = torch.ones_like(ratios, dtype=torch.bool)
    result, gradient = evaluate(load_zoo()["up"](), ClipInputs(old + ratios.log(), old, advantages, mask))
    torch.testing.assert_close(result.objective, torch.tensor([[2.0, -1.6, -6.0, -4.0]]))
    torch.testing.assert_close(gradient, torch.tensor([[2.0, 0.0, 0.0, -4.0]]))
    assert result.clipped.tolist() == [[False, True, True, False]]
    torch.testing.assert_close(result.log_ratio, ratios.log())


@pytest.mark.parametrize("shift", [1.0, -7.0, -40.0])
def test_tokens_with_positive_advantages_do_not_depend_on_the_old_policy(shift):
    policy = load_zoo()["up"]()
    inputs = inputs_for(policy, seed=3)
    moved = dataclasses.replace(inputs, old_log_probs=inputs.old_log_probs + shift)
    (_, before), (_, after) = evaluate(policy, inputs), evaluate(policy, moved)
    good = (inputs.advantages > 0) & inputs.response_mask
    assert torch.equal(after[good], before[good])
    assert torch.equal(before[good], inputs.advantages.expand_as(before)[good])
    assert not torch.equal(after[~good], before[~good])
