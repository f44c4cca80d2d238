"""What every clip policy keeps, in the order in which a broken law explains most: form, layout, numbers, meaning, settings."""

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

from rlzoo import ops
from rlzoo.policy import NAMED, ClipPolicy, ClipStats, contract_problem
from rlzoo.testing import data
from rlzoo.testing.data import INTEGER_TOKEN_FIELDS, TOKEN_FIELDS, answer, evaluate, fresh, left_padded, map_tensors, visible
from rlzoo.types import ClipInputs, ClipResult

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


class LawWarning(UserWarning):
    """What a law advises on a policy that keeps it."""


def law(*, example: Example = data.off_policy_inputs, shrinks: bool = True) -> Callable[[Callable[..., None]], Law]:
    """Make a law of a check; its docstring is the statement, without the number."""

    def make(check: Callable[[ClipPolicy, ClipInputs], None]) -> Law:
        statement = (check.__doc__ or "").partition("\n")[0].partition(". ")[2]
        return Law(check.__name__, statement, check, example, shrinks)

    return make


def _some_inputs(policy: ClipPolicy) -> ClipInputs:
    """Inputs that are made without a call of the policy."""
    return data.uniform_inputs(policy, (0.0, 0.1), length=2, advantage=1.0)


def _assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float = 1e-4) -> None:
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)} in place of {tuple(expected.shape)}"
    wrong = ~torch.isclose(got, expected, rtol=tolerance, atol=1e-6, equal_nan=True)
    assert not wrong.any(), f"{what}: {got[wrong][0]:.4g} in place of {expected[wrong][0]:.4g}"


class LawError(AssertionError):
    """A failure on other inputs than those the law was given, which it brings with it."""

    def __init__(self, what: str, inputs: ClipInputs) -> None:
        super().__init__(what)
        self.inputs = inputs


def _assert_nowhere(places: Tensor, what: str, inputs: ClipInputs | None = None) -> None:
    """Fail with the first of the places, ``(B, T)``, where something is wrong; on inputs of the law's own, with its row."""
    if places.any():
        row, token = places.nonzero()[0].tolist()
        what = f"{what} (row {row}, token {token})"
        raise AssertionError(what) if inputs is None else LawError(what, _row(inputs, row))


def _row(inputs: ClipInputs, row: int) -> ClipInputs:
    """The inputs of one response."""
    return map_tensors(inputs, operator.itemgetter(slice(row, row + 1)))


def _tokens(values: Tensor, inputs: ClipInputs) -> Tensor:
    """Values per response or token as ``(B, T)``."""
    return values.expand(inputs.response_mask.shape)


# form


