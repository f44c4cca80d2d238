"""GPG compared with loops in float64: A log pi on every response token, and nothing else."""

import dataclasses

import numpy as np
import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test, inputs_for


def gpg(log_probs, old_log_probs, rollout_log_probs, advantages, mask):
    rows, columns = mask.shape
    objective, derivative = np.zeros((rows, columns)), np.zeros((rows, columns))
    for b in range(rows):
        for t in range(columns):
            if mask[b, t]:
                advantage = advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t]
                objective[b, t] = advantage * log_probs[b, t]
                derivative[b, t] = advantage
    return ClosedForm(objective, derivative, np.zeros((rows, columns), dtype=bool))


test_equals_the_closed_form = closed_form_test("gpg", gpg, clips=False)


def test_hand_worked_response():
    # A = 2: 2 * -0.5 = -1 and 2 * -1.5 = -3, gradient 2; A = -4: 1 and 8, gradient -4; the last token is masked
    tokens = torch.tensor([[-0.5, -1.5, -9.0], [-0.25, -2.0, -9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    result, gradient = evaluate(
        load_zoo()["gpg"](), ClipInputs(tokens, torch.full_like(tokens, -1.0), torch.tensor([[2.0], [-4.0]]), mask)
    )
    assert result.objective[:, :2].tolist() == [[-1.0, -3.0], [1.0, 8.0]]
    assert gradient.tolist() == [[2.0, 2.0, 0.0], [-4.0, -4.0, 0.0]]
    assert not result.clipped.any()


def test_the_gradient_is_the_advantage_for_any_old_policy():
    policy = load_zoo()["gpg"]()
    inputs = inputs_for(policy, seed=3)
    expected = torch.where(inputs.response_mask, inputs.advantages, 0.0)
    objectives = []
    for shift in (0.0, 1.0, -7.0, -40.0):
        result, gradient = evaluate(policy, dataclasses.replace(inputs, old_log_probs=inputs.old_log_probs + shift))
        assert torch.equal(gradient, expected)
        objectives.append(result.objective[inputs.response_mask])
    assert all(torch.equal(objective, objectives[0]) for objective in objectives)
