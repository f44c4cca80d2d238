"""A plugin as a stranger writes it; read by the type checker only, which must complete what is right and catch what is not."""

from __future__ import annotations

from typing import Annotated, assert_type

from pydantic import Field
from torch import Tensor

from rlzoo import Advantage, ClipBand, ClipInputs, ClipPolicy, ClipResult, ClipStats, Width, hookimpl, load_zoo, ops


class Mine(ClipPolicy):
    """A sequence rule with one width."""

    name = "mine"
    paper = "none"
    scope = "sequence"

    width: Annotated[float, Width()] = Field(0.2, gt=0, le=10, description="half-width of the band")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip the summed log-ratio."""
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        assert_type(log_ratio, Tensor)
        edge = log_ratio.new_full((), self.width)
        result = ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))
        assert_type(result, ClipResult)
        return result

    def updated(self, stats: ClipStats) -> Mine:
        """Widen as the drift grows."""
        drift = stats.log_ratio / stats.length
        assert_type(drift, Tensor)
        return self.replace(width=float(drift.abs().max()))


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """The policies of this plugin."""
    return [Mine]


def what_an_editor_knows(inputs: ClipInputs) -> None:
    """Types of fields, methods and results."""
    policy = Mine(width=0.3, advantage="group_mean", reduction="sequence_mean")
    assert_type(policy.width, float)
    assert_type(policy.advantage, Advantage)
    assert_type(policy.scaled(2.0), Mine)
    assert_type(policy.replace(width=0.1), Mine)
    assert_type(policy(inputs).clipped, Tensor)
    assert_type(inputs.rollout_log_probs, Tensor | None)
    assert_type(inputs.seed, int)
    assert_type(load_zoo()["mine"], type[ClipPolicy])
    assert_type(Mine.width_fields(), tuple[str, ...])


def what_is_caught(inputs: ClipInputs) -> None:
    """Each line is a mistake; an ignore that caught nothing would be an error itself."""
    Mine(widht=0.3)  # type: ignore[call-arg]
    Mine(width="wide")  # type: ignore[arg-type]
    Mine(advantage="gropu_norm")  # type: ignore[arg-type]
    Mine(reduction="mean")  # type: ignore[arg-type]
    Mine().width = 0.1  # type: ignore[misc]
    print(inputs.logprobs)  # type: ignore[attr-defined]
    inputs.log_probs = inputs.old_log_probs  # type: ignore[misc]
    ops.log_ratio(inputs, against="sampler")  # type: ignore[arg-type]
    ops.sequence_sum(inputs)  # type: ignore[call-arg, arg-type]
    ClipResult(inputs.log_probs)  # type: ignore[call-arg]
    ClipPolicy()  # type: ignore[abstract]


class WrongAnswer(ClipPolicy):
    """Returns a tensor, has a scope there is none of."""

    name = "wrong"
    paper = "none"
    scope = "word"  # type: ignore[assignment]

    def __call__(self, inputs: ClipInputs) -> Tensor:  # type: ignore[override]
        """Forget the result's type."""
        return inputs.log_probs
