"""Builds the sampler of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzoo.config.sections import ModelConfig, RolloutConfig
from rlzoo.models.probe import Probe
from rlzoo.rollout.decode import Way
from rlzoo.rollout.sampler import HFSampler, Sampler

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
    """Build the sampler selected by ``rollout.engine``; if it needs weights, the caller must set them before sampling.

    Args:
        model: the trained model.
        tokenizer: its tokenizer.
        end_ids: tokens that end a response.
        named: model settings.
        settings: sampling settings.
        own_weights: whether transformers samples from a copy of the model; vLLM always has its own weights.
        device: device of that copy; the model itself stays where it is.
        probe: rows of the model; see `HFSampler`.

    Raises:
        UserError: no way of sampling gives the model's log-probs; vLLM is not installed or does not support the settings; the
            server is unavailable or misconfigured.
    """
    size = model.config.get_text_config().vocab_size
    common: dict[str, Any] = {
        "end_ids": frozenset(token for token in end_ids if token < size),  # vLLM rejects ids outside the vocabulary
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
        "chat_template": named.chat_template,
    }
    if settings.engine in ("hf", "generate"):
        way: Way | None = "generate" if settings.engine == "generate" else None
        return HFSampler(model, tokenizer, own_weights=own_weights, way=way, device=device, probe=probe, **common)
    from rlzoo.rollout.vllm_sampler import VLLMSampler

    common["top_k"] = settings.top_k
    if settings.vllm.server is not None:
        from rlzoo.rollout.vllm_server import ServerSampler

        return ServerSampler(model, tokenizer, settings.vllm, served=named.path, **common)
    overlaps = settings.max_staleness > 0  # if so, vLLM samples while the learner works, so it must not sleep
    awake = settings.vllm.model_copy(update={"sleep": False}) if overlaps else settings.vllm
    return VLLMSampler(model, tokenizer, awake, **common)
