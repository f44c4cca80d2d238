"""The base class for clip policies, each of which holds the settings, the help text and the mathematics of one rule."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, ClassVar, Literal, Self, get_args

import annotated_types
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlzoo.core.advantages import Advantage
from rlzoo.core.errors import PolicyError, did_you_mean
from rlzoo.core.fairness import bin_index
from rlzoo.core.reductions import PER_TOKEN, Reduction
from rlzoo.core.settings import Settings
from rlzoo.core.types import METRIC, NEEDS, ClipBand, ClipInputs, ClipResult

Scope = Literal["token", "sequence", "batch"]
"""``token``: a per-token objective, computed for each row independently. ``sequence``: a per-response objective, with
``(B, 1)`` advantages only. ``batch``: an objective of either shape, computed from all responses of the step."""


class Width:
    """Marks a field as a clip width so that `ClipPolicy.scaled` scales it: ``Annotated[float, Width(), Field(...)]``."""


@dataclass(frozen=True, slots=True)
class ClipStats:
    """Statistics of one update, summed across micro-batches and ranks, which let a rule track the log-ratios.

    All tensors except `bin_edges` are ``(num_bins, 2)``: rows are length bins, and columns are negative and positive
    advantages.
    """

    bin_edges: Tensor  # (num_bins + 1,) response lengths in tokens
    num_responses: Tensor
    num_clipped: Tensor  # for a token rule, a response contributes its share of clipped tokens
    log_ratio: Tensor  # sum of the judged log-ratio (for a token rule, its mean over the response)
    log_ratio_squared: Tensor
    length: Tensor  # sum of response lengths in tokens
    progress: float = 0.0  # in [0, 1): the share of the run's updates that precede this one

    @classmethod
    def of(
        cls,
        bin_edges: Tensor,
        length: Tensor,
        advantage: Tensor,
        clipped: Tensor,
        log_ratio: Tensor,
        *,
        progress: float = 0.0,
    ) -> ClipStats:
        """Sum the rows in float64. Pass only rows with a non-zero advantage.

        Args:
            bin_edges: ``(num_bins + 1,)`` in tokens.
            length: ``(n,)`` in tokens.
            advantage: ``(n,)``; only the sign matters. If advantages differ by token, pass their sum over the tokens.
            clipped: ``(n,)`` between 0 and 1.
            log_ratio: ``(n,)``, the quantity that the rule judged.
            progress: share of the run's updates that precede this one.
        """
        cell = bin_index(length, bin_edges) * 2 + (advantage > 0)

        def total(values: Tensor) -> Tensor:
            zero = torch.zeros(2 * (len(bin_edges) - 1), dtype=torch.float64)
            return zero.index_add_(0, cell, values.double()).view(-1, 2)

        number, squared = torch.ones_like(length), log_ratio.square()
        return cls(bin_edges, total(number), total(clipped), total(log_ratio), total(squared), total(length), progress)


class ClipPolicy(Settings, ABC):
    """A rule with its settings. It is a pure function from log-probabilities and advantages to an objective.

    A subclass sets `name`, `paper` and `scope`, declares its settings as fields with descriptions and bounds, and implements
    `__call__`. It must not reduce the objective, access a model, or log. Instances are frozen and compare by value.

    A subclass may override `__call__`, `scaled`, `targeting`, `updated` and the class variables. It may redeclare `advantage`
    and `reduction`, for example to narrow them to a subset of the known names. All other attribute names of this class and of
    pydantic models are reserved.

    Example:
        >>> import torch
        >>> from rlzoo import ops
        >>> class Unclipped(ClipPolicy):
        ...     "Importance-weighted policy gradient without clipping."
        ...     name, paper, scope = "unclipped", "none", "token"
        ...     def __call__(self, inputs):
        ...         return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)
        >>> Unclipped().reduction
        'sequence_mean'
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    scope: ClassVar[Scope]
    needs: ClassVar[frozenset[str]] = frozenset()  # fields of `ClipInputs` that the rule requires, from `NEEDS`
    exempt: ClassVar[Mapping[str, str]] = {}  # laws of `rlzoo.testing` that the rule breaks on purpose, and why
    learns_without_advantages: ClassVar[bool] = False  # responses with A = 0 may have a gradient, e.g. from a penalty
    ratio_to_sampler: ClassVar[bool] = False  # the ratio uses `rollout_log_probs`, which already corrects for the sampler
    watch: ClassVar[Mapping[str, str]] = {}  # metrics that show whether this rule works well, and how to read them

    advantage: Advantage = Field("group_norm", description="how a group's rewards become advantages")
    reduction: Reduction = Field("sequence_mean", description="how the objective is reduced to a scalar")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Copy the descriptions of `advantage` and `reduction` to subclasses that change only the default."""
        for name in ("advantage", "reduction"):
            if (field := cls.model_fields.get(name)) is not None:
                field.description = field.description or ClipPolicy.model_fields[name].description

    @abstractmethod
    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Compute the unreduced objective, which is maximised, and the clip decisions."""

    @model_validator(mode="after")
    def _reduction_suits_scope(self) -> Self:
        if self.scope == "sequence" and self.reduction in PER_TOKEN:
            raise ValueError(
                f"reduction {self.reduction!r} needs a per-token objective, but {self.name} has a per-response objective; "
                "use 'sequence_mean'"
            )
        return self

    def scaled(self, factor: float) -> Self:
        """Return the rule with every width multiplied by ``factor`` (> 0), for example to match a clip fraction by bisection.

        Widths are clamped to the bounds of their fields so that ``1 - clip_low`` stays above 0.

        Raises:
            ValueError: the rule has no width.
        """
        widths = {name: getattr(self, name) for name in self.width_fields() if getattr(self, name) is not None}
        if not widths:
            raise ValueError(f"rule {self.name!r} has no width to scale")
        return self.replace(**{name: _within(type(self), name, width * factor) for name, width in widths.items()})

    def targeting(self, clip_fraction: float) -> Self | None:
        """Return the rule configured to clip the given share of the responses, or None if the rule has no target share."""
        return None

    def updated(self, stats: ClipStats) -> Self:
        """Return the policy for the next update. An adaptive policy returns a new frozen object."""
        return self

    @property
    def is_adaptive(self) -> bool:
        """Whether the rule changes from update to update."""
        return type(self).updated is not ClipPolicy.updated

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether all responses to a prompt must be in one minibatch, because the rule or the reduction combines them."""
        return "group_ids" in self.needs or self.reduction == "prompt_mean"

    def replace(self, **settings: Any) -> Self:
        """Return a validated copy with some settings changed."""
        return type(self).model_validate({**self.model_dump(), **settings})

    @classmethod
    def width_fields(cls) -> tuple[str, ...]:
        """Return the names of the fields marked with `Width`."""
        return tuple(
            name for name, field in cls.model_fields.items() if any(isinstance(mark, Width) for mark in field.metadata)
        )


def limited_to_needs(policy: ClipPolicy, inputs: ClipInputs) -> ClipInputs:
    """Return inputs that raise a `PolicyError` if the rule reads an optional field that it does not name in `needs`."""
    kind = _limited(policy.name, frozenset(policy.needs))
    return kind(**{field.name: getattr(inputs, field.name) for field in fields(kind)})


@cache
def _limited(rule: str, needs: frozenset[str]) -> type[ClipInputs]:
    def refuse(name: str, inputs: ClipInputs) -> None:
        declared = ", ".join(map(repr, sorted({*needs, name})))
        problem = f"reads inputs.{name}, but does not name it in `needs`; declare needs = frozenset({{{declared}}})"
        raise PolicyError(rule, problem)

    absent = {name: property(partial(refuse, name), lambda inputs, value: None) for name in NEEDS if name not in needs}
    known = {name: field for name, field in ClipInputs.__dataclass_fields__.items() if name not in absent}
    members = {"__slots__": (), "__dataclass_fields__": known, "__repr__": lambda inputs: f"ClipInputs({', '.join(known)})"}
    return type("ClipInputs", (ClipInputs,), members | absent)


def form_problem(policy: ClipPolicy, inputs: ClipInputs, result: object) -> str | None:
    """Describe the first problem with a result's shapes and types, or return None."""
    if not isinstance(result, ClipResult):
        return f"returned a {type(result).__name__}, expected a ClipResult"
    size, length = inputs.log_probs.shape
    either = ((size, 1), (size, length))
    allowed = {"token": either[1:], "sequence": either[:1], "batch": either}[policy.scope]
    for name, shapes in (("objective", allowed), ("log_ratio", either), ("clipped", either)):
        tensor = getattr(result, name)
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        if got not in shapes:
            return f"returned {name} of shape {got}, expected {' or '.join(map(str, shapes))}"
    if result.objective.dtype != torch.float32:
        return f"returned an objective of type {result.objective.dtype}, expected torch.float32"
    if result.clipped.dtype != torch.bool:
        return f"returned clipped of type {result.clipped.dtype}, expected torch.bool"
    problem = None if result.band is None else _band_problem(result.band, inputs, tuple(result.log_ratio.shape))
    return problem or (_metrics_problem(result.metrics, either) if result.metrics else None)


