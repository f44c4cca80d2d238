"""The laws that advantage estimators and mismatch corrections must obey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.advantages import AdvantageEstimator, AdvantageInputs
from rlzoo.core.corrections import Correction, CorrectionInputs
from rlzoo.testing.laws import assert_close, assert_complete_settings

Part = TypeVar("Part", AdvantageEstimator, Correction)
SIZE = 32
"""Number of responses per prompt in the examples; some estimators use subsets of up to 32 responses."""


class PartLaw(Generic[Part]):
    """One law for estimators or corrections: its name, its statement, and its check, which raises an AssertionError."""

    def __init__(self, check: Callable[[Part], None]) -> None:
        self.name = check.__name__
        self.check: Callable[[Part], None] = check
        self.statement = (check.__doc__ or "").partition("\n")[0]

    def __call__(self, part: Part) -> None:
        """Check an estimator or a correction against this law."""
        self.check(part)


def broken(laws: tuple[PartLaw[Part], ...], part: Part) -> Iterator[tuple[str, str]]:
    """Yield each law that an estimator or a correction breaks without an exemption, with the observed failure."""
    for law in laws:
        if law.name in part.exempt:
            continue
        try:
            law(part)
        except AssertionError as error:
            yield law.name, str(error).partition("\n")[0]
        except Exception as error:  # raising any exception breaks the law
            yield law.name, f"{type(error).__name__}: {error}".partition("\n")[0]


def settings_are_complete(part: AdvantageEstimator | Correction) -> None:
    """Settings have defaults, descriptions and bounds, and survive a dump and reload; unknown settings are rejected."""
    assert_complete_settings(type(part))


# estimators


def advantage_inputs(estimator: AdvantageEstimator, *, equal: bool = False, seed: int = 0) -> AdvantageInputs:
    """Return three groups of ragged responses with one to three turns, and every field that an estimator may need."""
    rng = torch.Generator().manual_seed(seed)
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
    return AdvantageInputs(
        rewards,
        torch.arange(3).repeat_interleave(SIZE)[:, None],
        mask,
        turns,
        paid if "token_rewards" in estimator.needs else None,
        states,
        torch.where(mask, probs.log(), 0.0),
        torch.where(mask, probs.square() + (1 - probs).square() / 2, 0.0),  # two other tokens share the remaining probability
    )


def advantages_have_the_form(estimator: AdvantageEstimator) -> None:
    """Advantages are finite float32 tensors of shape (B, 1) or (B, T), detached from the graph, and 0 outside the mask."""
    inputs = advantage_inputs(estimator)
    got = estimator(replace(inputs, rewards=inputs.rewards.clone().requires_grad_()))
    allowed = ((len(inputs.rewards), 1), tuple(inputs.response_mask.shape))
    assert tuple(got.shape) in allowed, f"shape {tuple(got.shape)}, expected {' or '.join(map(str, allowed))}"
    assert got.dtype == torch.float32, f"type {got.dtype}, expected torch.float32"
    assert got.isfinite().all(), "an advantage is not finite"
    assert not got.requires_grad, "an advantage carries a gradient"


def rewards_are_not_changed(estimator: AdvantageEstimator) -> None:
    """The inputs do not change, and the same inputs give the same advantages."""
    _assert_pure(estimator, advantage_inputs(estimator), advantage_inputs(estimator))


def _assert_pure(part: Callable[[Any], Tensor], inputs: Any, same: Any) -> None:
    assert torch.equal(part(inputs), part(inputs)), "the same inputs gave different results"
    for field in fields(inputs):
        got, expected = getattr(inputs, field.name), getattr(same, field.name)
        assert got is None or torch.equal(got, expected), f"{field.name} was changed"


def equal_rewards_have_no_advantage(estimator: AdvantageEstimator) -> None:
    """If all rewards are equal, including all per-step rewards, every advantage is exactly 0."""
    inputs = advantage_inputs(estimator, equal=True)
    if "state_ids" in estimator.needs:
        inputs = replace(inputs, rewards=torch.zeros_like(inputs.rewards))
    got = estimator(inputs)
    assert not got.any(), f"equal rewards have the advantage {got[got != 0][:1].tolist()}"


def advantages_follow_their_rows(estimator: AdvantageEstimator) -> None:
    """Reordering the responses reorders their advantages."""
    inputs = advantage_inputs(estimator)
    order = torch.randperm(len(inputs.rewards), generator=torch.Generator().manual_seed(1))
    assert_close(estimator(inputs.select(order)), estimator(inputs)[order], "reordered rows")


def prompts_are_independent(estimator: AdvantageEstimator) -> None:
    """The advantages of a prompt's responses do not depend on the responses to other prompts."""
    inputs = advantage_inputs(estimator)
    first = inputs.group_ids == 0
    changed = replace(inputs, rewards=torch.where(first, inputs.rewards, 7 * inputs.rewards + 3))
    assert_close(estimator(changed)[:SIZE], estimator(inputs)[:SIZE], "advantages with changed rewards of another prompt")


