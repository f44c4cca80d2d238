"""The teacher, a frozen model that differs from the trained one and scores the responses of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlzoo.core.errors import RunError, UserError
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import MicroBatches
from rlzoo.learner.row_check import check_rows
from rlzoo.models.pretrained import context_length, embedding_rows, naming
from rlzoo.models.probe import Probe

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from rlzoo.config.run_config import RunConfig
    from rlzoo.learner.batch import Batch


class Teacher:
    """Scores responses with a frozen model, which has its own data type and micro-batches, on the learner's device.

    Its log-probs are normalised over its own vocabulary, at the run's temperature and over the tokens that the sampler kept.
    Raises `UserError` if log-probs depend on more than their row or the model takes fewer than ``longest`` tokens (if given).
    """

    def __init__(self, model: PreTrainedModel, accelerator: Accelerator, config: RunConfig, longest: int | None) -> None:
        limit, self.num_tokens = context_length(model), min(embedding_rows(model), len(model.get_output_embeddings().weight))
        if longest is not None and limit is not None and longest > limit:
            raise UserError(f"model.reference takes {limit} tokens, but rows may have {longest}; lower rollout.max_new_tokens")
        settings = config.learner.model_copy(update={"autocast": "none", "gradient_checkpointing": False})
        self._device, self._home = accelerator.device, "cpu" if config.model.reference_offload else accelerator.device
        self.module = ResponseLogProbs(model.to(self._device), config.rollout.temperature).eval()
        self._micro_batches = MicroBatches(accelerator, model, settings, pad_id=0)  # padding is masked, so any ID will do
        with naming("model.reference"):
            check_rows(self._micro_batches, self.module, self.module, settings, Probe.of(model, longest))
        self.module.to(self._home)

    def log_probs(self, batch: Batch) -> Tensor:
        """Compute the log-probs of all responses, ``(B, T)``; raise `RunError` if a row has a token that the model lacks."""
        ids = torch.cat([*batch.sequences, *([] if batch.kept is None else [batch.kept.ids])])
        if (largest := int(ids.max())) >= self.num_tokens:
            lacks = f"lacks token {largest}, which the sampler drew or kept; its token ids are below {self.num_tokens}"
            raise RunError(f"model.reference {lacks}; choose a model with a larger head")
        log_probs, _ = self._micro_batches.log_probs(self.module.to(self._device), batch)
        self.module.to(self._home)
        return log_probs
