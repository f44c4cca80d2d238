"""Describes the devices of a run: their number, their memory, and their data-sheet speed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlzoo.core.errors import UserError, did_you_mean
from rlzoo.models.machine import total_memory

_NUMBER = r"[0-9]{1,6}(?:\.[0-9]{1,6})?"
_SPEC = re.compile(
    rf"(?P<count>[1-9][0-9]{{0,4}})x(?:(?P<memory>{_NUMBER})GB(?:@(?P<teraflops>{_NUMBER}))?|(?P<name>[A-Za-z][\w-]*))"
)


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
    flops: float | None = None  # dense bfloat16 FLOP/s of one device; None if unknown
    bandwidth: float | None = None  # memory bandwidth of one device in bytes per second; None if unknown
    is_cpu: bool = False  # whether the device is a CPU, whose memory all processes share

    def share(self, processes: int) -> float:
        """Return the memory that each process may use, in bytes."""
        return self.memory / processes if self.is_cpu else self.memory


DATA_SHEETS: dict[str, tuple[float, float, float]] = {
    # memory in GB, dense bfloat16 TFLOP/s, memory TB/s, from NVIDIA's data sheets (SXM version if there is one, otherwise PCIe)
    "A100-40GB": (40, 312, 1.555),
    "A100-80GB": (80, 312, 2.039),
    "H100": (80, 989, 3.35),
    "H200": (141, 989, 4.8),
    "L40S": (48, 362, 0.864),
    "RTX4090": (24, 165, 1.008),
}


def parse_devices(text: str) -> Devices:
    """Parse ``8xH100``, ``2x24GB`` or, with a speed in TFLOP/s, ``2x24GB@165``; raise UserError for any other text."""
    match = _SPEC.fullmatch(text.replace(" ", ""))
    name = match["name"] if match else None
    sheet = next((sheet for sheet in DATA_SHEETS if sheet.lower() == (name or "").lower()), None)
    if match is None or (name and sheet is None):
        hint = did_you_mean(name, DATA_SHEETS) if name else ""
        allowed = f"expected a value such as 8xH100, 2x24GB or 2x24GB@165 (TFLOP/s); names: {', '.join(DATA_SHEETS)}"
        raise UserError(f"--devices {text!r}: {allowed}{hint}")
    count = int(match["count"])
    if sheet is None:
        speed = float(match["teraflops"] or 0) * 1e12 or None
        return Devices(f"{match['memory']} GB", count, int(float(match["memory"]) * 1e9), speed)
    gigabytes, teraflops, terabytes = DATA_SHEETS[sheet]
    return Devices(sheet, count, int(gigabytes * 1e9), teraflops * 1e12, terabytes * 1e12)


def this_machine() -> Devices:
    """Return the GPUs of this machine, or its CPU if it has none."""
    import torch

    if not torch.cuda.is_available():
        return Devices("this machine's CPU", 1, total_memory(), is_cpu=True)
    gpu = torch.cuda.get_device_properties(0)
    plain = gpu.name.replace(" ", "").lower()
    sheet = next((DATA_SHEETS[name] for name in DATA_SHEETS if name.lower().partition("-")[0] in plain), None)
    speeds = (sheet[1] * 1e12, sheet[2] * 1e12) if sheet else (None, None)
    return Devices(gpu.name, torch.cuda.device_count(), int(gpu.total_memory), *speeds)
