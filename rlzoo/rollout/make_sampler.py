"""Builds the sampler of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzoo.config.engines import engine_of
from rlzoo.config.sections import ModelConfig, RolloutConfig
from rlzoo.models.probe import Probe
from rlzoo.rollout.sampler import Sampler

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def make_sampler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: frozenset[int],
    *,
    named: ModelConfig,
    settings: RolloutConfig,
    own_weights: bool = False,
    device: torch.device | None = None,
    probe: Probe | None = None,
) -> Sampler:
    """Build the sampler of ``rollout.engine``; if it needs weights, the caller must set them before sampling.

    Args:
        model: the trained model.
        tokenizer: its tokenizer.
        end_ids: tokens that end a response.
        named: model settings.
        settings: sampling settings.
        own_weights: whether an engine that samples with the model samples from a copy of it.
        device: device of that copy; the model itself stays where it is.
        probe: rows of the model; see `HFSampler`.

    Raises:
        UserError: no way of sampling gives the model's log-probs; the engine is not installed or does not support the settings;
            its server is unavailable or misconfigured.
    """
    size = model.config.get_text_config().vocab_size
    sampler: Sampler = engine_of(settings).make(
        model,
        tokenizer,
        path=named.path,
        own_weights=own_weights,
        device=device,
        probe=probe,
        end_ids=frozenset(token for token in end_ids if token < size),  # vLLM rejects ids outside the vocabulary
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        chat_template=named.chat_template,
    )
    return sampler
