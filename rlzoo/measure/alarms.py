"""Warnings that are raised once in a run, when a metric has been bad for some steps in a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlzoo.policy import ClipPolicy


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that can be wrong."""

    name: str
    metric: str
    is_bad: Callable[[float], bool]
    patience: int  # steps in a row
    message: str


ALARMS = (
    Alarm(
        "inert",
        "clip/fraction",
        lambda value: value == 0,
        10,
        "clip is inert: nothing clipped for {patience} steps; narrow {widths}, or find a width with `rlzoo calibrate`",
    ),
    Alarm(
        "saturated",
        "clip/fraction",
        lambda value: value > 0.5,
        3,
        "band is saturated: {value:.0%} of the responses clipped, over half for {patience} steps; widen {widths}, find a width "
        "with `rlzoo calibrate`, or lower learner.lr",
    ),
    Alarm(
        "ess",
        "fairness/ess",
        lambda value: value < 0.2,
        3,
        "effective sample size collapsed: {value:.0%} of the responses carry the gradient, under a fifth for {patience} steps; "
        "lower learner.lr or take fewer updates per rollout batch (learner.num_minibatches, learner.num_epochs)",
    ),
    Alarm(
        "drift",
        "ratio/drift_long",
        lambda value: abs(value) > 0.5,
        5,
        "drift is no longer negligible: log-ratios of long responses are centred {value:+.2f} standard deviations from 0, "
        "more than half of one for {patience} steps; lower learner.lr, or centre the band if the policy has a drift setting",
    ),
)


class Alarms:
    """Counts bad steps in a row."""

    def __init__(self, policy: ClipPolicy) -> None:
        widths = policy.width_fields()
        self._widths = " and ".join(f"clip.{name}" for name in widths) or "the band"
        # a rule that never cuts is not inert because it cuts nothing
        self._alarms = [alarm for alarm in ALARMS if widths or alarm.name != "inert"]
        self._bad_steps: dict[str, int] = {}
        self.raised: list[str] = []  # names, in the order in which they were raised

    def state(self) -> dict[str, Any]:
        """The state for `restore`, as plain JSON."""
        return {"bad_steps": self._bad_steps, "raised": self.raised}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a `ValueError` if it is none."""
        bad_steps, raised = dict(state["bad_steps"]), list(state["raised"])
        known = {alarm.name for alarm in ALARMS}
        if not {*bad_steps, *raised} <= known or not all(type(number) is int for number in bad_steps.values()):
            raise ValueError(f"alarms {bad_steps} and {raised}; known are {', '.join(sorted(known))}")
        self._bad_steps, self.raised = bad_steps, raised

    def after_step(self, metrics: Mapping[str, float]) -> list[str]:
        """Take one step's metrics and return the warnings to show now. A step without the metric changes nothing."""
        messages = []
        for alarm in self._alarms:
            value = metrics.get(alarm.metric)
            if value is None or alarm.name in self.raised:
                continue
            number = self._bad_steps.get(alarm.name, 0) + 1 if alarm.is_bad(value) else 0
            self._bad_steps[alarm.name] = number
            if number == alarm.patience:
                self.raised.append(alarm.name)
                messages.append(alarm.message.format(value=value, patience=alarm.patience, widths=self._widths))
        return messages
