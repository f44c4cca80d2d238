"""The laws of clip policies, on form, layout, numbers, meaning and settings. The first broken law often explains others."""

from __future__ import annotations

import dataclasses
import math
import operator
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any, Literal

import annotated_types
import pydantic
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlzoo.core import ops
from rlzoo.core.errors import first_mistake
from rlzoo.core.policy import NAMED, ClipPolicy, ClipStats, form_problem
from rlzoo.core.settings import Settings
from rlzoo.core.types import ClipInputs, ClipResult
from rlzoo.testing import data
from rlzoo.testing.data import TOKEN_FIELDS, answer, call, evaluate, fresh, map_tensors, visible
from rlzoo.testing.reach import Watched

Example = Callable[[Any], Any]
Evaluation = tuple[ClipResult, Tensor]  # a result and the gradient of its objective


@dataclass(frozen=True)
class Law:
    """A law with its statement, its example inputs and its check, which raises an AssertionError with the observed values.

    The check and the example take a rule, an estimator or a correction; see `rlzoo.testing.parts`.
    """

    name: str
    statement: str
    check: Callable[[Any, Any], None]
    example: Example
    shrinks: bool  # whether to shrink the inputs when the law fails
    everywhere: bool = False  # whether the law must also hold on `data.reaching_inputs`

    def examples(self, policy: Any) -> Iterator[Any]:
        """Yield the inputs on which to check a policy. The first may be created without calling the policy."""
        yield self.example(policy)
        if self.everywhere:
            yield from data.reaching_inputs(policy)

    def __call__(self, policy: Any, inputs: Any = None) -> None:
        """Check a policy against this law, on the law's examples or on the given inputs."""
        for example in self.examples(policy) if inputs is None else [inputs]:
            self.check(policy, example)

    def failure(self, policy: Any, inputs: Any = None) -> Exception | None:
        """Return the exception that checking a policy raises, or None. Any exception fails the law."""
        try:
            self(policy, inputs)
        except Exception as error:
            return error
        return None


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, preceded by the error's type unless that is AssertionError."""
    text = first_mistake(error) if isinstance(error, pydantic.ValidationError) else str(error).strip().partition("\n")[0]
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"


def law(
    *, example: Example = data.off_policy_inputs, shrinks: bool = True, everywhere: bool = False
) -> Callable[[Callable[..., None]], Law]:
    """Turn a check into a law. The first line of the check's docstring becomes the statement."""

    def make(check: Callable[[Any, Any], None]) -> Law:
        return Law(check.__name__, (check.__doc__ or "").partition("\n")[0], check, example, shrinks, everywhere)

    return make


def _some_inputs(policy: ClipPolicy) -> ClipInputs:
    """Return inputs that are created without calling the policy."""
    return data.uniform_inputs(policy, (0.0, 0.1), length=2, advantage=1.0)


def assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float = 1e-4) -> None:
    """Check that two tensors have the same shape and nearly the same values. ``what`` describes them."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    wrong = ~torch.isclose(got, expected, rtol=tolerance, atol=1e-6, equal_nan=True)
    assert not wrong.any(), f"{what}: {got[wrong][0]:.4g}, expected {expected[wrong][0]:.4g}"


class LawError(AssertionError):
    """Raised if a law fails on inputs other than those passed to it. ``inputs`` holds the inputs on which it failed."""

    def __init__(self, what: str, inputs: ClipInputs) -> None:
        super().__init__(what)
        self.inputs = inputs


def _assert_nowhere(places: Tensor, what: str, inputs: ClipInputs | None = None) -> None:
    """Raise an error that names the first True position of ``places``, ``(B, T)``, with its row of ``inputs`` if given."""
    if places.any():
        row, token = places.nonzero()[0].tolist()
        what = f"{what} (row {row}, token {token})"
        raise (
            AssertionError(what)
            if inputs is None
            else LawError(what, map_tensors(inputs, operator.itemgetter(slice(row, row + 1))))
        )


def _tokens(values: Tensor, inputs: ClipInputs) -> Tensor:
    """Expand per-response or per-token values to ``(B, T)``."""
    return values.expand(inputs.response_mask.shape)


def _assert_same(policy: ClipPolicy, inputs: ClipInputs, expected: Evaluation, where: str) -> None:
    """Check that the inputs give the expected objective, gradient and clip decisions on response tokens."""
    result, gradient = evaluate(policy, inputs)
    got, wanted = (_tokens(answer.objective, inputs)[inputs.response_mask] for answer in (result, expected[0]))
    assert_close(got, wanted, f"objective {where}")
    assert_close(gradient, expected[1], f"gradient {where}")
    changed = _tokens(result.clipped, inputs) != _tokens(expected[0].clipped, inputs)
    _assert_nowhere(changed & inputs.response_mask, f"another clip decision {where}")


def _mapped(evaluation: Evaluation, change: Callable[[Tensor], Tensor]) -> Evaluation:
    """Return a result and its gradient with ``change`` applied to each tensor."""
    result, gradient = evaluation
    return ClipResult(change(result.objective), change(result.log_ratio), change(result.clipped)), change(gradient)


# form


@law(example=_some_inputs, shrinks=False)
def settings_are_complete(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """The rule has defaults, round-trips through its dump and rejects unknown keys; fields have descriptions and bounds."""
    assert_complete_settings(type(policy))


def assert_complete_settings(kind: type[Settings]) -> None:
    """Check the class of a rule, an estimator or a correction. See `settings_are_complete`."""
    assert kind.model_config.get("frozen"), "instances are not frozen"
    assert _survives_its_dump(kind()), "dumping and loading the defaults does not restore them"
    try:
        kind.model_validate({"no_such_setting": 1})
    except pydantic.ValidationError:
        pass
    else:
        raise AssertionError("an unknown key is accepted")
    for name, field in kind.model_fields.items():
        assert field.description, f"field {name!r} has no description"
        is_number = {field.annotation, *typing.get_args(field.annotation)} & {float, int}
        assert not is_number or any(isinstance(mark, BOUNDS) for mark in field.metadata), f"number {name!r} has no bound"


def _survives_its_dump(settings: Settings) -> bool:
    """Whether an object can be restored from its dump, both as Python objects and as JSON, the format of checkpoints."""
    kind = type(settings)
    try:
        restored = (kind.model_validate(settings.model_dump()), kind.model_validate_json(settings.model_dump_json()))
    except ValueError:
        return False
    return all(copy == settings for copy in restored)


BOUNDS = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt, annotated_types.Interval)


@law(example=_some_inputs, shrinks=False)
def names_are_known(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Estimator, reduction, scope, needs and the laws in `exempt` are known names, and every exemption has a reason."""
    from rlzoo.core.zoo import policy_problem

    problem = policy_problem(type(policy))
    assert problem is None, problem
    known = [law.name for law in LAWS]
    for name, reason in policy.exempt.items():
        assert name in known, f"the rule opts out of {name!r}, which is not a law"
        assert reason.strip(), f"the rule opts out of {name!r} without a reason"


