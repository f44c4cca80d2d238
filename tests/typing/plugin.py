"""A plugin by an outside author, for mypy only: nothing here is ever run.

`nox -s types` checks it with the project's strict settings. It asserts the types on which a plugin author may
rely. Mistakes that mypy must find are each marked with their error, and strict mode reports a mark without its error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, assert_type

from pydantic import Field
from torch import Tensor

from rlzoo import (
    Advantage,
    ClipBand,
    ClipInputs,
    ClipPolicy,
    ClipResult,
    ClipStats,
    Reduction,
    RunConfig,
    Width,
    hookimpl,
    load_zoo,
    ops,
)
from rlzoo.core.policy import Scope
from rlzoo.testing import LAWS, Law, Outcome, check, evaluate, parametrize_with_checks


class Stranger(ClipPolicy):
    """A band on the mean log-ratio that follows the clip fraction."""

    name = "stranger"
    paper = "none"
    scope = "sequence"
    watch: ClassVar = {"clip/fraction": "approaches a tenth"}
    exempt: ClassVar[Mapping[str, str]] = {"widths_scale": "an example of a reason"}

    advantage: Advantage = Field("leave_one_out", description="how a group's rewards become advantages")
    reduction: Reduction = Field("sequence_mean", description="how the objective is reduced to a scalar")
    width_low: Annotated[float, Width()] = Field(0.1, gt=0, le=10, description="width of the band below")
    width_high: Annotated[float, Width()] = Field(0.1, gt=0, le=10, description="width of the band above")
    ceiling: float | None = Field(None, gt=0, le=10, description="dual clip; null for none")
    num_updates: int = Field(0, ge=0, description="updates seen")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each response's mean log-ratio."""
        assert_type(inputs.log_probs, Tensor)
        assert_type(inputs.rollout_log_probs, Tensor | None)
        assert_type(inputs.seed, int)
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs, against="rollout"), inputs.response_mask)
        one = assert_type(log_ratio.new_ones(()), Tensor)
        band = ClipBand(low=-self.width_low * one, high=self.width_high * one)
        assert_type(ops.clamp_by_advantage(log_ratio, inputs.advantages, band), tuple[Tensor, Tensor])
        return assert_type(ops.clipped_surrogate(log_ratio, inputs.advantages, band), ClipResult)

    def updated(self, stats: ClipStats) -> Self:
        """Count the update and widen the band above."""
        number = assert_type(stats.num_responses, Tensor)
        wider = self.replace(num_updates=self.num_updates + 1, width_high=float(number.sum()))
        return assert_type(wider, Self)


@hookimpl
def rlzoo_clip_policies() -> Iterable[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [Stranger]


def what_an_author_may_rely_on(inputs: ClipInputs, stats: ClipStats) -> None:
    """Types of the public names."""
    policy = Stranger(width_high=0.2, ceiling=None)
    assert_type(policy.width_high, float)
    assert_type(policy.ceiling, float | None)
    assert_type(policy.advantage, Advantage)
    assert_type(policy.reduction, Reduction)
    assert_type(policy.name, str)
    assert_type(policy.scope, Literal["sequence"])
    assert_type(policy.exempt, Mapping[str, str])
    assert_type(policy(inputs), ClipResult)
    assert_type(policy.scaled(2.0), Stranger)
    assert_type(policy.updated(stats), Stranger)
    assert_type(policy.replace(width_low=0.3), Stranger)
    assert_type(Stranger.width_fields(), tuple[str, ...])
    assert_type(rlzoo_clip_policies(), Iterable[type[ClipPolicy]])

    result = policy(inputs)
    assert_type(result.objective, Tensor)
    assert_type(result.clipped, Tensor)
    assert_type(result.band, ClipBand | None)

    zoo = load_zoo(["my_rule.py"])
    assert_type(zoo["stranger"], type[ClipPolicy])
    assert_type(zoo["stranger"](), ClipPolicy)
    assert_type(zoo["stranger"].scope, Scope)
    assert_type(zoo.get("stranger"), type[ClipPolicy] | None)
    assert_type(list(zoo), list[str])
    assert_type(zoo.entries["stranger"].source, str)
    assert_type(RunConfig.compose(clip="stranger").clip, ClipPolicy)

    assert_type(LAWS, tuple[Law, ...])
    assert_type(check(policy), list[Outcome])
    assert_type(check(policy)[0].status, Literal["pass", "fail", "opted out"])
    assert_type(evaluate(policy, inputs), tuple[ClipResult, Tensor])
    parametrize_with_checks([policy, zoo["stranger"]()])


class Unfinished(ClipPolicy):
    """Has no `__call__`, so it cannot be instantiated."""

    name = "unfinished"
    paper = "none"
    scope = "token"


def mistakes_in_the_use_of_a_policy(policy: Stranger, inputs: ClipInputs, settings: dict[str, Any]) -> None:
    """Each line has one mistake, which mypy reports."""
    Stranger(width_hihg=0.2)  # type: ignore[call-arg]
    Stranger(width_high="wide")  # type: ignore[arg-type]
    Stranger(width_high=None)  # type: ignore[arg-type]
    Stranger(advantage=3)  # type: ignore[arg-type]
    Stranger(reduction="mean")  # type: ignore[arg-type]
    Unfinished()  # type: ignore[abstract]
    ClipPolicy(**settings)  # type: ignore[abstract]
    policy.width_high = 0.2  # type: ignore[misc]
    print(policy.width_hihg)  # type: ignore[attr-defined]
    policy.scaled("twice")  # type: ignore[arg-type]
    policy(inputs.log_probs)  # type: ignore[arg-type]
    print(policy(inputs).loss)  # type: ignore[attr-defined]
    print(policy(inputs).objective.requires_gradient)  # type: ignore[attr-defined]
    print(inputs.logprobs)  # type: ignore[attr-defined]
    inputs.seed = 1  # type: ignore[misc]
    ClipInputs(inputs.log_probs, inputs.old_log_probs, inputs.advantages)  # type: ignore[call-arg]
    ClipResult(inputs.log_probs, inputs.log_probs)  # type: ignore[call-arg]
    ops.log_ratio(inputs, against="reference")  # type: ignore[arg-type]
    ops.lengths(inputs)  # type: ignore[arg-type]
    parametrize_with_checks([Stranger])  # type: ignore[list-item]


class WrongAnswer(Stranger):
    """Returns only the objective."""

    def __call__(self, inputs: ClipInputs) -> Tensor:  # type: ignore[override]
        """Return a tensor."""
        return inputs.log_probs


class WrongReturn(Stranger):
    """Declares a result but returns a tensor."""

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Return a tensor."""
        return inputs.log_probs  # type: ignore[return-value]


class WrongArgument(Stranger):
    """Takes tensors as its argument."""

    def __call__(self, log_probs: Tensor, old_log_probs: Tensor) -> ClipResult:  # type: ignore[override]
        """Take tensors."""
        return ClipResult(log_probs, old_log_probs, log_probs > 0)


class WrongScope(Stranger):
    """Has a scope that does not exist."""

    scope = "word"  # type: ignore[assignment]


class WrongUpdate(Stranger):
    """Updates to another class."""

    def updated(self, stats: ClipStats) -> ClipPolicy:  # type: ignore[override]
        """Return some policy."""
        return self


class WrongDefault(Stranger):
    """Has a default of another type than its field."""

    advantage: Advantage = 3  # type: ignore[assignment]
    width_low: float = Field("wide", description="no number")  # type: ignore[assignment]
    name: int = 3  # type: ignore[misc, assignment]
