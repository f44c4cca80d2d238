"""The ten laws every clip policy keeps, as a public conformance kit.

In a plugin's tests, one line::

    from rlzoo.testing import parametrize_with_checks

    test_my_policy = parametrize_with_checks([MyPolicy()])

A policy that breaks a law on purpose names it with a reason in its class attribute ``exempt``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import annotated_types
import pydantic
import torch
from torch import Tensor

from rlzoo import ops
from rlzoo.policy import ClipPolicy
from rlzoo.types import ClipInputs, ClipResult

Law = Callable[[ClipPolicy], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one policy fared on one law.

    Example:
        ``Outcome(law="zero_advantage_zero_gradient", status="opted out", detail="adds a penalty")``
    """

    law: str
    status: Literal["pass", "fail", "opted out"]
    detail: str = ""


def check(policy: ClipPolicy) -> list[Outcome]:
    """Run the ten laws on one policy, without pytest; in the order of `LAWS`."""
    return [_outcome(policy, law) for law in LAWS]


def _outcome(policy: ClipPolicy, law: Law) -> Outcome:
    if law.__name__ in policy.exempt:
        return Outcome(law.__name__, "opted out", policy.exempt[law.__name__])
    try:
        law(policy)
    except Exception as error:  # a policy that raises has failed the law, whatever it raises
        return Outcome(law.__name__, "fail", f"{type(error).__name__}: {error}".strip())
    return Outcome(law.__name__, "pass")


def parametrize_with_checks(policies: Sequence[ClipPolicy]) -> Callable[..., None]:
    """A pytest test function with one case per policy and law; opted-out laws are left out."""
    import pytest

    cases = [(policy, law) for policy in policies for law in LAWS if law.__name__ not in policy.exempt]

    @pytest.mark.parametrize(("policy", "law"), cases, ids=[f"{p.name}-{law.__name__}" for p, law in cases])
    def test_policy_keeps_the_laws(policy: ClipPolicy, law: Law) -> None:
        law(policy)

    return test_policy_keeps_the_laws


def off_policy_inputs(policy: ClipPolicy, seed: int = 0, num_responses: int = 24, max_length: int = 40) -> ClipInputs:
    """Ragged data on which 10 to 40 % of the responses with non-zero advantage is clipped, and every sixth advantage is 0.

    The spread of the token log-ratios is searched so that this policy clips; for one that never does it is 0.1.
    """
    rng = torch.Generator().manual_seed(seed)
    length = torch.randint(1, max_length + 1, (num_responses, 1), generator=rng)
    length[0] = max_length
    mask = torch.arange(max_length) < length
    noise = torch.randn(num_responses, max_length, generator=rng)
    old_log_probs = -torch.rand(num_responses, max_length, generator=rng) - 0.05
    advantages = torch.randn(num_responses, 1, generator=rng)
    advantages[::6] = 0

    def with_spread(spread: float) -> ClipInputs:
        rollout = old_log_probs + 0.001 * noise
        return ClipInputs(old_log_probs + spread * noise, old_log_probs, advantages, mask, rollout)

    low, high = 1e-6, 2.0
    for _ in range(40):
        spread = (low * high) ** 0.5
        fraction = _clip_fraction(policy, with_spread(spread))
        if 0.2 <= fraction <= 0.3:
            return with_spread(spread)
        low, high = (spread, high) if fraction < 0.2 else (low, spread)
    inputs = with_spread(spread)
    return inputs if 0.1 <= _clip_fraction(policy, inputs) <= 0.4 else with_spread(0.1)


def _clip_fraction(policy: ClipPolicy, inputs: ClipInputs) -> float:
    clipped = policy(inputs).clipped.float()
    if clipped.shape[-1] != 1:
        clipped = ops.sequence_mean(clipped, inputs.response_mask)
    return float(clipped[inputs.advantages[:, 0] != 0].mean())


def evaluate(policy: ClipPolicy, inputs: ClipInputs) -> tuple[ClipResult, Tensor]:
    """The policy's result and ``d objective.sum() / d log_probs``, ``(B, T)`` float32, over unmasked positions."""
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    result = policy(dataclasses.replace(inputs, log_probs=log_probs))
    gradient = torch.autograd.grad(_visible(result.objective, inputs).sum(), log_probs)[0]
    return result, gradient.float()


def _visible(values: Tensor, inputs: ClipInputs) -> Tensor:
    return values if values.shape[-1] == 1 else values[inputs.response_mask]


