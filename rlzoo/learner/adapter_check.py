"""Checks, before the first step, that the merged weights of a model with an adapter reproduce the model being trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlzoo.core.errors import UserError
from rlzoo.learner.optimization import kept_weights, named_adapter, named_weights, origin
from rlzoo.models.adapters import without_adapter
from rlzoo.models.probe import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def check_adapter(model: PreTrainedModel, before: Mapping[str, Tensor]) -> None:
    """Raise `UserError` unless merged weights give the logits of the adapted model.

    Args:
        model: the unsharded model with its adapter. The adapter starts at 0, so the check temporarily gives it random weights.
        before: the result of `named_weights` before the adapter was added. Its tensors share the model's memory.
    """
    _refuse_tied(model)
    adapter = dict(named_adapter(model))
    trained, originals, merged = kept_weights(adapter.items(), keep=True), dict[str, Tensor](), set[str]()
    with torch.random.fork_rng(), evaluation_mode(model):
        torch.manual_seed(0)
        try:
            start = _logits(model)
            for name, parameter in model.named_parameters():
                for layer in origin(model, name)[1]:  # each update is half as large as the weight that it changes
                    factors = [weight for key, weight in layer.named_parameters() if key.startswith("lora_")]
                    for weight in factors:
                        weight.normal_()
                    factors[0].mul_(parameter.norm() / (2 * layer.get_delta_weight("default").norm()))
            expected = _logits(model)
            for name, tensor in named_weights(model):
                merged.add(name)
                if name in before and tensor.data_ptr() != before[name].data_ptr():
                    originals[name] = before[name].to("cpu", copy=True)
                    before[name].copy_(tensor)
            with without_adapter(model):
                actual = _logits(model)
                for tensor in map(before.__getitem__, originals):
                    tensor.mul_(1 + torch.finfo(tensor.dtype).eps / 2 * torch.randn_like(tensor))
                rounded = _logits(model)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # the model uses a module in an unusual way
            raise UserError(f"learner.lora.target: the adapted model fails ({error}); choose other modules") from error
        finally:
            for name, tensor in originals.items():
                before[name].copy_(tensor)
            for name, tensor in adapter.items():
                tensor.copy_(trained[name])
    if renamed := merged ^ before.keys():
        raise UserError(f"learner.lora.target: {min(renamed)} cannot be saved under its own name; choose other modules")
    # use medians over tokens, because rounding may route individual tokens to other experts
    pairs = ((actual, expected), (rounded, actual), (expected, start))
    difference, noise, change = (float((first - second).norm(dim=-1).median()) for first, second in pairs)
    if difference > 2e-3 * change + 5 * noise:
        raise UserError(
            f"learner.lora.target: the merged weights do not reproduce the adapted {type(model).__name__}, because it reads an "
            "adapted weight directly; choose other modules"
        )


def _refuse_tied(model: PreTrainedModel) -> None:
    """Raise `UserError` if an adapted tensor is also used, without the adapter, under another name."""
    names: dict[int, dict[str | None, bool]] = {}
    for name, tensor in model.state_dict().items():
        original, layers = origin(model, name)
        names.setdefault(tensor.data_ptr() or id(tensor), {})[original] = bool(layers)
    for tied in names.values():
        if len(tied) > 1 and any(tied.values()):
            raise UserError(
                f"learner.lora.target: {' and '.join(map(str, tied))} are the same tensor (tied weights), which an adapter "
                "would change in one place only; leave them out of the target, or choose a model whose weights are not tied"
            )


def _logits(model: PreTrainedModel) -> Tensor:
    """Return the logits ``(16, V)`` of 16 tokens, with 0 in place of non-finite logits."""
    ids = torch.arange(3, 19, device=model.device)[None] % model.config.get_text_config().vocab_size
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0].float().nan_to_num(0.0, 0.0, 0.0)
