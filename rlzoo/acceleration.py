"""Interface to the optional CPU optimizations in `rlzoo.fast_cpu`; rlzoo also runs if that package is deleted."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlzoo.fast_cpu.fused import FusedStep

IS_THERE = find_spec("rlzoo.fast_cpu") is not None


def prepare_model(model: PreTrainedModel) -> None:
    """Choose the kernels for the model's matrix multiplications on a CPU."""
    if IS_THERE:
        from rlzoo.fast_cpu.cpu import prepare_cpu

        prepare_cpu(model)


def can_fuse(model: PreTrainedModel) -> bool:
    """Return whether `fused_step` supports the model."""
    if not IS_THERE:
        return False
    from rlzoo.fast_cpu import fused

    return fused.can_fuse(model)


def fused_step(model: PreTrainedModel, length: int) -> FusedStep:
    """Return a module that computes next-token logits with fused, packed weights, for up to ``length`` tokens per row."""
    from rlzoo.fast_cpu.fused import FusedStep

    return FusedStep(model, length)


def joined_bytes() -> int:
    """Return the total size of a model's layers, in bytes, up to which sampling fuses and packs copies of their matrices."""
    if not IS_THERE:
        return 0
    from rlzoo.fast_cpu.fused import JOINED_BYTES

    return JOINED_BYTES
