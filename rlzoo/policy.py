"""The clip policy: configuration, help text and mathematics of one rule in one class."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Union, get_args, get_origin

import annotated_types
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlzoo.advantages import Advantage
from rlzoo.errors import UserError, did_you_mean
from rlzoo.fairness import bin_index
from rlzoo.reductions import Reduction

if TYPE_CHECKING:
    from torch import Tensor

    from rlzoo.types import ClipInputs, ClipResult

Scope = Literal["token", "sequence", "batch"]
"""``token``: an objective per token, each row judged by itself; ``sequence``: an objective per response, advantages ``(B, 1)``
only; ``batch``: judged with every response of the step at hand, an objective of either shape."""


class Width:
    """Marks a field as a width: `ClipPolicy.scaled` multiplies it. Use as ``Annotated[float, Width(), Field(...)]``."""


@dataclass(frozen=True, slots=True)
class ClipStats:
    """What one update did, summed over micro-batches and ranks; enough to track drift, spread and quantiles.

    Every tensor is ``(num_bins, 2)``: a row per length bin, the columns for advantages below and above zero.

    Example:
        ``stats.log_ratio / stats.length`` is the drift per token of a rule that judges the sum.
    """

    bin_edges: Tensor  # (num_bins + 1,) response lengths in tokens
    num_responses: Tensor
    num_clipped: Tensor  # a token rule's response counts with its share of clipped tokens
    log_ratio: Tensor  # sum of the judged log-ratio (a token rule: its mean over the response)
    log_ratio_squared: Tensor
    length: Tensor  # sum of response lengths in tokens
    progress: float = 0.0  # in [0, 1), share of the run's updates that were done before this one

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
        """Sum rows up, in float64; give those with a non-zero advantage only.

        Args:
            bin_edges: ``(num_bins + 1,)`` in tokens.
            length: ``(n,)`` in tokens.
            advantage: ``(n,)``, of which the sign counts; summed over the tokens where they differ by token.
            clipped: ``(n,)`` from 0 to 1.
            log_ratio: ``(n,)`` what the policy judged.
            progress: of the run, before this update.
        """
        cell = bin_index(length, bin_edges) * 2 + (advantage > 0)

        def total(values: Tensor) -> Tensor:
            zero = torch.zeros(2 * (len(bin_edges) - 1), dtype=torch.float64)
            return zero.index_add_(0, cell, values.double()).view(-1, 2)

        number, squared = torch.ones_like(length), log_ratio.square()
        return cls(bin_edges, total(number), total(clipped), total(log_ratio), total(squared), total(length), progress)


class ClipPolicy(BaseModel, ABC):
    """One rule: a pure function from log-probabilities and advantages to an objective, with its settings.

    A subclass sets `name`, `paper` and `scope`, declares its settings as fields with a description and a bound, and
    implements `__call__`. It never reduces, never sees a model, never logs. Instances are frozen and compare by value.

    A subclass may override `__call__`, `scaled`, `targeting`, `updated` and the class variables. It may narrow `advantage` and
    `reduction` to fewer of the known names. Every other name of this class and of pydantic's models is reserved.

    Example:
        >>> import torch
        >>> from rlzoo import ops
        >>> class Unclipped(ClipPolicy):
        ...     "Importance-weighted policy gradient without a clip."
        ...     name, paper, scope = "unclipped", "none", "token"
        ...     def __call__(self, inputs):
        ...         return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)
        >>> Unclipped().reduction
        'sequence_mean'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    paper: ClassVar[str]
    scope: ClassVar[Scope]
    needs: ClassVar[frozenset[str]] = frozenset()  # of `NEEDS`: the fields of `ClipInputs` that are filled for this rule
    exempt: ClassVar[Mapping[str, str]] = {}  # laws of `rlzoo.testing` this rule breaks on purpose, with the reason
    learns_without_advantages: ClassVar[bool] = False  # a response with A = 0 may have a gradient, such as a penalty's
    ratio_to_sampler: ClassVar[bool] = False  # its ratio is to `rollout_log_probs`, and so corrects for the sampler already
    watch: ClassVar[Mapping[str, str]] = {}  # metrics that tell whether this rule does well, and what they say

    advantage: Advantage = Field("group_norm", description="how the rewards of a group become advantages")
    reduction: Reduction = Field("sequence_mean", description="how the objective becomes a scalar")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Give `advantage` and `reduction` their description where a subclass sets only another default."""
        for name in ("advantage", "reduction"):
            if (field := cls.model_fields.get(name)) is not None:
                field.description = field.description or ClipPolicy.model_fields[name].description

    @abstractmethod
    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Judge every response; returns an objective to be maximised, not reduced."""

    @model_validator(mode="after")
    def _reduction_suits_scope(self) -> Self:
        if self.scope == "sequence" and self.reduction == "token_mean":
            raise ValueError(
                f"reduction 'token_mean' needs an objective per token, and {self.name} has one per response; "
                "use 'sequence_mean'"
            )
        return self

    def scaled(self, factor: float) -> Self:
        """The same rule with every width multiplied by ``factor`` (> 0); what matching a clip fraction bisects on.

        A width that would pass a bound of its field stops at it: ``1 - clip_low`` stays above 0.

        Raises:
            ValueError: the rule has no width.
        """
        widths = {name: getattr(self, name) for name in self.width_fields() if getattr(self, name) is not None}
        if not widths:
            raise ValueError(f"clip policy {self.name!r} has no width to scale")
        return self.replace(**{name: _within(type(self), name, width * factor) for name, width in widths.items()})

    def targeting(self, clip_fraction: float) -> Self | None:
        """The same rule told which share of the responses to clip; None for a rule that does not adapt to a share."""
        return None

    def updated(self, stats: ClipStats) -> Self:
        """The policy for the next update; adaptive policies return a new frozen model."""
        return self

    @property
    def is_adaptive(self) -> bool:
        """Whether the rule changes from update to update."""
        return type(self).updated is not ClipPolicy.updated

    def replace(self, **settings: Any) -> Self:
        """A validated copy with some settings changed."""
        return type(self).model_validate({**self.model_dump(), **settings})

    @classmethod
    def width_fields(cls) -> tuple[str, ...]:
        """Names of the fields marked with `Width`."""
        return tuple(
            name for name, field in cls.model_fields.items() if any(isinstance(mark, Width) for mark in field.metadata)
        )


