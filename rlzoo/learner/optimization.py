"""Optimizer steps on one or several processes: `backward` accumulates gradients, and `apply` applies them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlzoo.config.sections import LearnerConfig
from rlzoo.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

logger = logging.getLogger("rlzoo")


class PlainOptimization:
    """A model with its optimizer, on one process, or on several processes with a copy of the model each (DDP).

    `DeepSpeedOptimization` has the same methods and attributes. ``model`` is called like the original module and sums the
    gradients over processes. ``optimizer`` is the optimizer whose learning rate a scheduler sets.

    Weights with a float32 master are rounded from it after every step, so that small steps accumulate. A single process also
    accumulates the gradients of its micro-batches in float32; with several, DDP accumulates them in the weights' data type.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        masters: Sequence[tuple[nn.Parameter, nn.Parameter]] = (),
    ) -> None:
        self.accelerator = accelerator
        self.optimizer = optimizer
        self.model, self._prepared = accelerator.prepare(module, optimizer)
        self._masters = masters  # module parameters with the float32 copies that are optimized
        if accelerator.num_processes == 1:
            hooked: Any  # torch does not type the method
            for hooked, master in masters:
                hooked.register_post_accumulate_grad_hook(partial(_hand_over, master))

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Wrap a micro-batch's forward and backward pass; processes exchange gradients at the end of the last one."""
        return nullcontext() if is_last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this process's share of the step's loss."""
        # DDP averages over processes, but the shares must be summed
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def apply(self, max_grad_norm: float | None) -> tuple[float, bool]:
        """Clip the gradient's norm, update the weights and reset the gradient.

        Returns:
            The norm over all processes before clipping, and whether it was finite; if not, the weights are unchanged.
        """
        for parameter, master in self._masters:
            _hand_over(master, parameter)
        trained = self._parameters() if self._masters else self.model.parameters()
        norm = float(self.accelerator.clip_grad_norm_(trained, max_grad_norm or float("inf")))
        finite = bool(torch.isfinite(torch.tensor(norm)))
        if finite:
            self._prepared.step()
            self._round_masters()
        self.forget()
        return norm, finite

    def forget(self) -> None:
        """Reset the gradient."""
        self._prepared.zero_grad()
        for parameter, _ in self._masters:
            parameter.grad = None

    def save(self, folder: Path) -> None:
        """Write the trained parameters and the optimizer's states."""
        tensors = {f"parameter/{index}": parameter.detach() for index, parameter in enumerate(self._parameters())}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{key}/{index}": torch.as_tensor(value) for key, value in state.items()}
        whole = {name: _gathered(tensor).contiguous() for name, tensor in tensors.items()}
        if self.accelerator.is_main_process:
            save_file(whole, folder / "optimizer.safetensors")

    def load(self, folder: Path, num_steps: int) -> None:
        """Restore what `save` wrote after ``num_steps`` steps on the same number of processes."""
        if is_shared(self.accelerator):
            raise UserError("--resume is not supported under FSDP; use --deepspeed zero3")
        tensors = load_file(folder / "optimizer.safetensors")
        for problem in _misfits(tensors, self._parameters(), self.optimizer, num_steps):
            raise UserError(f"--resume: {str(folder / 'optimizer.safetensors')!r} does not belong to this run: {problem}")
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            key, index = name.rsplit("/", 1)
            if key != "parameter":
                state.setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters()):
                parameter.copy_(tensors[f"parameter/{index}"])
        self._round_masters()

    def _parameters(self) -> list[nn.Parameter]:
        """Return the optimized parameters, with masters in place of the weights that have one."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def _round_masters(self) -> None:
        for parameter, master in self._masters:
            parameter.copy_(master)


def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a parameter's gradient to that of its master, and free it."""
    if parameter.grad is None:
        return
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


def _misfits(
    tensors: Mapping[str, Tensor], parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, num_steps: int
) -> Iterator[str]:
    """Yield the mismatches between a saved optimizer and the parameters after ``num_steps`` steps."""
    is_adamw = type(optimizer) is torch.optim.AdamW  # other optimizers may have other states
    expected: dict[str, Tensor] = {f"parameter/{index}": parameter for index, parameter in enumerate(parameters)}
    for index, parameter in enumerate(parameters):
        states = {f"step/{index}": torch.zeros(()), f"exp_avg/{index}": parameter, f"exp_avg_sq/{index}": parameter}
        if is_adamw and not states.keys().isdisjoint(tensors):  # a parameter that never had a gradient has none
            expected |= states
    known = {name for name in tensors if name in expected or (not is_adamw and not name.startswith("parameter/"))}
    for name in sorted(tensors.keys() ^ known | expected.keys() - tensors.keys()):
        yield f"{name} is {'unknown' if name in tensors else 'missing'}: the run has {len(parameters)} parameters"
    taken = max((int(tensors[name]) for name in known if name.startswith("step/") and tensors[name].ndim == 0), default=0)
    if is_adamw and taken != num_steps:
        yield f"it has taken {taken} steps, not {num_steps}"
    for name in sorted(known):
        given, wanted = tensors[name], expected.get(name, tensors[name])
        if given.shape != wanted.shape or given.dtype != wanted.dtype:
            yield (
                f"{name} has {given.dtype} values of shape {tuple(given.shape)}, "
                f"not {wanted.dtype} of shape {tuple(wanted.shape)}"
            )
        if given.is_floating_point() and not bool(given.isfinite().all()):
            yield f"{name} holds a value that is not finite"


