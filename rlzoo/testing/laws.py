"""The laws of clip policies: form, layout, numbers, meaning and settings. The first broken law usually explains the others."""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import annotated_types
import pydantic
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlzoo.core import ops
from rlzoo.core.policy import NAMED, ClipPolicy, ClipStats, contract_problem
from rlzoo.core.settings import Settings
from rlzoo.core.types import ClipInputs, ClipResult
from rlzoo.testing import data
from rlzoo.testing.data import INTEGER_TOKEN_FIELDS, TOKEN_FIELDS, answer, evaluate, fresh, left_padded, map_tensors, visible

Example = Callable[[ClipPolicy], ClipInputs]


@dataclass(frozen=True)
class Law:
    """One law: its statement, its example inputs, and its check, which raises an AssertionError with the observed values."""

    name: str
    statement: str
    check: Callable[[ClipPolicy, ClipInputs], None]
    example: Example
    shrinks: bool  # whether to shrink the inputs when the law fails

    def __call__(self, policy: ClipPolicy, inputs: ClipInputs | None = None) -> None:
        """Check a policy against this law, on the law's example or on the given inputs."""
        self.check(policy, self.example(policy) if inputs is None else inputs)


class LawWarning(UserWarning):
    """Advice that a law gives on a policy that obeys it."""


def law(*, example: Example = data.off_policy_inputs, shrinks: bool = True) -> Callable[[Callable[..., None]], Law]:
    """Turn a check into a law; the first line of the check's docstring, without its number, becomes the statement."""

    def make(check: Callable[[ClipPolicy, ClipInputs], None]) -> Law:
        statement = (check.__doc__ or "").partition("\n")[0].partition(". ")[2]
        return Law(check.__name__, statement, check, example, shrinks)

    return make


def _some_inputs(policy: ClipPolicy) -> ClipInputs:
    """Return inputs that are created without calling the policy."""
    return data.uniform_inputs(policy, (0.0, 0.1), length=2, advantage=1.0)


def assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float = 1e-4) -> None:
    """Check that two tensors have the same shape and nearly the same values; ``what`` describes them."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    wrong = ~torch.isclose(got, expected, rtol=tolerance, atol=1e-6, equal_nan=True)
    assert not wrong.any(), f"{what}: {got[wrong][0]:.4g}, expected {expected[wrong][0]:.4g}"


class LawError(AssertionError):
    """A failure on inputs other than those given; the error holds the inputs on which the law failed."""

    def __init__(self, what: str, inputs: ClipInputs) -> None:
        super().__init__(what)
        self.inputs = inputs


def _assert_nowhere(places: Tensor, what: str, inputs: ClipInputs | None = None) -> None:
    """Raise an error that names the first True position of ``(B, T)``, with that row of ``inputs`` if given."""
    if places.any():
        row, token = places.nonzero()[0].tolist()
        what = f"{what} (row {row}, token {token})"
        raise AssertionError(what) if inputs is None else LawError(what, _row(inputs, row))


def _row(inputs: ClipInputs, row: int) -> ClipInputs:
    """Return the inputs of one response."""
    return map_tensors(inputs, operator.itemgetter(slice(row, row + 1)))


def _tokens(values: Tensor, inputs: ClipInputs) -> Tensor:
    """Expand per-response or per-token values to ``(B, T)``."""
    return values.expand(inputs.response_mask.shape)


# form


@law(example=_some_inputs, shrinks=False)
def settings_are_complete(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """1. The rule has defaults, round-trips through its dump and rejects unknown keys; fields have descriptions and bounds."""
    assert_complete_settings(type(policy))


def assert_complete_settings(kind: type[Settings]) -> None:
    """Check the class of a rule, an estimator or a correction; see `settings_are_complete`."""
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
        assert any(isinstance(mark, BOUNDS) for mark in field.metadata) or not _unbounded(field.annotation), (
            f"number {name!r} has no bound"
        )


def _survives_its_dump(made: Settings) -> bool:
    """Whether an object can be restored from its dump, both as Python objects and as JSON (the format of checkpoints)."""
    kind = type(made)
    try:
        restored = (kind.model_validate(made.model_dump()), kind.model_validate_json(made.model_dump_json()))
    except ValueError:
        return False
    return all(each == made for each in restored)


BOUNDS = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt, annotated_types.Interval)


def _unbounded(annotation: Any) -> bool:
    """Whether a type holds a number without a bound: ``float``, ``int | None``, ``tuple[float, ...]``."""
    if annotation in (float, int):
        return True
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        marks = [mark for part in parts[1:] for mark in (part.metadata if hasattr(part, "metadata") else [part])]
        return not any(isinstance(mark, BOUNDS) for mark in marks) and _unbounded(parts[0])
    return (
        origin is not Literal
        and isinstance(origin, type | type(typing.Union) | types.UnionType)
        and any(map(_unbounded, parts))
    )


@law(example=_some_inputs, shrinks=False)
def names_are_known(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """2. Estimator, reduction, scope, needs and the laws in `exempt` are known names, and every exemption has a reason."""
    from rlzoo.core.zoo import policy_problem

    problem = contract_problem(type(policy)) or policy_problem(type(policy))
    assert problem is None, problem
    known = [each.name for each in LAWS]
    for name, reason in policy.exempt.items():
        assert name in known, f"the rule opts out of {name!r}, which is not a law"
        assert reason.strip(), f"the rule opts out of {name!r} without a reason"


@law(example=data.ragged_inputs)
def is_pure(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """3. A call changes no inputs, settings or globals; equal inputs give equal results; log_ratio is detached."""
    first, first_gradient = evaluate(policy, inputs)
    given, settings, globals_ = fresh(inputs), policy.model_dump(), (torch.get_default_dtype(), torch.is_grad_enabled())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2**31)  # no step has this seed
        state = torch.get_rng_state()
        policy(given)
        is_untouched = torch.equal(torch.get_rng_state(), state)
    for name in data.ALL_FIELDS:
        now, before = getattr(given, name), getattr(inputs, name)
        assert before is None or torch.equal(now.nan_to_num(), before.nan_to_num()), f"{name} was changed"
    assert policy.model_dump() == settings, "a call changed the policy's own settings"
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
    assert not first.log_ratio.requires_grad, "log_ratio carries a gradient; detach it"


class _Watched(TorchFunctionMode):
    """Passes the keyword arguments and the result of every torch call to a function."""

    def __init__(self, note: Callable[[dict[str, Any], Any], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(kwargs or {}, result)
        return result


@law()
def draws_follow_the_seed(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """4. A rule that draws random numbers draws different numbers if `inputs.seed` differs."""
    drawn: list[list[Tensor]] = []

    def note(keywords: dict[str, Any], result: Any) -> None:
        if keywords.get("generator") is not None:
            drawn[-1].extend(each.clone() for each in _all_tensors(result))

    for seed in (1, 2, 99):
        drawn.append([])
        with _Watched(note):
            policy(dataclasses.replace(fresh(inputs), seed=seed))
    first = drawn[0]
    same = all(
        len(other) == len(first) and all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
        for other in drawn[1:]
    )
    few = sum(each.numel() for each in first) < 8  # with so few values, all may be equal by chance
    assert few or not same, "every seed gives the same draws; use torch.Generator().manual_seed(inputs.seed)"


@law()
def answers_in_float32(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """5. For float32 and bfloat16 inputs, the result is float32; the result and its metrics are finite and correctly shaped."""
    size, max_length = inputs.log_probs.shape
    either = {(size, 1), (size, max_length)}
    shapes = {"token": {(size, max_length)}, "sequence": {(size, 1)}, "batch": either}[policy.scope]
    for given in (inputs, map_tensors(inputs, lambda values: values.bfloat16(), TOKEN_FIELDS)):
        result = policy(fresh(given))
        assert isinstance(result, ClipResult), f"the result is a {type(result).__name__}, not a ClipResult"
        for name, allowed, dtype in (
            ("objective", shapes, torch.float32),
            ("log_ratio", either, torch.float32),
            ("clipped", either, torch.bool),
        ):
            values = getattr(result, name)
            assert values.dtype == dtype, f"{name} is {values.dtype}, not {dtype}"
            got = tuple(values.shape)
            assert got in allowed, f"{name} has the wrong shape for scope {policy.scope!r}: {got}, expected {allowed}"
        assert visible(result.objective, inputs).isfinite().all(), "the objective is not finite"
        assert visible(result.log_ratio, inputs).isfinite().all(), "log_ratio is not finite"
    for given in (inputs, data.moved(inputs, 0.0), *_swept(policy)):
        size, max_length = given.log_probs.shape
        either = {(size, 1), (size, max_length)}
        for name, values in policy(fresh(given)).metrics.items():
            assert tuple(values.shape) in either, f"metric {name!r} has shape {tuple(values.shape)}, not one of {either}"
            assert visible(values, given).isfinite().all(), f"metric {name!r} is not finite"
    _, gradient = evaluate(policy, inputs)
    assert gradient.isfinite().all(), "the gradient is not finite"


@law()
def computes_in_float32(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """6. Tensors with a gradient are float32; bfloat16 inputs are cast first, so that no value, cut or metric is rounded."""
    given = fresh(inputs)
    given.log_probs.requires_grad_()
    seen: set[torch.dtype] = set()
    with _Watched(lambda _, result: seen.update(each.dtype for each in _all_tensors(result) if each.requires_grad)):
        policy(given)
    others = ", ".join(sorted(map(str, seen - {torch.float32})))
    assert not others, f"the gradient passes through {others}; compute in float32"
    half = map_tensors(inputs, lambda values: values.bfloat16(), TOKEN_FIELDS)
    cast = map_tensors(half, lambda values: values.float(), TOKEN_FIELDS)
    (got, gradient), (expected, expected_gradient) = (evaluate(policy, each) for each in (half, cast))
    what = "bfloat16 inputs are not cast to float32 first:"
    assert_close(visible(got.log_ratio, inputs), visible(expected.log_ratio, inputs), f"{what} log_ratio", 1e-5)
    assert_close(visible(got.objective, inputs).float(), visible(expected.objective, inputs), f"{what} objective")
    assert torch.equal(got.clipped, expected.clipped), f"{what} clip decisions differ"
    for name, values in expected.metrics.items():
        assert_close(visible(got.metrics[name], inputs).float(), visible(values, inputs).float(), f"{what} metric {name!r}")
    wrong = (gradient - expected_gradient).abs() > 0.05 * expected_gradient.abs() + 0.01 * expected_gradient.abs().max()
    _assert_nowhere(wrong, f"{what} the gradient differs")


class _Devices(TorchFunctionMode):
    """Records the first call that mixes tensors from several devices; zero-dimensional tensors may be mixed.

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


