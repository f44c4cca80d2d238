"""The laws that advantage estimators and mismatch corrections must obey."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.advantages import AdvantageEstimator, AdvantageInputs
from rlzoo.core.corrections import Correction, CorrectionInputs
from rlzoo.testing.laws import Law, assert_close, assert_complete_settings, law

Component = AdvantageEstimator | Correction
Inputs = AdvantageInputs | CorrectionInputs
SIZE = 32
"""Number of responses per prompt in the examples. Some estimators use subsets of up to 32 responses."""


# the examples


def with_rewards(inputs: AdvantageInputs, rewards: Tensor) -> AdvantageInputs:
    """Return the inputs with new rewards. Each reward r is the sum of two named rewards that increase with r up to 1."""
    second = 0.1 * rewards**3
    return replace(inputs, rewards=rewards, reward_parts={"first": rewards - second, "second": second})


def advantage_inputs(estimator: AdvantageEstimator, *, equal: bool = False) -> AdvantageInputs:
    """Return three groups of ragged responses with one to three turns, and every field that an estimator may need."""
    rng = torch.Generator().manual_seed(0)
    number, size = 3 * SIZE, 12
    lengths = torch.randint(3, size, (number, 1), generator=rng)
    lengths[::SIZE] = size
    mask = torch.arange(size) < lengths
    turns = torch.where(mask, torch.arange(size) // 4, -1)
    rewards = torch.full((number, 1), 0.1) if equal else torch.randn(number, 1, generator=rng)
    paid = torch.zeros(number, size)
    if "token_rewards" in estimator.needs:
        ends = (torch.arange(size) % 4 == 3) & (torch.arange(size) < lengths - 1)
        paid = torch.where(ends, 0.1 if equal else torch.randn(number, size, generator=rng), 0.0)
    states = torch.where(mask, torch.randint(0, 3, (number, size), generator=rng).gather(1, turns.clamp(min=0)), -1)
    probs = torch.rand(number, size, generator=rng) * 0.9 + 0.05
    inputs = AdvantageInputs(
        rewards,
        torch.arange(3).repeat_interleave(SIZE)[:, None],
        mask,
        turns,
        paid if "token_rewards" in estimator.needs else None,
        states,
        torch.where(mask, probs.log(), 0.0),
        torch.where(mask, probs.flip(1).log(), 0.0),
        values=torch.where(mask, probs - 0.5, 0.0),
        last_values=probs[:, :1],
        finished=lengths < size,
    )
    return with_rewards(inputs, rewards)


def correction_inputs(correction: Correction, spread: float = 0.3) -> CorrectionInputs:
    """Return ragged responses with gaps. Sampler and trainer differ by about ``spread`` nats per token."""
    rng = torch.Generator().manual_seed(0)
    mask = torch.arange(20) < torch.randint(1, 21, (24, 1), generator=rng)
    mask[::3, 2] = False
    mask[:, 0] = True
    old = -torch.rand(24, 20, generator=rng) - 0.5
    sampled = old - spread * torch.randn(24, 20, generator=rng)
    return CorrectionInputs(old, sampled.clamp(max=-1e-3), mask, torch.randn(24, 1, generator=rng))


def example_inputs(component: Component) -> Inputs:
    """Return the inputs for an estimator or a correction."""
    return advantage_inputs(component) if isinstance(component, AdvantageEstimator) else correction_inputs(component)


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    """Return the tensors of the inputs by name, including the named rewards."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    values |= values.get("reward_parts") or {}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def component_examples(component: Component) -> list[Inputs]:
    """Return all the inputs on which an estimator or a correction is checked."""
    if isinstance(component, AdvantageEstimator):
        return [advantage_inputs(component, equal=equal) for equal in (False, True)]
    return [correction_inputs(component, spread) for spread in (0.003, 0.3, 3.0)]


part_law = partial(law, example=example_inputs, shrinks=False)


def assert_form(values: Tensor, *shapes: tuple[int, ...]) -> None:
    """Check that a result is a finite, detached float32 tensor of one of the shapes."""
    assert tuple(values.shape) in shapes, f"shape {tuple(values.shape)}, expected {' or '.join(map(str, shapes))}"
    assert values.dtype == torch.float32, f"type {values.dtype}, expected torch.float32"
    assert values.isfinite().all(), "the result is not finite"
    assert not values.requires_grad, "the result carries a gradient"


# both


@part_law()
def settings_are_complete(component: Component, inputs: Inputs) -> None:
    """Settings have defaults, descriptions and bounds, and survive a dump and reload; unknown settings are rejected."""
    assert_complete_settings(type(component))


@part_law()
def inputs_are_not_changed(component: Component, inputs: Any) -> None:
    """The inputs do not change, and the same inputs give the same result."""
    untouched = deepcopy(inputs)
    assert torch.equal(component(inputs), component(inputs)), "the same inputs gave different results"
    before = tensors(untouched)
    for name, value in tensors(inputs).items():
        assert torch.equal(value, before[name]), f"{name} was changed"


@part_law()
def masked_positions_are_ignored(component: Component, inputs: Any) -> None:
    """Neither the content of masked positions nor extra padding changes a result."""
    mask, expected = inputs.response_mask, component(inputs)
    fills = {torch.bool: False, torch.int64: -1, torch.float32: torch.nan}
    padded = {
        name: torch.nn.functional.pad(torch.where(mask, value, fill := fills[value.dtype]), (0, 3), value=fill)
        for name, value in tensors(inputs).items()
        if value.shape[1] != 1
    }
    got = component(replace(inputs, **padded))[:, : expected.shape[-1]]
    if expected.shape[-1] != 1:
        got = torch.where(mask, got, expected)
    assert_close(got, expected, "with NaN at masked positions and three columns of padding")