class DeepSpeedOptimization:
    """Shards optimizer states and gradients among processes (ZeRO-2), and also the weights (ZeRO-3)."""

    def __init__(self, accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator = accelerator
        self.model, _ = accelerator.prepare(module, optimizer)
        self.optimizer = self.model.basic_optimizer  # differs from the given one if states are offloaded to the CPU
        stage = accelerator.state.deepspeed_plugin.zero_stage
        if self.model.zero_optimization_stage() != stage or self.model.dp_world_size != accelerator.num_processes:
            raise UserError(
                f"DeepSpeed was asked for ZeRO-{stage} over {accelerator.num_processes} processes and gave "
                f"ZeRO-{self.model.zero_optimization_stage()} over {self.model.dp_world_size}"
            )

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Do nothing, because DeepSpeed exchanges gradients at every backward pass."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this process's share of the step's loss."""
        self.model.backward(loss * self.accelerator.num_processes, scale_wrt_gas=False)

    def apply(self, max_grad_norm: float | None) -> tuple[float, bool]:
        """Update the weights and reset the gradient; DeepSpeed's configuration already has the norm limit."""
        self.model.step()
        norm = float(self.model.get_global_grad_norm() or 0.0)
        return norm, bool(self.model.was_step_applied())

    def forget(self) -> None:
        """Reset the gradient."""
        self.model.zero_grad()

    def save(self, folder: Path) -> None:
        """Write the trained parameters and the optimizer's states; every process writes its shard."""
        self.model.save_checkpoint(str(folder), tag="deepspeed")

    def load(self, folder: Path, num_steps: int) -> None:
        """Restore what `save` wrote; rejects files that would run code."""
        from accelerate.utils import patch_environment
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        own_types = torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address])
        try:
            # the files are pickles, which DeepSpeed loads without restrictions; torch's switch overrides this
            with patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD=1), own_types:
                self.model.load_checkpoint(str(folder), tag="deepspeed")
        except UnpicklingError as error:
            raise UserError(
                f"--resume: {str(folder)!r} contains objects other than tensors and settings, and is not loaded"
            ) from error


Optimization = PlainOptimization | DeepSpeedOptimization


def make_scheduler(optimizer: torch.optim.Optimizer, config: LearnerConfig, num_updates: int) -> Any:
    """Return transformers' learning-rate scheduler of the configured name, over ``num_updates`` updates."""
    from transformers import get_scheduler

    return get_scheduler(
        "constant_with_warmup" if config.schedule == "constant" else config.schedule,
        optimizer,
        num_warmup_steps=config.warmup_updates,
        num_training_steps=num_updates,
    )


def make_optimization(accelerator: Accelerator, module: nn.Module, config: LearnerConfig) -> Optimization:
    """Pair the module with an optimizer for its trainable parameters, distributed as the accelerator requires."""
    from accelerate.utils import DistributedType

    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    has_deepspeed = accelerator.distributed_type is DistributedType.DEEPSPEED
    rounded = [] if has_deepspeed else [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
    keeps = config.master_weights and not is_shared(accelerator)
    masters = {
        parameter: nn.Parameter(parameter.detach().to(accelerator.device, torch.float32, copy=True))
        for parameter in (rounded if keeps else ())
    }
    if rounded and not keeps and accelerator.is_main_process:
        remedy = "use --deepspeed zero3 instead of FSDP" if config.master_weights else "set learner.master_weights=true"
        logger.warning(
            "bfloat16 weights have no float32 copies: steps below 0.4 %% of a weight are lost to rounding; %s", remedy
        )
    trained = [masters.get(parameter, parameter) for parameter in parameters]
    optimizer = _adamw(config)(trained, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    if has_deepspeed:
        return DeepSpeedOptimization(accelerator, module, optimizer)
    return PlainOptimization(accelerator, module, optimizer, tuple(masters.items()))


def _adamw(config: LearnerConfig) -> Any:
    if config.optimizer == "adamw":
        return partial(torch.optim.AdamW, fused=True)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError("learner.optimizer='adamw_8bit' needs bitsandbytes: pip install bitsandbytes") from error
    return AdamW8bit


def is_shared(accelerator: Accelerator) -> bool:
    """Return whether processes hold shards of the optimizer's states (ZeRO, FSDP2), so that all must save."""
    return accelerator.distributed_type == "FSDP" or getattr(accelerator.state, "deepspeed_plugin", None) is not None


def is_spread(accelerator: Accelerator) -> bool:
    """Return whether the weights are sharded among processes (ZeRO-3, FSDP2)."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return accelerator.distributed_type == "FSDP" or (plugin is not None and plugin.zero_stage == 3)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every current weight of the model, unsharded; all processes must iterate over all weights.

    Names are those of the model without adapters, and low-rank updates are merged into their weights.
    """
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        layer = model.get_submodule(name.split(".base_layer.")[0]) if ".base_layer." in name else None
        own = [parameter, *(layer.parameters() if layer is not None else ())]
        with _whole(own):
            tensor = _gathered(parameter.detach())
            if layer is not None and name.endswith(".base_layer.weight"):
                tensor = tensor + layer.get_delta_weight("default").detach().to(tensor.dtype)
            yield name.replace(".base_layer.", "."), tensor
    kept = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def kept_weights(weights: Iterable[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Copy the current weights to the CPU; processes with ``keep=False`` take part but return an empty dict."""
    copies = ((name, tensor.to("cpu", copy=True) if keep else tensor) for name, tensor in weights)
    return {name: tensor for name, tensor in copies if keep}


def _gathered(tensor: Tensor) -> Tensor:
    """Gather a tensor that FSDP2 has sharded; other tensors are unchanged."""
    full = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if full is None else full()
    return whole


def _whole(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """Gather parameters that ZeRO-3 has sharded, for the duration of the block."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
    return whole
