"""What is trained instead of all weights, and kept instead of all activations: LoRA and gradient checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from rlzoo.config.sections import LearnerConfig, LoraConfig
from rlzoo.errors import UserError
from rlzoo.models.pretrained import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_for_training(model: PreTrainedModel, config: LearnerConfig) -> None:
    """Add the low-rank update and switch gradient checkpointing on, where the settings ask for them.

    Raises:
        UserError: PEFT is not installed, or the model has no such modules.
    """
    if config.lora.rank:
        _add_lora(model, config.lora)
    if config.gradient_checkpointing:
        if hasattr(model, "activation_checkpointing_enable"):  # its name in newer transformers
            model.activation_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # dropout is off; transformers checkpoints in training mode only


def _add_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    try:
        import peft
    except ImportError as error:
        raise UserError("learner.lora.rank needs PEFT: pip install 'rlzoo-llm[lora]'") from error
    alpha = 2 * config.rank if config.alpha is None else config.alpha
    settings = peft.LoraConfig(r=config.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=config.target)
    try:
        with quiet(), torch.random.fork_rng():
            torch.manual_seed(0)  # half of the update begins with random numbers: the same in every process and run
            model.add_adapter(settings)
    except ValueError as error:
        raise UserError(f"learner.lora.target={config.target!r}: {str(error).splitlines()[0]}") from error


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether a low-rank update is trained instead of the weights."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextlib.contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Within it, the model is the one that training started from."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