def _assert_close(got: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}")


def settings_are_complete(policy: ClipPolicy) -> None:
    """1. Default-constructible, round-trips through its dump, refuses unknown keys; fields have descriptions and bounds."""
    kind = type(policy)
    assert kind.model_validate(kind().model_dump()) == kind(), "the dump of the defaults does not give the defaults back"
    try:
        kind.model_validate({"no_such_setting": 1})
    except pydantic.ValidationError:
        pass
    else:
        raise AssertionError("an unknown key is accepted")
    for name, field in kind.model_fields.items():
        assert field.description, f"field {name!r} has no description"
        if any(number in str(field.annotation) for number in ("float", "int")):
            bounds = (
                annotated_types.Ge,
                annotated_types.Gt,
                annotated_types.Le,
                annotated_types.Lt,
                annotated_types.Interval,
            )
            assert any(isinstance(mark, bounds) for mark in field.metadata), f"number {name!r} has no bound"


def ratio_one_is_reinforce(policy: ClipPolicy) -> None:
    """2. At ratio 1 nothing is clipped and the gradient is A times one positive constant per row."""
    inputs = off_policy_inputs(policy)
    inputs = dataclasses.replace(inputs, log_probs=inputs.old_log_probs)
    result, gradient = evaluate(policy, inputs)
    assert not _visible(result.clipped, inputs).any(), "something is clipped at ratio 1"
    per_row = ops.sequence_mean(gradient, inputs.response_mask)
    _assert_close(gradient, torch.where(inputs.response_mask, per_row, 0.0), "the gradient differs between a row's tokens")
    rows = inputs.advantages != 0
    assert (per_row[rows] / inputs.advantages[rows] > 0).all(), "the gradient is not along the advantage"


def masked_positions_are_ignored(policy: ClipPolicy) -> None:
    """3. NaN and infinity on masked positions change neither value nor gradient, with padding on either side."""
    inputs = off_policy_inputs(policy)
    expected, expected_gradient = evaluate(policy, inputs)
    for poison in (float("nan"), float("inf"), float("-inf")):
        spoiled = _map_tokens(inputs, lambda values, poison=poison: torch.where(inputs.response_mask, values, poison))  # type: ignore[misc]
        result, gradient = evaluate(policy, spoiled)
        _assert_close(_visible(result.objective, inputs), _visible(expected.objective, inputs), f"{poison} in the padding")
        _assert_close(gradient, expected_gradient, f"gradient with {poison} in the padding")
        left = _map_tokens(spoiled, lambda values: values.flip(-1))
        result, gradient = evaluate(policy, dataclasses.replace(left, response_mask=inputs.response_mask.flip(-1)))
        _assert_close(gradient.flip(-1), expected_gradient, "gradient with the padding on the left")


def _map_tokens(inputs: ClipInputs, change: Callable[[Tensor], Tensor]) -> ClipInputs:
    names = ("log_probs", "old_log_probs", "rollout_log_probs")
    return dataclasses.replace(inputs, **{name: change(getattr(inputs, name)) for name in names})


def rows_are_independent(policy: ClipPolicy) -> None:
    """4. A row alone gives what the row in a batch gives (scopes token and sequence): micro-batching is safe."""
    if policy.scope == "batch":
        return
    inputs = off_policy_inputs(policy)
    whole, gradient = evaluate(policy, inputs)
    for row in range(len(inputs.log_probs)):
        values = {field.name: getattr(inputs, field.name)[row : row + 1] for field in dataclasses.fields(inputs)}
        alone, alone_gradient = evaluate(policy, ClipInputs(**values))
        _assert_close(alone.objective, whole.objective[row : row + 1], f"objective of row {row} alone")
        _assert_close(alone_gradient, gradient[row : row + 1], f"gradient of row {row} alone")
        assert torch.equal(alone.clipped, whole.clipped[row : row + 1]), f"clip decision of row {row} alone differs"


def zero_advantage_zero_gradient(policy: ClipPolicy) -> None:
    """5. Where the advantage is zero, so is the gradient; and nothing counts as clipped there."""
    inputs = off_policy_inputs(policy)
    rows = inputs.advantages[:, 0] == 0
    result, gradient = evaluate(policy, inputs)
    assert (gradient[rows] == 0).all(), "a response with zero advantage has a gradient"
    assert not result.clipped[rows].any(), "a response with zero advantage counts as clipped"


