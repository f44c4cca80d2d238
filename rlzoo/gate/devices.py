"""Describes a run's devices: how many there are, and how much memory they have."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlzoo.core.errors import UserError, did_you_mean
from rlzoo.models.machine import total_memory

_SPEC = re.compile(r"([1-9][0-9]{0,4})x(?:([0-9]{1,6}(?:\.[0-9]{1,6})?)GB|([A-Za-z][\w-]*))")


@dataclass(frozen=True, slots=True)
class Devices:
    """One or more identical devices.

    Example:
        >>> parse_devices("8xH100").memory
        80000000000
    """

    name: str
    count: int
    memory: int  # memory of one device in bytes
    is_cpu: bool = False  # whether the device is a CPU, whose memory all processes share

    def share(self, processes: int) -> float:
        """Return the memory that each process may use, in bytes."""
        return self.memory / processes if self.is_cpu else self.memory


GIGABYTES = {"A100-40GB": 40, "A100-80GB": 80, "B200": 180, "H100": 80, "H200": 141, "L4": 24, "L40S": 48, "RTX4090": 24}
"""Memory of each named device in GB, from NVIDIA's data sheets."""


def parse_devices(text: str) -> Devices:
    """Parse ``8xH100`` or ``2x24GB``; raise UserError for any other text."""
    match = _SPEC.fullmatch(text.replace(" ", ""))
    count, size, name = match.groups() if match else (0, None, None)
    known = next((known for known in GIGABYTES if known.lower() == (name or "").lower()), None)
    if size is None and known is None:
        hint = did_you_mean(name, GIGABYTES) if name else ""
        raise UserError(f"--devices {text!r}: expected a value such as 8xH100 or 2x24GB; names: {', '.join(GIGABYTES)}{hint}")
    return Devices(known or f"{size} GB", int(count), int(float(size or GIGABYTES[known or ""]) * 1e9))


def this_machine() -> Devices:
    """Return the GPUs of this machine, or its CPU if it has none."""
    import torch

    if not torch.cuda.is_available():
        return Devices("this machine's CPU", 1, total_memory(), is_cpu=True)
    gpu = torch.cuda.get_device_properties(0)
    return Devices(gpu.name, torch.cuda.device_count(), int(gpu.total_memory))