@law(example=data.ragged_inputs, everywhere=True)
def is_pure(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """A call changes no inputs, settings or globals; equal inputs give equal results; log_ratio is detached."""
    first, first_gradient = evaluate(policy, inputs)
    example, settings, globals_ = fresh(inputs), policy.model_dump(), (torch.get_default_dtype(), torch.is_grad_enabled())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2**31)  # no step has this seed
        state = torch.get_rng_state()
        call(policy, example)
        is_untouched = torch.equal(torch.get_rng_state(), state)
    for name in data.ALL_FIELDS:
        now, before = getattr(example, name), getattr(inputs, name)
        assert before is None or torch.equal(now.nan_to_num(), before.nan_to_num()), f"{name} was changed"
    assert policy.model_dump() == settings, "a call changed the rule's own settings"
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == globals_, "a call changed torch's global settings"
    assert is_untouched, "the rule draws from torch's global generator; use torch.Generator().manual_seed(inputs.seed)"
    evaluate(policy, data.moved(inputs, 0.5))
    second, second_gradient = evaluate(policy, inputs)
    for what, one, other in (
        ("objective", first.objective, second.objective),
        ("gradient", first_gradient, second_gradient),
        ("log_ratio", first.log_ratio, second.log_ratio),
        ("clip decision", first.clipped.float(), second.clipped.float()),
    ):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), f"a second call with the same inputs gave a different {what}"
    assert torch.equal(answer(policy, inputs).objective, first.objective), "without a gradient, the objective differs"
    assert not first.log_ratio.requires_grad, "log_ratio carries a gradient; detach it"