def the_better_response_has_the_larger_advantage(estimator: AdvantageEstimator) -> None:
    """If two responses to a prompt differ only in the reward, the higher reward gives at least as large an advantage."""
    inputs = advantage_inputs(estimator)
    same = inputs.select(torch.zeros(SIZE, dtype=torch.long))
    paid = None if same.token_rewards is None else torch.zeros_like(same.token_rewards)
    rewards = torch.rand(SIZE, 1, generator=torch.Generator().manual_seed(2)).sort(0).values
    got = estimator(replace(same, rewards=rewards, token_rewards=paid)).sum(-1)
    assert (got.diff() >= -1e-6).all(), "a better response has a smaller advantage"


def padding_is_ignored(estimator: AdvantageEstimator) -> None:
    """Neither extra padding columns nor the content of masked positions changes an advantage."""
    inputs = advantage_inputs(estimator)
    expected = estimator(inputs)

    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    padding = {torch.bool: False, torch.int64: -1, torch.float32: float("nan")}
    wide = {
        name: torch.nn.functional.pad(value, (0, 3), value=padding[value.dtype])
        for name, value in values.items()
        if value is not None and value.shape[1] != 1
    }
    got = estimator(replace(inputs, **wide))
    assert_close(got[:, : expected.shape[-1]], expected, "advantages with three extra columns of padding")


ADVANTAGE_LAWS: tuple[PartLaw[AdvantageEstimator], ...] = tuple(
    PartLaw(check)
    for check in (
        settings_are_complete,
        advantages_have_the_form,
        rewards_are_not_changed,
        equal_rewards_have_no_advantage,
        advantages_follow_their_rows,
        prompts_are_independent,
        the_better_response_has_the_larger_advantage,
        padding_is_ignored,
    )
)
"""The laws for advantage estimators."""


# corrections


