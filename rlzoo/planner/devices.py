"""What computes a run: how many devices, how much memory each has, and how fast it is by its data sheet."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlzoo.errors import UserError, did_you_mean

_SPEC = re.compile(r"(?P<count>[1-9][0-9]{0,4})x(?:(?P<memory>[0-9.]+)GB(?:@(?P<teraflops>[0-9.]+))?|(?P<name>[A-Za-z][\w-]*))")


@dataclass(frozen=True, slots=True)
class Devices:
    """Some equal devices.

    Example:
        >>> parse_devices("8xH100").memory
        80000000000
    """

    name: str
    count: int
    memory: int  # bytes of one device
    flops: float | None = None  # floating-point operations per second of one, dense, in bfloat16; None: not known
    bandwidth: float | None = None  # bytes per second from one's memory; None: not known
    is_cpu: bool = False  # then the memory is the machine's, shared by all processes


DATA_SHEETS: dict[str, tuple[float, float, float]] = {
    # GB of memory, dense bfloat16 TFLOP/s without sparsity, TB/s of memory: NVIDIA's data sheets of the SXM (else PCIe) parts
    "A100-40GB": (40, 312, 1.555),
    "A100-80GB": (80, 312, 2.039),
    "H100": (80, 989, 3.35),
    "H200": (141, 989, 4.8),
    "L40S": (48, 362, 0.864),
    "RTX4090": (24, 165, 1.008),
}


def parse_devices(text: str) -> Devices:
    """Devices from ``8xH100``, ``2x24GB`` or, with a speed in TFLOP/s, ``2x24GB@165``.

    Raises:
        UserError: it is none of these; in one line.
    """
    match = _SPEC.fullmatch(text.replace(" ", ""))
    allowed = f"write 8xH100, 2x24GB or 2x24GB@165 (TFLOP/s); names: {', '.join(DATA_SHEETS)}"
    if match is None:
        raise UserError(f"--devices {text!r}: {allowed}")
    count, name = int(match["count"]), match["name"]
    if name is None:
        try:
            memory, speed = float(match["memory"]), float(match["teraflops"] or 0)
        except ValueError:
            raise UserError(f"--devices {text!r}: {allowed}") from None
        return Devices(f"{match['memory']} GB", count, int(memory * 1e9), speed * 1e12 or None)
    known = {sheet.lower(): sheet for sheet in DATA_SHEETS}
    if name.lower() not in known:
        raise UserError(f"--devices {text!r}: {allowed}{did_you_mean(name, DATA_SHEETS)}")
    return _from_sheet(known[name.lower()], count)


def this_machine() -> Devices:
    """The GPUs of this machine, or its processor where there is none."""
    import torch

    if not torch.cuda.is_available():
        import psutil

        return Devices("this machine's processor", 1, int(psutil.virtual_memory().total), is_cpu=True)
    found = torch.cuda.get_device_properties(0)
    plain = found.name.replace(" ", "").lower()
    sheet = next((DATA_SHEETS[name] for name in DATA_SHEETS if name.lower().partition("-")[0] in plain), None)
    speeds = (sheet[1] * 1e12, sheet[2] * 1e12) if sheet else (None, None)
    return Devices(found.name, torch.cuda.device_count(), int(found.total_memory), *speeds)


def _from_sheet(name: str, count: int) -> Devices:
    memory, speed, bandwidth = DATA_SHEETS[name]
    return Devices(name, count, int(memory * 1e9), speed * 1e12, bandwidth * 1e12)
