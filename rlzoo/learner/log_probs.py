"""A module that computes log-probabilities of response tokens from token IDs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlzoo.models.autocast import uncached_autocast
from rlzoo.models.probe import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlzoo.learner.micro_batches import ModelInputs
    from rlzoo.rollout.kept import KeptSets

LOGITS_PER_CHUNK = 2**24
"""Maximum number of logits in memory at once on a CPU: 64 MB in float32, regardless of the vocabulary size."""

LOGITS_PER_CHUNK_ON_GPU = 2**28
"""The same limit on a GPU: 1 GB. Every chunk reads the head's weights and adds to their gradient, so small chunks are slow."""

LOWEST = -1e6
"""Log-prob of a token with probability 0, in nats. With -inf, differences of log-probs and entropies would be NaN."""

LARGE_LOGIT = 1e4
"""Upper bound on the logits that the check for a soft cap produces."""

logger = logging.getLogger("rlzoo")


class ResponseLogProbs(nn.Module):
    """Wraps a causal language model to compute log-probabilities and entropies of response tokens only.

    The head runs on one chunk of response tokens at a time, and the backward pass recomputes each chunk. Logits of shape
    (B, T, vocabulary) are therefore never materialized. For models that transform the logits after the head, the
    constructor disables chunking.

    If tokens were sampled from a truncated distribution, probabilities are renormalized over the tokens that the sampler kept.
    Log-probs, entropies and gradients then refer to the truncated distribution.
    """

    def __init__(self, language_model: PreTrainedModel, temperature: float = 1.0, *, entropy_gradient: bool = False) -> None:
        super().__init__()
        self.entropy_gradient = entropy_gradient
        self.language_model = language_model
        self.temperature = temperature
        self.chunked = head_gives_the_logits(language_model)
        if not self.chunked:
            logger.warning("%s transforms its logits, so log-probs are not computed in chunks", type(language_model).__name__)

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of each response token and the entropy of its distribution.

        Args:
            inputs: R rows of S tokens, N of which the model chose.

        Returns:
            Two float32 ``(N,)`` tensors in nats, row by row: differentiable log-probabilities, and entropies that carry a
            gradient if ``entropy_gradient`` is set.
        """
        targets = inputs.input_ids.roll(-1, dims=1)[inputs.predicts]
        if self.chunked:
            hidden = self.language_model.base_model(**inputs.arguments).last_hidden_state[inputs.predicts]
            head = self.language_model.get_output_embeddings()
            return chunked_log_probs(
                hidden.bfloat16() if head.weight.dtype == torch.bfloat16 else hidden,  # some models accumulate in float32
                targets,
                head,
                self.temperature,
                entropy_gradient=self.entropy_gradient,
                kept=inputs.kept,
            )
        logits = self.language_model(**inputs.arguments).logits[inputs.predicts]
        return _log_probs_of_logits(logits, targets, inputs.kept, self.temperature, self.entropy_gradient)


def chunked_log_probs(
    hidden: Tensor,
    targets: Tensor,
    head: nn.Linear,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of ``targets`` and entropies with at most `logits_per_chunk` logits in memory.

    The chunks' gradients with respect to the head's weights are summed in the weights' data type, even under autocast.

    Args:
        hidden: ``(N, H)`` last hidden states.
        targets: ``(N,)`` token IDs.
        head: maps ``(n, H)`` to ``(n, V)`` logits.
        temperature: the divisor of the logits.
        entropy_gradient: whether the entropies carry a gradient.
        kept: N sets of tokens over which probabilities are renormalized; None for the whole vocabulary.

    Returns:
        Two float32 ``(N,)`` tensors: the log-probabilities and the entropies.
    """
    device = hidden.device.type
    chunk = max(1, logits_per_chunk(is_cpu=device == "cpu") // head.out_features)

    def of_chunk(states: Tensor, ids: Tensor, sets: KeptSets | None) -> tuple[Tensor, Tensor]:
        with uncached_autocast(device):  # otherwise, the chunks' gradients would be summed in bfloat16
            logits = head(states)
        return _log_probs_of_logits(logits, ids, sets, temperature, entropy_gradient)

    chunks = torch.split(hidden, chunk), torch.split(targets, chunk)
    arguments = zip(*chunks, [None] * len(chunks[0]) if kept is None else kept.split(chunk), strict=True)
    recomputes = torch.is_grad_enabled() and len(targets) > chunk
    results = [
        checkpoint(of_chunk, *chunk_arguments, use_reentrant=False) if recomputes else of_chunk(*chunk_arguments)
        for chunk_arguments in arguments
    ]
    return torch.cat([log_probs for log_probs, _ in results]), torch.cat([entropy for _, entropy in results])


def logits_per_chunk(*, is_cpu: bool) -> int:
    """Return the maximum number of logits in memory at once."""
    return LOGITS_PER_CHUNK if is_cpu else LOGITS_PER_CHUNK_ON_GPU


def _log_probs_of_logits(
    logits: Tensor,
    targets: Tensor,
    kept: KeptSets | None,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    if kept is not None:
        scaled = scaled.masked_fill(~kept.mask(logits.shape[-1]), -torch.inf)
    log_probs = scaled.log_softmax(dim=-1)
    chosen = log_probs.gather(-1, targets[:, None]).squeeze(-1).clamp(min=LOWEST)
    # the entropy comes last, so that a backward pass that recomputes the chunk stops before it if it needs no gradient
    all_log_probs = log_probs if entropy_gradient else log_probs.detach()
    entropy = -(all_log_probs.exp() * all_log_probs.clamp(min=LOWEST)).sum(dim=-1)
    return chosen, entropy


@torch.no_grad()
def head_gives_the_logits(model: PreTrainedModel) -> bool:
    """Check with 8 tokens whether the model's head reads ``base_model(x)`` and whether the logits are the head's output.

    The head's input is scaled up inside the model, so that a soft cap takes effect even if the model's logits are small.
    """
    head, passed = model.get_output_embeddings(), list[Tensor]()
    weight = getattr(head, "weight", None)
    if weight is None or model.base_model is model or getattr(head, "bias", None) is not None:
        return False
    largest = weight.norm(dim=-1).max()
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size

    def scale_up(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        passed.append(inputs[0])
        return (inputs[0] * (LARGE_LOGIT / largest / inputs[0].norm(dim=-1).max()),)

    hooks = (
        head.register_forward_pre_hook(scale_up),
        head.register_forward_hook(lambda _, inputs, logits: passed.append(logits)),
    )
    with evaluation_mode(model):
        try:
            logits = model(input_ids=ids, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if len(passed) != 2:
        return False
    return all(
        ours.shape == theirs.shape and torch.allclose(ours.float(), theirs.float(), rtol=1e-3, atol=1e-3)
        for ours, theirs in zip(passed, (states, logits), strict=True)
    )
