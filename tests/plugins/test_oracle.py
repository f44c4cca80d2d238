"""Value, gradient and clip decisions of the bundled rules compared with a float64 NumPy evaluation of the textbook formulas."""

import dataclasses

import numpy as np
import pytest

from rlzoo import load_zoo
from rlzoo.core.reductions import StepCounts, reduce_objective
from rlzoo.testing import evaluate, off_policy_inputs
from tests import oracle

CASES = [
    ("grpo", {}),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.3}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.01, "clip_high": 0.02, "dual_clip": 1.03}),
    ("rloo", {}),
    ("rloo", {"clip_low": 0.3, "clip_high": 0.1, "dual_clip": 1.5}),
    ("rloo", {"clip_low": None, "clip_high": None}),
    ("fspo", {}),
    ("fspo", {"width_low": 0.02, "width_high": 0.04, "drift": -0.01, "width_ceiling": 0.06}),
    ("fspo", {"width_ceiling": None, "drift": 0.005}),
]


def evaluate_both(name, settings, seed, widen=1.0):
    policy = load_zoo()[name](**settings)
    inputs = off_policy_inputs(policy, seed=seed)
    log_probs = inputs.old_log_probs + widen * (inputs.log_probs - inputs.old_log_probs)
    inputs = dataclasses.replace(inputs, log_probs=log_probs)
    arrays = [tensor.double().numpy() for tensor in (log_probs, inputs.old_log_probs, inputs.advantages)]
    expected = getattr(oracle, name)(*arrays, inputs.response_mask.numpy(), **settings)
    return inputs, evaluate(policy, inputs), expected


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_value_gradient_and_clip_decisions_equal_the_closed_form(name, settings, seed):
    inputs, (result, gradient), expected = evaluate_both(name, settings, seed)
    mask = inputs.response_mask.numpy()
    visible = mask if result.objective.shape[1] > 1 else np.ones_like(expected.objective, dtype=bool)
    np.testing.assert_allclose(result.objective.detach().numpy()[visible], expected.objective[visible], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient.numpy(), expected.derivative, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(result.clipped.numpy()[visible], expected.clipped[visible])


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_far_off_policy_equals_the_closed_form(name, settings):
    # six times the spread that clips a quarter: nearly all A > 0 are above their band, and the ceilings are reached
    inputs, (result, gradient), expected = evaluate_both(name, settings, seed=5, widen=6.0)
    np.testing.assert_allclose(gradient.numpy(), expected.derivative, rtol=2e-4, atol=1e-6)
    visible = inputs.response_mask.numpy() if result.objective.shape[1] > 1 else slice(None)
    np.testing.assert_array_equal(result.clipped.numpy()[visible], expected.clipped[visible])


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant_length"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo", "fspo"])
def test_reduced_value_and_gradient_equal_the_closed_form(name, reduction):
    if reduction == "token_mean" and name != "grpo":
        return  # rejected, see test_reductions
    inputs, (_, _), expected = evaluate_both(name, {}, seed=1)
    mask = inputs.response_mask
    log_probs = inputs.log_probs.clone().requires_grad_()
    result = load_zoo()[name]()(dataclasses.replace(inputs, log_probs=log_probs))
    counts = StepCounts(num_responses=len(mask), num_tokens=int(mask.sum()))
    value = reduce_objective(result.objective, mask, reduction, counts, max_length=33)
    value.backward()
    expected_value, _ = oracle.reduce(expected.objective, mask.numpy(), reduction, 33)
    assert value.item() == pytest.approx(expected_value, rel=1e-5, abs=1e-7)
    gradient = oracle.gradient(expected, mask.numpy(), reduction, 33)
    np.testing.assert_allclose(log_probs.grad.numpy(), gradient, rtol=2e-5, atol=1e-8)
