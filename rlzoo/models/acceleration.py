"""Interface to the optional CPU optimizations in `rlzoo.models.fast_cpu`. rlzoo also runs without that package."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlzoo.models.fast_cpu.fused import FusedStep

__all__ = ("can_fuse", "fused_step", "prepare_cpu")

if find_spec("rlzoo.models.fast_cpu") is not None:
    from rlzoo.models.fast_cpu.cpu import prepare_cpu
    from rlzoo.models.fast_cpu.fused import can_fuse
else:

    def prepare_cpu(model: PreTrainedModel) -> None:
        """Leave the kernels to torch."""

    def can_fuse(model: PreTrainedModel) -> bool:
        """Return False, because `fused_step` is not available."""
        return False


def fused_step(model: PreTrainedModel, length: int) -> FusedStep:
    """Return a module that uses fused, packed weights to compute next-token logits for up to ``length`` tokens per row."""
    from rlzoo.models.fast_cpu.fused import FusedStep

    return FusedStep(model, length)
