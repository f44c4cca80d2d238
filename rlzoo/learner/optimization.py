"""Takes optimizer steps in one or several processes. `backward` accumulates gradients, and `apply` applies them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlzoo.config.sections import LearnerConfig
from rlzoo.core.errors import UserError, described
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import ModelInputs
from rlzoo.models.pretrained import embedding_rows

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from rlzoo.learner.values import ResponseValues

logger = logging.getLogger("rlzoo")

SHARDS = "fsdp"
"""Name of the folder that holds the shards of all processes in the state of an FSDP2 checkpoint."""


class PlainOptimization:
    """A model with its optimizer, in one process or in several processes that each have a copy of the model (DDP).

    `DeepSpeedOptimization` and `FSDPOptimization` have the same methods and attributes. ``model`` is called like the original
    module and sums the gradients across processes. ``optimizer`` is the optimizer whose learning rate a scheduler sets.
    ``rounded_to`` is the data type to which weights are rounded when they are read, or None if no rounding is needed.

    After every step, a weight that has a float32 master is set to the master's rounded value, so small steps accumulate.
    A single process also accumulates the gradients of its micro-batches in float32. With several processes, DDP accumulates
    them in the weights' data type.
    """

    rounded_to: torch.dtype | None = None

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
        self._masters = masters  # each module parameter with its float32 copy, which is optimized
        if accelerator.num_processes == 1:
            hooked: Any  # torch provides no type for the method
            for hooked, master in masters:
                hooked.register_post_accumulate_grad_hook(partial(_hand_over, master))

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Wrap a micro-batch's forward and backward passes. Processes exchange gradients at the end of the last micro-batch."""
        return nullcontext() if is_last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this process's share of the step's loss."""
        # DDP averages across processes, but the shares must be summed
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def apply(self, max_grad_norm: float | None) -> tuple[float, bool]:
        """Clip the gradient's norm, update the weights and reset the gradient.

        Returns:
            The gradient's norm across all processes before clipping, and whether it was finite. If it was not, the weights
            are unchanged.
        """
        for parameter, master in self._masters:
            _hand_over(master, parameter)
        trained = _parameters(self.optimizer) if self._masters else self.model.parameters()
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
        if self.accelerator.is_main_process:
            tensors = {name: tensor.contiguous() for name, tensor in _tensors(self.optimizer).items()}
            save_file(tensors, folder / "optimizer.safetensors")

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote with the same number of processes."""
        if (folder / SHARDS).is_dir():
            raise UserError(f"--resume: {str(folder)!r} was saved with launch.fsdp=true; resume with launch.fsdp=true")
        _restore(self.optimizer, load_file(folder / "optimizer.safetensors"))
        self._round_masters()

    @torch.no_grad()
    def _round_masters(self) -> None:
        for parameter, master in self._masters:
            parameter.copy_(master)


def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a parameter's gradient to its master's gradient and free the parameter's gradient."""
    if parameter.grad is None:
        return
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the optimized parameters, replacing each weight that has a master with that master."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimized parameters and the optimizer's states by name, such as ``exp_avg/0``."""
    parameters = enumerate(_parameters(optimizer))
    tensors: dict[str, Tensor] = {f"parameter/{index}": parameter.detach() for index, parameter in parameters}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{key}/{index}": torch.as_tensor(value) for key, value in state.items()}
    return tensors


