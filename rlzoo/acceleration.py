"""Optional speed: what `rlzoo.fast_cpu` offers, and nothing if that folder was deleted."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlzoo.fast_cpu.fused import FusedStep

IS_THERE = find_spec("rlzoo.fast_cpu") is not None


def prepare_process() -> None:
    """Set how the threads of torch wait for each other; call before torch is imported."""
    if IS_THERE:
        from rlzoo.fast_cpu.waiting import prepare_waiting

        prepare_waiting()


def prepare_model(model: PreTrainedModel) -> None:
    """Choose how the model's matrices are multiplied on a CPU."""
    if IS_THERE:
        from rlzoo.fast_cpu.cpu import prepare_cpu

        prepare_cpu(model)


def sharing_cores(threads: int) -> AbstractContextManager[None]:
    """Within the block, let waiting threads sleep while other processes need the cores."""
    if not IS_THERE:
        return nullcontext()
    from rlzoo.fast_cpu.waiting import waiting_by_load

    return waiting_by_load(threads)


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether `fused_step` knows the model."""
    if not IS_THERE:
        return False
    from rlzoo.fast_cpu import fused

    return fused.can_fuse(model)


def fused_step(model: PreTrainedModel, length: int) -> FusedStep:
    """Compute next-token logits with joined and packed matrices, for rows of at most ``length`` tokens."""
    from rlzoo.fast_cpu.fused import FusedStep

    return FusedStep(model, length)


def joined_bytes() -> int:
    """Largest model, in bytes of its layers, whose matrices are copied while sampling."""
    if not IS_THERE:
        return 0
    from rlzoo.fast_cpu.fused import JOINED_BYTES

    return JOINED_BYTES