def extremes_stay_finite(policy: ClipPolicy) -> None:
    """6. Log-ratios of +-50 per token over 4096 tokens give finite values and gradients for every sign of A."""
    shift = torch.tensor([50.0, 50.0, 50.0, -50.0, -50.0, -50.0])[:, None].expand(6, 4096)
    old = torch.full((6, 4096), -1.0)
    advantages = torch.tensor([1.0, 0.0, -1.0, 1.0, 0.0, -1.0])[:, None]
    mask = torch.ones(6, 4096, dtype=torch.bool)
    result, gradient = evaluate(policy, ClipInputs(old + shift, old, advantages, mask, old))
    assert result.objective.isfinite().all(), f"objective {result.objective.flatten()[:6].tolist()} is not finite"
    assert gradient.isfinite().all(), "the gradient is not finite"


def answers_in_float32(policy: ClipPolicy) -> None:
    """7. bfloat16 in, float32 out, in the shapes of the contract."""
    inputs = _map_tokens(off_policy_inputs(policy), lambda values: values.bfloat16())
    result, _ = evaluate(policy, inputs)
    size, max_length = inputs.log_probs.shape
    shape = (size, 1) if policy.scope == "sequence" else (size, max_length)
    shapes = {(size, 1), (size, max_length)} if policy.scope == "batch" else {shape}
    assert result.objective.dtype == torch.float32, f"objective is {result.objective.dtype}"
    assert result.clipped.dtype == torch.bool, f"clipped is {result.clipped.dtype}"
    for name in ("objective", "log_ratio", "clipped"):
        got = tuple(getattr(result, name).shape)
        assert got in shapes, f"{name} is {got}, expected {shape}"


def is_pure(policy: ClipPolicy) -> None:
    """8. Only log_probs gets a gradient, inputs stay as they were, and the same inputs give the same answer."""
    inputs = off_policy_inputs(policy)
    names = ("log_probs", "old_log_probs", "advantages", "rollout_log_probs")
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in names}
    first = policy(dataclasses.replace(inputs, **leaves))
    torch.autograd.backward(_visible(first.objective, inputs).sum())
    assert leaves["log_probs"].grad is not None, "log_probs has no gradient"
    for name in names[1:]:
        assert leaves[name].grad is None, f"{name} gets a gradient"
        assert torch.equal(leaves[name], getattr(inputs, name)), f"{name} was changed"
    assert not first.log_ratio.requires_grad, "log_ratio carries a gradient; detach it"
    second = policy(inputs)
    assert torch.equal(first.objective, second.objective), "the same inputs gave another objective"


def clipped_means_no_gradient(policy: ClipPolicy) -> None:
    """9. Where A != 0 and the log-ratio is below 20: ``clipped`` exactly where the gradient is zero; and some is."""
    inputs = off_policy_inputs(policy)
    result, gradient = evaluate(policy, inputs)
    fraction = _clip_fraction(policy, inputs)
    assert 0.1 <= fraction <= 0.4, f"clips {fraction:.0%} of ragged data of any spread, expected 10 to 40 %"
    relevant = inputs.response_mask & (inputs.advantages != 0) & (result.log_ratio.abs() < ops.LOG_RATIO_LIMIT)
    disagree = relevant & (result.clipped != (gradient == 0))
    assert not disagree.any(), f"clipped and zero gradient disagree at {disagree.nonzero()[0].tolist()}"


def compiles(policy: ClipPolicy) -> None:
    """10. Traces in one graph with ``torch.compile(fullgraph=True, backend="aot_eager")``, to the same values."""
    inputs = off_policy_inputs(policy)
    names = ("log_probs", "old_log_probs", "advantages", "response_mask", "rollout_log_probs")

    def objective(*tensors: Tensor) -> Tensor:
        return policy(ClipInputs(*tensors)).objective

    traced: Any = torch.compile(objective, fullgraph=True, backend="aot_eager")
    tensors = [getattr(inputs, name) for name in names]
    _assert_close(traced(*tensors), objective(*tensors), "compiled objective")


LAWS: tuple[Law, ...] = (
    settings_are_complete,
    ratio_one_is_reinforce,
    masked_positions_are_ignored,
    rows_are_independent,
    zero_advantage_zero_gradient,
    extremes_stay_finite,
    answers_in_float32,
    is_pure,
    clipped_means_no_gradient,
    compiles,
)
"""The laws, in order; each takes a policy and raises AssertionError with what it saw."""
