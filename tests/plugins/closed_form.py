"""Compares a policy with a float64 evaluation of its closed form, written without its code."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlzoo import load_zoo
from rlzoo.testing import evaluate, off_policy_inputs


@dataclass(frozen=True)
class ClosedForm:
    """The textbook result: the objective, d(objective.sum())/d(log_probs), and where the rule acted."""

    objective: NDArray[np.float64]  # (B, T) or (B, 1); entries of masked positions are not compared
    derivative: NDArray[np.float64]  # (B, T), 0 where masked
    clipped: NDArray[np.bool_]  # (B, T) or (B, 1); entries of masked positions are not compared


Rule = Callable[..., ClosedForm]
"""``rule(log_probs, old_log_probs, rollout_log_probs, advantages, mask, **needed, **settings)`` takes float64 arrays and a bool
mask (B, T); ``needed`` are the arrays that the policy names in `needs`."""


def inputs_for(policy, seed=0, widen=1.0, token_advantages=False):
    """Return ragged off-policy data; ``widen`` multiplies the log-ratios, and every sixth response has A = 0."""
    inputs = off_policy_inputs(policy, seed=seed)
    rng = torch.Generator().manual_seed(1000 + seed)
    log_probs = inputs.old_log_probs + widen * (inputs.log_probs - inputs.old_log_probs)
    log_probs = log_probs.clamp(max=-1e-3)  # probabilities stay below 1
    rollout = inputs.old_log_probs + 0.01 * torch.randn(log_probs.shape, generator=rng)
    advantages = inputs.advantages
    if token_advantages:
        advantages = advantages + 0.5 * torch.randn(log_probs.shape, generator=rng)
        advantages[:, ::5] = 0
    return dataclasses.replace(inputs, log_probs=log_probs, rollout_log_probs=rollout.clamp(max=-1e-3), advantages=advantages)


def arrays_of(inputs):
    """Return the inputs as float64 arrays in the order of a `Rule`'s arguments; masked positions are NaN."""
    mask = inputs.response_mask
    names = ("log_probs", "old_log_probs", "rollout_log_probs")
    tokens = [torch.where(mask, getattr(inputs, name), torch.nan).double().numpy() for name in names]
    return [*tokens, inputs.advantages.double().numpy(), mask.numpy()]


def assert_equals_closed_form(name, rule: Rule, settings=None, *, seed=0, widen=1.0, token_advantages=False, rtol=2e-5):
    """Check that objective, gradient and clip decisions of a policy equal those of ``rule``; returns both results."""
    settings = settings or {}
    policy = load_zoo()[name](**settings)
    inputs = inputs_for(policy, seed, widen, token_advantages)
    needed = {name: getattr(inputs, name).numpy() for name in policy.needs}
    expected = rule(*arrays_of(inputs), **needed, **settings)
    result, gradient = evaluate(policy, inputs)
    mask = inputs.response_mask.numpy()
    for got, wanted, what in (
        (result.objective.detach().numpy(), expected.objective, "objective"),
        (result.clipped.numpy(), expected.clipped, "clipped"),
    ):
        assert got.shape == wanted.shape, f"{what} is {got.shape}, expected {wanted.shape}"
        visible = mask if got.shape == mask.shape else mask.any(axis=1, keepdims=True)
        np.testing.assert_allclose(
            got[visible].astype(float), wanted[visible].astype(float), rtol=rtol, atol=1e-6, err_msg=what
        )
    np.testing.assert_allclose(gradient.numpy(), expected.derivative, rtol=rtol, atol=1e-6, err_msg="gradient")
    return result, expected


def closed_form_test(name, rule: Rule, settings=({},), *, clips=True, by_token=None):
    """Return a test that compares a policy with its closed form, on data near its band and far beyond.

    ``clips`` says whether the policy clips in every case near its band. ``by_token`` says whether its advantages may differ by
    token; by default, this is so for rules of scope "token".
    """
    by_token = load_zoo()[name].scope == "token" if by_token is None else by_token
    cases = [(0, 1.0, False), (1, 1.0, by_token), (2, 1.0, False), (5, 6.0, by_token)]

    @pytest.mark.parametrize(("seed", "widen", "token_advantages"), cases)
    @pytest.mark.parametrize("setting", settings, ids=str)
    def test(setting, seed, widen, token_advantages):
        rtol = 2e-5 if widen == 1.0 else 2e-4
        _, expected = assert_equals_closed_form(
            name, rule, setting, seed=seed, widen=widen, token_advantages=token_advantages, rtol=rtol
        )
        assert expected.clipped.any() or not clips or widen > 1

    return test