@law(example=_some_inputs, shrinks=False)
def settings_are_complete(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """1. Default-constructible, round-trips through its dump, refuses unknown keys; fields have descriptions and bounds."""
    kind = type(policy)
    assert kind.model_config.get("frozen"), "instances are not frozen"
    assert _survives_its_dump(kind()), "the dump of the defaults does not give the defaults back"
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


def _survives_its_dump(policy: ClipPolicy) -> bool:
    """Whether its dump gives it back, as it is and as JSON, which is how checkpoints keep it."""
    kind = type(policy)
    try:
        restored = (kind.model_validate(policy.model_dump()), kind.model_validate_json(policy.model_dump_json()))
    except ValueError:
        return False
    return all(each == policy for each in restored)


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
    """2. Estimator, reduction, scope, needs and the laws in `exempt` are known names; every exemption has a reason."""
    from rlzoo.zoo import policy_problem

    problem = contract_problem(type(policy)) or policy_problem(type(policy))
    assert problem is None, problem
    known = [each.name for each in LAWS]
    for name, reason in policy.exempt.items():
        assert name in known, f"opts out of {name!r}, which is no law"
        assert reason.strip(), f"opts out of {name!r} without a reason"


@law(example=data.ragged_inputs)
def is_pure(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """3. Inputs, settings and globals stay as they were; any call, from the first on, answers alike; log_ratio is detached."""
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
    assert is_untouched, "torch's global generator was used; draw with torch.Generator().manual_seed(inputs.seed)"
    evaluate(policy, data.moved(inputs, 0.5))
    second, second_gradient = evaluate(policy, inputs)
    for what, one, other in (
        ("objective", first.objective, second.objective),
        ("gradient", first_gradient, second_gradient),
        ("log_ratio", first.log_ratio, second.log_ratio),
        ("clip decision", first.clipped.float(), second.clipped.float()),
    ):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), f"the same inputs gave another {what}"
    assert not first.log_ratio.requires_grad, "log_ratio carries a gradient; detach it"


class _Draws(TorchFunctionMode):
    """Records what is drawn from a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (kwargs or {}).get("generator") is not None:
            self.seen.extend(each.clone() for each in _all_tensors(result))
        return result


@law()
def draws_follow_the_seed(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """4. A rule that draws at random draws other numbers at another `inputs.seed`."""
    drawn = []
    for seed in (1, 2, 99):
        with _Draws() as draws:
            policy(dataclasses.replace(fresh(inputs), seed=seed))
        drawn.append(draws.seen)
    first = drawn[0]
    same = all(
        len(other) == len(first) and all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
        for other in drawn[1:]
    )
    few = sum(each.numel() for each in first) < 8  # which may well be drawn again
    assert few or not same, "every seed draws the same; draw with torch.Generator().manual_seed(inputs.seed)"


@law()
def answers_in_float32(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """5. The answer to float32 or bfloat16 is float32; it and its metrics are finite and have the shapes of the contract."""
    size, max_length = inputs.log_probs.shape
    either = {(size, 1), (size, max_length)}
    shapes = {"token": {(size, max_length)}, "sequence": {(size, 1)}, "batch": either}[policy.scope]
    for given in (inputs, map_tensors(inputs, lambda values: values.bfloat16(), TOKEN_FIELDS)):
        result = policy(fresh(given))
        assert isinstance(result, ClipResult), f"the answer is a {type(result).__name__}, not a ClipResult"
        for name, allowed, dtype in (
            ("objective", shapes, torch.float32),
            ("log_ratio", either, torch.float32),
            ("clipped", either, torch.bool),
        ):
            values = getattr(result, name)
            assert values.dtype == dtype, f"{name} is {values.dtype}, not {dtype}"
            got = tuple(values.shape)
            assert got in allowed, f"{name} has another shape than scope {policy.scope!r} asks for: {got}, not {allowed}"
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


class _Types(TorchFunctionMode):
    """Records in which types, other than float32, anything is computed that carries a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _all_tensors(result):
            if tensor.requires_grad and tensor.dtype != torch.float32:
                self.seen.add(str(tensor.dtype))
        return result


@law()
def computes_in_float32(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """6. What carries the gradient is float32; bfloat16 inputs are cast first, so that no value, cut or metric is rounded."""
    given = fresh(inputs)
    given.log_probs.requires_grad_()
    with _Types() as types_:
        policy(given)
    assert not types_.seen, f"the gradient passes through {', '.join(sorted(types_.seen))}, not float32 alone"
    half = map_tensors(inputs, lambda values: values.bfloat16(), TOKEN_FIELDS)
    cast = map_tensors(half, lambda values: values.float(), TOKEN_FIELDS)
    (got, gradient), (expected, expected_gradient) = (evaluate(policy, each) for each in (half, cast))
    what = "bfloat16 inputs are not cast to float32 first:"
    _assert_close(visible(got.log_ratio, inputs), visible(expected.log_ratio, inputs), f"{what} log_ratio", 1e-5)
    _assert_close(visible(got.objective, inputs).float(), visible(expected.objective, inputs), f"{what} objective")
    assert torch.equal(got.clipped, expected.clipped), f"{what} another clip decision"
    for name, values in expected.metrics.items():
        _assert_close(visible(got.metrics[name], inputs).float(), visible(values, inputs).float(), f"{what} metric {name!r}")
    wrong = (gradient - expected_gradient).abs() > 0.05 * expected_gradient.abs() + 0.01 * expected_gradient.abs().max()
    _assert_nowhere(wrong, f"{what} another gradient")


class _Calls(TorchFunctionMode):
    """Keeps what every call of torch gave."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append(result)
        return result


class _Devices(TorchFunctionMode):
    """Records the first call that mixes tensors of several devices; numbers in tensors without a dimension do not count.

    A call that needs the values, which a meta tensor does not have, gives what it gave on the CPU.
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
    """Values with their tensors, in tuples and lists, on the device that holds no values."""
    if isinstance(values, Tensor):
        return values.to("meta")
    return type(values)(map(_on_meta, values)) if type(values) in (tuple, list) else values


@law(shrinks=False)
def runs_on_another_device(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """7. Tensors are made on the device of the inputs, and the answer is there."""
    advice = "make tensors with device=inputs.log_probs.device"
    given, without_values = fresh(inputs), map_tensors(inputs, lambda values: values.to("meta"))
    with _Calls() as calls:
        policy(given)
    try:
        with _Devices(calls.seen) as devices:
            result = policy(without_values)
    except Exception:  # a rule that hands values to another library is judged up to there
        assert devices.mixed is None, f"{devices.mixed} mixes the inputs' device with the CPU; {advice}"
        return
    assert devices.mixed is None, f"{devices.mixed} mixes the inputs' device with the CPU; {advice}"
    for name in ("objective", "log_ratio", "clipped"):
        assert getattr(result, name).device.type == "meta", f"{name} is not on the device of the inputs; {advice}"


def _all_tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _all_tensors(value)
    elif isinstance(values, dict):
        yield from _all_tensors(list(values.values()))


@law()
def rollout_log_probs_are_optional(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """8. Without rollout_log_probs the answer is as if they were the old ones."""
    expected, expected_gradient = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs))
    try:
        got, gradient = evaluate(policy, dataclasses.replace(inputs, rollout_log_probs=None))
    except Exception as error:
        raise AssertionError(f"without rollout_log_probs: {type(error).__name__}: {error}") from error
    what = "without rollout_log_probs"
    _assert_close(visible(got.objective, inputs), visible(expected.objective, inputs), f"objective {what}")
    _assert_close(gradient, expected_gradient, f"gradient {what}")


@law(example=data.on_policy_inputs)
def ratio_is_to_the_old_model(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """9. rollout_log_probs change nothing at ratio 1, or it warns; with `ratio_to_sampler`, likelier tokens weigh no more."""
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
        advice = "if its ratio is to the sampler, set ratio_to_sampler, or a mismatch correction corrects twice"
        warnings.warn(f"the {what} at ratio 1 depends on rollout_log_probs: {advice}", LawWarning, stacklevel=2)


def _assert_likelier_weighs_no_more(policy: ClipPolicy, inputs: ClipInputs) -> None:
    shifted = (dataclasses.replace(inputs, rollout_log_probs=inputs.old_log_probs + shift) for shift in (-0.02, 0.0, 0.02))
    rarer, same, likelier = (evaluate(policy, given)[1].abs() for given in shifted)
    mask = inputs.response_mask & (inputs.advantages != 0)
    heavier = (likelier > same * 1.0001) | (same > rarer * 1.0001)
    _assert_nowhere(mask & heavier, "a token that the sampler found likelier weighs more: is its ratio upside down?")


# layout


@law()
def masked_positions_are_ignored(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """10. NaN and infinity on masked positions change neither value nor gradient, with padding on either side."""
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
def padding_changes_nothing(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """11. More masked columns anywhere, whatever is in them, change neither value, gradient nor cuts."""
    size, width = inputs.log_probs.shape
    keep = torch.arange(width) + 2 + (torch.arange(width) >= 3)  # two on the left, one after the third token, five on the right

    def wider(values: Tensor, fill: float) -> Tensor:
        return torch.full((size, width + 8), fill).to(values.dtype).index_copy(1, keep, values)

    padded = inputs
    for fill, name in zip((-3.0, -1.0, -5.0, 2.0, -0.5), TOKEN_FIELDS, strict=True):  # so that no difference is 0
        padded = map_tensors(padded, partial(wider, fill=fill), (name,))
    padded = map_tensors(padded, lambda values: wider(values, 0), ("response_mask", "token_ids"))
    padded = map_tensors(padded, lambda values: wider(values, -1), ("turn_ids",))
    if inputs.advantages.shape[-1] == width > 1:
        padded = dataclasses.replace(padded, advantages=wider(inputs.advantages, 0))
    expected, expected_gradient = evaluate(policy, inputs)
    result, gradient = evaluate(policy, padded)
    inside = inputs.response_mask
    got, wanted = _tokens(result.objective, padded)[:, keep][inside], _tokens(expected.objective, inputs)[inside]
    _assert_close(got, wanted, "objective with more padding")
    _assert_close(gradient[:, keep], expected_gradient, "gradient with more padding")
    changed = _tokens(result.clipped, padded)[:, keep] != _tokens(expected.clipped, inputs)
    _assert_nowhere(changed & inside, "more padding changes a clip decision")


@law()
def row_order_changes_nothing(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """12. Responses in another order, and groups of other numbers, have the same values, gradients and cuts."""
    order = torch.arange(len(inputs.log_probs)).flip(0).roll(len(inputs.log_probs) // 3)
    expected, expected_gradient = evaluate(policy, inputs)
    result, gradient = evaluate(policy, map_tensors(inputs, lambda values: values[order]))
    _assert_close(result.objective, expected.objective[order], "objective with the rows in another order")
    _assert_close(gradient, expected_gradient[order], "gradient with the rows in another order")
    assert torch.equal(result.clipped, expected.clipped[order]), "the order of the rows changes a clip decision"
    if inputs.group_ids is not None:
        result, gradient = evaluate(policy, dataclasses.replace(inputs, group_ids=1000 - 7 * inputs.group_ids))
        _assert_close(result.objective, expected.objective, "objective with other numbers for the groups")
        _assert_close(gradient, expected_gradient, "gradient with other numbers for the groups")


@law()
def rows_are_independent(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """13. A row alone has the value, gradient and cuts it has in a batch (scopes token, sequence): micro-batching is safe."""
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
def groups_are_independent(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """14. A group alone has the value, gradient and cuts it has in a batch (rules that need group_ids)."""
    if "group_ids" not in policy.needs or inputs.group_ids is None:
        return
    whole, gradient = evaluate(policy, inputs)
    for number in sorted(set(inputs.group_ids[:, 0].tolist())):
        own = (inputs.group_ids == number)[:, 0]
        alone, alone_gradient = evaluate(policy, map_tensors(inputs, operator.itemgetter(own)))
        _assert_close(alone_gradient, gradient[own], f"a group alone has another gradient than in the batch (group {number})")
        what = f"a group alone has another objective than in the batch (group {number})"
        _assert_close(alone.objective, whole.objective[own], what)
        assert torch.equal(alone.clipped, whole.clipped[own]), f"clip decision of group {number} alone differs"


@law(example=data.on_policy_inputs)
def batch_size_changes_nothing(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """15. A batch that holds every response twice gives each the gradient at ratio 1 and the cuts it had (scope batch, 5 %)."""
    if policy.scope != "batch" or ratio_one_is_reinforce.name in policy.exempt:
        return
    _, expected = evaluate(policy, inputs)
    _, gradient = evaluate(policy, _twice(inputs))
    what = "gradient in a batch that holds every response twice (the learner divides by the counts, not the rule)"
    _assert_close(gradient[: len(expected)], expected, what, tolerance=0.05)
    off_policy = data.off_policy_inputs(policy)
    before = _tokens(answer(policy, off_policy).clipped, off_policy)
    twice = _twice(off_policy)
    after = _tokens(answer(policy, twice).clipped, twice)[: len(before)]
    changed = float((before != after)[off_policy.response_mask].float().mean())
    assert changed <= 0.05, f"a batch that holds every response twice has {changed:.0%} other clip decisions"


def _twice(inputs: ClipInputs) -> ClipInputs:
    """A batch that holds every response twice, in groups of their own."""
    doubled = map_tensors(inputs, lambda values: torch.cat([values, values]))
    if inputs.group_ids is None:
        return doubled
    number = inputs.group_ids.max() + 1
    return dataclasses.replace(doubled, group_ids=torch.cat([inputs.group_ids, inputs.group_ids + number]))


# numbers


@law(example=_some_inputs, shrinks=False)
def small_batches_stay_finite(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """16. One token, one response, equal responses or advantages, a row without tokens: values and gradients are finite."""
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
    assert finite, "a row without a token makes the objective or the gradient infinite: divide by ops.lengths, at least 1"


@law(example=data.extreme_inputs)
def extremes_stay_finite(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """17. Log-ratios of +-100 per token over 4096 tokens, or on one, give finite values and gradients for every sign of A."""
    result, gradient = evaluate(policy, inputs)
    assert result.objective.isfinite().all(), "the objective is not finite"
    assert gradient.isfinite().all(), "the gradient is not finite"


# meaning


@law(example=data.on_policy_inputs)
def ratio_one_is_reinforce(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """18. At ratio 1 nothing is clipped and the gradient is A times one positive constant per row."""
    result, gradient = evaluate(policy, inputs)
    assert not visible(result.clipped, inputs).any(), "something is clipped at ratio 1"
    assert gradient.isfinite().all(), "the gradient at ratio 1 is not finite"
    per_row = ops.sequence_mean(gradient, inputs.response_mask)
    _assert_close(gradient, torch.where(inputs.response_mask, per_row, 0.0), "the gradient differs between a row's tokens")
    rows = (inputs.advantages != 0) & inputs.response_mask.any(dim=-1, keepdim=True)
    assert (per_row[rows] != 0).all(), "the gradient of a response is zero, though its advantage is not"
    assert (per_row[rows] / inputs.advantages[rows] > 0).all(), "the gradient is not along the advantage"


@law()
def zero_advantage_zero_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """19. Where the advantage is zero, so is the gradient; and nothing counts as clipped there."""
    rows = inputs.advantages[:, 0] == 0
    result, gradient = evaluate(policy, inputs)
    assert (gradient[rows] == 0).all(), (
        "a response with zero advantage has a gradient; if it should, set learns_without_advantages and opt out of this law"
    )
    assert not result.clipped[rows].any(), "a response with zero advantage counts as clipped"


@law()
def penalties_are_declared(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """20. A rule that gives a response with zero advantage a gradient sets `learns_without_advantages`."""
    without = dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    _, gradient = evaluate(policy, without)
    assert policy.learns_without_advantages or (gradient == 0).all(), (
        "without advantages there is a gradient, which the learner skips unless learns_without_advantages is set"
    )


@law()
def advantages_scale_the_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """21. Advantages times 4 (at ratio 1: 1000) scale the gradient as much; at ratio 1 opposite ones give the opposite."""
    if "rewards" in policy.needs or ratio_one_is_reinforce.name in policy.exempt:
        return
    at_one = dataclasses.replace(inputs, log_probs=inputs.old_log_probs, rollout_log_probs=inputs.old_log_probs)
    cases = [(" at ratio 1", at_one, factor) for factor in (4.0, 1000.0, -1.0)]
    if not policy.learns_without_advantages:  # a penalty does not grow with the advantages
        cases.append(("", inputs, 4.0))
    for what, given, factor in cases:
        _, expected = evaluate(policy, given)
        _, gradient = evaluate(policy, dataclasses.replace(given, advantages=factor * given.advantages))
        _assert_close(gradient, factor * expected, f"gradient{what} with advantages times {factor:g}", 1e-3)


@law()
def token_advantages_are_honoured(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """22. Advantages (B, T) count for their own token; equal ones in a row give what (B, 1) gives (objectives per token)."""
    expected, expected_gradient = evaluate(policy, inputs)
    if policy.scope == "sequence" or expected.objective.shape[-1] == 1 != inputs.log_probs.shape[-1]:
        return
    mask = inputs.response_mask
    spread = torch.where(mask, inputs.advantages, 0.0)
    result, gradient = evaluate(policy, dataclasses.replace(inputs, advantages=spread))
    _assert_close(gradient, expected_gradient, "gradient with advantages (B, T) in place of (B, 1)")
    _assert_close(visible(result.objective, inputs), visible(expected.objective, inputs), "objective with advantages (B, T)")
    own = _token_advantages(inputs)
    _, gradient = evaluate(policy, dataclasses.replace(inputs, advantages=own))
    if zero_advantage_zero_gradient.name not in policy.exempt:
        _assert_nowhere((own == 0) & (gradient != 0), "a token with advantage 0 has a gradient")
    if ratio_one_is_reinforce.name not in policy.exempt:
        at_one = dataclasses.replace(inputs, log_probs=inputs.old_log_probs, rollout_log_probs=inputs.old_log_probs)
        _, whole = evaluate(policy, at_one)
        _, gradient = evaluate(policy, dataclasses.replace(at_one, advantages=own))
        expected_gradient = own * torch.where(inputs.advantages == 0, 0.0, whole / inputs.advantages)
        _assert_close(gradient, expected_gradient, "at ratio 1 a token's gradient is not along its own advantage")


def _token_advantages(inputs: ClipInputs) -> Tensor:
    """Advantages ``(B, T)`` of both signs in every row, one in five 0; 0 in rows with A = 0."""
    noise = torch.randn(inputs.response_mask.shape, generator=torch.Generator().manual_seed(1))
    noise[:, 2::5] = 0
    return torch.where(inputs.response_mask & (inputs.advantages != 0), noise, 0.0)


@law(example=data.on_policy_inputs)
def rows_weigh_the_same(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """23. At ratio 1 the tokens of all responses with the same sign of A have one gradient per unit of A (scope token)."""
    if policy.scope != "token" or ratio_one_is_reinforce.name in policy.exempt:
        return
    _, gradient = evaluate(policy, inputs)
    for side in (1, -1):
        weights = (gradient / inputs.advantages).abs()[inputs.response_mask & (inputs.advantages.sign() == side)]
        if len(weights) and weights.max() > weights.min() * 1.001:
            what = f"at ratio 1 tokens of different responses weigh {weights.min():.3g} to {weights.max():.3g}"
            raise AssertionError(f"{what}: it is the reduction that averages over tokens and responses, not the rule")


@law(example=data.on_policy_inputs)
def log_ratio_rises_with_log_probs(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """24. log_ratio is 0 at ratio 1, and rises with the log-probs of the response, in proportion and for every token."""
    chosen = (torch.arange(len(inputs.log_probs)) % 2 == 0)[:, None]  # half of the rows: a rule may compare them with others

    def judged(shift: float) -> Tensor:
        moved = torch.where(chosen, inputs.log_probs + shift, inputs.log_probs)
        log_ratio = _tokens(answer(policy, dataclasses.replace(inputs, log_probs=moved)).log_ratio, inputs)
        return torch.where(inputs.response_mask, log_ratio.float(), 0.0)

    assert judged(0.0).isfinite().all(), "log_ratio is not finite"
    _assert_nowhere(judged(0.0).abs() > 1e-4, "log_ratio is not 0 at ratio 1")
    lower, raised, higher = (judged(shift)[::2] for shift in (-0.05, 0.05, 0.1))
    for smaller, larger in ((lower, torch.zeros_like(lower)), (torch.zeros_like(raised), raised), (raised, higher)):
        assert (larger >= smaller).all(), "log_ratio falls where the log-probs rise"
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
        assert (bend < 5e-4).all(), "log_ratio does not rise in proportion to the tokens' log-ratios: is it a ratio?"


@law()
def clipped_means_no_gradient(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """25. Where A != 0 and the log-ratio is below 20: ``clipped`` exactly where the gradient is zero; and some is."""
    result, gradient = evaluate(policy, inputs)
    relevant = _relevant(result, inputs)
    _assert_nowhere(relevant & result.clipped & (gradient != 0), "counts as clipped, and has a gradient")
    _assert_nowhere(relevant & ~result.clipped & (gradient == 0), "has no gradient, and does not count as clipped")
    has_width = any(getattr(policy, name) is not None for name in policy.width_fields())
    if (has_width or result.band is not None) and len(inputs.log_probs) > 1:
        assert result.clipped.any(), "clips 0% of ragged data of any spread, though it has a width or a band"


def _relevant(result: ClipResult, inputs: ClipInputs) -> Tensor:
    """Where a decision can be seen in the gradient: A != 0, and no log-ratio at the limit; ``(B, T)``."""
    moved = (inputs.log_probs - inputs.old_log_probs).abs()
    limits = (result.log_ratio.abs() < ops.LOG_RATIO_LIMIT) & (moved < ops.LOG_RATIO_LIMIT)
    return inputs.response_mask & (inputs.advantages != 0) & limits


@law()
def clipped_means_held_back(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """26. For rules that opt out of clipped_means_no_gradient: ``clipped`` is where the gradient is cut, capped or reversed."""
    if clipped_means_no_gradient.name not in policy.exempt:
        return
    mask, side = inputs.response_mask, inputs.advantages.sign()
    at_one = dataclasses.replace(inputs, log_probs=inputs.old_log_probs, rollout_log_probs=inputs.old_log_probs)

    def is_flat(given: ClipInputs, gradient: Tensor, way: int) -> Tensor:
        """Whether the gradient stays the same when the policy moves the way the advantage pushes, or the other way."""
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
        is_seen = gradient.abs() > 1e-20 * gradient_at_one.abs()  # a weight that fades may become too small for float32
        flat, reversed_ = is_flat(given, gradient, 1) & is_seen & ~flat_at_one, gradient * side < 0
        capped = flat & (log_ratio * side > 0)
        unreported = relevant & ~clipped & reversed_
        if not policy.learns_without_advantages:
            _assert_nowhere(unreported, "the gradient is reversed, and it does not count as clipped", given)
        elif unreported.any():
            what = "a penalty reverses the gradient, and it does not count as clipped: the clip fraction leaves it out"
            warnings.warn(what, LawWarning, stacklevel=2)
        _assert_nowhere(relevant & ~clipped & capped, "the weight is capped, and it does not count as clipped", given)
        held = flat | is_flat(given, gradient, -1) & ~flat_at_one | reversed_ | (gradient == 0)
        if policy.learns_without_advantages:  # a penalty's pull back counts, too
            unclipped = gradient_at_one * ops.limited_exp(given.log_probs - given.old_log_probs)
            held = held | ((gradient - unclipped) * log_ratio < 0)
        _assert_nowhere(relevant & clipped & ~held, "counts as clipped, and is neither cut nor capped nor reversed", given)
    for advantage in (1.0, -1.0):
        swept = data.uniform_inputs(policy, [advantage * each for each in (0.0, *SWEEP)], 1, advantage)
        result, gradient = evaluate(policy, swept)
        size = gradient[:, 0].abs()
        drops = (size[1:] == 0) & (size[:-1] > 0.05 * size[0])  # a weight that fades is small before it is 0
        unreported = torch.zeros_like(swept.response_mask)
        unreported[1:, 0] = drops & ~result.clipped[1:, 0]
        _assert_nowhere(unreported, "the gradient is cut, and it does not count as clipped", swept)


@law()
def only_cuts_outward(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """27. A > 0 is cut above ratio 1 only, A < 0 below it or above a ceiling; and further out it stays cut."""
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
    """What is wrong with the decisions from ratio 1 outwards, and at which of them."""
    decisions = [clipped for clipped, _ in cuts]
    if advantage > 0 > way and any(decisions):
        return "a positive advantage is cut below ratio 1", decisions.index(True)
    if advantage < 0 < way and any(cut for _, cut in cuts[:1]):
        return "a negative advantage is cut as soon as the ratio is above 1", 0
    if decisions != sorted(decisions):
        place = next(each for each in range(1, len(decisions)) if decisions[each - 1] and not decisions[each])
        return f"a {'positive' if advantage > 0 else 'negative'} advantage is cut, and further out it is not", place
    return None


SWEEP = tuple(1e-5 * 1.25**step for step in range(54))  # up to 1.4


def _swept(policy: ClipPolicy) -> list[ClipInputs]:
    """Responses whose tokens share a log-ratio, of two lengths and both signs of A."""
    steps = (*SWEEP, *(-log_ratio for log_ratio in SWEEP))
    return [data.uniform_inputs(policy, steps, length, advantage) for length in (1, 16) for advantage in (1.0, -1.0)]


def _cuts(policy: ClipPolicy, log_ratios: list[float], length: int, advantage: float) -> list[tuple[bool, bool]]:
    """Whether a response with the same log-ratio on every token counts as clipped, and whether its gradient is cut too."""
    inputs = data.uniform_inputs(policy, log_ratios, length, advantage)
    result, gradient = evaluate(policy, inputs)
    clipped = _tokens(result.clipped, inputs).any(dim=-1)
    cut = clipped & (gradient == 0).all(dim=-1)
    inside = (result.log_ratio.abs() < ops.LOG_RATIO_LIMIT).all(dim=-1).tolist()
    return [pair for pair, seen in zip(zip(clipped.tolist(), cut.tolist(), strict=True), inside, strict=True) if seen]


@law()
def band_is_the_one_used(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """28. Beyond the edge that the sign of A picks, everything is clipped; and where all tokens agree, nothing is within it."""
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
            _assert_nowhere(relevant & result.clipped & ~beyond, "counts as clipped within the band that is reported", own)
        if clipped_means_no_gradient.name not in policy.exempt:
            what = "does not count as clipped beyond the band that is reported"
            _assert_nowhere(relevant & ~result.clipped & beyond, what, own)


@law(shrinks=False)
def every_need_matters(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """29. Every input in `needs`, and every border between turns, changes an answer, by default or with another option."""
    if not policy.needs:
        return
    examples = [data.moved(inputs, factor) for factor in (1.0, 4.0, 0.25)]
    rules = [policy, *(other for _, other in _options(policy)), *_switched_on(policy)]
    for need in sorted(policy.needs):
        changed = [
            (given, dataclasses.replace(given, **{need: new})) for given in examples for new in _other_values(given, need)
        ]
        assert any(_differs(rule, *pair) for rule in rules for pair in changed), (
            f"{need} is named in `needs` and changes nothing"
        )
    if inputs.turn_ids is not None:
        for turn in range(int(inputs.turn_ids.max())):
            joined = torch.where(inputs.turn_ids > turn, inputs.turn_ids - 1, inputs.turn_ids)
            changed = [(given, dataclasses.replace(given, turn_ids=joined)) for given in examples]
            what = f"it changes nothing if turns {turn} and {turn + 1} are one"
            assert any(_differs(rule, *pair) for rule in rules for pair in changed), what


def _other_values(inputs: ClipInputs, need: str) -> list[Any]:
    """Other values of a field that a policy may need."""
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
    """Whether a policy answers two inputs differently, or fails on the second."""
    try:
        return any(not torch.equal(old, new) for old, new in zip(_answers(policy, one), _answers(policy, other), strict=True))
    except Exception:  # an input that it fails on is one that it reads
        return True


def _answers(policy: ClipPolicy, inputs: ClipInputs) -> list[Tensor]:
    """Everything that a policy answers, with the gradient."""
    result, gradient = evaluate(policy, inputs)
    values = (result.objective, result.log_ratio, result.clipped, *result.metrics.values())
    return [gradient, *(visible(each.detach(), inputs).nan_to_num() for each in values)]


def _near(log_ratio: Tensor, edge: Tensor) -> Tensor:
    return (log_ratio - edge).abs() < 1e-5 * (1 + edge.abs())


# settings


@law(shrinks=False)
def widths_scale(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """30. ``scaled(f)`` is valid and clips less on both sides of A the larger f is; a rule without a width refuses."""
    try:
        same = policy.scaled(1.0)
    except ValueError:
        widths = [name for name in policy.width_fields() if getattr(policy, name) is not None]
        assert not widths, "scaled(1) is refused, and the rule has fields marked Width"
        return
    assert same == policy, "scaled(1) is another policy"
    examples = _spread_out(policy, inputs)
    narrow, _, wide = policies = [policy.scaled(factor) for factor in (0.25, 1.0, 4.0)]
    sides = {"A > 0": 1, "A < 0": -1}
    shares = {side: [[_share(each, given, sign) for each in policies] for given in examples] for side, sign in sides.items()}
    if any(share > 0 for side in shares.values() for each in side for share in each):
        for side, fractions in shares.items():
            clips, falls = any(any(each) for each in fractions), any(each[0] > each[2] for each in fractions)
            shown = next((each for each in fractions if any(each)), fractions[0])
            assert falls or not clips, (
                f"where {side}, wider bands do not clip less: clip fractions at 1/4, 1, 4 times the width "
                + ", ".join(f"{fraction:.2f}" for fraction in shown)
            )
    else:  # a weight that fades
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
            raise AssertionError(f"scaled({factor:g}) is not valid; a width must stop at its bound: {reason}") from error
        assert visible(answer(far, inputs).objective, inputs).isfinite().all(), (
            f"scaled({factor:g}) gives values that are not finite"
        )


def _share(policy: ClipPolicy, inputs: ClipInputs, side: int) -> float:
    """The share that is clipped of the responses with one sign of A."""
    clipped = ops.per_response(answer(policy, inputs).clipped.float(), inputs.response_mask)
    rows = inputs.advantages.sign() == side
    return float(clipped[rows].mean()) if bool(rows.any()) else 0.0


def _spread_out(policy: ClipPolicy, inputs: ClipInputs) -> list[ClipInputs]:
    """The inputs with log-ratios of several sizes, and responses whose tokens share one."""
    return [*(data.moved(inputs, factor) for factor in (1.0, 0.25, 4.0, 16.0)), *_swept(policy)]


@law(shrinks=False)
def every_width_matters(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """31. Every Width that is not null changes what is clipped or the objective; null does not clip more than the narrowest."""
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
    """A width that is null is none; not one of 0."""
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
    """The policy with each value of a setting that its class allows."""
    for value in values:
        try:
            yield policy.replace(**{name: value})
        except ValueError:
            continue


def _other_widths(policy: ClipPolicy, name: str, width: float) -> Iterator[ClipPolicy]:
    """The policy with other values of one width, as far as its bounds allow them."""
    return _valid(policy, name, (width * factor for factor in (0.5, 2.0, 0.1, 10.0, 0.01, 100.0)))


@law(shrinks=False)
def update_is_pure(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """32. ``updated`` gives one frozen policy for the same sums, that survives its dump; the old one answers as before."""
    result, _ = evaluate(policy, inputs)
    before, answers = policy.model_dump(), _answers(policy, inputs)
    empty = data.clip_stats(dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages)), result)
    stats = data.clip_stats(inputs, result)
    for sums in (stats, empty, _sums(policy, inputs, 1.0), _sums(policy, inputs, 0.0)):
        first, second = policy.updated(sums), policy.updated(sums)
        assert type(first) is type(policy), f"updated gives a {type(first).__name__}"
        assert first == second, "the same sums gave another policy"
        _assert_usable(first, inputs)
        same = zip(answers, _answers(policy, inputs), strict=True)
        assert all(torch.equal(one, other) for one, other in same), (
            "after updated, the policy it was called on answers differently"
        )
    assert policy.model_dump() == before, "updated changed the policy it was called on"


def _sums(policy: ClipPolicy, inputs: ClipInputs, share: float, progress: float = 0.3) -> ClipStats:
    """The sums of an update in which a share of every response was clipped."""
    length = inputs.response_mask.sum(dim=-1).float()
    edges = torch.stack([length.min(), length.median(), length.max()])
    sign = torch.ones_like(length)
    sign[::2] = -1
    judged = ops.per_response(answer(policy, inputs).log_ratio, inputs.response_mask)[:, 0]
    return ClipStats.of(edges, length, sign, torch.full_like(length, share), judged, progress=progress)


def _assert_usable(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """An updated policy is valid, gives finite values, and does not clip at ratio 1."""
    assert _survives_its_dump(policy), "an updated policy is not valid, or does not survive its dump"
    assert evaluate(policy, inputs)[0].objective.isfinite().all(), "an updated policy gives values that are not finite"
    if ratio_one_is_reinforce.name not in policy.exempt:
        at_one = data.on_policy_inputs(policy)
        assert not visible(answer(policy, at_one).clipped, at_one).any(), "an updated policy clips at ratio 1"


@law(shrinks=False)
def many_updates_stay_valid(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """33. A hundred updates, whether everything or nothing is clipped in them, give a policy that is still valid."""
    if not policy.is_adaptive:
        return
    for share in (0.0, 1.0):
        sums, current = _sums(policy, inputs, share), policy
        for step in range(100):
            current = current.updated(dataclasses.replace(sums, progress=step / 100))
        _assert_usable(current, inputs)


@law(shrinks=False)
def updates_go_by_shares(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """34. Twice as many of the same responses give the same update: what counts is the share that is clipped."""
    if not policy.is_adaptive:
        return
    once = _sums(policy, inputs, 0.02)
    sums = ("num_responses", "num_clipped", "log_ratio", "log_ratio_squared", "length")
    twice = dataclasses.replace(once, **{name: 2 * getattr(once, name) for name in sums})
    warm = policy.updated(once)  # the first may only start an average
    got, expected = (torch.tensor(_numbers(warm.updated(each).model_dump())) for each in (twice, once))
    _assert_close(got, expected, "twice as many of the same responses give another update")


def _numbers(settings: Any) -> list[float]:
    """The numbers in nested settings."""
    if isinstance(settings, dict | list | tuple):
        return [number for each in (settings.values() if isinstance(settings, dict) else settings) for number in _numbers(each)]
    return [float(settings)] if isinstance(settings, int | float) else []


@law(shrinks=False)
def updates_pull_back(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """35. Five updates in which everything was clipped do not make it clip more than five in which nothing was; or it warns."""
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
        what = "clips more after updates in which everything was clipped than after some in which nothing was"
        warnings.warn(f"{what}: is its feedback upside down?", LawWarning, stacklevel=2)


@law(shrinks=False)
def every_option_keeps_the_laws(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """36. Every other word, the other of true and false, and null or a number in its place, keep the laws, too."""
    for what, other in _options(policy):
        for each in LAWS:
            if each.name in policy.exempt or each.name in ONCE:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", LawWarning)
                    each(other)
            except Exception as error:
                if _is_broken(each, policy):  # with the defaults, too: it has been told
                    continue
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                message = f"with {what}: {each.name}: {kind}{str(error).strip().partition(chr(10))[0]}"
                raise AssertionError(message) from error


def _is_broken(each: Law, policy: ClipPolicy) -> bool:
    try:
        each(policy)
    except Exception:  # a law may fail with whatever the policy raises
        return True
    return False


ONCE = {"settings_are_complete", "names_are_known", "every_need_matters", "every_option_keeps_the_laws", "compiles"}
"""Laws on a class rather than on its settings, and one that is slow."""


def _options(policy: ClipPolicy) -> Iterator[tuple[str, ClipPolicy]]:
    """The policy with each of its words, switches and nulls changed, as far as its class allows it."""
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
    """Numbers within the bounds of a field; integers last."""
    marks = [mark for mark in field.metadata if isinstance(mark, BOUNDS)]
    bounds = [
        float(bound) for name in ("gt", "ge", "lt", "le") for mark in marks if (bound := getattr(mark, name, None)) is not None
    ]
    low, high = min(bounds, default=0.0), max(bounds, default=0.0)
    size = min(1.0, high - low) if high > low else 1.0
    return [low + 0.5 * size, low + 2 * size, float(round(low) + 1), float(round(low) + 8)]


def _switched_on(policy: ClipPolicy) -> Iterator[ClipPolicy]:
    """The policy with each number that is 0 above it: a part that is off by default."""
    for name, field in type(policy).model_fields.items():
        if getattr(policy, name) == 0 and not isinstance(getattr(policy, name), bool):
            yield from islice(_valid(policy, name, _some_numbers(field)), 1)


@law(shrinks=False)
def compiles(policy: ClipPolicy, inputs: ClipInputs) -> None:
    """37. With ``torch.compile(fullgraph=True, backend="aot_eager")`` the values are the same; warns if it has no graph."""
    given = {name: values for name in data.ALL_FIELDS if (values := getattr(inputs, name)) is not None}
    constants: dict[str, Any] = {name: getattr(inputs, name) for name in ("max_length", "progress")}

    def objective(**tensors: Any) -> Tensor:
        return policy(ClipInputs(**tensors, **constants)).objective

    expected = objective(**given)
    torch.compiler.reset()  # what other policies left in its caches counts against this one
    traced: Any = torch.compile(objective, fullgraph=True, backend="aot_eager")
    try:
        with warnings.catch_warnings():
            # torch's own, where warnings are errors: on Python 3.13.0 it says that its guards run slower
            warnings.simplefilter("ignore")
            got = traced(**given)
    except Exception as error:  # right, and slower than need be
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"has no one graph and runs uncompiled: {type(error).__name__}: {reason}", LawWarning, stacklevel=2)
        return
    _assert_close(got, expected, "compiled objective")


LAWS: tuple[Law, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Law))
"""The laws, in the order in which they are written down."""