@torch.no_grad()
def _restore(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Set the optimized parameters and the optimizer's states to the values that `_tensors` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        key, index = name.rsplit("/", 1)
        if key != "parameter":
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for number, parameter in enumerate(_parameters(optimizer)):
        parameter.copy_(tensors[f"parameter/{number}"])


class DeepSpeedOptimization:
    """Shards the optimizer states and gradients across processes (ZeRO-2). ZeRO-3 also shards the weights."""

    rounded_to: torch.dtype | None = None

    def __init__(self, accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator = accelerator
        accelerator.deepspeed_engine_wrapped = None  # otherwise, Accelerate warns that it trains only one of two models
        self.model, _ = accelerator.prepare(module, optimizer)
        self.optimizer = self.model.basic_optimizer  # differs from the given optimizer if states are offloaded to the CPU

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Do nothing, because DeepSpeed exchanges gradients in every backward pass."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this process's share of the step's loss."""
        self.model.backward(loss * self.accelerator.num_processes, scale_wrt_gas=False)

    def apply(self, max_grad_norm: float | None) -> tuple[float, bool]:
        """Clip the gradient's norm, update the weights and reset the gradient; see `PlainOptimization.apply`."""
        self.model.optimizer.clip_grad = max_grad_norm or 0.0
        self.model.step()
        norm = float(self.model.get_global_grad_norm() or 0.0)
        return norm, bool(self.model.was_step_applied())

    def forget(self) -> None:
        """Reset the gradient."""
        self.model.zero_grad()

    def save(self, folder: Path) -> None:
        """Write the trained parameters and the optimizer's states. Every process writes its shard."""
        self.model.save_checkpoint(str(folder), tag="deepspeed")

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote. Reject files that would run code."""
        from accelerate.utils import patch_environment
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        own_types = torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address])
        try:
            # the files are pickles, which DeepSpeed loads without restrictions unless torch's environment variable is set
            with patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD=1), own_types:
                self.model.load_checkpoint(str(folder), tag="deepspeed")
        except UnpicklingError as error:
            raise UserError(
                f"--resume: {str(folder)!r} contains objects other than tensors and settings, so it was not loaded"
            ) from error


class FSDPOptimization:
    """Shards weights, gradients and optimizer states across processes (PyTorch's FSDP2).

    A pass gathers the weights of one layer at a time. For bfloat16 weights, each process keeps float32 shards (the
    masters). A pass gathers these shards rounded to bfloat16, and gradients are summed and accumulated in float32.

    Accelerate connects the processes but is not used for sharding. On a CPU, it silently skips FSDP2. With mixed precision, it
    rounds the log-probs and the exchanged gradients to bfloat16.
    """

    def __init__(self, accelerator: Accelerator, module: nn.Module, config: LearnerConfig) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        self.accelerator = accelerator
        trained = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
        self.rounded_to = torch.bfloat16 if torch.bfloat16 in trained and config.master_weights else None
        dtypes = {parameter.dtype for parameter in module.parameters()} if self.rounded_to else trained
        if len(dtypes) > 1:
            names = " and ".join(sorted(map(str, dtypes)))
            raise UserError(f"launch.fsdp: all weights must have the same data type, not {names}; use launch.deepspeed=zero3")
        if accelerator.mixed_precision == "bf16":
            autocast = torch.autocast(accelerator.device.type, dtype=torch.bfloat16)
            module.forward = autocast(module.forward)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        policy = MixedPrecisionPolicy(self.rounded_to, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in (*_layers(module), module):
            if self.rounded_to:
                for parameter in layer.parameters():
                    parameter.data = parameter.data.float()
            # otherwise, the embedding and the head would stay gathered after a pass and would not see a restored checkpoint
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            assert isinstance(layer, FSDPModule), "fully_shard extends the class of the module"
            layer.set_gradient_divide_factor(1.0)  # sum the processes' shares of the loss instead of averaging them
            layer.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            layer.set_reduce_scatter_unused_params(True)  # one process may use an expert that another does not
        self.model = module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = _adamw(parameters, config)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Do nothing, because gradients are sharded after every backward pass."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this process's share of the step's loss."""
        torch.autograd.backward(loss)

    def apply(self, max_grad_norm: float | None) -> tuple[float, bool]:
        """Clip the norm of the whole gradient, update the weights, and reset the gradient; see `PlainOptimization.apply`."""
        parameters = _parameters(self.optimizer)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = _gathered(torch.nn.utils.get_total_norm(gradients))
        finite = bool(norm.isfinite())
        if finite:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm or float("inf"), norm)
            self.optimizer.step()
        self.forget()
        return float(norm), finite

    def forget(self) -> None:
        """Reset the gradient."""
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        """Write the trained parameters and the optimizer's states as safetensors. Every process writes its shard."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(_tensors(self.optimizer), storage_writer=HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True))

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote with any number of processes."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        shards = folder / SHARDS
        if not shards.is_dir():
            raise UserError(f"--resume: {str(folder)!r} was saved without launch.fsdp; resume with launch.fsdp=false")
        reader, parameters = HuggingFaceStorageReader(str(shards)), _parameters(self.optimizer)
        written: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)  # safetensors files contain only tensors
        tensors = {
            name: torch.zeros_like(parameters[int(name.rsplit("/", 1)[1])].detach()) if saved.size else torch.zeros(())
            for name, saved in written.items()
        }
        load(tensors, storage_reader=reader)
        _restore(self.optimizer, tensors)


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers whose weights are gathered together, innermost first. Transformers lists the classes of such layers."""
    modules = list(module.modules())
    names = {name for child in modules for name in getattr(child, "_no_split_modules", None) or ()}
    return [child for child in reversed(modules) if type(child).__name__ in names]


Optimization = PlainOptimization | DeepSpeedOptimization | FSDPOptimization


def make_scheduler(optimizer: torch.optim.Optimizer, config: LearnerConfig, num_updates: int) -> LambdaLR:
    """Return the configured learning-rate scheduler for ``num_updates`` updates."""
    return LambdaLR(optimizer, partial(_lr_factor, config=config, num_updates=num_updates))


def _lr_factor(update: int, config: LearnerConfig, num_updates: int) -> float:
    """Return the learning-rate factor for an update, counted from 0. The factor is 1 at the end of the warm-up."""
    if update < config.warmup_updates:
        return (update + 1) / config.warmup_updates
    left = max(0, num_updates - update) / max(1, num_updates - config.warmup_updates)
    return {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[config.schedule]


def freeze_unused(accelerator: Accelerator, module: ResponseLogProbs | ResponseValues) -> None:
    """Freeze parameters that are never used for text, such as those of a vision tower, and let steps use different experts.

    Otherwise, DDP would wait for gradients that never come, and DeepSpeed would decay weights that never learn.

    Raises:
        UserError: a training pass of the model fails, or DeepSpeed cannot train the model in several processes.
    """
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType

    model, length = module.language_model, 16
    various = torch.arange(length, device=model.device)[None] % embedding_rows(model)
    try:
        with_one_token, with_various = (_used(module, tokens) for tokens in (torch.zeros_like(various), various))
    except Exception as error:  # the model's code can cause any exception
        raise UserError(
            f"model.path: a training pass of {type(model).__name__} in {model.dtype} with attention "
            f"{model.config._attn_implementation!r} fails ({described(error)}); set another model.dtype or "
            "model.attn_implementation, or choose another model"
        ) from error
    text_model = set(model.get_decoder().parameters())
    for parameter in set(module.parameters()) - with_one_token - with_various - text_model:
        parameter.requires_grad_(False)
    adds_in_order = accelerator.distributed_type is DistributedType.DEEPSPEED and accelerator.num_processes > 1
    if adds_in_order and with_one_token != with_various:
        raise UserError(
            f"launch.deepspeed: the layers that {type(model).__name__} uses depend on the tokens, so DeepSpeed would add "
            "gradients of different layers together; use launch.fsdp=true"
        )
    if any(parameter.requires_grad for parameter in text_model - (with_one_token & with_various)):
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)


def _used(module: nn.Module, tokens: Tensor) -> set[nn.Parameter]:
    """Return the trained parameters on which the log-probs of tokens ``(B, T)`` depend."""
    log_probs, _ = module(ModelInputs(tokens, None, None, torch.ones_like(tokens, dtype=torch.bool)))
    nodes, used = {log_probs.grad_fn}, set[nn.Parameter]()
    remaining = list(nodes)
    while remaining:
        node = remaining.pop()
        used.update([node.variable] if hasattr(node, "variable") else ())
        new = {earlier for earlier, _ in node.next_functions if earlier is not None} - nodes
        nodes |= new
        remaining += new
    return used


def make_optimization(
    accelerator: Accelerator, module: nn.Module, config: LearnerConfig, *, fsdp: bool = False
) -> Optimization:
    """Pair the module with an optimizer for its trainable parameters, distributed as the accelerator or ``fsdp`` requires."""
    from accelerate.utils import DistributedType

    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    has_deepspeed = accelerator.distributed_type is DistributedType.DEEPSPEED
    rounded = [] if has_deepspeed else [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
    if rounded and not config.master_weights and accelerator.is_main_process:
        logger.warning(
            "bfloat16 weights have no float32 copies: updates below 0.4% of a weight are lost to rounding; "
            "set learner.master_weights=true"
        )
    if fsdp:
        return FSDPOptimization(accelerator, module, config)
    masters = {
        parameter: nn.Parameter(parameter.detach().to(accelerator.device, torch.float32, copy=True))
        for parameter in (rounded if config.master_weights else ())
    }
    trained = [masters.get(parameter, parameter) for parameter in parameters]
    optimizer = _adamw(trained, config)
    if has_deepspeed:
        return DeepSpeedOptimization(accelerator, module, optimizer)
    return PlainOptimization(accelerator, module, optimizer, tuple(masters.items()))


def _adamw(parameters: Sequence[nn.Parameter], config: LearnerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def named_weights(model: PreTrainedModel, rounded_to: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every current weight of the model, unsharded. All processes must iterate over all weights.

    Names match the model without adapters, and low-rank updates are merged into their weights. ``rounded_to`` is the
    data type of weights for which the model holds float32 masters.
    """
    for name, parameter in model.named_parameters():
        original, layers = origin(model, name)
        if original is None:
            continue
        with _unsharded([parameter, *(weight for layer in layers for weight in layer.parameters())]):
            tensor = _gathered(parameter.detach().to(rounded_to or parameter.dtype))
            for layer in layers:
                tensor = (tensor + _gathered(layer.get_delta_weight("default").detach())).to(tensor.dtype)
            yield original, tensor
    kept = model.state_dict().keys()
    yield from ((origin(model, name)[0] or name, buffer) for name, buffer in model.named_buffers() if name in kept)


def origin(model: nn.Module, name: str) -> tuple[str | None, list[Any]]:
    """Return a tensor's name before adapters were added (None for an adapter's tensor) and the PEFT layers that adapt it.

    PEFT wraps experts once for each adapted parameter, so a name may contain ``base_layer`` several times.
    """
    *path, last = name.split(".")
    module, names, layers = model, list[str](), list[Any]()
    for child in path:
        if not hasattr(module, "get_delta_weight"):
            names.append(child)
        elif child == "base_layer":
            layers.append(module)
        else:
            return None, []
        module = getattr(module, child)
    adapting = [layer for layer in layers if layer.get_base_layer() is module]
    return ".".join([*names, last]), [layer for layer in adapting if getattr(layer, "parameter_name", "weight") == last]


def named_adapter(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield only the weights of the adapter, unsharded. All processes must iterate over all weights."""
    for name, parameter in model.named_parameters():
        if origin(model, name)[0] is None:
            with _unsharded([parameter]):
                yield name, _gathered(parameter.detach())


def kept_weights(weights: Iterable[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Copy the current weights to the CPU. Processes with ``keep=False`` take part but return an empty dict."""
    copies = ((name, tensor.to("cpu", copy=True) if keep else tensor) for name, tensor in weights)
    return {name: tensor for name, tensor in copies if keep}


def _gathered(tensor: Tensor) -> Tensor:
    """Gather a tensor that FSDP2 has sharded. Return other tensors unchanged."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def _unsharded(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """Inside the block, gather the parameters that ZeRO-3 has sharded."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
    return gathered