def correction_inputs(seed: int = 0, spread: float = 0.3) -> CorrectionInputs:
    """Return ragged responses with gaps; sampler and trainer differ by about ``spread`` nats per token."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.arange(20) < torch.randint(1, 21, (24, 1), generator=rng)
    mask[::3, 2] = False
    mask[:, 0] = True
    old = -torch.rand(24, 20, generator=rng) - 0.5
    sampled = old - spread * torch.randn(24, 20, generator=rng)
    return CorrectionInputs(old, sampled.clamp(max=-1e-3), mask, torch.randn(24, 1, generator=rng))


def weights_have_the_form(correction: Correction) -> None:
    """Weights are finite, non-negative, detached float32 tensors of shape (B, 1), or (B, T) if ``is_per_token``."""
    inputs = correction_inputs()
    got = correction(replace(inputs, old_log_probs=inputs.old_log_probs.clone().requires_grad_()))
    expected = tuple(inputs.response_mask.shape) if correction.is_per_token else (len(inputs.response_mask), 1)
    assert tuple(got.shape) == expected, f"shape {tuple(got.shape)}, expected {expected}"
    assert got.dtype == torch.float32, f"type {got.dtype}, expected torch.float32"
    assert not got.requires_grad, "a weight carries a gradient"
    assert got.isfinite().all(), "a weight is not finite"
    assert (got >= 0).all(), "a weight is negative: it would reverse the gradient"


def agreement_weighs_one(correction: Correction) -> None:
    """If sampler and trainer agree, every weight is 1."""
    inputs = correction_inputs()
    weights = correction(replace(inputs, rollout_log_probs=inputs.old_log_probs))
    wrong = weights[(weights - 1).abs() > 1e-5]
    assert not len(wrong), f"sampler and trainer agree on a response, but its weight is {wrong[:1].tolist()}"


def masked_values_are_ignored(correction: Correction) -> None:
    """Neither NaN at masked positions nor extra padding changes a weight."""
    inputs = correction_inputs()
    mask, expected = inputs.response_mask, correction(inputs)
    spoiled = replace(
        inputs,
        old_log_probs=inputs.old_log_probs.masked_fill(~mask, torch.nan),
        rollout_log_probs=inputs.rollout_log_probs.masked_fill(~mask, torch.inf),
    )
    old, sampled, visible = (
        torch.nn.functional.pad(values, (0, 3)) for values in (spoiled.old_log_probs, spoiled.rollout_log_probs, mask)
    )
    wide = CorrectionInputs(old, sampled, visible, inputs.advantages)
    for what, weights in (("NaN in the padding", correction(spoiled)), ("extra padding", correction(wide))):
        got = weights[:, : expected.shape[-1]]
        if expected.shape[-1] != 1:
            got = torch.where(mask, got, expected)
        assert_close(got, expected, what)


def weights_follow_their_rows(correction: Correction) -> None:
    """A response's weight does not depend on other responses."""
    inputs = correction_inputs()
    whole = correction(inputs)
    for row in range(len(whole)):
        own = slice(row, row + 1)
        alone = CorrectionInputs(**{field.name: getattr(inputs, field.name)[own] for field in fields(inputs)})
        assert_close(correction(alone), whole[own], f"row {row} alone")


def weights_stay_finite(correction: Correction) -> None:
    """Log-ratios of +-50 per token over 4096 tokens give finite, non-negative weights."""
    shift = torch.tensor([[50.0], [-50.0], [0.01], [-0.01]]).expand(4, 4096)
    old = torch.full((4, 4096), -60.0)
    mask = torch.ones(4, 4096, dtype=torch.bool)
    weights = correction(CorrectionInputs(old, old - shift, mask, torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])))
    assert weights.isfinite().all(), "a weight is not finite"
    assert (weights >= 0).all(), "a weight is negative"


def inputs_are_not_changed(correction: Correction) -> None:
    """The inputs do not change, and the same inputs give the same weights."""
    _assert_pure(correction, correction_inputs(), correction_inputs())


def it_corrects_something(correction: Correction) -> None:
    """If sampler and trainer differ by about half a nat per token, some weights differ from 1."""
    weights = correction(correction_inputs(spread=0.5))
    assert ((weights - 1).abs() > 1e-4).any(), "every weight is 1"
    assert (ops.per_response(weights, correction_inputs().response_mask) < 1.0).any(), "no response has a weight below 1"


CORRECTION_LAWS: tuple[PartLaw[Correction], ...] = tuple(
    PartLaw(check)
    for check in (
        settings_are_complete,
        weights_have_the_form,
        inputs_are_not_changed,
        agreement_weighs_one,
        masked_values_are_ignored,
        weights_follow_their_rows,
        weights_stay_finite,
        it_corrects_something,
    )
)
"""The laws for mismatch corrections."""
