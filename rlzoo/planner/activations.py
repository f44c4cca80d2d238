"""The activations of a micro-batch: how rows are cut into them, and what the backward pass needs of the forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlzoo.config.run_config import RunConfig
from rlzoo.learner.log_probs import LOGITS_PER_CHUNK
from rlzoo.learner.micro_batches import max_tokens
from rlzoo.planner.architecture import Architecture

FLOAT = 4  # bytes of a float32
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class PassShape:
    """A batch of one forward and backward pass.

    Example:
        ``PassShape(rows=2, length=8448, response=8192, is_first=True)``
    """

    rows: int
    length: int  # tokens of the longest row, prompt and response
    response: int  # of these, the response's
    is_first: bool  # of its optimizer step: there are no gradients yet when it begins

    @property
    def tokens(self) -> int:
        """Tokens of the batch, padding included."""
        return self.rows * self.length


def micro_batches(
    config: RunConfig, architecture: Architecture | None, prompt: int, processes: int, *, is_cpu: bool = False
) -> tuple[PassShape, ...]:
    """Those micro-batches of an optimizer step that may need most memory, with every prompt and response at its longest.

    They are a full one, and what is left over.
    """
    response = config.rollout.max_new_tokens
    depth = architecture.num_layers * architecture.hidden_size if architecture is not None else 1
    limit = max_tokens(config.learner.max_tokens_per_micro_batch, is_cpu=is_cpu, depth=depth)
    rows = rows_per_step(config, processes)
    length = prompt + response
    fits = max(1, min(rows, limit // length))
    found = [PassShape(fits, length, response, is_first=rows // fits < 2)]
    if rows // fits < 2 and rows % fits:
        found.append(PassShape(rows % fits, length, response, is_first=False))
    return tuple(found)


def rows_per_step(config: RunConfig, processes: int) -> int:
    """Responses of one optimizer step on one process, at most: minibatches and shares differ in size by up to one."""
    responses = config.rollout.num_prompts * config.rollout.group_size
    return math.ceil(math.ceil(responses / config.learner.num_minibatches) / processes)


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of activations at three moments of a backward pass, which goes from the last layer to the first.

    Example:
        Without gradient checkpointing all of them are there at the head, and a layer's are let go when it is done.
    """

    at_head: float
    at_last_layer: float
    at_first_layer: float
    layer_share: float  # of the parameters, in one layer


def compute_bytes(config: RunConfig) -> int:
    """Bytes of an element of the matrix products' inputs and outputs."""
    return 2 if config.learner.autocast == "bfloat16" else BYTES[config.model.dtype]


def layer_activations(architecture: Architecture, config: RunConfig, batch: PassShape) -> float:
    """Bytes that the backward pass of one layer needs from its forward pass, for a whole micro-batch.

    As transformers computes it: an RMS norm keeps its input in float32, the normed input and its output; attention keeps
    query, key, value (repeated for every query head where rows are packed) and output; the MLP keeps four inner tensors.
    """
    element, hidden = compute_bytes(config), architecture.hidden_size
    wide = FLOAT if config.learner.autocast == "bfloat16" else element  # residuals and norms stay in the weights' type
    norms = 2 * hidden * (FLOAT + wide + element)
    if architecture.qk_norm:
        norms += (architecture.query_size + architecture.kv_size) * (FLOAT + element)
    masked = has_mask(config)
    keys = architecture.query_size if masked else architecture.kv_size
    attention = (2 * architecture.query_size + 2 * keys) * element + architecture.num_heads * FLOAT
    mlp = 4 * architecture.intermediate_size * element
    per_token = norms + attention + mlp
    if config.model.attn_implementation == "eager":
        per_token += architecture.num_heads * batch.length * (FLOAT + (element if element != FLOAT else 0))
    elif masked:
        per_token += batch.length * element  # the mask as a tensor to add, made anew in every layer
    return per_token * batch.tokens


def has_mask(config: RunConfig) -> bool:
    """Whether attention is given a mask, as packed rows need; its memory grows with the square of a row's length."""
    return config.learner.packing and not (config.model.attn_implementation or "").startswith("flash")


def kept_activations(architecture: Architecture, config: RunConfig, batch: PassShape) -> Kept:
    """Bytes of activations held at the moments of a micro-batch's backward pass."""
    element, layers, hidden = compute_bytes(config), architecture.num_layers, architecture.hidden_size
    layer = layer_activations(architecture, config, batch)
    in_backward = (3 * architecture.intermediate_size + 2 * hidden) * element * batch.tokens
    mask = batch.length * batch.tokens if has_mask(config) else 0
    casts = 0
    if config.learner.autocast == "bfloat16" and config.model.dtype == "float32":  # casts of the weights, until they are used
        casts = 2 * (layers * architecture.layer_matrix_parameters + architecture.embedding_parameters)
    one_input = hidden * BYTES[config.model.dtype] * batch.tokens
    inputs, again = (layers * one_input, layer) if config.learner.gradient_checkpointing else (layers * layer, 0)
    last_norm = hidden * (FLOAT + 2 * element) * batch.tokens
    return Kept(
        at_head=mask + casts + inputs + last_norm,
        at_last_layer=mask + casts + inputs + again + in_backward,
        at_first_layer=mask + casts / layers + inputs / layers + again + in_backward,
        layer_share=architecture.layer_parameters / architecture.num_parameters,
    )


def log_prob_bytes(architecture: Architecture, config: RunConfig, batch: PassShape) -> float:
    """Bytes of one chunk of logits and what is computed from it: log-probs, probabilities and their product in float32."""
    chunk = max(1, LOGITS_PER_CHUNK // architecture.vocab_size)
    tokens = min(chunk, batch.rows * batch.response)
    return tokens * architecture.vocab_size * (3 * FLOAT + compute_bytes(config))
