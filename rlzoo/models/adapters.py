"""Prepares models for training with LoRA and gradient checkpointing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from rlzoo.config.sections import LearnerConfig, LoraConfig
from rlzoo.core.errors import UserError
from rlzoo.models.pretrained import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_for_training(model: PreTrainedModel, config: LearnerConfig) -> None:
    """Add a LoRA adapter and enable gradient checkpointing, as configured.

    Raises:
        UserError: the model lacks the target modules or cannot recompute activations.
    """
    if config.lora.rank:
        _add_lora(model, config.lora)
    model.eval()
    if config.gradient_checkpointing:
        _checkpoint(model)


def _checkpoint(model: PreTrainedModel) -> None:
    """Let layers recompute their activations in the backward pass.

    Transformers recomputes only in training mode, in which some models draw random numbers even without dropout. Therefore,
    only the layers themselves are put into training mode. All modules inside and around them stay in evaluation mode.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    try:
        if hasattr(model, "activation_checkpointing_enable"):  # the name in newer transformers versions
            model.activation_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise UserError(
            f"learner.gradient_checkpointing=true: {' '.join(str(error).split()).rstrip('.')}; set it to false"
        ) from error
    enabled = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    layers = [module for module in enabled if isinstance(module, GradientCheckpointingLayer)]
    for module in layers or enabled:
        module.training = True


def _add_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    import peft

    alpha = 2 * config.rank if config.alpha is None else config.alpha
    # PEFT interprets a string as a regular expression for whole names, such as model.layers.0.self_attn.q_proj
    is_pattern = len(config.target) == 1 and not re.fullmatch(r"\w+(\.\w+)*", config.target[0])
    target = config.target[0] if is_pattern else list(config.target)
    settings = peft.LoraConfig(r=config.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=target)
    names = [f".{name}" for name, _ in model.named_modules()]
    try:
        with quiet(), torch.random.fork_rng():
            torch.manual_seed(0)  # LoRA's random initial matrix must be the same on all processes and in all runs
            model.add_adapter(settings)
    except (ValueError, re.error) as error:
        raise UserError(f"learner.lora.target={target!r}: {' '.join(str(error).split())[:400]}") from error
    # PEFT ignores names without a match if another name matches, and has already replaced the names of single experts
    for name in () if is_pattern else sorted(settings.target_modules or ()):
        if not any(full.endswith(f".{name}") for full in names):
            raise UserError(f"learner.lora.target={target!r}: the model has no module {name!r}")


def has_adapter(model: PreTrainedModel) -> bool:
    """Return whether the run trains a LoRA adapter instead of the weights."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextlib.contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Disable the adapter inside the block, so that the model computes the outputs of the starting model."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
