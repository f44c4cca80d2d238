"""Checks before the first step that the weights that are saved are those that are trained, if an adapter is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlzoo.errors import UserError
from rlzoo.learner.optimization import named_adapter, named_weights, origin
from rlzoo.models.adapters import without_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def check_adapter(model: PreTrainedModel, before: Mapping[str, Tensor], setting: str) -> None:
    """Check with a random adapter that the merged weights give the logits of the adapted model; the adapter is restored.

    Args:
        model: the model with its adapter, unsharded.
        before: the weights from `named_weights` before the adapter was added, which share the model's memory.
        setting: the setting that selects the modules, for messages.

    Raises:
        UserError: an adapted weight is shared, has another name or shape than before, or is used in another way than adapted.
    """
    names: dict[int, list[str]] = {}
    adapted = []
    for name, tensor in model.state_dict().items():
        original, layers = origin(model, name)
        names.setdefault(tensor.data_ptr() or id(tensor), []).append(original or name)
        adapted += [tensor.data_ptr()] if layers else []
    for first, *others in map(names.__getitem__, adapted):
        if others:
            raise UserError(
                f"{setting}: {first} and {others[0]} are the same tensor (tied weights), which an adapter of one of them would "
                "separate; choose other modules, or a model whose weights are not tied"
            )
    trained, training = {name: tensor.clone() for name, tensor in named_adapter(model)}, model.training
    originals: dict[str, Tensor] = {}
    with torch.random.fork_rng():
        try:
            model.eval()
            start = _logits(model)
            _randomise(model)
            expected = _logits(model)
            merged = {}
            for name, tensor in named_weights(model):
                merged[name] = tensor.shape
                if name in before and tensor.shape == before[name].shape and tensor.data_ptr() != before[name].data_ptr():
                    originals[name] = before[name].to("cpu", copy=True)
                    before[name].copy_(tensor)
            with without_adapter(model):
                actual = _logits(model)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # the model uses its modules in another way
            raise UserError(f"{setting}: the adapted model fails ({error}); choose other modules") from error
        finally:
            for name, tensor in originals.items():
                before[name].copy_(tensor)
            for name, tensor in named_adapter(model):
                tensor.copy_(trained[name])
            model.train(training)
    wrong = sorted({(name, tensor.shape) for name, tensor in before.items()} ^ set(merged.items()))
    if wrong:
        raise UserError(f"{setting}: {wrong[0][0]} cannot be saved under the name that it had; choose other modules")
    # the median over tokens, because rounding may route a token to another expert
    error = float(((actual - expected).norm(dim=-1) / (expected - start).norm(dim=-1)).nanmedian())
    if not error < (0.1 if model.dtype.itemsize < 4 else 2e-3):
        raise UserError(
            f"{setting}: the merged weights do not reproduce the adapted {type(model).__name__} (relative error {error:.2g}): "
            "it reads an adapted weight directly; choose other modules"
        )


def _randomise(model: PreTrainedModel) -> None:
    """Set the adapter to random values, so that each update is half as large as the weight that it changes."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        for layer in origin(model, name)[1]:
            own = {key: weight for key, weight in layer.named_parameters() if key.startswith("lora_")}
            for weight in own.values():
                weight.normal_()
            scale = parameter.float().norm() / (2 * layer.get_delta_weight("default").float().norm())
            next(weight for key, weight in own.items() if "B" in key).mul_(scale)


def _logits(model: PreTrainedModel) -> Tensor:
    """Return the logits ``(16, V)`` of a few tokens; values that are not finite are 0."""
    ids = torch.arange(3, 19, device=model.device)[None] % model.config.get_text_config().vocab_size
    return model(input_ids=ids, use_cache=False).logits[0].float().nan_to_num(0.0, 0.0, 0.0)
