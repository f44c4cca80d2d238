"""Optimizer steps of a model, in one process or several: gradients added up by `backward`, applied by `apply`."""

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
    """A model with its optimizer, in one process, or in several with a copy of the model each (DDP).

    `DeepSpeedOptimization` has the same methods and attributes. ``model`` is called as the module that was given; behind it,
    the gradients of the processes are added up. ``optimizer`` is the one whose learning rate a scheduler sets.

    Weights with a float32 master are rounded from it after every step, so that small steps add up. One process adds up the
    gradients of its micro-batches in float32 too; with several, DDP adds them up in the weights' type.
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
        self._masters = masters  # parameters of the module, each with the float32 copy that the optimizer has
        if accelerator.num_processes == 1:
            hooked: Any  # torch gives the method no types
            for hooked, master in masters:
                hooked.register_post_accumulate_grad_hook(partial(_hand_over, master))

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch's forward and backward pass; processes exchange gradients at the last one's end."""
        return nullcontext() if is_last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this process's share of the step's loss."""
        # DDP averages over processes; the shares are parts of a sum
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def apply(self, max_grad_norm: float | None) -> tuple[float, bool]:
        """Clip the gradient's norm, change the weights, forget the gradient.

        Returns:
            The norm over all processes before clipping, and whether it was finite; if not, the weights are as before.
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
        """Forget the gradient."""
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
        """Read back what `save` wrote after so many steps, in as many processes."""
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
        """What the optimizer changes: masters in place of the weights that have one."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def _round_masters(self) -> None:
        for parameter, master in self._masters:
            parameter.copy_(master)


def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a parameter's gradient to its master's, and free it."""
    if parameter.grad is None:
        return
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


def _misfits(
    tensors: Mapping[str, Tensor], parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, num_steps: int
) -> Iterator[str]:
    """What in a saved optimizer does not fit parameters after so many steps."""
    is_adamw = type(optimizer) is torch.optim.AdamW  # another optimizer may keep its states in a form of its own
    expected: dict[str, Tensor] = {f"parameter/{index}": parameter for index, parameter in enumerate(parameters)}
    for index, parameter in enumerate(parameters):
        states = {f"step/{index}": torch.zeros(()), f"exp_avg/{index}": parameter, f"exp_avg_sq/{index}": parameter}
        if is_adamw and not states.keys().isdisjoint(tensors):  # it has none of a parameter that never had a gradient
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
    """Several processes that share the optimizer's states and gradients (ZeRO-2), or also the weights (ZeRO-3)."""

    def __init__(self, accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator = accelerator
        self.model, _ = accelerator.prepare(module, optimizer)
        self.optimizer = self.model.basic_optimizer  # another one, where its states are in the CPU's memory
        stage = accelerator.state.deepspeed_plugin.zero_stage
        if self.model.zero_optimization_stage() != stage or self.model.dp_world_size != accelerator.num_processes:
            raise UserError(
                f"DeepSpeed was asked for ZeRO-{stage} over {accelerator.num_processes} processes and gave "
                f"ZeRO-{self.model.zero_optimization_stage()} over {self.model.dp_world_size}"
            )

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Nothing: DeepSpeed exchanges gradients at every backward pass."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this process's share of the step's loss."""
        self.model.backward(loss * self.accelerator.num_processes, scale_wrt_gas=False)

    def apply(self, max_grad_norm: float | None) -> tuple[float, bool]:
        """Change the weights, and forget the gradient; DeepSpeed got the limit of the norm when it was set up."""
        self.model.step()
        norm = float(self.model.get_global_grad_norm() or 0.0)
        return norm, bool(self.model.was_step_applied())

    def forget(self) -> None:
        """Forget the gradient."""
        self.model.zero_grad()

    def save(self, folder: Path) -> None:
        """Write the trained parameters and the optimizer's states, every process its part."""
        self.model.save_checkpoint(str(folder), tag="deepspeed")

    def load(self, folder: Path, num_steps: int) -> None:
        """Read back what `save` wrote; a file that would run code is refused."""
        from accelerate.utils import patch_environment
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        own_types = torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address])
        try:
            # the files are pickles, which DeepSpeed lets run any code; torch's switch overrules what it asks for
            with patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD=1), own_types:
                self.model.load_checkpoint(str(folder), tag="deepspeed")
        except UnpicklingError as error:
            raise UserError(f"--resume: {str(folder)!r} holds more than tensors and settings, and is not loaded") from error


Optimization = PlainOptimization | DeepSpeedOptimization


def make_scheduler(optimizer: torch.optim.Optimizer, config: LearnerConfig, num_updates: int) -> Any:
    """The learning rate's course over ``num_updates`` optimizer steps: transformers' own of that name."""
    from transformers import get_scheduler

    return get_scheduler(
        "constant_with_warmup" if config.schedule == "constant" else config.schedule,
        optimizer,
        num_warmup_steps=config.warmup_updates,
        num_training_steps=num_updates,
    )


def make_optimization(accelerator: Accelerator, module: nn.Module, config: LearnerConfig) -> Optimization:
    """The module with an optimizer for its trainable parameters, as the accelerator's processes share them."""
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
        remedy = "use --deepspeed zero3 in place of FSDP" if config.master_weights else "set learner.master_weights=true"
        logger.warning(
            "bfloat16 weights without float32 copies: steps below 0.4 %% of a weight are lost in rounding; %s", remedy
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
    """Whether a checkpoint takes all processes, each holding a part of the optimizer's states (ZeRO, FSDP2)."""
    return accelerator.distributed_type == "FSDP" or getattr(accelerator.state, "deepspeed_plugin", None) is not None


def is_spread(accelerator: Accelerator) -> bool:
    """Whether every process holds a part of the weights only (ZeRO-3, FSDP2)."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return accelerator.distributed_type == "FSDP" or (plugin is not None and plugin.zero_stage == 3)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model as it is now, whole, one after the other; all processes must ask for all of them.

    Names are those of a model without adapters; a low-rank update is added to the weight it belongs to.
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
    """Weights as they are now, on the CPU; nothing in a process that does not keep them, though it takes part."""
    copies = ((name, tensor.to("cpu", copy=True) if keep else tensor) for name, tensor in weights)
    return {name: tensor for name, tensor in copies if keep}


def _gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that FSDP2 has spread; any other as it is."""
    full = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if full is None else full()
    return whole


def _whole(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """Within it, parameters that ZeRO-3 has spread over processes are whole."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
    return whole
