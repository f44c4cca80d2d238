"""Speeds up matrix products on CPUs by replacing MKL with oneDNN where MKL is half as fast.

torch uses MKL for float32 products. On AMD CPUs, MKL uses AVX2 even if AVX-512 is available. oneDNN, which torch uses for
bfloat16, supports AVX-512 on these CPUs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlzoo.models.machine import cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALLEST = 2**15
"""Minimum number of elements in a weight for oneDNN to pay off, because oneDNN compiles a kernel for every new shape."""

PACKED = 2**19
"""Minimum number of elements in a bfloat16 weight for packing to pay off."""


def prepare_cpu(model: PreTrainedModel) -> None:
    """Use oneDNN where it is faster. Do nothing if the model is on a GPU or a GPU is available."""
    if model.device.type != "cpu" or torch.cuda.is_available():
        return
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores():
        torch.set_num_threads(cores())  # torch respects the affinity but not a container's quota
    if is_slow_with_mkl():
        use_onednn(model)


@functools.cache
def is_slow_with_mkl() -> bool:
    """Return whether torch uses MKL on an AMD CPU with AVX-512 even though oneDNN is available."""
    if not _has_avx512() or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    processor = Path("/proc/cpuinfo")
    return has_onednn() and processor.exists() and "AuthenticAMD" in processor.read_text(encoding="utf-8")


def has_onednn() -> bool:
    """Return whether this build of torch supports oneDNN products."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def use_onednn(model: nn.Module) -> None:
    """Make the model's linear layers use oneDNN. Their weights and names do not change."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= SMALLEST:
            module.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    """A linear layer that uses oneDNN for float32 products on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """See `torch.nn.Linear`."""
        is_float32 = input.device.type == "cpu" and input.dtype == self.weight.dtype == torch.float32
        if not is_float32 or not input.numel() or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        result: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return onednn_linear(states, weight, bias).data  # `data` is not a view, so a model may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        for_states, for_weight, for_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            onednn_linear(gradient, weight.t()) if for_states else None,
            onednn_linear(rows.t(), states.reshape(-1, states.shape[-1]).t()) if for_weight else None,
            rows.sum(dim=0) if for_bias else None,
        )


class Product:
    """``states @ weight.T + bias`` without a gradient, optimized for many products with a constant weight.

    For a small number of rows, oneDNN spends as much time reordering a bfloat16 weight as computing the product. A packed copy
    of the weight avoids the reordering.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packs: bool = True) -> None:
        """Store the weight. ``packs`` determines whether to keep a packed copy."""
        self.weight, self.bias = weight, bias
        self.multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = nn.functional.linear
        on_cpu, size = weight.device.type == "cpu", weight.numel()
        if on_cpu and weight.dtype == torch.float32 and size >= SMALLEST and is_slow_with_mkl():
            self.multiply = onednn_linear
        elif on_cpu and weight.dtype == torch.bfloat16 and size >= PACKED and packs and _has_avx512() and has_onednn():
            self.weight, self.multiply = torch.ops.mkldnn._reorder_linear_weight(weight), onednn_linear

    def __call__(self, states: Tensor) -> Tensor:
        """Multiply the states ``(B, K)``, which have at least one row, by the weight."""
        return self.multiply(states, self.weight, self.bias)


def _has_avx512() -> bool:
    return bool(torch.backends.cpu.get_cpu_capability() == "AVX512")


def onednn_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear` with oneDNN, in float32 on a CPU."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return result
