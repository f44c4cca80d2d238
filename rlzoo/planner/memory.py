"""The memory of one device, part by part: what the learner, the reference model and the sampler hold at their peaks."""

from __future__ import annotations

from dataclasses import dataclass

from rlzoo.config import RunConfig
from rlzoo.engine.model import LOGITS_PER_CHUNK
from rlzoo.planner.architecture import Architecture
from rlzoo.planner.sharding import Sharding

FLOAT = 4  # bytes of a float32
_BYTES = {"float32": 4, "bfloat16": 2}
_MOMENT_BYTES_8BIT = 1 + FLOAT / 256  # and a scale for each block of 256
_SAMPLER_BYTES_PER_LOGIT = 32  # float32 scores, scaled, log-probs; float64 probabilities and their sums: OwnDraws


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A batch of one forward and backward pass.

    Example:
        ``MicroBatch(rows=2, length=8448, response=8192, is_first=True)``
    """

    rows: int
    length: int  # tokens of the longest row, prompt and response
    response: int  # of these, the response's
    is_first: bool  # of its optimizer step: there are no gradients yet when it begins

    @property
    def tokens(self) -> int:
        """Tokens of the batch, padding included."""
        return self.rows * self.length


def micro_batches(config: RunConfig, prompt: int, processes: int) -> tuple[MicroBatch, ...]:
    """Those micro-batches of an optimizer step that may need most memory, with every prompt and response at its longest.

    They are a full one, what is left over, and, where the longest rows go alone, two rows of half the limit: those need a
    mask over their padding.
    """
    response, limit = config.rollout.max_new_tokens, config.learner.max_tokens_per_micro_batch
    rows = rows_per_step(config, processes)
    length = prompt + response
    fits = max(1, min(rows, limit // length))
    found = [MicroBatch(fits, length, response, is_first=rows // fits < 2)]
    if rows // fits < 2 and rows % fits:
        found.append(MicroBatch(rows % fits, length, response, is_first=False))
    if fits == 1 and rows > 1 and limit // 2 > prompt:
        found.append(MicroBatch(2, limit // 2, limit // 2 - prompt, is_first=rows < 4))
    return tuple(found)


def rows_per_step(config: RunConfig, processes: int) -> int:
    """Responses of one optimizer step on one process."""
    responses = config.rollout.num_prompts * config.rollout.group_size
    return max(1, responses // config.learner.num_minibatches // processes)


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


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, by part.

    Example:
        ``memory.peak`` is what a device needs; ``memory.parts()`` is what it consists of at that moment.
    """

    weights: float
    master_weights: float
    optimizer: float
    reference: float
    buffers: float
    gradients: float
    head_gradient: float  # the embedding's part of the gradient, held apart while the rest is computed
    kept: Kept
    log_probs: float
    sampler: float
    sampler_stays: bool  # its memory is not given back while the learner works
    is_first: bool  # the micro-batch is its step's first: there are no gradients yet when it begins

    @property
    def states(self) -> float:
        """What is held all the time."""
        return self.weights + self.master_weights + self.optimizer + self.reference + self.buffers

    @property
    def learner(self) -> float:
        """The peak of an optimizer step."""
        return self.states + sum(self._learner_parts().values())

    @property
    def sampling(self) -> float:
        """The peak while responses are sampled."""
        return self.states + self.sampler

    @property
    def peak(self) -> float:
        """What a device needs."""
        return max(self.learner, self.sampling)

    def parts(self) -> dict[str, float]:
        """Bytes by part at the peak; those that are 0 are left out."""
        states = {
            "weights": self.weights,
            "master weights": self.master_weights,
            "optimizer states": self.optimizer,
            "reference model": self.reference,
            "communication buffers": self.buffers,
        }
        moment = self._learner_parts() if self.learner >= self.sampling else {"sampler": self.sampler}
        return {name: size for name, size in {**states, **moment}.items() if size}

    def _learner_parts(self) -> dict[str, float]:
        """What an optimizer step adds to the states, at the largest of its moments."""
        earlier = 0.0 if self.is_first else self.gradients
        shown = "activations of a micro-batch"
        at_head = {"gradients": earlier + self.head_gradient, shown: self.kept.at_head, "log-prob chunk": self.log_probs}
        begun = earlier or self.gradients * self.kept.layer_share
        at_last_layer = {"gradients": begun + self.head_gradient, shown: self.kept.at_last_layer}
        done = self.gradients + self.head_gradient * (not self.is_first)
        at_first_layer = {"gradients": done, shown: self.kept.at_first_layer}
        at_end = {"gradients": self.gradients + self.head_gradient * (2 - self.is_first), shown: 0.0}
        parts = max((at_head, at_last_layer, at_first_layer, at_end), key=lambda moment: sum(moment.values()))
        return {**parts, "sampler": self.sampler} if self.sampler_stays else parts