@law()
def draws_follow_the_seed(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """A rule that draws random numbers draws different numbers if `inputs.seed` differs."""
    drawn: list[list[Tensor]] = []

    def note(_: Any, __: Any, keywords: dict[str, Any], result: Any) -> None:
        if keywords.get("generator") is not None:
            drawn[-1].extend(tensor.clone() for tensor in _all_tensors(result))

    for seed in (1, 2, 99):
        drawn.append([])
        with Watched(note):
            call(policy, dataclasses.replace(fresh(inputs), seed=seed))
    first = drawn[0]
    same = all(
        len(other) == len(first) and all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
        for other in drawn[1:]
    )
    few = sum(tensor.numel() for tensor in first) < 8  # with so few values, all may be equal by chance
    assert few or not same, "every seed gives the same draws; use torch.Generator().manual_seed(inputs.seed)"


@law(everywhere=True)
def answers_in_float32(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """For float32 and bfloat16 inputs, the result is float32; the result and its metrics are finite and correctly shaped."""
    for example in (inputs, map_tensors(inputs, lambda values: values.bfloat16(), TOKEN_FIELDS)):
        result = _formed(policy, example)
        assert result.log_ratio.dtype == torch.float32, f"log_ratio is {result.log_ratio.dtype}, not torch.float32"
        assert visible(result.objective, inputs).isfinite().all(), "the objective is not finite"
        assert visible(result.log_ratio, inputs).isfinite().all(), "log_ratio is not finite"
    names = sorted(result.metrics)
    for example in (inputs, data.moved(inputs, 0.0), *_swept(policy)):
        metrics = _formed(policy, example).metrics
        assert sorted(metrics) == names, f"metrics {names} for some responses, but {sorted(metrics)} for others"
        for name, values in metrics.items():
            assert visible(values, example).isfinite().all(), f"metric {name!r} is not finite"
    _, gradient = evaluate(policy, inputs)
    assert gradient.isfinite().all(), "the gradient is not finite"


def _formed(policy: ClipPolicy, inputs: ClipInputs) -> ClipResult:
    """Return the policy's result after checking its shapes and types as in training."""
    result = call(policy, fresh(inputs))
    problem = form_problem(policy, inputs, result)
    assert problem is None, f"the rule {problem}"
    return result


@law(everywhere=True)
def computes_in_float32(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Gradients pass through float32 only, nothing is counted in fewer bits, and bfloat16 inputs are cast before use."""
    example = fresh(inputs)
    example.log_probs.requires_grad_()
    seen: set[tuple[str, torch.dtype]] = set()

    def note(func: Any, _: Any, __: Any, result: Any) -> None:
        for tensor in _all_tensors(result):
            if tensor.requires_grad:
                seen.add(("the gradient passes through", tensor.dtype))
            elif tensor.dtype.itemsize < 4 and (tensor.is_floating_point() or "sum" in getattr(func, "__name__", "")):
                seen.add(("float32 inputs are rounded, or tokens counted, in", tensor.dtype))

    with Watched(note):
        call(policy, example)
    for what, dtype in sorted(seen, key=str):
        assert dtype == torch.float32, f"{what} {dtype}; compute in float32"
    half = map_tensors(inputs, lambda values: values.bfloat16(), TOKEN_FIELDS)
    cast = map_tensors(half, lambda values: values.float(), TOKEN_FIELDS)
    (got, gradient), (expected, expected_gradient) = (evaluate(policy, example) for example in (half, cast))
    what = "bfloat16 inputs are not cast to float32 first:"
    assert_close(visible(got.log_ratio, inputs), visible(expected.log_ratio, inputs), f"{what} log_ratio", 1e-5)
    assert_close(visible(got.objective, inputs).float(), visible(expected.objective, inputs), f"{what} objective")
    assert torch.equal(got.clipped, expected.clipped), f"{what} clip decisions differ"
    for name, values in expected.metrics.items():
        assert_close(visible(got.metrics[name], inputs).float(), visible(values, inputs).float(), f"{what} metric {name!r}")
    wrong = (gradient - expected_gradient).abs() > 0.05 * expected_gradient.abs() + 0.01 * expected_gradient.abs().max()
    _assert_nowhere(wrong, f"{what} the gradient differs")


class _Devices(TorchFunctionMode):
    """Records the first call that mixes tensors from several devices. Zero-dimensional tensors may be mixed.

    A meta tensor has no values. A call that needs values therefore returns the result of the same call on the CPU.
    """

    FREE: typing.ClassVar = {Tensor.to, Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__}

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.mixed: str | None = None
        self.seen = iter(seen)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = next(self.seen, None)
        devices = {tensor.device.type for tensor in _all_tensors((args, kwargs or {})) if tensor.dim()}
        is_mixed = len(devices) > 1 and func not in self.FREE
        if self.mixed is None and (is_mixed or (func in (Tensor.numpy, Tensor.__array__) and devices == {"meta"})):
            self.mixed = getattr(func, "__name__", str(func))
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            if self.mixed is not None or before is None:
                raise
            return before if func in (Tensor.cpu, Tensor.to) else _on_meta(before)


def _on_meta(values: Any) -> Any:
    """Move a tensor, or the tensors in a tuple or list, to the meta device."""
    if isinstance(values, Tensor):
        return values.to("meta")
    return type(values)(map(_on_meta, values)) if type(values) in (tuple, list) else values


@law(shrinks=False, everywhere=True)
def runs_on_another_device(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """The rule creates tensors on the inputs' device, and its result is on that device."""
    advice = "create tensors with device=inputs.log_probs.device"
    example, without_values = fresh(inputs), map_tensors(inputs, lambda values: values.to("meta"))
    results: list[Any] = []
    with Watched(lambda *noted: results.append(noted[-1])):
        call(policy, example)
    try:
        with _Devices(results) as devices:
            result = call(policy, without_values)
    except Exception:  # a rule that passes values to another library is checked only up to that call
        assert devices.mixed is None, f"{devices.mixed} mixes the inputs' device with the CPU; {advice}"
        return
    assert devices.mixed is None, f"{devices.mixed} mixes the inputs' device with the CPU; {advice}"
    for name in ("objective", "log_ratio", "clipped"):
        assert getattr(result, name).device.type == "meta", f"{name} is not on the device of the inputs; {advice}"


def _all_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _all_tensors(value)
    elif isinstance(values, dict):
        yield from _all_tensors(list(values.values()))


@law(everywhere=True)
def rollout_log_probs_are_optional(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """If rollout_log_probs is missing, the rule uses old_log_probs instead."""
    expected = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs))
    _assert_same(policy, dataclasses.replace(inputs, rollout_log_probs=None), expected, "without rollout_log_probs")


@law(example=data.on_policy_inputs)
def ratio_is_to_the_old_model(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """rollout_log_probs are ignored at ratio 1; with `ratio_to_sampler`, raising them increases no weight."""
    if policy.ratio_to_sampler:
        _assert_likelier_weighs_no_more(policy, inputs)
        return
    where = "with other rollout_log_probs (if the rule's ratio is to the sampler, set ratio_to_sampler)"
    noise = torch.linspace(-1, 1, inputs.log_probs.numel()).view_as(inputs.log_probs).sin() + 0.2
    for size in (0.02, 0.5, 3.0):
        other = dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs - size * noise.abs())
        _assert_same(policy, other, evaluate(policy, inputs), f"at ratio 1 {where}")
    for factor in (1.0, 8.0):
        example = data.moved(data.off_policy_inputs(policy), factor)
        other = dataclasses.replace(example, rollout_log_probs=example.old_log_probs - noise.abs())
        (result, gradient), (expected, expected_gradient) = evaluate(policy, other), evaluate(policy, example)
        free = ~_tokens(result.clipped | expected.clipped, example)  # the sampler may decide what is clipped
        assert_close(gradient[free], expected_gradient[free], f"gradient off ratio 1 {where}")


def _assert_likelier_weighs_no_more(policy: ClipPolicy, inputs: ClipInputs) -> None:
    shifted = (dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs + shift) for shift in (-0.02, 0.0, 0.02))
    rarer, same, likelier = (evaluate(policy, example)[1].abs() for example in shifted)
    mask = inputs.response_mask & (inputs.advantages != 0)
    heavier = (likelier > same * 1.0001) | (same > rarer * 1.0001)
    _assert_nowhere(mask & heavier, "a token with a higher probability under the sampler weighs more: is the ratio inverted?")
    off_policy, far = data.off_policy_inputs(policy), inputs.old_log_probs - 1
    pairs = ((example, dataclasses.replace(example, rollout_log_probs=far)) for example in (inputs, off_policy))
    assert any(differs(policy, *pair) for pair in pairs), "rollout_log_probs change nothing, although ratio_to_sampler is set"


# layout


@law(everywhere=True)
def masked_positions_are_ignored(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Masked positions change no value, gradient or clip decision, whatever they contain and wherever they are."""
    size, width = inputs.log_probs.shape
    # add two columns on the left, one after the third token, and five on the right
    columns = torch.arange(width) + 2 + (torch.arange(width) >= 3)

    def padded(values: Tensor, fill: float) -> Tensor:
        filled = torch.where(inputs.response_mask, values, fill)
        return torch.full((size, width + 8), fill, dtype=filled.dtype).index_copy(1, columns, filled).to(values.dtype)

    expected = _mapped(evaluate(policy, inputs), lambda values: padded(_tokens(values, inputs), 0))
    layout = map_tensors(inputs, partial(padded, fill=0), ("response_mask", "token_ids"))
    layout = map_tensors(layout, partial(padded, fill=-1), ("turn_ids",))
    # use a different fill for each field, so that no difference between two fields is 0
    for fills in ((-3.0, -1.0, -5.0, 2.0, -0.5), *([poison] * 5 for poison in (torch.nan, torch.inf, -torch.inf))):
        wider = layout
        for fill, name in zip(fills, TOKEN_FIELDS, strict=True):
            wider = map_tensors(wider, partial(padded, fill=fill), (name,))
        _assert_same(policy, wider, expected, f"with {fills[0]:g} in the padding")


@law(everywhere=True)
def row_order_changes_nothing(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Reordering the responses or renumbering the groups changes no value, gradient or clip decision."""
    rows = operator.itemgetter(torch.arange(len(inputs.log_probs)).flip(0).roll(len(inputs.log_probs) // 3))
    expected = evaluate(policy, inputs)
    _assert_same(policy, map_tensors(inputs, rows), _mapped(expected, rows), "with reordered rows")
    if inputs.group_ids is not None:
        renumbered = dataclasses.replace(inputs, group_ids=1000 - 7 * inputs.group_ids)
        _assert_same(policy, renumbered, expected, "with renumbered groups")


@law(everywhere=True)
def rows_are_independent(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """A row, or a group if the rule needs group_ids, has the same value, gradient and clip decisions alone as in a batch."""
    if policy.scope != "batch":
        kind, numbers = "row", torch.arange(len(inputs.log_probs))
    elif inputs.group_ids is not None:
        kind, numbers = "group", inputs.group_ids[:, 0]
    else:
        return
    expected = evaluate(policy, inputs)
    for number in torch.unique(numbers).tolist():
        rows = operator.itemgetter(numbers == number)
        _assert_same(policy, map_tensors(inputs, rows), _mapped(expected, rows), f"of a {kind} alone ({kind} {number})")


@law(example=data.on_policy_inputs)
def batch_size_changes_nothing(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Duplicating every response changes its gradient at ratio 1 by at most 5% (scope batch)."""
    if policy.scope != "batch" or ratio_one_is_reinforce.name in policy.exempt:
        return
    _, expected = evaluate(policy, inputs)
    twice = map_tensors(inputs, lambda values: torch.cat([values, values]))
    if inputs.group_ids is not None:  # the copies form separate groups
        copies = inputs.group_ids + inputs.group_ids.max() + 1
        twice = dataclasses.replace(twice, group_ids=torch.cat([inputs.group_ids, copies]))
    _, gradient = evaluate(policy, twice)
    what = "gradient in a batch with every response twice (the learner divides by the counts, not the rule)"
    assert_close(gradient[: len(expected)], expected, what, tolerance=0.05)


# numbers


@law(example=_some_inputs, shrinks=False)
def small_batches_stay_finite(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Values and gradients are finite for one token, one response, equal responses, equal advantages, and empty rows."""
    for rows, length, log_ratio, advantage in product((1, 2, 6), (1, 2, 3), (0.0, 0.01), (1.0, 0.0, -1.0)):
        equal = data.uniform_inputs(policy, [log_ratio] * rows, length, advantage)
        if problem := _not_finite(policy, equal):
            where = f"with {rows} equal rows of {length} tokens, log-ratios {log_ratio:g} and A = {advantage:g}"
            raise LawError(f"{problem} {where}", equal)
    mask = data.ragged_inputs(policy).response_mask.index_fill(0, torch.tensor([2]), False)
    empty = data.filled(policy, dataclasses.replace(data.ragged_inputs(policy), response_mask=mask))
    problem = _not_finite(policy, empty)
    assert problem is None, f"{problem} with a row without tokens: divide by ops.lengths, which is at least 1"


def _not_finite(policy: ClipPolicy, inputs: ClipInputs) -> str | None:
    """Name the values in a rule's result that are not finite, or return None."""
    result, gradient = evaluate(policy, inputs)
    edges = () if result.band is None else (result.band.low, result.band.high, result.band.ceiling)
    if not visible(result.objective, inputs).isfinite().all():
        return "the objective is not finite"
    if not gradient.isfinite().all():
        return "the gradient is not finite"
    return "an edge is NaN" if any(edge is not None and edge.isnan().any() for edge in edges) else None


@law(example=data.extreme_inputs, everywhere=True)
def extremes_stay_finite(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Values and gradients stay finite for log-ratios of +-100 on one or all of 4096 tokens, for every sign of A."""
    problem = _not_finite(policy, inputs)
    assert problem is None, problem


# meaning


@law(example=data.on_policy_inputs)
def ratio_one_is_reinforce(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """At ratio 1, nothing is clipped, and each row's gradient is A times a positive constant."""
    result, gradient = evaluate(policy, inputs)
    assert not visible(result.clipped, inputs).any(), "a token or response is clipped at ratio 1"
    assert gradient.isfinite().all(), "the gradient at ratio 1 is not finite"
    per_row = ops.sequence_mean(gradient, inputs.response_mask)
    assert_close(gradient, torch.where(inputs.response_mask, per_row, 0.0), "the gradient differs between the tokens of a row")
    rows = (inputs.advantages != 0) & inputs.response_mask.any(dim=-1, keepdim=True)
    assert (per_row[rows] != 0).all(), "a response with a nonzero advantage has a zero gradient"
    assert (per_row[rows] / inputs.advantages[rows] > 0).all(), "the gradient is not in the direction of the advantage"


@law(everywhere=True)
def zero_advantage_zero_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Where the advantage is zero, the gradient is zero and nothing counts as clipped."""
    rows = inputs.advantages[:, 0] == 0
    result, gradient = evaluate(policy, inputs)
    how = f"opt out: exempt = {{{zero_advantage_zero_gradient.name!r}: REASON}}"
    how = how if policy.learns_without_advantages else f"set learns_without_advantages = True and {how}"
    assert (gradient[rows] == 0).all(), f"a response with zero advantage has a gradient; if this is intended, {how}"
    assert not result.clipped[rows].any(), "a response with zero advantage counts as clipped"


@law(everywhere=True)
def penalties_are_declared(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """A rule whose gradient is nonzero at zero advantage sets `learns_without_advantages`."""
    without = dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    _, gradient = evaluate(policy, without)
    assert policy.learns_without_advantages or (gradient == 0).all(), (
        "the gradient is nonzero without advantages; the learner skips it unless learns_without_advantages is set"
    )


@law()
def advantages_scale_the_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Multiplying A by a factor multiplies the gradient by the same factor: by 4 at any ratio, and by 1000 or -1 at ratio 1."""
    if "rewards" in policy.needs or ratio_one_is_reinforce.name in policy.exempt:
        return
    at_one = data.at_ratio_1(inputs)
    cases = [(" at ratio 1", at_one, factor) for factor in (4.0, 1000.0, -1.0)]
    if not policy.learns_without_advantages:  # a penalty does not scale with the advantages
        cases.append(("", inputs, 4.0))
    for what, example, factor in cases:
        _, expected = evaluate(policy, example)
        _, gradient = evaluate(policy, dataclasses.replace(example, advantages=factor * example.advantages))
        assert_close(gradient, factor * expected, f"gradient{what} with advantages times {factor:g}", 1e-3)


@law()
def token_advantages_are_honoured(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """In per-token objectives, each token uses its own (B, T) advantage; a row of equal advantages acts like (B, 1)."""
    expected = evaluate(policy, inputs)
    if policy.scope == "sequence" or expected[0].objective.shape[-1] == 1 != inputs.log_probs.shape[-1]:
        return
    by_token = dataclasses.replace(inputs, advantages=torch.where(inputs.response_mask, inputs.advantages, 0.0))
    _assert_same(policy, by_token, expected, "with advantages (B, T) instead of (B, 1)")
    token_advantages = _token_advantages(inputs)
    _, gradient = evaluate(policy, dataclasses.replace(inputs, advantages=token_advantages))
    if zero_advantage_zero_gradient.name not in policy.exempt:
        _assert_nowhere((token_advantages == 0) & (gradient != 0), "a token with advantage 0 has a gradient")
    if ratio_one_is_reinforce.name not in policy.exempt:
        at_one = data.at_ratio_1(inputs)
        _, by_row = evaluate(policy, at_one)
        _, gradient = evaluate(policy, dataclasses.replace(at_one, advantages=token_advantages))
        expected_gradient = token_advantages * torch.where(inputs.advantages == 0, 0.0, by_row / inputs.advantages)
        assert_close(gradient, expected_gradient, "at ratio 1, a token's gradient is not proportional to its own advantage")


def _token_advantages(inputs: ClipInputs) -> Tensor:
    """Return random advantages ``(B, T)`` of both signs, with 0 at every fifth token and in all rows with A = 0."""
    noise = torch.randn(inputs.response_mask.shape, generator=torch.Generator().manual_seed(1))
    noise[:, 2::5] = 0
    return torch.where(inputs.response_mask & (inputs.advantages != 0), noise, 0.0)


@law(example=data.on_policy_inputs)
def rows_weigh_the_same(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """At ratio 1, all tokens with the same sign of A have the same gradient per unit of A (scope token)."""
    if policy.scope != "token" or ratio_one_is_reinforce.name in policy.exempt:
        return
    _, gradient = evaluate(policy, inputs)
    for side in (1, -1):
        weights = (gradient / inputs.advantages).abs()[inputs.response_mask & (inputs.advantages.sign() == side)]
        if len(weights) and weights.max() > weights.min() * 1.001:
            what = f"at ratio 1, tokens of different responses weigh {weights.min():.3g} to {weights.max():.3g}"
            raise AssertionError(f"{what}: leave averaging over tokens and responses to the reduction")


@law(example=data.on_policy_inputs)
def log_ratio_rises_with_log_probs(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """For every token, log_ratio is 0 at ratio 1, and rises in proportion to the log-probs of the response."""
    # shift only half of the rows, because a rule may compare rows with each other
    chosen = (torch.arange(len(inputs.log_probs)) % 2 == 0)[:, None]

    def judged(shift: float) -> Tensor:
        moved = torch.where(chosen, inputs.log_probs + shift, inputs.log_probs)
        log_ratio = _tokens(answer(policy, dataclasses.replace(inputs, log_probs=moved)).log_ratio, inputs)
        return torch.where(inputs.response_mask, log_ratio.float(), 0.0)

    _assert_nowhere(~(judged(0.0).abs() <= 1e-4), "log_ratio is not 0 at ratio 1, or not finite")
    shifted = torch.stack([judged(shift)[::2] for shift in (-0.05, 0.0, 0.05, 0.1)])
    assert (shifted.diff(dim=0) >= -1e-6).all(), "log_ratio falls when the log-probs rise"
    assert (shifted.sum(-1).diff(dim=0) > 0).all(), "log_ratio does not rise with the log-probs"
    for advantage in (1.0, -1.0):
        example = data.uniform_inputs(policy, (-1.2, -0.8, -0.4, -0.1, 0.0, 0.1, 0.4, 0.8, 1.2), 4, advantage)
        reported = _tokens(answer(policy, example).log_ratio, example)
        assert (reported.diff(dim=0) > 0).all(), (
            "the log_ratio of a token does not rise with the log-probs of the whole response"
        )
        even = data.uniform_inputs(policy, [0.05 * step for step in range(-8, 9)], 4, advantage)
        bend = _tokens(answer(policy, even).log_ratio, even).diff(dim=0).diff(dim=0).abs()
        assert (bend < 5e-4).all(), (
            "log_ratio is not proportional to the tokens' log-ratios: is it a ratio instead of its logarithm?"
        )


@law(everywhere=True)
def gradients_follow_the_advantage(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """At any ratio, a gradient against the advantage counts as clipped, unless `learns_without_advantages` is set."""
    if policy.learns_without_advantages:  # a penalty may reverse the gradient without cutting it
        return
    for factor in (1.0, 0.05, 0.25, 4.0, 16.0):
        example = data.moved(inputs, factor)
        result, gradient = evaluate(policy, example)
        reversed_ = _relevant(result, example) & ~_tokens(result.clipped, example) & (gradient * example.advantages < 0)
        _assert_nowhere(reversed_, "the gradient is reversed, but the position does not count as clipped", example)


@law(everywhere=True)
def clipped_means_no_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Where A != 0 and log-ratios are below 20, ``clipped`` positions are exactly those without a gradient."""
    result, gradient = evaluate(policy, inputs)
    relevant = _relevant(result, inputs)
    _assert_nowhere(relevant & result.clipped & (gradient != 0), "a position counts as clipped but has a gradient")
    unreported = relevant & ~result.clipped & (gradient == 0)
    if unreported.any():
        unreported = unreported & ~_faded(policy, inputs)
    _assert_nowhere(unreported, "a position has no gradient but does not count as clipped")


def _faded(policy: ClipPolicy, inputs: ClipInputs) -> Tensor:
    """Mark the positions whose gradient decays to 0. As all log-ratios shrink, the gradient reappears there but is small."""
    gradients = [evaluate(policy, data.moved(inputs, 0.85**step))[1].abs() for step in range(30)]
    first = torch.stack([gradient > 0 for gradient in gradients]).int().argmax(dim=0, keepdim=True)
    reappeared = torch.stack(gradients).gather(0, first)[0]
    return (reappeared > 0) & (reappeared < 1e-3 * evaluate(policy, data.at_ratio_1(inputs))[1].abs())


def _relevant(result: ClipResult, inputs: ClipInputs) -> Tensor:
    """Mark the positions ``(B, T)`` whose gradient reveals the clip decision: A != 0, and no log-ratio is at the limit."""
    moved = (inputs.log_probs - inputs.old_log_probs).abs()
    limits = (result.log_ratio.abs() < ops.LOG_RATIO_LIMIT) & (moved < ops.LOG_RATIO_LIMIT)
    return inputs.response_mask & (inputs.advantages != 0) & limits


@law()
def clipped_means_held_back(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """For rules exempt from clipped_means_no_gradient, ``clipped`` means that the gradient is cut, capped or reversed."""
    if clipped_means_no_gradient.name not in policy.exempt:
        return
    mask, side = inputs.response_mask, inputs.advantages.sign()
    at_one = data.at_ratio_1(inputs)

    def is_flat(example: ClipInputs, gradient: Tensor, way: int) -> Tensor:
        """Whether a small move along the advantage (way 1) or against it (way -1) leaves the gradient unchanged."""
        moves = (torch.where(mask, example.log_probs + way * step * side, example.log_probs) for step in (0.01, 0.02))
        others = [evaluate(policy, dataclasses.replace(example, log_probs=moved))[1] for moved in moves]
        return torch.stack([(other - gradient).abs() <= 1e-6 * gradient.abs() for other in others]).all(0)

    _, gradient_at_one = evaluate(policy, at_one)
    flat_at_one = is_flat(at_one, gradient_at_one, 1)
    for factor in (1.0, 4.0, 16.0):
        example = data.moved(inputs, factor)
        result, gradient = evaluate(policy, example)
        clipped, log_ratio = _tokens(result.clipped, example), _tokens(result.log_ratio, example)
        relevant = _relevant(result, example)
        is_seen = gradient.abs() > 1e-4 * gradient_at_one.abs()  # a weight that has decayed is rounded to a few values
        flat, reversed_ = is_flat(example, gradient, 1) & is_seen & ~flat_at_one, gradient * side < 0
        capped = flat & (log_ratio * side > 0)
        _assert_nowhere(
            relevant & ~clipped & capped, "the weight is capped, but the position does not count as clipped", example
        )
        held = flat | is_flat(example, gradient, -1) & ~flat_at_one | reversed_ | (gradient == 0)
        if policy.learns_without_advantages:  # the restoring force of a penalty also holds back the policy
            unclipped = gradient_at_one * ops.limited_exp(example.log_probs - example.old_log_probs)
            held = held | ((gradient - unclipped) * log_ratio < 0)
        _assert_nowhere(
            relevant & clipped & ~held, "a position counts as clipped, but its gradient is not cut, capped or reversed", example
        )
    for advantage in (1.0, -1.0):
        swept = data.uniform_inputs(policy, [advantage * step for step in (0.0, *SWEEP)], 1, advantage)
        result, gradient = evaluate(policy, swept)
        size = gradient[:, 0].abs()
        drops = (size[1:] == 0) & (size[:-1] > 0.05 * size[0])  # a decaying weight is small before it becomes 0
        unreported = torch.zeros_like(swept.response_mask)
        unreported[1:, 0] = drops & ~result.clipped[1:, 0]
        _assert_nowhere(unreported, "the gradient is cut, but the position does not count as clipped", swept)


@law(everywhere=True)
def only_cuts_outward(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Gradients are cut only above ratio 1 if A > 0, and only below 1 or above a ceiling if A < 0; cuts persist outward."""
    if policy.ratio_to_sampler:  # such a rule may also drop tokens on which sampler and trainer disagree
        inputs = dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs)
    by_token = dataclasses.replace(inputs, advantages=_token_advantages(inputs))
    for example in (inputs, by_token) if policy.scope == "token" else (inputs,):
        result = answer(policy, example)
        if result.clipped.shape[-1] == 1 and example is by_token:
            continue
        inward = _relevant(result, example) & result.clipped & (example.advantages > 0) & (result.log_ratio < 0)
        _assert_nowhere(inward, "a positive advantage is cut below ratio 1", by_token if example is by_token else None)
    for length in (1, 16):
        for advantage in (1.0, -1.0):
            for way in (1.0, -1.0):
                steps = [way * log_ratio for log_ratio in SWEEP]
                if wrong := _wrong_cut(_cuts(policy, steps, length, advantage), advantage, way):
                    what, place = wrong
                    raise LawError(what, data.uniform_inputs(policy, [steps[place]], length, advantage))


def _wrong_cut(cuts: list[tuple[bool, bool]], advantage: float, way: float) -> tuple[str, int] | None:
    """Return a description and the index of the first wrong decision, counting away from ratio 1, or None."""
    decisions = [clipped for clipped, _ in cuts]
    if advantage > 0 > way and any(decisions):
        return "a positive advantage is cut below ratio 1", decisions.index(True)
    if advantage < 0 < way and any(cut for _, cut in cuts[:1]):
        return "a negative advantage is cut immediately above ratio 1", 0
    if decisions != sorted(decisions):
        place = next(index for index in range(1, len(decisions)) if decisions[index - 1] and not decisions[index])
        return f"a {'positive' if advantage > 0 else 'negative'} advantage is cut, but not at ratios further from 1", place
    return None


SWEEP = tuple(1e-5 * 1.25**step for step in range(54))  # up to 1.4


def _swept(policy: ClipPolicy) -> list[ClipInputs]:
    """Return responses whose tokens share a log-ratio, for two lengths and both signs of A."""
    steps = (*SWEEP, *(-log_ratio for log_ratio in SWEEP))
    return [data.uniform_inputs(policy, steps, length, advantage) for length in (1, 16) for advantage in (1.0, -1.0)]


def _cuts(policy: ClipPolicy, log_ratios: list[float], length: int, advantage: float) -> list[tuple[bool, bool]]:
    """Return, for each log-ratio of a whole response, whether it counts as clipped and whether its gradient is cut."""
    inputs = data.uniform_inputs(policy, log_ratios, length, advantage)
    result, gradient = evaluate(policy, inputs)
    clipped = _tokens(result.clipped, inputs).any(dim=-1)
    cut = clipped & (gradient == 0).all(dim=-1)
    inside = (result.log_ratio.abs() < ops.LOG_RATIO_LIMIT).all(dim=-1).tolist()
    return [pair for pair, seen in zip(zip(clipped.tolist(), cut.tolist(), strict=True), inside, strict=True) if seen]


@law()
def band_is_the_one_used(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Positions beyond the band's edge for the sign of A are clipped; if all tokens share a log-ratio, no others are."""
    for number, example in enumerate([inputs, *_swept(policy)]):
        result = answer(policy, example)
        band, judged = result.band, result.log_ratio
        if band is None:
            continue
        positive, negative = example.advantages > 0, example.advantages < 0
        beyond = (positive & (judged > band.high)) | (negative & (judged < band.low))
        near = _near(judged, band.high) | _near(judged, band.low)
        if band.ceiling is not None:
            beyond, near = beyond | (negative & (judged > band.ceiling)), near | _near(judged, band.ceiling)
        relevant = _relevant(result, example) & ~near
        shown = example if number else None
        if number:
            _assert_nowhere(relevant & result.clipped & ~beyond, "a position inside the reported band counts as clipped", shown)
        if clipped_means_no_gradient.name not in policy.exempt:
            what = "a position outside the reported band does not count as clipped"
            _assert_nowhere(relevant & ~result.clipped & beyond, what, shown)


@law(shrinks=False)
def every_branch_is_reached(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """A rule with a width or a band clips some of the examples, and every comparison in the rule is true on some of them."""
    result = answer(policy, inputs)
    is_limited = result.band is not None or any(getattr(policy, name) is not None for name in policy.width_fields())
    if is_limited and clipped_means_no_gradient.name not in policy.exempt:
        assert result.clipped.any(), "the rule has a width or a band, but clips 0% of ragged data of any spread"
    passed = data.passed_branches(policy)
    if all(branch.true for branch in passed if branch.is_exact):  # the examples cannot guess a token ID
        for branch in passed:
            assert branch.true, f"never true on examples of any scale: {branch.where}"


@law(shrinks=False)
def every_need_matters(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Every input in `needs` and every turn boundary changes some result, with the defaults or another option."""
    if not policy.needs:
        return
    examples = [data.moved(inputs, factor) for factor in (1.0, 4.0, 0.25)]
    wild = [data.wild_inputs(policy, seed) for seed in range(6)]
    examples += [data.moved(example, factor) for factor in (1.0, 0.1) for example in wild]
    rules = [policy, *(other for _, other in _options(policy))]
    for need in sorted(policy.needs):
        changed = (
            (example, dataclasses.replace(example, **{need: new}))
            for example in examples
            for new in _other_values(example, need)
        )
        assert any(differs(rule, *pair) for pair in changed for rule in rules), f"{need} is in `needs` but changes nothing"
    if inputs.turn_ids is not None:
        for turn in range(int(inputs.turn_ids.max())):
            joined = (map_tensors(example, partial(_joined, turn=turn), ("turn_ids",)) for example in examples)
            what = f"merging turns {turn} and {turn + 1} changes nothing"
            assert any(differs(rule, *pair) for pair in zip(examples, joined, strict=True) for rule in rules), what


def _joined(turn_ids: Tensor, turn: int) -> Tensor:
    return torch.where(turn_ids > turn, turn_ids - 1, turn_ids)


def _other_values(inputs: ClipInputs, need: str) -> list[Any]:
    """Return alternative values for a field that a policy may need."""
    value = getattr(inputs, need)
    if need in ("old_entropy", "ref_log_probs"):
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).abs()
        return [torch.where(inputs.response_mask, value + 0.5 * noise, value)]
    change: dict[str, Callable[[], list[Any]]] = {
        "group_ids": lambda: [torch.arange(len(value))[:, None], torch.zeros_like(value)],
        "turn_ids": lambda: [torch.where(inputs.response_mask, 0, -1)],
        "token_ids": lambda: [value.flip(-1), torch.zeros_like(value)],
        "rewards": lambda: [1 - value],
        "finished": lambda: [~value],
        "max_length": lambda: [2 * value, max(1, value // 2)],
        "progress": lambda: [0.0, 0.9],
    }
    return change[need]()


def differs(policy: ClipPolicy, one: ClipInputs, other: ClipInputs) -> bool:
    """Whether a policy gives different results on two inputs, or fails on the second."""
    try:
        return any(not torch.equal(old, new) for old, new in zip(_answers(policy, one), _answers(policy, other), strict=True))
    except Exception:  # a failure on an input shows that the policy reads it
        return True


def _answers(policy: ClipPolicy, inputs: ClipInputs) -> list[Tensor]:
    """Return everything that a policy computes, including the gradient."""
    result, gradient = evaluate(policy, inputs)
    values = (result.objective, result.log_ratio, result.clipped, *result.metrics.values())
    return [gradient, *(visible(tensor.detach(), inputs).nan_to_num() for tensor in values)]


def _near(log_ratio: Tensor, edge: Tensor) -> Tensor:
    return (log_ratio - edge).abs() < 1e-5 * (1 + edge.abs())


# settings


@law(shrinks=False)
def widths_scale(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """``scaled(f)`` is valid and clips less for larger f, for both signs of A; without a width, it raises an error."""
    aimed, other = policy.targeting(0.1), policy.targeting(0.3)
    assert aimed is None or type(aimed) is type(policy), f"targeting(0.1) returned {type(aimed).__name__}, not the rule or None"
    assert aimed is None or aimed != other, "targeting(0.1) and targeting(0.3) return the same rule"
    try:
        same = policy.scaled(1.0)
    except ValueError:
        widths = [name for name in policy.width_fields() if getattr(policy, name) is not None]
        assert not widths, "scaled(1) raises an error, but the rule has fields marked Width"
        return
    assert same == policy, "scaled(1) is not equal to the rule"
    examples = _spread_out(policy, inputs)
    narrow, wide, clips = policy.scaled(0.25), policy.scaled(4.0), False
    for sign, side in ((1, "A > 0"), (-1, "A < 0")):
        shares = [(data.clip_fraction(narrow, example, sign), data.clip_fraction(wide, example, sign)) for example in examples]
        nonzero = [pair for pair in shares if any(pair)]
        clips = clips or bool(nonzero)
        assert not nonzero or any(less > more for less, more in nonzero), (
            f"for {side}, wider bands do not clip less; clip fractions at 1/4 and 4 times the width: "
            f"{nonzero[0][0]:.2f}, {nonzero[0][1]:.2f}"
        )
    if not clips:  # the rule lets weights decay instead of clipping
        changes = any(not _same_cut(answer(narrow, example), answer(wide, example), example) for example in examples)
        assert changes, "scaled(1/4) and scaled(4) clip nothing and have the same objective"
    for factor in (1e3, 1e6):
        try:
            far = policy.scaled(factor)
            type(far).model_validate(far.model_dump())
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise AssertionError(f"scaled({factor:g}) is not valid; limit a scaled width to its bound: {reason}") from error
        assert visible(answer(far, inputs).objective, inputs).isfinite().all(), (
            f"scaled({factor:g}) gives values that are not finite"
        )


def _same_cut(result: ClipResult, other: ClipResult, inputs: ClipInputs) -> bool:
    """Whether two results have the same objective and clip decisions on response tokens."""
    pairs = ((result.objective, other.objective), (result.clipped, other.clipped))
    return all(torch.equal(visible(one, inputs), visible(two, inputs)) for one, two in pairs)


def _spread_out(policy: ClipPolicy, inputs: ClipInputs) -> list[ClipInputs]:
    """Return the inputs with log-ratios of several magnitudes, plus responses whose tokens share a log-ratio."""
    return [*(data.moved(inputs, factor) for factor in (1.0, 0.25, 4.0, 16.0)), *_swept(policy)]


@law(shrinks=False)
def every_width_matters(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Every non-null Width affects the objective or what is clipped; null clips no more than the narrowest width."""
    examples = _spread_out(policy, inputs)
    answers = [answer(policy, example) for example in examples]
    for name in policy.width_fields():
        width = getattr(policy, name)
        if width is not None:
            changes = any(
                not _same_cut(answer(other, example), expected, example)
                for other in _valid(policy, name, (width * factor for factor in (0.5, 2.0, 0.1, 10.0, 0.01, 100.0)))
                for example, expected in zip(examples, answers, strict=True)
            )
            assert changes, f"the width {name!r} changes nothing"
        _assert_null_is_no_band(policy, name, examples)


def _assert_null_is_no_band(policy: ClipPolicy, name: str, examples: list[ClipInputs]) -> None:
    """Check that a width of null means no band rather than a width of 0."""
    try:
        null = policy.replace(**{name: None})
    except ValueError:
        return
    narrow = next(_valid(policy, name, [factor * (getattr(policy, name) or 0.2) for factor in (0.01, 0.1, 1.0, 10.0)]), None)
    if narrow is None:
        return
    fractions = [(data.clip_fraction(null, example), data.clip_fraction(narrow, example)) for example in examples]
    is_tighter = any(one > other for one, other in fractions) and not any(one < other for one, other in fractions)
    assert not is_tighter, f"{name} = null clips more than {name} = {getattr(narrow, name):g}, as if it were 0"


def _valid(policy: ClipPolicy, name: str, values: Iterable[Any]) -> Iterator[ClipPolicy]:
    """Yield the policy with each given value of a setting, skipping values that the policy's class does not allow."""
    for value in values:
        try:
            yield policy.replace(**{name: value})
        except ValueError:
            continue


@law(shrinks=False)
def update_is_pure(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """``updated`` is deterministic, returns a rule of the same class that can be dumped, and changes nothing in place."""
    result, _ = evaluate(policy, inputs)
    before, answers = policy.model_dump(), _answers(policy, inputs)
    empty = data.clip_stats(dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages)), result)
    stats = data.clip_stats(inputs, result)
    for sums in (stats, empty, _sums(policy, inputs, 1.0), _sums(policy, inputs, 0.0)):
        first, second = policy.updated(sums), policy.updated(sums)
        assert type(first) is type(policy), f"updated returned a {type(first).__name__}"
        assert first == second, "the same sums gave a different rule"
        _assert_usable(first, inputs)
        same = zip(answers, _answers(policy, inputs), strict=True)
        assert all(torch.equal(one, other) for one, other in same), (
            "updated changed the results of the rule that it was called on"
        )
    assert policy.model_dump() == before, "updated changed the rule it was called on"


def _sums(policy: ClipPolicy, inputs: ClipInputs, share: float, progress: float = 0.3) -> ClipStats:
    """Return the statistics of an update in which the given share of every response was clipped."""
    length = inputs.response_mask.sum(dim=-1).float()
    edges = torch.stack([length.min(), length.median(), length.max()])
    sign = torch.ones_like(length)
    sign[::2] = -1
    judged = ops.per_response(answer(policy, inputs).log_ratio, inputs.response_mask)[:, 0]
    return ClipStats.of(edges, length, sign, torch.full_like(length, share), judged, progress=progress)


def _assert_usable(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Check that an updated rule is valid, gives finite values and does not clip at ratio 1."""
    assert _survives_its_dump(policy), "an updated rule is not valid, or cannot be restored from its dump"
    assert evaluate(policy, inputs)[0].objective.isfinite().all(), "an updated rule gives values that are not finite"
    if ratio_one_is_reinforce.name not in policy.exempt:
        at_one = data.on_policy_inputs(policy)
        assert not visible(answer(policy, at_one).clipped, at_one).any(), "an updated rule clips at ratio 1"


@law(shrinks=False)
def updates_go_by_shares(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Updates depend on shares, not counts: twice as many of the same responses give the same update."""
    if not policy.is_adaptive:
        return
    once = _sums(policy, inputs, 0.02)
    sums = ("num_responses", "num_clipped", "log_ratio", "log_ratio_squared", "length")
    twice = dataclasses.replace(once, **{name: 2 * getattr(once, name) for name in sums})
    warm = policy.updated(once)  # the first update may only initialise an average
    got, expected = (torch.tensor(_numbers(warm.updated(stats).model_dump())) for stats in (twice, once))
    assert_close(got, expected, "twice as many of the same responses give a different update")


def _numbers(settings: Any) -> list[float]:
    """Return the numbers in nested settings."""
    if isinstance(settings, dict | list | tuple):
        return [
            number for value in (settings.values() if isinstance(settings, dict) else settings) for number in _numbers(value)
        ]
    return [float(settings)] if isinstance(settings, int | float) else []


@law(shrinks=False)
def updates_pull_back(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """After five updates with everything clipped, a rule clips no more than after five without clipping."""
    if not policy.is_adaptive:
        return
    after = []
    for share in (0.0, 1.0):
        current, sums = policy, _sums(policy, inputs, share)
        for _ in range(5):
            current = current.updated(sums)
        after.append([data.clip_fraction(current, example) for example in _spread_out(policy, inputs)])
    pairs = list(zip(*after, strict=True))
    assert any(full < none for none, full in pairs) or not any(full > none for none, full in pairs), (
        "the rule clips more after updates in which everything was clipped than after updates in which nothing was: does its "
        "feedback have the wrong sign?"
    )


@law(shrinks=False)
def updates_keep_the_band_open(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """After 100 updates on the same responses, on those with one sign of A, or on none, the band is still open."""
    if not policy.is_adaptive:
        return
    far = data.moved(inputs, 16.0)  # which the rule clips as it would clip ``inputs`` with a very narrow band
    for signs in ((-math.inf, math.inf), (0.0, math.inf), (-math.inf, 0.0), (0.0, 0.0)):
        kept, current = dataclasses.replace(inputs, advantages=inputs.advantages.clamp(*signs)), policy
        for _ in range(100):
            current = current.updated(data.clip_stats(kept, answer(current, kept)))
        for sign in (-1, 1):
            first, last = data.clip_fraction(policy, inputs, sign), data.clip_fraction(current, inputs, sign)
            assert last <= max(first, 0.9 * data.clip_fraction(policy, far, sign)), (
                f"after 100 updates, the band is closed for A {'<>'[sign > 0]} 0: do updates without such responses close it?"
            )


@law(shrinks=False)
def every_option_keeps_the_laws(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """The laws also hold for every other option of a setting: any allowed word, true or false, and null or a number."""
    for what, other in _options(policy):
        for law in LAWS:
            if law.name in policy.exempt or law.name in ONCE or (error := law.failure(other, law.example(other))) is None:
                continue
            if law.failure(policy) is None:  # a law that also fails with the defaults is reported for the defaults
                raise AssertionError(f"with {what}: {law.name}: {first_line(error)}") from error


NUMBERS = (0.5, 2.0, 0.05, 16.0, 256.0)
"""Numbers to try in place of null. The first number that the class allows is used."""

ONCE = {
    "settings_are_complete", "names_are_known", "every_branch_is_reached", "every_need_matters", "every_option_keeps_the_laws",
}  # fmt: skip
"""Laws that are checked once per class instead of for every option, because they concern the class."""


def _options(policy: ClipPolicy) -> Iterator[tuple[str, ClipPolicy]]:
    """Yield variants of the policy in which one word, boolean or null is replaced by a value that the class allows."""
    for name, field in type(policy).model_fields.items():
        if name in NAMED:
            continue
        value, parts = getattr(policy, name), {field.annotation, *typing.get_args(field.annotation)}
        words = [word for option in parts if typing.get_origin(option) is Literal for word in typing.get_args(option)]
        others: list[Any] = sorted((word for word in words if word != value), key=str)
        if bool in parts:
            others.append(not value)
        if type(None) in parts and value is not None:
            others.append(None)
        for other in others:
            for changed in _valid(policy, name, [other]):
                yield f"{name} = {'null' if other is None else repr(other)}", changed
        if value is None:
            for changed in islice(_valid(policy, name, NUMBERS), 1):
                yield f"{name} = {getattr(changed, name)}", changed


LAWS: tuple[Law, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Law))
"""The laws, in the order of their definition."""
