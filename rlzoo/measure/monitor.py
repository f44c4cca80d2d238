"""Monitors clipping over many steps, computing a profile by length and warning after consecutive bad steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlzoo.core.policy import ClipPolicy
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.response_table import ResponseTable

logger = logging.getLogger("rlzoo")

FILE, SIZES = "monitor.safetensors", "num_responses"

WINDOW = 50  # number of most recent steps whose responses are pooled in a profile


@dataclass(frozen=True, slots=True)
class Alarm:
    """A condition on a metric that triggers a warning."""

    name: str
    metric: str
    is_bad: Callable[[float], bool]
    patience: int  # number of consecutive bad steps before the warning
    message: str


ALARMS = (
    Alarm(
        "inert",
        "clip/fraction",
        lambda value: value == 0,
        10,
        "clip is inert: nothing was clipped for {patience} steps; narrow {widths}, or find a width with `rlzoo calibrate`",
    ),
    Alarm(
        "saturated",
        "clip/fraction",
        lambda value: value > 0.5,
        3,
        "clip is saturated: {value:.0%} is clipped (more than half for {patience} steps); widen {widths}, find a width "
        "with `rlzoo calibrate`, or lower learner.lr",
    ),
    Alarm(
        "ess",
        "fairness/ess",
        lambda value: value < 0.2,
        3,
        "effective sample size collapsed: {value:.0%} of the responses carry the gradient (under 20% for {patience} steps); "
        "lower learner.lr or use fewer updates per rollout batch (learner.num_minibatches, learner.num_epochs)",
    ),
    Alarm(
        "drift",
        "ratio/drift_long",
        lambda value: abs(value) > 0.5,
        5,
        "drift is no longer negligible: log-ratios of long responses are centred {value:+.2f} standard deviations from 0 "
        "(more than 0.5 for {patience} steps); lower learner.lr, or centre the band if the rule has a drift setting",
    ),
    Alarm(
        "mismatch",
        "mismatch/log_ratio_abs_mean",
        lambda value: not value <= 0.1,
        1,  # a few stale updates cause only 0.03, so even a single step above 0.1 is a bad sign
        "sampler and trainer have drifted apart: their log-probs differ by {value:.2f} nats per token (more than 0.1); lower "
        "rollout.max_staleness or learner.lr; with rollout.max_staleness=0, compare model.dtype and rollout.vllm.dtype",
    ),
)


class Monitor:
    """Keeps the response tables of the last `WINDOW` steps and counts consecutive bad steps for each alarm."""

    def __init__(self, policy: ClipPolicy, *, expects_mismatch: bool = False) -> None:
        self._tables: deque[ResponseTable] = deque(maxlen=WINDOW)
        widths = policy.width_fields()
        self._widths = " and ".join(f"clip.{name}" for name in widths) or "the band"
        silent = (not widths and "inert", expects_mismatch and "mismatch")  # a rule without a width never clips
        self._alarms = [alarm for alarm in ALARMS if alarm.name not in silent]
        self._bad_steps: dict[str, int] = {}
        self.raised: list[str] = []  # names of alarms, in the order in which they were raised

    def after_step(self, step: int, tables: Sequence[ResponseTable], metrics: Mapping[str, float]) -> list[str]:
        """Add one step's rows and metrics. Log and return a warning for each alarm that they raise."""
        if tables:
            self._tables.append(ResponseTable.concat(tables))
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
                logger.warning("step %d: %s", step, messages[-1])
        return messages

    def alarm_state(self) -> dict[str, Any]:
        """Return the alarms' state as JSON-serialisable data for `restore`."""
        return {"bad_steps": self._bad_steps, "raised": self.raised}

    def save(self, folder: Path) -> None:
        """Write the kept rows to a folder in a checkpoint."""
        names = [field.name for field in fields(ResponseTable)]
        columns = {name: torch.cat([getattr(table, name) for table in self._tables]) for name in names if self._tables}
        sizes = torch.tensor([len(table.length) for table in self._tables], dtype=torch.long)
        save_file({**columns, SIZES: sizes}, folder / FILE)

    def restore(self, folder: Path, alarms: Mapping[str, Any]) -> None:
        """Restore the rows that `save` wrote and the alarms that `alarm_state` returned."""
        columns = load_file(folder / FILE)
        sizes = columns.pop(SIZES).tolist()
        rows_by_step = {name: column.split(sizes) for name, column in columns.items()}
        self._tables.extend(ResponseTable(**{name: rows[n] for name, rows in rows_by_step.items()}) for n in range(len(sizes)))
        self._bad_steps, self.raised = dict(alarms["bad_steps"]), list(alarms["raised"])

    def profile(self) -> LengthProfile | None:
        """Compute the profile of all kept rows, or return None if no row has a nonzero advantage."""
        return LengthProfile.of(ResponseTable.concat(self._tables)) if self._tables else None
