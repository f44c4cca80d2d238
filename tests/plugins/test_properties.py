"""Properties of every installed policy on any batch: ragged, padded anywhere, up to 8192 tokens, with extreme ratios."""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlzoo import load_zoo
from rlzoo.testing import evaluate
from rlzoo.testing.data import filled, visible
from tests.test_properties import BATCHES, EXTREME, POISONS, Batch

pytestmark = pytest.mark.long

ZOO = load_zoo()
SETTINGS = settings(max_examples=15, deadline=None, derandomize=True, database=None)
BY_TOKEN = [name for name, policy in ZOO.items() if policy.scope != "sequence"]
BY_ROW = [name for name, policy in ZOO.items() if policy.scope != "batch"]
PENALISED = {name for name, policy in ZOO.items() if "zero_advantage_zero_gradient" in policy.exempt}
WIDE = [name for name, policy in ZOO.items() if policy.width_fields() and name != "clip-cov"]  # its draw depends on the band
# the size of A matters, not only its sign: covariance bounds, and penalties that are not multiplied by A
SIZE_MATTERS = {"clip-cov", "dro", "kl-cov", "opmd"}
PROPORTIONAL = [name for name, policy in ZOO.items() if name not in SIZE_MATTERS and "rewards" not in policy.needs]

NOTHING = Batch(rows=((0, 1.0), (0, -1.0)))  # two responses without tokens
ONE = Batch(rows=((1, 1e6),), push=1)

policies = partial(pytest.mark.parametrize, "name")
EVERY = policies(ZOO)


def inputs_of(name, batch, *padding, **fill):
    """Return a batch's tensors, including those that a rule needs."""
    return filled(ZOO[name], batch.inputs(*padding, **fill))


def chosen(values, inputs):
    """Return a result's values per token, in order, at real tokens; a value per response is repeated for each of its tokens."""
    return values.expand_as(inputs.response_mask)[inputs.response_mask]


def assert_same(first, second, first_inputs, second_inputs):
    """Check that two results, each with its gradient, agree in value up to rounding and in every decision."""
    (ours, our_gradient), (theirs, their_gradient) = first, second
    for one, other in ((ours.objective, theirs.objective), (our_gradient, their_gradient), (ours.log_ratio, theirs.log_ratio)):
        torch.testing.assert_close(chosen(one, first_inputs), chosen(other, second_inputs), rtol=1e-4, atol=1e-6)
    assert torch.equal(chosen(ours.clipped, first_inputs), chosen(theirs.clipped, second_inputs))


@EVERY
@SETTINGS
@given(batch=BATCHES, padding=st.sampled_from(["right", "left", "scattered"]))
@example(batch=EXTREME, padding="right")
@example(batch=dataclasses.replace(EXTREME, push=-1), padding="right")
@example(batch=ONE, padding="right")
@example(batch=NOTHING, padding="right")
def test_value_and_gradient_are_finite(name, batch, padding):
    inputs = inputs_of(name, batch, padding)
    result, gradient = evaluate(ZOO[name](), inputs)
    assert visible(result.objective, inputs).isfinite().all()
    assert visible(result.log_ratio, inputs).isfinite().all()
    assert gradient.isfinite().all()


@EVERY
@SETTINGS
@given(batch=BATCHES, poison=st.sampled_from(POISONS), padding=st.sampled_from(["right", "left", "scattered"]))
@example(batch=EXTREME, poison=float("nan"), padding="left")
@example(batch=NOTHING, poison=float("nan"), padding="right")
def test_the_content_of_padding_never_matters(name, batch, poison, padding):
    policy, inputs, poisoned = ZOO[name](), inputs_of(name, batch, padding), inputs_of(name, batch, padding, fill=poison)
    (expected, expected_gradient), (result, gradient) = evaluate(policy, inputs), evaluate(policy, poisoned)
    assert torch.equal(gradient, expected_gradient)
    assert (gradient[~inputs.response_mask] == 0).all()
    for field in ("objective", "log_ratio", "clipped"):
        assert torch.equal(visible(getattr(result, field), inputs), visible(getattr(expected, field), inputs)), field


@policies(ZOO)
@SETTINGS
@given(batch=BATCHES, padding=st.sampled_from(["left", "scattered"]))
@example(batch=EXTREME, padding="left")
def test_the_padding_side_never_matters(name, batch, padding):
    right, other = inputs_of(name, batch), inputs_of(name, batch, padding)
    assert_same(evaluate(ZOO[name](), right), evaluate(ZOO[name](), other), right, other)


@policies(["clip-cov", "kl-cov"])
def test_covariance_rules_select_no_token_if_all_advantages_are_equal(name):
    # A = 1e6 everywhere: A - mean A is 0, and so is every covariance, wherever the padding is
    batch = Batch(rows=((258, 1e6), (559, 1e6), (561, 1e6)), push=-1)
    right, other = inputs_of(name, batch), inputs_of(name, batch, "left")
    assert_same(evaluate(ZOO[name](), right), evaluate(ZOO[name](), other), right, other)


@policies(BY_TOKEN)
@SETTINGS
@given(batch=BATCHES, poison=st.sampled_from(POISONS))
@example(batch=EXTREME, poison=float("nan"))
def test_token_advantages_keep_every_property(name, batch, poison):
    policy, batch = ZOO[name](), dataclasses.replace(batch, by_token=True)
    inputs, other = inputs_of(name, batch), inputs_of(name, batch, "left", fill=poison)
    first, second = evaluate(policy, inputs), evaluate(policy, other)
    assert_same(first, second, inputs, other)
    result, gradient = first
    assert gradient.isfinite().all()
    zero = inputs.advantages == 0
    assert not (result.clipped & zero).any()
    assert name in PENALISED or (gradient[zero] == 0).all()


@policies(WIDE)
@SETTINGS
@given(batch=BATCHES, narrow=st.floats(0.01, 1.0), wide=st.floats(1.0, 100.0))
@example(batch=EXTREME, narrow=0.5, wide=2.0)
def test_a_wider_band_clips_nothing_that_a_narrower_one_does_not(name, batch, narrow, wide):
    inputs = inputs_of(name, batch)
    fewer, more = (ZOO[name]().scaled(factor)(inputs).clipped for factor in (wide, narrow))
    assert not (fewer & ~more).any()


@policies(PROPORTIONAL)
@SETTINGS
@given(batch=BATCHES, factor=st.sampled_from([2.0**-10, 0.5, 2.0, 2.0**10]))
@example(batch=EXTREME, factor=2.0)
def test_a_multiple_of_the_advantage_gives_that_multiple_of_the_objective(name, batch, factor):
    policy, inputs = ZOO[name](), inputs_of(name, batch)
    result, gradient = evaluate(policy, inputs)
    scaled, scaled_gradient = evaluate(policy, dataclasses.replace(inputs, advantages=factor * inputs.advantages))
    assert torch.equal(scaled.clipped, result.clipped)
    for one, other in ((scaled.objective, result.objective), (scaled_gradient, gradient)):
        # exact except for numbers that are too small for float32
        torch.testing.assert_close(one, factor * other, rtol=1e-5, atol=1e-35)