@law(shrinks=False)
def runs_on_another_device(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """7. The rule creates tensors on the inputs' device, and its result is on that device."""
    advice = "create tensors with device=inputs.log_probs.device"
    given, without_values = fresh(inputs), map_tensors(inputs, lambda values: values.to("meta"))
    results: list[Any] = []
    with _Watched(lambda _, result: results.append(result)):
        policy(given)
    try:
        with _Devices(results) as devices:
            result = policy(without_values)
    except Exception:  # a rule that passes values to another library is checked only up to the call of that library
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


@law()
def rollout_log_probs_are_optional(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """8. If rollout_log_probs is missing, the rule uses old_log_probs instead."""
    expected, expected_gradient = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs))
    try:
        got, gradient = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=None))
    except Exception as error:
        raise AssertionError(f"without rollout_log_probs: {type(error).__name__}: {error}") from error
    what = "without rollout_log_probs"
    assert_close(visible(got.objective, inputs), visible(expected.objective, inputs), f"objective {what}")
    assert_close(gradient, expected_gradient, f"gradient {what}")


@law(example=data.on_policy_inputs)
def ratio_is_to_the_old_model(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """9. rollout_log_probs are ignored at ratio 1 (warning only); with `ratio_to_sampler`, raising them increases no weight."""
    if policy.ratio_to_sampler:
        _assert_likelier_weighs_no_more(policy, inputs)
        return
    noise = torch.linspace(-0.02, 0.03, inputs.log_probs.numel()).view_as(inputs.log_probs)
    expected, expected_gradient = evaluate(policy, inputs)
    result, gradient = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs + noise))
    moved = not torch.allclose(
        visible(result.log_ratio, inputs), visible(expected.log_ratio, inputs), atol=1e-5, equal_nan=True
    )
    if moved or not torch.allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6, equal_nan=True):
        what = "log_ratio" if moved else "gradient"
        advice = (
            "if the rule's ratio is relative to the sampler, set ratio_to_sampler; otherwise the mismatch is corrected twice"
        )
        warnings.warn(f"the {what} at ratio 1 depends on rollout_log_probs: {advice}", LawWarning, stacklevel=2)