def _band_problem(band: object, inputs: ClipInputs, shape: tuple[int, ...]) -> str | None:
    """Describe the first problem with a result's band, whose edges must be broadcastable to ``shape``, or return None."""
    if not isinstance(band, ClipBand):
        return f"returned a band of type {type(band).__name__}, expected a ClipBand"
    for name in ("low", "high", *(["ceiling"] if band.ceiling is not None else [])):
        edge = getattr(band, name)
        if not isinstance(edge, Tensor):
            return f"returned a band whose {name} is a {type(edge).__name__}, expected a tensor"
        if edge.ndim > 2 or any(size not in (1, whole) for size, whole in zip(edge.shape[::-1], shape[::-1], strict=False)):
            return (
                f"returned a band whose {name} has the shape {tuple(edge.shape)}, expected {shape}, or 1 in place of a number"
            )
        # a comparison with NaN is false, so nothing would be clipped
        if bool((edge.isnan() & inputs.response_mask).any()) and bool(inputs.log_probs[inputs.response_mask].isfinite().all()):
            return f"returned a band whose {name} is NaN for a response with tokens"
    return None


def _metrics_problem(metrics: object, shapes: tuple[tuple[int, int], ...]) -> str | None:
    """Describe the first problem with a result's metrics, or return None."""
    if not isinstance(metrics, Mapping):
        return f"returned metrics of type {type(metrics).__name__}, expected a dictionary of tensors"
    for name, values in metrics.items():
        if not isinstance(name, str) or not METRIC.fullmatch(name):
            return f"returned a metric called {name!r}; names must consist of lower-case letters, digits and underscores"
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        if got not in shapes:
            return f"returned metric {name!r} of shape {got}, expected {' or '.join(map(str, shapes))}"
    return None


