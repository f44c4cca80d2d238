"""How a run's states are spread over its processes, read from the settings of its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlzoo.config.sections import LaunchConfig
from rlzoo.processes import zero_settings

_BUCKET = 5e8  # DeepSpeed's reduce_bucket_size, in elements
_LIVE = 1e9  # its stage3_max_live_parameters


@dataclass(frozen=True, slots=True)
class Sharding:
    """What each of N processes holds of the model's states.

    Example:
        >>> Sharding(processes=8, stage=3, offload="none").share(800)
        100.0
    """

    processes: int
    stage: int  # of ZeRO; 0: data parallel without DeepSpeed, every process holds everything
    offload: str  # "none", "optimizer" or "all", as in LaunchConfig
    bucket_elements: float = _BUCKET
    live_elements: float = _LIVE

    @property
    def has_deepspeed(self) -> bool:
        """Whether DeepSpeed owns the optimizer."""
        return self.stage > 0

    def share(self, size: float) -> float:
        """One process's part of something spread over all."""
        return size / self.processes

    @classmethod
    def of(cls, launch: LaunchConfig, processes: int) -> Sharding:
        """From the settings, and the number of processes they come to.

        Raises:
            UserError: there is no such file of DeepSpeed's settings, or it is none.
        """
        if launch.deepspeed is None:
            return cls(processes, 0, launch.offload)
        zero = zero_settings(launch.deepspeed)
        return cls(
            processes,
            int(zero.get("stage", 0)),
            _offload(zero) or launch.offload,
            _number(zero.get("reduce_bucket_size"), _BUCKET),
            _number(zero.get("stage3_max_live_parameters"), _LIVE),
        )


def _offload(zero: dict[str, Any]) -> str | None:
    def is_off(part: str) -> bool:
        settings = zero.get(part)
        return isinstance(settings, dict) and settings.get("device", "none") != "none"

    if is_off("offload_param"):
        return "all"
    return "optimizer" if is_off("offload_optimizer") else None


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise  # else "auto"
