"""Which sampler a run has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlzoo.config.sections import ModelConfig, RolloutConfig
from rlzoo.rollout.decode import Way
from rlzoo.rollout.sampler import HFSampler, Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def make_sampler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: frozenset[int],
    *,
    named: ModelConfig,
    settings: RolloutConfig,
    own_weights: bool = False,
) -> Sampler:
    """The sampler that ``rollout.engine`` names; one that needs weights is given them before it samples.

    Args:
        model: the trained model.
        tokenizer: its tokenizer.
        end_ids: tokens that end a response.
        named: which model it is.
        settings: how it samples.
        own_weights: whether transformers samples from a copy of the model; vLLM always has its own.

    Raises:
        UserError: vLLM is not installed or cannot sample as asked, or the server is not there or serves something else.
    """
    size = model.config.get_text_config().vocab_size
    common: dict[str, Any] = {
        "end_ids": frozenset(token for token in end_ids if token < size),  # vLLM refuses one that cannot be drawn
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
        "chat_template": named.chat_template,
    }
    if settings.engine in ("hf", "generate"):
        way: Way | None = "generate" if settings.engine == "generate" else None
        return HFSampler(model, tokenizer, own_weights=own_weights, way=way, **common)
    from rlzoo.rollout.vllm_sampler import VLLMSampler

    if settings.vllm.server is not None:
        from rlzoo.rollout.vllm_server import ServerSampler

        return ServerSampler(model, tokenizer, settings.vllm, served=named.path, **common)
    overlaps = settings.max_staleness > 0  # then it samples while the learner works, and never sleeps
    awake = settings.vllm.model_copy(update={"sleep": False}) if overlaps else settings.vllm
    return VLLMSampler(model, tokenizer, awake, **common)