OVERRIDABLE = frozenset({"scaled", "targeting", "updated", "model_config", "model_post_init"})
"""Attributes of `ClipPolicy` that a subclass may override, in addition to class variables and Python's own methods."""

NAMED = ("advantage", "reduction")
"""The fields of every policy that select another part by name."""


def contract_problem(policy: type[ClipPolicy]) -> str | None:
    """Describe the first declaration in a policy class that would fail or be ignored in training, or return None."""
    for name in policy.model_fields.keys() & ClipPolicy.__class_vars__:
        return f"declares {name!r} as a field, but it is a class variable: write {name} = ... without an annotation"
    settable = OVERRIDABLE | ClipPolicy.__class_vars__ | {*NAMED}
    reserved = (set(dir(ClipPolicy)) | set(ClipPolicy.__annotations__)) - settable
    declared = policy.model_fields.keys() - ClipPolicy.model_fields.keys()
    for kind in policy.__mro__[: policy.__mro__.index(ClipPolicy)]:
        if issubclass(kind, ClipPolicy):
            declared |= {name for name in vars(kind) if not name.startswith(("__", "_abc_"))}
    if taken := sorted(declared & (reserved | OVERRIDABLE & policy.model_fields.keys())):
        return f"declares {taken[0]!r}, which is reserved in every rule; choose another name"
    for name in set(NAMED) - policy.model_fields.keys():
        return f"declares {name!r} as a class variable, but it is a field"
    default, known = policy.model_fields["reduction"].get_default(call_default_factory=True), get_args(Reduction)
    if default not in known:
        return f"has the default {default!r} for 'reduction' (known: {', '.join(known)})"
    return _needs_problem(policy)


def _needs_problem(policy: type[ClipPolicy]) -> str | None:
    """Describe the problem with a policy's `needs`, or return None."""
    if not isinstance(policy.needs, frozenset | set):
        return f"declares needs = {policy.needs!r}; it must be a frozenset of names, such as frozenset({{'group_ids'}})"
    for need in sorted(map(str, policy.needs)):
        if need not in NEEDS:
            return f"needs {need!r}, which is not an optional input (known: {', '.join(NEEDS)}){did_you_mean(need, NEEDS)}"
    if "group_ids" in policy.needs and policy.scope != "batch":
        return f"needs group_ids with scope {policy.scope!r}: the rule compares responses, so the scope must be 'batch'"
    return None


def _within(policy: type[ClipPolicy], name: str, value: float) -> float:
    """Clamp a value to the bounds of a field."""
    for mark in policy.model_fields[name].metadata:
        if isinstance(mark, annotated_types.Le):
            value = min(value, float(str(mark.le)))
        elif isinstance(mark, annotated_types.Lt):
            value = min(value, math.nextafter(float(str(mark.lt)), -math.inf))
        elif isinstance(mark, annotated_types.Ge):
            value = max(value, float(str(mark.ge)))
        elif isinstance(mark, annotated_types.Gt):
            value = max(value, math.nextafter(float(str(mark.gt)), math.inf))
    return value