# estimators


@part_law()
def advantages_have_the_form(estimator: AdvantageEstimator, inputs: AdvantageInputs) -> None:
    """Advantages are finite float32 tensors of shape (B, 1) or (B, T), detached from the graph, and 0 outside the mask."""
    advantages = estimator(replace(inputs, rewards=inputs.rewards.clone().requires_grad_()))
    assert_form(advantages, (len(inputs.rewards), 1), tuple(inputs.response_mask.shape))


@law(example=partial(advantage_inputs, equal=True), shrinks=False)
def equal_rewards_have_no_advantage(estimator: AdvantageEstimator, inputs: AdvantageInputs) -> None:
    """If all rewards are equal, including all per-step rewards, every advantage is exactly 0."""
    if "state_ids" in estimator.needs:
        inputs = with_rewards(inputs, torch.zeros_like(inputs.rewards))
    got = estimator(inputs)
    assert not got.any(), f"equal rewards have the advantage {got[got != 0][:1].tolist()}"


@part_law()
def advantages_follow_their_rows(estimator: AdvantageEstimator, inputs: AdvantageInputs) -> None:
    """Reordering the responses reorders their advantages."""
    order = torch.randperm(len(inputs.rewards), generator=torch.Generator().manual_seed(1))
    assert_close(estimator(inputs.select(order)), estimator(inputs)[order], "reordered rows")


@part_law()
def prompts_are_independent(estimator: AdvantageEstimator, inputs: AdvantageInputs) -> None:
    """The advantages of a prompt's responses do not depend on the responses to other prompts."""
    first = inputs.group_ids == 0
    changed = with_rewards(inputs, torch.where(first, inputs.rewards, 7 * inputs.rewards + 3))
    assert_close(estimator(changed)[:SIZE], estimator(inputs)[:SIZE], "advantages with changed rewards of another prompt")


@part_law()
def the_better_response_has_the_larger_advantage(estimator: AdvantageEstimator, inputs: AdvantageInputs) -> None:
    """If two responses to a prompt differ only in the reward, the higher reward gives at least as large an advantage."""
    same = inputs.select(torch.zeros(SIZE, dtype=torch.long))
    paid = None if same.token_rewards is None else torch.zeros_like(same.token_rewards)
    rewards = torch.rand(SIZE, 1, generator=torch.Generator().manual_seed(2)).sort(0).values
    got = estimator(with_rewards(replace(same, token_rewards=paid), rewards)).sum(-1)
    assert (got.diff() >= -1e-6).all(), "a better response has a smaller advantage"


ADVANTAGE_LAWS: tuple[Law, ...] = (
    settings_are_complete,
    advantages_have_the_form,
    inputs_are_not_changed,
    equal_rewards_have_no_advantage,
    advantages_follow_their_rows,
    prompts_are_independent,
    the_better_response_has_the_larger_advantage,
    masked_positions_are_ignored,
)
"""The laws for advantage estimators."""


# corrections


@part_law()
def weights_have_the_form(correction: Correction, inputs: CorrectionInputs) -> None:
    """Weights are finite, non-negative, detached float32 tensors of shape (B, 1), or (B, T) if ``is_per_token``."""
    # log-ratios of +-50 per token over 4096 tokens
    shift = torch.tensor([[50.0], [-50.0], [0.01], [-0.01]]).expand(4, 4096)
    old, mask = torch.full((4, 4096), -60.0), torch.ones(4, 4096, dtype=torch.bool)
    extreme = CorrectionInputs(old, old - shift, mask, torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]))
    for example in (inputs, extreme):
        weights = correction(replace(example, old_log_probs=example.old_log_probs.clone().requires_grad_()))
        size, width = example.response_mask.shape
        assert_form(weights, (size, width if correction.is_per_token else 1))
        assert (weights >= 0).all(), "a weight is negative: it would reverse the gradient"


@part_law()
def agreement_weighs_one(correction: Correction, inputs: CorrectionInputs) -> None:
    """If sampler and trainer agree, every weight is 1."""
    weights = correction(replace(inputs, rollout_log_probs=inputs.old_log_probs))
    wrong = weights[(weights - 1).abs() > 1e-5]
    assert not len(wrong), f"sampler and trainer agree on a response, but its weight is {wrong[:1].tolist()}"


@part_law()
def weights_follow_their_rows(correction: Correction, inputs: CorrectionInputs) -> None:
    """A response's weight does not depend on other responses."""
    weights = correction(inputs)
    for row in range(len(weights)):
        alone = CorrectionInputs(**{field.name: getattr(inputs, field.name)[row : row + 1] for field in fields(inputs)})
        assert_close(correction(alone), weights[row : row + 1], f"row {row} alone")


@law(example=partial(correction_inputs, spread=0.5), shrinks=False)
def it_corrects_something(correction: Correction, inputs: CorrectionInputs) -> None:
    """If sampler and trainer differ by about half a nat per token, some weights differ from 1."""
    weights = correction(inputs)
    assert ((weights - 1).abs() > 1e-4).any(), "every weight is 1"
    assert (ops.per_response(weights, inputs.response_mask) < 1.0).any(), "no response has a weight below 1"


CORRECTION_LAWS: tuple[Law, ...] = (
    settings_are_complete,
    weights_have_the_form,
    inputs_are_not_changed,
    agreement_weighs_one,
    masked_positions_are_ignored,
    weights_follow_their_rows,
    it_corrects_something,
)
"""The laws for mismatch corrections."""
