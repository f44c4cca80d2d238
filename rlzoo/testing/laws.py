"""What every clip policy keeps: ten laws of the contract, and two on `scaled` and `updated`."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import annotated_types
import pydantic
import torch
from torch import Tensor

from rlzoo import ops
from rlzoo.policy import ClipPolicy
from rlzoo.testing import data
from rlzoo.testing.data import INTEGER_TOKEN_FIELDS, TOKEN_FIELDS, evaluate, left_padded, map_tensors, visible
from rlzoo.types import ClipInputs

Example = Callable[[ClipPolicy], ClipInputs]


@dataclass(frozen=True)
class Law:
    """One law: what it says, the inputs it is held on, and the check, which raises AssertionError with what it saw.

    Example:
        ``law(policy)`` holds a policy to it; ``law(policy, inputs)`` does so on other inputs.
    """

    name: str
    statement: str
    check: Callable[[ClipPolicy, ClipInputs], None]
    example: Example
    shrinks: bool  # whether a failure is worth repeating on smaller inputs

    def __call__(self, policy: ClipPolicy, inputs: ClipInputs | None = None) -> None:
        """Hold a policy to this law, on its example or on given inputs."""
        self.check(policy, self.example(policy) if inputs is None else inputs)


def law(*, example: Example = data.off_policy_inputs, shrinks: bool = True) -> Callable[[Callable[..., None]], Law]:
    """Make a law of a check; its docstring is the statement, without the number."""

    def make(check: Callable[[ClipPolicy, ClipInputs], None]) -> Law:
        statement = (check.__doc__ or "").partition("\n")[0].partition(". ")[2]
        return Law(check.__name__, statement, check, example, shrinks)

    return make


def _assert_close(got: Tensor, expected: Tensor, what: str) -> None:
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)} in place of {tuple(expected.shape)}"
    wrong = ~torch.isclose(got, expected, rtol=1e-4, atol=1e-6)
    assert not wrong.any(), f"{what}: {got[wrong][0]:.6g} in place of {expected[wrong][0]:.6g}"


@law(shrinks=False)
def settings_are_complete(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """1. Default-constructible, round-trips through its dump, refuses unknown keys; fields have descriptions and bounds."""
    kind = type(policy)
    assert kind.model_validate(kind().model_dump()) == kind(), "the dump of the defaults does not give the defaults back"
    try:
        kind.model_validate({"no_such_setting": 1})
    except pydantic.ValidationError:
        pass
    else:
        raise AssertionError("an unknown key is accepted")
    bounds = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt, annotated_types.Interval)
    for name, field in kind.model_fields.items():
        assert field.description, f"field {name!r} has no description"
        if any(number in str(field.annotation) for number in ("float", "int")):
            items = any(f"{bound.__name__}(" in str(field.annotation) for bound in bounds)  # of a tuple
            assert items or any(isinstance(mark, bounds) for mark in field.metadata), f"number {name!r} has no bound"


@law(example=data.on_policy_inputs)
def ratio_one_is_reinforce(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """2. At ratio 1 nothing is clipped and the gradient is A times one positive constant per row."""
    result, gradient = evaluate(policy, inputs)
    assert not visible(result.clipped, inputs).any(), "something is clipped at ratio 1"
    per_row = ops.sequence_mean(gradient, inputs.response_mask)
    _assert_close(gradient, torch.where(inputs.response_mask, per_row, 0.0), "the gradient differs between a row's tokens")
    rows = (inputs.advantages != 0) & inputs.response_mask.any(dim=-1, keepdim=True)
    assert (per_row[rows] / inputs.advantages[rows] > 0).all(), "the gradient is not along the advantage"


@law()
def masked_positions_are_ignored(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """3. NaN and infinity on masked positions change neither value nor gradient, with padding on either side."""
    mask = inputs.response_mask
    expected, expected_gradient = evaluate(policy, inputs)
    for poison in (float("nan"), float("inf"), float("-inf")):
        spoiled = map_tensors(inputs, partial(torch.Tensor.masked_fill, mask=~mask, value=poison), TOKEN_FIELDS)
        result, gradient = evaluate(policy, spoiled)
        _assert_close(visible(result.objective, inputs), visible(expected.objective, inputs), f"{poison} in the padding")
        _assert_close(gradient, expected_gradient, f"gradient with {poison} in the padding")
        left = map_tensors(spoiled, lambda values: left_padded(values, mask), (*TOKEN_FIELDS, *INTEGER_TOKEN_FIELDS))
        result, gradient = evaluate(policy, dataclasses.replace(left, response_mask=left_padded(mask, mask)))
        _assert_close(gradient, left_padded(expected_gradient, mask), "gradient with the padding on the left")


@law()
def rows_are_independent(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """4. A row alone gives what the row in a batch gives (scopes token and sequence): micro-batching is safe."""
    if policy.scope == "batch":
        return
    whole, gradient = evaluate(policy, inputs)
    for row in range(len(inputs.log_probs)):
        own = slice(row, row + 1)
        alone, alone_gradient = evaluate(policy, map_tensors(inputs, operator.itemgetter(own)))
        _assert_close(alone.objective, whole.objective[own], f"objective of row {row} alone")
        _assert_close(alone_gradient, gradient[own], f"gradient of row {row} alone")
        assert torch.equal(alone.clipped, whole.clipped[own]), f"clip decision of row {row} alone differs"


@law()
def zero_advantage_zero_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """5. Where the advantage is zero, so is the gradient; and nothing counts as clipped there."""
    rows = inputs.advantages[:, 0] == 0
    result, gradient = evaluate(policy, inputs)
    assert (gradient[rows] == 0).all(), (
        "a response with zero advantage has a gradient; if it should, set learns_without_advantages and opt out of this law"
    )
    assert not result.clipped[rows].any(), "a response with zero advantage counts as clipped"


@law(example=data.extreme_inputs)
def extremes_stay_finite(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """6. Log-ratios of +-50 per token over 4096 tokens give finite values and gradients for every sign of A."""
    result, gradient = evaluate(policy, inputs)
    assert result.objective.isfinite().all(), f"the objective is not finite: {result.objective.flatten()[:6].tolist()}"
    assert gradient.isfinite().all(), "the gradient is not finite"


@law()
def answers_in_float32(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """7. bfloat16 in, float32 out, in the shapes of the contract."""
    result, _ = evaluate(policy, map_tensors(inputs, lambda values: values.bfloat16(), TOKEN_FIELDS))
    size, max_length = inputs.log_probs.shape
    either = {(size, 1), (size, max_length)}
    shapes = {"token": {(size, max_length)}, "sequence": {(size, 1)}, "batch": either}[policy.scope]
    assert result.objective.dtype == torch.float32, f"objective is {result.objective.dtype}"
    assert result.clipped.dtype == torch.bool, f"clipped is {result.clipped.dtype}"
    for name, allowed in (("objective", shapes), ("log_ratio", either), ("clipped", either)):
        got = tuple(getattr(result, name).shape)
        assert got in allowed, f"{name} has another shape than scope {policy.scope!r} asks for: {got}, not {allowed}"


@law()
def is_pure(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """8. Only log_probs gets a gradient, inputs stay as they were, and the same inputs give the same answer."""
    names = ("log_probs", "old_log_probs", "advantages", "rollout_log_probs")
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in names}
    mask = inputs.response_mask.clone()
    first = policy(dataclasses.replace(inputs, **leaves, response_mask=mask))
    torch.autograd.backward(visible(first.objective, inputs).sum())
    assert leaves["log_probs"].grad is not None, "log_probs has no gradient"
    for name in names:
        assert name == "log_probs" or leaves[name].grad is None, f"{name} gets a gradient"
        assert torch.equal(leaves[name], getattr(inputs, name)), f"{name} was changed"
    assert torch.equal(mask, inputs.response_mask), "response_mask was changed"
    assert not first.log_ratio.requires_grad, "log_ratio carries a gradient; detach it"
    second = policy(inputs)
    assert torch.equal(first.objective, second.objective), "the same inputs gave another objective"


@law(example=data.clipping_inputs)
def clipped_means_no_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """9. Where A != 0 and the log-ratio is below 20: ``clipped`` exactly where the gradient is zero; and some is."""
    result, gradient = evaluate(policy, inputs)
    relevant = inputs.response_mask & (inputs.advantages != 0) & (result.log_ratio.abs() < ops.LOG_RATIO_LIMIT)
    disagree = relevant & (result.clipped != (gradient == 0))
    assert not disagree.any(), f"clipped and zero gradient disagree: at row and token {disagree.nonzero()[:1].tolist()}"


@law(shrinks=False)
def compiles(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """10. Traces in one graph with ``torch.compile(fullgraph=True, backend="aot_eager")``, to the same values."""
    given = {name: values for name in data.ALL_FIELDS if (values := getattr(inputs, name)) is not None}
    constants: dict[str, Any] = {name: getattr(inputs, name) for name in ("max_length", "progress")}

    def objective(**tensors: Any) -> Tensor:
        return policy(ClipInputs(**tensors, **constants)).objective

    torch.compiler.reset()  # what other policies left in its caches counts against this one
    traced: Any = torch.compile(objective, fullgraph=True, backend="aot_eager")
    _assert_close(traced(**given), objective(**given), "compiled objective")


@law(shrinks=False)
def widths_scale(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """11. ``scaled(f)`` multiplies the widths and clips less the larger f is; a rule without a width refuses."""
    try:
        same = policy.scaled(1.0)
    except ValueError:
        assert not policy.width_fields(), "scaled(1) is refused, and the rule has fields marked Width"
        return
    assert same == policy, "scaled(1) is another policy"
    fractions = [data.clip_fraction(policy.scaled(factor), inputs) for factor in (0.25, 1.0, 4.0)]
    assert fractions[0] > fractions[2], f"wider bands do not clip less: clip fractions at 1/4, 1, 4 times the width {fractions}"


@law(shrinks=False)
def update_is_pure(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """12. ``updated`` gives a frozen policy of the same kind, the same for the same sums, that survives its dump."""
    result, _ = evaluate(policy, inputs)
    before = policy.model_dump()
    empty = data.clip_stats(dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages)), result)
    stats = data.clip_stats(inputs, result)
    for sums in (stats, empty):
        first, second = policy.updated(sums), policy.updated(sums)
        assert type(first) is type(policy), f"updated gives a {type(first).__name__}"
        assert first == second, "the same sums gave another policy"
        assert type(policy).model_validate(first.model_dump()) == first, "an updated policy does not survive its dump"
        assert evaluate(first, inputs)[0].objective.isfinite().all(), "an updated policy gives values that are not finite"
        if ratio_one_is_reinforce.name not in policy.exempt:
            at_one = data.on_policy_inputs(first)
            assert not visible(first(at_one).clipped, at_one).any(), "an updated policy clips at ratio 1"
    assert policy.model_dump() == before, "updated changed the policy it was called on"


LAWS: tuple[Law, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Law))
"""The laws, in the order in which they are written down."""