NEEDS = (
    "group_ids", "turn_ids", "old_entropy", "ref_log_probs", "rewards", "token_ids", "finished", "max_length", "progress",
)  # fmt: skip
"""The fields of `ClipInputs` that a policy may ask for in its `needs`."""

OVERRIDABLE = frozenset({"scaled", "targeting", "updated", "model_config", "model_post_init"})
"""Names of `ClipPolicy` that a subclass may override, besides its class variables and Python's own methods."""

NAMED = ("advantage", "reduction")
"""The fields of every policy that hold a name."""


def contract_problem(policy: type[ClipPolicy]) -> str | None:
    """What a policy class declares that would fail, or be ignored, once a run learns; None if there is nothing."""
    for name in policy.model_fields.keys() & ClipPolicy.__class_vars__:
        return f"declares {name!r} as a field; it belongs to the class: write {name} = ... without an annotation"
    settable = OVERRIDABLE | ClipPolicy.__class_vars__ | {*NAMED}
    reserved = (set(dir(ClipPolicy)) | set(ClipPolicy.__annotations__)) - settable
    declared = policy.model_fields.keys() - ClipPolicy.model_fields.keys()
    for kind in policy.__mro__[: policy.__mro__.index(ClipPolicy)]:
        if issubclass(kind, ClipPolicy):
            declared |= {name for name in vars(kind) if not name.startswith(("__", "_abc_"))}
    if taken := sorted(declared & (reserved | OVERRIDABLE & policy.model_fields.keys())):
        return f"declares {taken[0]!r}, which is the name of a part of every policy; choose another"
    if problem := _needs_problem(policy):
        return problem
    return next((problem for name in NAMED if (problem := _name_problem(policy, name))), None)


def _needs_problem(policy: type[ClipPolicy]) -> str | None:
    """What is wrong with a policy's `needs`."""
    if not isinstance(policy.needs, frozenset | set):
        return f"declares needs = {policy.needs!r}; it must be a frozenset of names, such as frozenset({{'group_ids'}})"
    for need in sorted(map(str, policy.needs)):
        if need not in NEEDS:
            return f"needs {need!r}, which is no optional input (known: {', '.join(NEEDS)}){did_you_mean(need, NEEDS)}"
    if "group_ids" in policy.needs and policy.scope != "batch":
        return f"needs group_ids with scope {policy.scope!r}: a group is judged together, so the scope must be 'batch'"
    return None


def _name_problem(policy: type[ClipPolicy], name: str) -> str | None:
    """What is wrong with a policy's `advantage` or `reduction`; which estimators there are is not known yet."""
    field = policy.model_fields.get(name)
    names = _literals(field.annotation) if field else None
    known = get_args(Reduction) if name == "reduction" else None
    narrowed = f"it may only be narrowed to {'some of ' + ', '.join(known) if known else 'a Literal of names of estimators'}"
    if field is None or (names is None and (known or field.annotation != Advantage)):
        return f"declares {name!r} as another kind of setting; {narrowed}"
    if unknown := [value for value in names or () if (value not in known if known else not isinstance(value, str))]:
        return f"allows {unknown[0]!r} for {name!r}; {narrowed}"
    default = field.get_default(call_default_factory=True)
    if not field.is_required() and names is not None and default not in names:
        return f"has the default {default!r} for {name!r} (known: {', '.join(map(str, names))})"
    return None


def _literals(annotation: Any) -> tuple[Any, ...] | None:
    """The values of a Literal, or of a union of them; None for any other annotation."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    parts = [_literals(part) for part in get_args(annotation)] if get_origin(annotation) in (Union, UnionType) else [None]
    return None if None in parts else tuple(value for part in parts for value in part or ())


def required_fields(policy: type[ClipPolicy]) -> list[str]:
    """The settings of a policy that have no default."""
    return [name for name, field in policy.model_fields.items() if field.is_required()]


def with_defaults(policy: type[ClipPolicy]) -> ClipPolicy:
    """The policy with its class defaults.

    Raises:
        UserError: a setting has none; names it.
    """
    if required := required_fields(policy):
        raise UserError(
            f"clip policy {policy.name!r}: the field {required[0]!r} has no default, and defaults are all there is here; "
            "give the field one, such as Field(1.0, gt=0, description=...)"
        )
    return policy()


def _within(policy: type[ClipPolicy], name: str, value: float) -> float:
    """The value, or the bound of the field that it would pass."""
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