def _assert_likelier_weighs_no_more(policy: ClipPolicy, inputs: ClipInputs) -> None:
    shifted = (dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs + shift) for shift in (-0.02, 0.0, 0.02))
    rarer, same, likelier = (evaluate(policy, given)[1].abs() for given in shifted)
    mask = inputs.response_mask & (inputs.advantages != 0)
    heavier = (likelier > same * 1.0001) | (same > rarer * 1.0001)
    _assert_nowhere(mask & heavier, "a token with a higher probability under the sampler weighs more: is the ratio inverted?")


# layout


@law()
def masked_positions_are_ignored(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """10. NaN and infinity at masked positions change neither values nor gradients, with padding on either side."""
    mask = inputs.response_mask
    expected, expected_gradient = evaluate(policy, inputs)
    for poison in (float("nan"), float("inf"), float("-inf")):
        spoiled = map_tensors(inputs, partial(torch.Tensor.masked_fill, mask=~mask, value=poison), TOKEN_FIELDS)
        result, gradient = evaluate(policy, spoiled)
        assert_close(visible(result.objective, inputs), visible(expected.objective, inputs), f"{poison} in the padding")
        assert_close(gradient, expected_gradient, f"gradient with {poison} in the padding")
        left = map_tensors(spoiled, lambda values: left_padded(values, mask), (*TOKEN_FIELDS, *INTEGER_TOKEN_FIELDS))
        result, gradient = evaluate(policy, dataclasses.replace(left, response_mask=left_padded(mask, mask)))
        assert_close(gradient, left_padded(expected_gradient, mask), "gradient with the padding on the left")


@law()
def padding_changes_nothing(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """11. Extra masked columns, with any content, change no value, gradient or clip decision."""
    size, width = inputs.log_probs.shape
    # two columns on the left, one after the third token, five on the right
    keep = torch.arange(width) + 2 + (torch.arange(width) >= 3)

    def wider(values: Tensor, fill: float) -> Tensor:
        return torch.full((size, width + 8), fill).to(values.dtype).index_copy(1, keep, values)

    padded = inputs
    # a different fill for each field, so that no difference between two fields is 0
    for fill, name in zip((-3.0, -1.0, -5.0, 2.0, -0.5), TOKEN_FIELDS, strict=True):
        padded = map_tensors(padded, partial(wider, fill=fill), (name,))
    padded = map_tensors(padded, lambda values: wider(values, 0), ("response_mask", "token_ids"))
    padded = map_tensors(padded, lambda values: wider(values, -1), ("turn_ids",))
    if inputs.advantages.shape[-1] == width > 1:
        padded = dataclasses.replace(padded, advantages=wider(inputs.advantages, 0))
    expected, expected_gradient = evaluate(policy, inputs)
    result, gradient = evaluate(policy, padded)
    inside = inputs.response_mask
    got, wanted = _tokens(result.objective, padded)[:, keep][inside], _tokens(expected.objective, inputs)[inside]
    assert_close(got, wanted, "objective with more padding")
    assert_close(gradient[:, keep], expected_gradient, "gradient with more padding")
    changed = _tokens(result.clipped, padded)[:, keep] != _tokens(expected.clipped, inputs)
    _assert_nowhere(changed & inside, "more padding changes a clip decision")


@law()
def row_order_changes_nothing(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """12. Reordering the responses or renumbering the groups changes no value, gradient or clip decision."""
    order = torch.arange(len(inputs.log_probs)).flip(0).roll(len(inputs.log_probs) // 3)
    expected, expected_gradient = evaluate(policy, inputs)
    result, gradient = evaluate(policy, map_tensors(inputs, lambda values: values[order]))
    assert_close(result.objective, expected.objective[order], "objective with reordered rows")
    assert_close(gradient, expected_gradient[order], "gradient with reordered rows")
    assert torch.equal(result.clipped, expected.clipped[order]), "reordering the rows changes a clip decision"
    if inputs.group_ids is not None:
        result, gradient = evaluate(policy, dataclasses.replace(inputs, group_ids=1000 - 7 * inputs.group_ids))
        assert_close(result.objective, expected.objective, "objective with renumbered groups")
        assert_close(gradient, expected_gradient, "gradient with renumbered groups")


@law()
def rows_are_independent(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """13. A row has the same value, gradient and clip decisions alone as in a batch (scopes token and sequence)."""
    if policy.scope == "batch":
        return
    whole, gradient = evaluate(policy, inputs)
    for row in range(len(inputs.log_probs)):
        own = slice(row, row + 1)
        alone, alone_gradient = evaluate(policy, map_tensors(inputs, operator.itemgetter(own)))
        assert_close(alone.objective, whole.objective[own], f"objective of row {row} alone")
        assert_close(alone_gradient, gradient[own], f"gradient of row {row} alone")
        assert torch.equal(alone.clipped, whole.clipped[own]), f"clip decision of row {row} alone differs"


@law()
def groups_are_independent(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """14. A group has the same value, gradient and clip decisions alone as in a batch (rules that need group_ids)."""
    if "group_ids" not in policy.needs or inputs.group_ids is None:
        return
    whole, gradient = evaluate(policy, inputs)
    for number in sorted(set(inputs.group_ids[:, 0].tolist())):
        own = (inputs.group_ids == number)[:, 0]
        alone, alone_gradient = evaluate(policy, map_tensors(inputs, operator.itemgetter(own)))
        assert_close(
            alone_gradient, gradient[own], f"a group has a different gradient alone than in the batch (group {number})"
        )
        what = f"a group has a different objective alone than in the batch (group {number})"
        assert_close(alone.objective, whole.objective[own], what)
        assert torch.equal(alone.clipped, whole.clipped[own]), f"clip decision of group {number} alone differs"


@law(example=data.on_policy_inputs)
def batch_size_changes_nothing(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """15. Duplicating every response changes its gradient at ratio 1 and its clip decisions by at most 5% (scope batch)."""
    if policy.scope != "batch" or ratio_one_is_reinforce.name in policy.exempt:
        return
    _, expected = evaluate(policy, inputs)
    _, gradient = evaluate(policy, _twice(inputs))
    what = "gradient in a batch with every response twice (the learner divides by the counts, not the rule)"
    assert_close(gradient[: len(expected)], expected, what, tolerance=0.05)
    off_policy = data.off_policy_inputs(policy)
    before = _tokens(answer(policy, off_policy).clipped, off_policy)
    twice = _twice(off_policy)
    after = _tokens(answer(policy, twice).clipped, twice)[: len(before)]
    changed = float((before != after)[off_policy.response_mask].float().mean())
    assert changed <= 0.05, f"in a batch with every response twice, {changed:.0%} of the clip decisions differ"


def _twice(inputs: ClipInputs) -> ClipInputs:
    """Return a batch that holds every response twice; the copies form their own groups."""
    doubled = map_tensors(inputs, lambda values: torch.cat([values, values]))
    if inputs.group_ids is None:
        return doubled
    number = inputs.group_ids.max() + 1
    return dataclasses.replace(doubled, group_ids=torch.cat([inputs.group_ids, inputs.group_ids + number]))


# numbers


@law(example=_some_inputs, shrinks=False)
def small_batches_stay_finite(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """16. Values and gradients are finite for one token, one response, equal responses, equal advantages, and empty rows."""
    for rows in (1, 2, 6):
        for length in (1, 2, 3):
            for log_ratio in (0.0, 0.01):
                for advantage in (1.0, 0.0):
                    given = data.uniform_inputs(policy, [log_ratio] * rows, length, advantage)
                    result, gradient = evaluate(policy, given)
                    where = f"with {rows} equal rows of {length} tokens, log-ratios {log_ratio:g} and A = {advantage:g}"
                    edges = () if result.band is None else (result.band.low, result.band.high, result.band.ceiling)
                    for what, is_right in (
                        ("the objective is not finite", result.objective.isfinite().all()),
                        ("the gradient is not finite", gradient.isfinite().all()),
                        ("an edge is NaN", not any(edge is not None and edge.isnan().any() for edge in edges)),
                    ):
                        if not is_right:
                            raise LawError(f"{what} {where}", given)
    mask = data.ragged_inputs(policy).response_mask.index_fill(0, torch.tensor([2]), False)
    given = data.filled(policy, dataclasses.replace(data.ragged_inputs(policy), response_mask=mask))
    result, gradient = evaluate(policy, given)
    finite = visible(result.objective, given).isfinite().all() and gradient.isfinite().all()
    assert finite, (
        "a row without tokens makes the objective or the gradient infinite: divide by ops.lengths, which is at least 1"
    )


@law(example=data.extreme_inputs)
def extremes_stay_finite(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """17. Values and gradients stay finite for log-ratios of +-100 on one or all of 4096 tokens, for every sign of A."""
    result, gradient = evaluate(policy, inputs)
    assert result.objective.isfinite().all(), "the objective is not finite"
    assert gradient.isfinite().all(), "the gradient is not finite"


# meaning


@law(example=data.on_policy_inputs)
def ratio_one_is_reinforce(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """18. At ratio 1, nothing is clipped, and each row's gradient is A times a positive constant."""
    result, gradient = evaluate(policy, inputs)
    assert not visible(result.clipped, inputs).any(), "a token or response is clipped at ratio 1"
    assert gradient.isfinite().all(), "the gradient at ratio 1 is not finite"
    per_row = ops.sequence_mean(gradient, inputs.response_mask)
    assert_close(gradient, torch.where(inputs.response_mask, per_row, 0.0), "the gradient differs between the tokens of a row")
    rows = (inputs.advantages != 0) & inputs.response_mask.any(dim=-1, keepdim=True)
    assert (per_row[rows] != 0).all(), "a response with a nonzero advantage has a zero gradient"
    assert (per_row[rows] / inputs.advantages[rows] > 0).all(), "the gradient is not in the direction of the advantage"


@law()
def zero_advantage_zero_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """19. Where the advantage is zero, the gradient is zero and nothing counts as clipped."""
    rows = inputs.advantages[:, 0] == 0
    result, gradient = evaluate(policy, inputs)
    assert (gradient[rows] == 0).all(), (
        "a response with zero advantage has a gradient; if this is intended, set learns_without_advantages and opt out"
    )
    assert not result.clipped[rows].any(), "a response with zero advantage counts as clipped"


@law()
def penalties_are_declared(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """20. A rule whose gradient is nonzero at zero advantage sets `learns_without_advantages`."""
    without = dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    _, gradient = evaluate(policy, without)
    assert policy.learns_without_advantages or (gradient == 0).all(), (
        "the gradient is nonzero without advantages; the learner skips it unless learns_without_advantages is set"
    )


@law()
def advantages_scale_the_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """21. The gradient scales with A: for a factor of 4 at any ratio, and for factors of 1000 and -1 at ratio 1."""
    if "rewards" in policy.needs or ratio_one_is_reinforce.name in policy.exempt:
        return
    at_one = dataclasses.replace(inputs, log_probs=inputs.old_log_probs, rollout_log_probs=inputs.old_log_probs)
    cases = [(" at ratio 1", at_one, factor) for factor in (4.0, 1000.0, -1.0)]
    if not policy.learns_without_advantages:  # a penalty does not scale with the advantages
        cases.append(("", inputs, 4.0))
    for what, given, factor in cases:
        _, expected = evaluate(policy, given)
        _, gradient = evaluate(policy, dataclasses.replace(given, advantages=factor * given.advantages))
        assert_close(gradient, factor * expected, f"gradient{what} with advantages times {factor:g}", 1e-3)


@law()
def token_advantages_are_honoured(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """22. In per-token objectives, each token uses its own (B, T) advantage; a row of equal advantages acts like (B, 1)."""
    expected, expected_gradient = evaluate(policy, inputs)
    if policy.scope == "sequence" or expected.objective.shape[-1] == 1 != inputs.log_probs.shape[-1]:
        return
    mask = inputs.response_mask
    spread = torch.where(mask, inputs.advantages, 0.0)
    result, gradient = evaluate(policy, dataclasses.replace(inputs, advantages=spread))
    assert_close(gradient, expected_gradient, "gradient with advantages (B, T) instead of (B, 1)")
    assert_close(visible(result.objective, inputs), visible(expected.objective, inputs), "objective with advantages (B, T)")
    own = _token_advantages(inputs)
    _, gradient = evaluate(policy, dataclasses.replace(inputs, advantages=own))
    if zero_advantage_zero_gradient.name not in policy.exempt:
        _assert_nowhere((own == 0) & (gradient != 0), "a token with advantage 0 has a gradient")
    if ratio_one_is_reinforce.name not in policy.exempt:
        at_one = dataclasses.replace(inputs, log_probs=inputs.old_log_probs, rollout_log_probs=inputs.old_log_probs)
        _, whole = evaluate(policy, at_one)
        _, gradient = evaluate(policy, dataclasses.replace(at_one, advantages=own))
        expected_gradient = own * torch.where(inputs.advantages == 0, 0.0, whole / inputs.advantages)
        assert_close(gradient, expected_gradient, "at ratio 1, a token's gradient is not proportional to its own advantage")


def _token_advantages(inputs: ClipInputs) -> Tensor:
    """Return random advantages ``(B, T)`` of both signs, with 0 at every fifth token and in all rows with A = 0."""
    noise = torch.randn(inputs.response_mask.shape, generator=torch.Generator().manual_seed(1))
    noise[:, 2::5] = 0
    return torch.where(inputs.response_mask & (inputs.advantages != 0), noise, 0.0)


@law(example=data.on_policy_inputs)
def rows_weigh_the_same(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """23. At ratio 1, all tokens with the same sign of A have the same gradient per unit of A (scope token)."""
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
    """24. For every token, log_ratio is 0 at ratio 1, and rises in proportion to the log-probs of the response."""
    # shift only half of the rows: a rule may compare rows with each other
    chosen = (torch.arange(len(inputs.log_probs)) % 2 == 0)[:, None]

    def judged(shift: float) -> Tensor:
        moved = torch.where(chosen, inputs.log_probs + shift, inputs.log_probs)
        log_ratio = _tokens(answer(policy, dataclasses.replace(inputs, log_probs=moved)).log_ratio, inputs)
        return torch.where(inputs.response_mask, log_ratio.float(), 0.0)

    assert judged(0.0).isfinite().all(), "log_ratio is not finite"
    _assert_nowhere(judged(0.0).abs() > 1e-4, "log_ratio is not 0 at ratio 1")
    lower, raised, higher = (judged(shift)[::2] for shift in (-0.05, 0.05, 0.1))
    for smaller, larger in ((lower, torch.zeros_like(lower)), (torch.zeros_like(raised), raised), (raised, higher)):
        assert (larger >= smaller).all(), "log_ratio falls when the log-probs rise"
        assert (larger.sum(-1) > smaller.sum(-1)).all(), "log_ratio does not rise with the log-probs"
    for advantage in (1.0, -1.0):
        given = data.uniform_inputs(policy, (-1.2, -0.8, -0.4, -0.1, 0.0, 0.1, 0.4, 0.8, 1.2), 4, advantage)
        reported = _tokens(answer(policy, given).log_ratio, given)
        assert (reported.mean(-1).diff() > 0).all(), "log_ratio does not rise with the log-probs of a whole response"
        assert (reported.diff(dim=0) > 0).all(), (
            "the log_ratio of a token does not rise with the log-probs of the whole response"
        )
        even = data.uniform_inputs(policy, [0.05 * step for step in range(-8, 9)], 4, advantage)
        bend = _tokens(answer(policy, even).log_ratio, even).diff(dim=0).diff(dim=0).abs()
        assert (bend < 5e-4).all(), (
            "log_ratio is not proportional to the tokens' log-ratios: is it a ratio instead of its logarithm?"
        )


@law()
def clipped_means_no_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """25. Where A != 0 and log-ratios are below 20, ``clipped`` positions exist and are exactly those without a gradient."""
    result, gradient = evaluate(policy, inputs)
    relevant = _relevant(result, inputs)
    _assert_nowhere(relevant & result.clipped & (gradient != 0), "a position counts as clipped but has a gradient")
    _assert_nowhere(relevant & ~result.clipped & (gradient == 0), "a position has no gradient but does not count as clipped")
    has_width = any(getattr(policy, name) is not None for name in policy.width_fields())
    if (has_width or result.band is not None) and len(inputs.log_probs) > 1:
        assert result.clipped.any(), "the rule has a width or a band, but clips 0% of ragged data of any spread"


def _relevant(result: ClipResult, inputs: ClipInputs) -> Tensor:
    """Mark the positions ``(B, T)`` where the gradient reveals the clip decision: A != 0, and no log-ratio is at the limit."""
    moved = (inputs.log_probs - inputs.old_log_probs).abs()
    limits = (result.log_ratio.abs() < ops.LOG_RATIO_LIMIT) & (moved < ops.LOG_RATIO_LIMIT)
    return inputs.response_mask & (inputs.advantages != 0) & limits


@law()
def clipped_means_held_back(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """26. For rules exempt from clipped_means_no_gradient, ``clipped`` means that the gradient is cut, capped or reversed."""
    if clipped_means_no_gradient.name not in policy.exempt:
        return
    mask, side = inputs.response_mask, inputs.advantages.sign()
    at_one = dataclasses.replace(inputs, log_probs=inputs.old_log_probs, rollout_log_probs=inputs.old_log_probs)

    def is_flat(given: ClipInputs, gradient: Tensor, way: int) -> Tensor:
        """Whether a small move along the advantage (way 1) or against it (way -1) leaves the gradient unchanged."""
        moves = (torch.where(mask, given.log_probs + way * step * side, given.log_probs) for step in (0.01, 0.02))
        others = [evaluate(policy, dataclasses.replace(given, log_probs=moved))[1] for moved in moves]
        return torch.stack([(other - gradient).abs() <= 1e-6 * gradient.abs() for other in others]).all(0)

    _, gradient_at_one = evaluate(policy, at_one)
    flat_at_one = is_flat(at_one, gradient_at_one, 1)
    for factor in (1.0, 4.0, 16.0):
        given = data.moved(inputs, factor)
        result, gradient = evaluate(policy, given)
        clipped, log_ratio = _tokens(result.clipped, given), _tokens(result.log_ratio, given)
        relevant = _relevant(result, given)
        is_seen = gradient.abs() > 1e-20 * gradient_at_one.abs()  # a decaying weight may underflow float32
        flat, reversed_ = is_flat(given, gradient, 1) & is_seen & ~flat_at_one, gradient * side < 0
        capped = flat & (log_ratio * side > 0)
        unreported = relevant & ~clipped & reversed_
        if not policy.learns_without_advantages:
            _assert_nowhere(unreported, "the gradient is reversed, but the position does not count as clipped", given)
        elif unreported.any():
            what = "a penalty reverses the gradient, but it does not count as clipped and is missing from the clip fraction"
            warnings.warn(what, LawWarning, stacklevel=2)
        _assert_nowhere(relevant & ~clipped & capped, "the weight is capped, but the position does not count as clipped", given)
        held = flat | is_flat(given, gradient, -1) & ~flat_at_one | reversed_ | (gradient == 0)
        if policy.learns_without_advantages:  # the restoring force of a penalty also holds back the policy
            unclipped = gradient_at_one * ops.limited_exp(given.log_probs - given.old_log_probs)
            held = held | ((gradient - unclipped) * log_ratio < 0)
        _assert_nowhere(
            relevant & clipped & ~held, "a position counts as clipped, but its gradient is not cut, capped or reversed", given
        )
    for advantage in (1.0, -1.0):
        swept = data.uniform_inputs(policy, [advantage * each for each in (0.0, *SWEEP)], 1, advantage)
        result, gradient = evaluate(policy, swept)
        size = gradient[:, 0].abs()
        drops = (size[1:] == 0) & (size[:-1] > 0.05 * size[0])  # a decaying weight is small before it becomes 0
        unreported = torch.zeros_like(swept.response_mask)
        unreported[1:, 0] = drops & ~result.clipped[1:, 0]
        _assert_nowhere(unreported, "the gradient is cut, but the position does not count as clipped", swept)


@law()
def only_cuts_outward(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """27. Gradients are cut only above ratio 1 if A > 0, and only below 1 or above a ceiling if A < 0; cuts persist outward."""
    own = dataclasses.replace(inputs, advantages=_token_advantages(inputs))
    for given in (inputs, own) if policy.scope == "token" else (inputs,):
        result = answer(policy, given)
        if result.clipped.shape[-1] == 1 and given is own:
            continue
        inward = _relevant(result, given) & result.clipped & (given.advantages > 0) & (result.log_ratio < 0)
        _assert_nowhere(inward, "a positive advantage is cut below ratio 1", own if given is own else None)
    for length in (1, 16):
        for advantage in (1.0, -1.0):
            for way in (1.0, -1.0):
                steps = [way * log_ratio for log_ratio in SWEEP]
                if wrong := _wrong_cut(_cuts(policy, steps, length, advantage), advantage, way):
                    what, place = wrong
                    raise LawError(what, data.uniform_inputs(policy, [steps[place]], length, advantage))


def _wrong_cut(cuts: list[tuple[bool, bool]], advantage: float, way: float) -> tuple[str, int] | None:
    """Return a description and the index of the first wrong decision, counting away from ratio 1; None if there is none."""
    decisions = [clipped for clipped, _ in cuts]
    if advantage > 0 > way and any(decisions):
        return "a positive advantage is cut below ratio 1", decisions.index(True)
    if advantage < 0 < way and any(cut for _, cut in cuts[:1]):
        return "a negative advantage is cut immediately above ratio 1", 0
    if decisions != sorted(decisions):
        place = next(each for each in range(1, len(decisions)) if decisions[each - 1] and not decisions[each])
        return f"a {'positive' if advantage > 0 else 'negative'} advantage is cut, but not at ratios further from 1", place
    return None


SWEEP = tuple(1e-5 * 1.25**step for step in range(54))  # up to 1.4


def _swept(policy: ClipPolicy) -> list[ClipInputs]:
    """Return responses whose tokens share a log-ratio, for two lengths and both signs of A."""
    steps = (*SWEEP, *(-log_ratio for log_ratio in SWEEP))
    return [data.uniform_inputs(policy, steps, length, advantage) for length in (1, 16) for advantage in (1.0, -1.0)]


def _cuts(policy: ClipPolicy, log_ratios: list[float], length: int, advantage: float) -> list[tuple[bool, bool]]:
    """For each log-ratio of a whole response, return whether the response counts as clipped and whether its gradient is cut."""
    inputs = data.uniform_inputs(policy, log_ratios, length, advantage)
    result, gradient = evaluate(policy, inputs)
    clipped = _tokens(result.clipped, inputs).any(dim=-1)
    cut = clipped & (gradient == 0).all(dim=-1)
    inside = (result.log_ratio.abs() < ops.LOG_RATIO_LIMIT).all(dim=-1).tolist()
    return [pair for pair, seen in zip(zip(clipped.tolist(), cut.tolist(), strict=True), inside, strict=True) if seen]


@law()
def band_is_the_one_used(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """28. Positions beyond the band's edge for the sign of A are clipped, and no others if all tokens share a log-ratio."""
    for number, given in enumerate([inputs, *_swept(policy)]):
        result = answer(policy, given)
        band, judged = result.band, result.log_ratio
        if band is None:
            continue
        positive, negative = given.advantages > 0, given.advantages < 0
        beyond = (positive & (judged > band.high)) | (negative & (judged < band.low))
        near = _near(judged, band.high) | _near(judged, band.low)
        if band.ceiling is not None:
            beyond, near = beyond | (negative & (judged > band.ceiling)), near | _near(judged, band.ceiling)
        relevant = _relevant(result, given) & ~near
        own = given if number else None
        if number:
            _assert_nowhere(relevant & result.clipped & ~beyond, "a position inside the reported band counts as clipped", own)
        if clipped_means_no_gradient.name not in policy.exempt:
            what = "a position outside the reported band does not count as clipped"
            _assert_nowhere(relevant & ~result.clipped & beyond, what, own)


@law(shrinks=False)
def every_need_matters(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """29. Every input in `needs` and every turn boundary changes some result, with the defaults or another option."""
    if not policy.needs:
        return
    examples = [data.moved(inputs, factor) for factor in (1.0, 4.0, 0.25)]
    rules = [policy, *(other for _, other in _options(policy)), *_switched_on(policy)]
    for need in sorted(policy.needs):
        changed = [
            (given, dataclasses.replace(given, **{need: new})) for given in examples for new in _other_values(given, need)
        ]
        assert any(_differs(rule, *pair) for rule in rules for pair in changed), f"{need} is in `needs` but changes nothing"
    if inputs.turn_ids is not None:
        for turn in range(int(inputs.turn_ids.max())):
            joined = torch.where(inputs.turn_ids > turn, inputs.turn_ids - 1, inputs.turn_ids)
            changed = [(given, dataclasses.replace(given, turn_ids=joined)) for given in examples]
            what = f"merging turns {turn} and {turn + 1} changes nothing"
            assert any(_differs(rule, *pair) for rule in rules for pair in changed), what


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


def _differs(policy: ClipPolicy, one: ClipInputs, other: ClipInputs) -> bool:
    """Whether a policy gives different results on two inputs, or fails on the second."""
    try:
        return any(not torch.equal(old, new) for old, new in zip(_answers(policy, one), _answers(policy, other), strict=True))
    except Exception:  # a failure on an input shows that the policy reads it
        return True


def _answers(policy: ClipPolicy, inputs: ClipInputs) -> list[Tensor]:
    """Return everything that a policy computes, including the gradient."""
    result, gradient = evaluate(policy, inputs)
    values = (result.objective, result.log_ratio, result.clipped, *result.metrics.values())
    return [gradient, *(visible(each.detach(), inputs).nan_to_num() for each in values)]


def _near(log_ratio: Tensor, edge: Tensor) -> Tensor:
    return (log_ratio - edge).abs() < 1e-5 * (1 + edge.abs())


# settings


@law(shrinks=False)
def widths_scale(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """30. ``scaled(f)`` is valid and clips less for larger f, for both signs of A; without a width, it raises an error."""
    try:
        same = policy.scaled(1.0)
    except ValueError:
        widths = [name for name in policy.width_fields() if getattr(policy, name) is not None]
        assert not widths, "scaled(1) raises an error, but the rule has fields marked Width"
        return
    assert same == policy, "scaled(1) is not equal to the policy"
    examples = _spread_out(policy, inputs)
    narrow, _, wide = policies = [policy.scaled(factor) for factor in (0.25, 1.0, 4.0)]
    sides = {"A > 0": 1, "A < 0": -1}
    shares = {side: [[_share(each, given, sign) for each in policies] for given in examples] for side, sign in sides.items()}
    if any(share > 0 for side in shares.values() for each in side for share in each):
        for side, fractions in shares.items():
            clips, falls = any(any(each) for each in fractions), any(each[0] > each[2] for each in fractions)
            shown = next((each for each in fractions if any(each)), fractions[0])
            assert falls or not clips, (
                f"for {side}, wider bands do not clip less; clip fractions at 1/4, 1, 4 times the width: "
                + ", ".join(f"{fraction:.2f}" for fraction in shown)
            )
    else:  # the rule lets weights decay instead of clipping
        changes = any(
            not torch.equal(*(visible(answer(each, given).objective, given) for each in (narrow, wide))) for given in examples
        )
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


def _share(policy: ClipPolicy, inputs: ClipInputs, side: int) -> float:
    """Return the clipped share of the responses whose advantage has the given sign."""
    clipped = ops.per_response(answer(policy, inputs).clipped.float(), inputs.response_mask)
    rows = inputs.advantages.sign() == side
    return float(clipped[rows].mean()) if bool(rows.any()) else 0.0


def _spread_out(policy: ClipPolicy, inputs: ClipInputs) -> list[ClipInputs]:
    """Return the inputs with log-ratios of several magnitudes, and responses whose tokens share a log-ratio."""
    return [*(data.moved(inputs, factor) for factor in (1.0, 0.25, 4.0, 16.0)), *_swept(policy)]


@law(shrinks=False)
def every_width_matters(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """31. Every non-null Width affects the objective or what is clipped; null clips no more than the narrowest width."""
    examples = _spread_out(policy, inputs)
    answers = [answer(policy, given) for given in examples]
    for name in policy.width_fields():
        width = getattr(policy, name)
        if width is not None:
            assert any(
                not torch.equal(visible(new.clipped, given), visible(old.clipped, given))
                or not torch.equal(visible(new.objective, given), visible(old.objective, given))
                for other in _other_widths(policy, name, width)
                for given, old in zip(examples, answers, strict=True)
                for new in [answer(other, given)]
            ), f"the width {name!r} changes nothing"
        _assert_null_is_no_band(policy, name, examples)


def _assert_null_is_no_band(policy: ClipPolicy, name: str, examples: list[ClipInputs]) -> None:
    """Check that a width of null means no band, and not a width of 0."""
    try:
        null = policy.replace(**{name: None})
    except ValueError:
        return
    narrow = next(_valid(policy, name, [factor * (getattr(policy, name) or 0.2) for factor in (0.01, 0.1, 1.0, 10.0)]), None)
    if narrow is None:
        return
    fractions = [(data.clip_fraction(null, given), data.clip_fraction(narrow, given)) for given in examples]
    is_tighter = any(one > other for one, other in fractions) and not any(one < other for one, other in fractions)
    assert not is_tighter, f"{name} = null clips more than {name} = {getattr(narrow, name):g}, as if it were 0"


def _valid(policy: ClipPolicy, name: str, values: Iterable[Any]) -> Iterator[ClipPolicy]:
    """Yield the policy with each given value of a setting, except values that the policy's class does not allow."""
    for value in values:
        try:
            yield policy.replace(**{name: value})
        except ValueError:
            continue


def _other_widths(policy: ClipPolicy, name: str, width: float) -> Iterator[ClipPolicy]:
    """Yield the policy with other values for one width, within the width's bounds."""
    return _valid(policy, name, (width * factor for factor in (0.5, 2.0, 0.1, 10.0, 0.01, 100.0)))


@law(shrinks=False)
def update_is_pure(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """32. ``updated`` is deterministic, returns a policy of the same class that can be dumped, and changes nothing in place."""
    result, _ = evaluate(policy, inputs)
    before, answers = policy.model_dump(), _answers(policy, inputs)
    empty = data.clip_stats(dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages)), result)
    stats = data.clip_stats(inputs, result)
    for sums in (stats, empty, _sums(policy, inputs, 1.0), _sums(policy, inputs, 0.0)):
        first, second = policy.updated(sums), policy.updated(sums)
        assert type(first) is type(policy), f"updated returned a {type(first).__name__}"
        assert first == second, "the same sums gave a different policy"
        _assert_usable(first, inputs)
        same = zip(answers, _answers(policy, inputs), strict=True)
        assert all(torch.equal(one, other) for one, other in same), (
            "updated changed the results of the policy that it was called on"
        )
    assert policy.model_dump() == before, "updated changed the policy it was called on"


def _sums(policy: ClipPolicy, inputs: ClipInputs, share: float, progress: float = 0.3) -> ClipStats:
    """Return the statistics of an update in which the given share of every response was clipped."""
    length = inputs.response_mask.sum(dim=-1).float()
    edges = torch.stack([length.min(), length.median(), length.max()])
    sign = torch.ones_like(length)
    sign[::2] = -1
    judged = ops.per_response(answer(policy, inputs).log_ratio, inputs.response_mask)[:, 0]
    return ClipStats.of(edges, length, sign, torch.full_like(length, share), judged, progress=progress)


def _assert_usable(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """Check that an updated policy is valid, gives finite values and does not clip at ratio 1."""
    assert _survives_its_dump(policy), "an updated policy is not valid, or cannot be restored from its dump"
    assert evaluate(policy, inputs)[0].objective.isfinite().all(), "an updated policy gives values that are not finite"
    if ratio_one_is_reinforce.name not in policy.exempt:
        at_one = data.on_policy_inputs(policy)
        assert not visible(answer(policy, at_one).clipped, at_one).any(), "an updated policy clips at ratio 1"


@law(shrinks=False)
def many_updates_stay_valid(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """33. The policy stays valid through a hundred updates in which everything, or nothing, is clipped."""
    if not policy.is_adaptive:
        return
    for share in (0.0, 1.0):
        sums, current = _sums(policy, inputs, share), policy
        for step in range(100):
            current = current.updated(dataclasses.replace(sums, progress=step / 100))
        _assert_usable(current, inputs)


@law(shrinks=False)
def updates_go_by_shares(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """34. Updates depend on shares, not counts: twice as many of the same responses give the same update."""
    if not policy.is_adaptive:
        return
    once = _sums(policy, inputs, 0.02)
    sums = ("num_responses", "num_clipped", "log_ratio", "log_ratio_squared", "length")
    twice = dataclasses.replace(once, **{name: 2 * getattr(once, name) for name in sums})
    warm = policy.updated(once)  # the first update may do no more than initialise an average
    got, expected = (torch.tensor(_numbers(warm.updated(each).model_dump())) for each in (twice, once))
    assert_close(got, expected, "twice as many of the same responses give a different update")


def _numbers(settings: Any) -> list[float]:
    """Return the numbers in nested settings."""
    if isinstance(settings, dict | list | tuple):
        return [number for each in (settings.values() if isinstance(settings, dict) else settings) for number in _numbers(each)]
    return [float(settings)] if isinstance(settings, int | float) else []


@law(shrinks=False)
def updates_pull_back(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """35. After five updates with everything clipped, a rule clips no more than after five without clipping (warning only)."""
    if not policy.is_adaptive:
        return
    after = []
    for share in (0.0, 1.0):
        current, sums = policy, _sums(policy, inputs, share)
        for _ in range(5):
            current = current.updated(sums)
        after.append([data.clip_fraction(current, given) for given in _spread_out(policy, inputs)])
    pairs = list(zip(*after, strict=True))
    if any(full > none for none, full in pairs) and not any(full < none for none, full in pairs):
        what = "the rule clips more after updates in which everything was clipped than after updates in which nothing was"
        warnings.warn(f"{what}: does its feedback have the wrong sign?", LawWarning, stacklevel=2)


@law(shrinks=False)
def every_option_keeps_the_laws(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """36. The laws also hold for every other option of a setting: any allowed word, true or false, and null or a number."""
    for what, other in _options(policy):
        for each in LAWS:
            if each.name in policy.exempt or each.name in ONCE:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", LawWarning)
                    each(other)
            except Exception as error:
                if _is_broken(each, policy):  # the law also fails with the defaults, which is reported separately
                    continue
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                message = f"with {what}: {each.name}: {kind}{str(error).strip().partition(chr(10))[0]}"
                raise AssertionError(message) from error


def _is_broken(each: Law, policy: ClipPolicy) -> bool:
    try:
        each(policy)
    except Exception:  # a law fails on any exception that the policy raises
        return True
    return False


ONCE = {"settings_are_complete", "names_are_known", "every_need_matters", "every_option_keeps_the_laws", "compiles"}
"""Laws that are checked once per class, not for every option, because they concern the class or are slow."""


def _options(policy: ClipPolicy) -> Iterator[tuple[str, ClipPolicy]]:
    """Yield variants of the policy, each with one word, boolean or null replaced, if the class allows the new value."""
    for name, field in type(policy).model_fields.items():
        if name in NAMED:
            continue
        value, parts = getattr(policy, name), {field.annotation, *typing.get_args(field.annotation)}
        words = [word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)]
        others: list[Any] = sorted((word for word in words if word != value), key=str)
        if bool in parts:
            others.append(not value)
        if type(None) in parts and value is not None:
            others.append(None)
        for other in others:
            for changed in _valid(policy, name, [other]):
                yield f"{name} = {'null' if other is None else repr(other)}", changed
        if value is None:
            for changed in islice(_valid(policy, name, _some_numbers(field)), 1):
                yield f"{name} = {getattr(changed, name)}", changed


def _some_numbers(field: Any) -> list[float]:
    """Return numbers within the bounds of a field, with integers last."""
    marks = [mark for mark in field.metadata if isinstance(mark, BOUNDS)]
    bounds = [
        float(bound) for name in ("gt", "ge", "lt", "le") for mark in marks if (bound := getattr(mark, name, None)) is not None
    ]
    low, high = min(bounds, default=0.0), max(bounds, default=0.0)
    size = min(1.0, high - low) if high > low else 1.0
    return [low + 0.5 * size, low + 2 * size, float(round(low) + 1), float(round(low) + 8)]


def _switched_on(policy: ClipPolicy) -> Iterator[ClipPolicy]:
    """Yield variants of the policy, each with one number raised above 0, which enables parts that are off by default."""
    for name, field in type(policy).model_fields.items():
        if getattr(policy, name) == 0 and not isinstance(getattr(policy, name), bool):
            yield from islice(_valid(policy, name, _some_numbers(field)), 1)


@law(shrinks=False)
def compiles(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """37. ``torch.compile(fullgraph=True, backend="aot_eager")`` gives the same values (warning only)."""
    given = {name: values for name in data.ALL_FIELDS if (values := getattr(inputs, name)) is not None}
    constants: dict[str, Any] = {name: getattr(inputs, name) for name in ("max_length", "progress")}

    def objective(**tensors: Any) -> Tensor:
        return policy(ClipInputs(**tensors, **constants)).objective

    expected = objective(**given)
    torch.compiler.reset()  # otherwise compilations of other policies would count toward torch's limit
    traced: Any = torch.compile(objective, fullgraph=True, backend="aot_eager")
    try:
        with warnings.catch_warnings():
            # torch itself warns, for example that guards run slower on Python 3.13.0; warnings may be errors here
            warnings.simplefilter("ignore")
            got = traced(**given)
    except Exception as error:  # the rule is correct, but slower than it could be
        reason = str(error).strip().partition("\n")[0]
        what = f"the rule does not compile to one graph and runs uncompiled: {type(error).__name__}: {reason}"
        warnings.warn(what, LawWarning, stacklevel=2)
        return
    assert_close(got, expected, "compiled objective")


LAWS: tuple[Law, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Law))
"""The laws, in the order of their definition."""