def memory(architecture: Architecture, config: RunConfig, sharding: Sharding, batch: MicroBatch, device_memory: float) -> Memory:
    """The memory of one device of a run.

    Args:
        architecture: the model's shape.
        config: the run.
        sharding: how states are spread.
        batch: one of its micro-batches.
        device_memory: bytes of one device, of which vLLM takes its share.
    """
    whole, element = weight_bytes(architecture, config), _BYTES[config.model.dtype]
    trained = trained_parameters(architecture, config)
    trained_element = FLOAT if config.learner.lora.rank else element  # PEFT keeps its matrices in float32
    deepspeed, at_stage_3 = sharding.has_deepspeed, sharding.stage == 3
    weights = whole + (trained * trained_element if config.learner.lora.rank else 0)
    if at_stage_3:
        weights = 0 if sharding.offload == "all" else sharding.share(weights)
    moments = 2 * trained * moment_bytes(config, deepspeed)
    master = trained * FLOAT if deepspeed else 0
    gradients = trained * trained_element
    if deepspeed:
        gradients = sharding.share(gradients)
        moments, master = sharding.share(moments), sharding.share(master)
        if sharding.offload != "none":
            moments = master = 0
    stays = config.rollout.engine == "vllm" and not config.rollout.vllm.sleep
    return Memory(
        weights=weights,
        master_weights=master,
        gradients=gradients,
        optimizer=moments,
        kept=kept_activations(architecture, config, batch),
        log_probs=log_prob_bytes(architecture, config, batch),
        reference=whole if has_reference(config) else 0,
        buffers=_buffers(whole, trained * trained_element, element, sharding),
        sampler=sampler_bytes(architecture, config, sharding, batch, device_memory),
        head_gradient=0 if config.learner.lora.rank else architecture.embedding_parameters * element,
        sampler_stays=stays,
        is_first=batch.is_first,
    )


def weight_bytes(architecture: Architecture, config: RunConfig) -> int:
    """Bytes of one whole copy of the model's weights."""
    return architecture.num_parameters * _BYTES[config.model.dtype]


def trained_parameters(architecture: Architecture, config: RunConfig) -> int:
    """Parameters that get a gradient: all of them, or those of the low-rank update."""
    lora = config.learner.lora
    if not lora.rank:
        return architecture.num_parameters
    adapted = [shape for name, shape in architecture.linears.items() if lora.target in ("all-linear", name)]
    return architecture.num_layers * lora.rank * sum(inputs + outputs for inputs, outputs in adapted)


def has_reference(config: RunConfig) -> bool:
    """Whether a copy of the starting model is kept for a KL."""
    return config.learner.kl_coef > 0 or config.reward.kl_coef > 0


def moment_bytes(config: RunConfig, deepspeed: bool) -> float:
    """Bytes of one of AdamW's moments per parameter: torch keeps them in the weights' type, DeepSpeed in float32."""
    if config.learner.optimizer == "adamw_8bit":
        return _MOMENT_BYTES_8BIT
    return FLOAT if deepspeed or config.learner.lora.rank else _BYTES[config.model.dtype]


def compute_bytes(config: RunConfig) -> int:
    """Bytes of an element of the matrix products' inputs and outputs."""
    return 2 if config.learner.autocast == "bfloat16" else _BYTES[config.model.dtype]


def layer_activations(architecture: Architecture, config: RunConfig, batch: MicroBatch) -> float:
    """Bytes that the backward pass of one layer needs from its forward pass, for a whole micro-batch.

    As transformers computes it: an RMS norm keeps its input in float32, the normed input and its output; attention keeps
    query, key, value (repeated for every query head where rows are padded) and output; the MLP keeps four inner tensors.
    """
    element, hidden = compute_bytes(config), architecture.hidden_size
    wide = FLOAT if config.learner.autocast == "bfloat16" else element  # residuals and norms stay in the weights' type
    norms = 2 * hidden * (FLOAT + wide + element)
    if architecture.qk_norm:
        norms += (architecture.query_size + architecture.kv_size) * (FLOAT + element)
    masked = has_mask(config, batch)
    keys = architecture.query_size if masked else architecture.kv_size
    attention = (2 * architecture.query_size + 2 * keys) * element + architecture.num_heads * FLOAT
    mlp = 4 * architecture.intermediate_size * element
    per_token = norms + attention + mlp
    if config.model.attn_implementation == "eager":
        per_token += architecture.num_heads * batch.length * (FLOAT + (element if element != FLOAT else 0))
    elif masked:
        per_token += batch.length * element  # the mask as a tensor to add, made anew in every layer
    return per_token * batch.tokens


def has_mask(config: RunConfig, batch: MicroBatch) -> bool:
    """Whether attention is given a mask, which costs memory that grows with the square of a row's length."""
    is_flash = (config.model.attn_implementation or "").startswith("flash")
    return not is_flash and (batch.rows > 1 or config.learner.packing)


def kept_activations(architecture: Architecture, config: RunConfig, batch: MicroBatch) -> Kept:
    """Bytes of activations held at the moments of a micro-batch's backward pass."""
    element, layers, hidden = compute_bytes(config), architecture.num_layers, architecture.hidden_size
    layer = layer_activations(architecture, config, batch)
    in_backward = (3 * architecture.intermediate_size + 2 * hidden) * element * batch.tokens
    mask = batch.length * batch.tokens if has_mask(config, batch) else 0
    casts = 0
    if config.learner.autocast == "bfloat16" and config.model.dtype == "float32":  # casts of the weights, until they are used
        casts = 2 * (layers * architecture.layer_matrix_parameters + architecture.embedding_parameters)
    one_input = hidden * _BYTES[config.model.dtype] * batch.tokens
    inputs, again = (layers * one_input, layer) if config.learner.gradient_checkpointing else (layers * layer, 0)
    last_norm = hidden * (FLOAT + 2 * element) * batch.tokens
    return Kept(
        at_head=mask + casts + inputs + last_norm,
        at_last_layer=mask + casts + inputs + again + in_backward,
        at_first_layer=mask + casts / layers + inputs / layers + again + in_backward,
        layer_share=architecture.layer_parameters / architecture.num_parameters,
    )


def log_prob_bytes(architecture: Architecture, config: RunConfig, batch: MicroBatch) -> float:
    """Bytes of one chunk of logits and what is computed from it: log-probs, probabilities and their product in float32."""
    chunk = max(1, LOGITS_PER_CHUNK // architecture.vocab_size)
    tokens = min(chunk, batch.rows * batch.response)
    return tokens * architecture.vocab_size * (3 * FLOAT + compute_bytes(config))


def _buffers(weights: float, gradients: float, element: int, sharding: Sharding) -> float:
    if sharding.stage == 3:
        return min(weights, sharding.live_elements * element) + min(gradients, sharding.bucket_elements * element)
    if sharding.has_deepspeed:
        return 2 * min(gradients, sharding.bucket_elements * element)
    return gradients if sharding.processes > 1 else 0  # the buckets of DistributedDataParallel


def sampler_bytes(
    architecture: Architecture, config: RunConfig, sharding: Sharding, batch: MicroBatch, device_memory: float
) -> float:
    """Bytes of the sampler: vLLM's share of the device, or the key-value cache and logits of transformers' `generate`."""
    settings, element = config.rollout, compute_bytes(config)
    if settings.engine == "vllm":
        return 0 if settings.vllm.server else settings.vllm.gpu_memory_utilization * device_memory
    responses = max(1, settings.num_prompts * settings.group_size // sharding.processes)
    rows = min(settings.batch_size, responses)
    cache = rows * batch.length * architecture.kv_bytes(element)
    logits = rows * architecture.vocab_size * _SAMPLER_BYTES_PER_LOGIT
    copy = weight_bytes(architecture, config) if sharding.stage == 3 else 0
    return cache + logits + copy
