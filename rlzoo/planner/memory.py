"""The memory of one device, part by part: what the learner, the reference model and the sampler hold at their peaks."""

from __future__ import annotations

from dataclasses import dataclass

from rlzoo.acceleration import joined_bytes
from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import needs_reference
from rlzoo.planner.activations import BYTES, FLOAT, Kept, PassShape, compute_bytes, kept_activations, log_prob_bytes
from rlzoo.planner.architecture import Architecture
from rlzoo.planner.sharding import Sharding

_MOMENT_BYTES_8BIT = 1 + FLOAT / 256  # and a scale for each block of 256
_SAMPLER_BYTES_PER_LOGIT = 5 * FLOAT  # logits; scaled; minus the largest; exponentiated; in blocks: `draw`


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, by part.

    Example:
        ``memory.peak`` is what a device needs, the larger of ``memory.learner`` and ``memory.sampling``.
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
        return self.states + sum(self._moment_parts().values())

    @property
    def sampling(self) -> float:
        """The peak while responses are sampled."""
        return self.states + self.sampler

    @property
    def peak(self) -> float:
        """What a device needs."""
        return max(self.learner, self.sampling)

    def learner_parts(self) -> dict[str, float]:
        """Bytes by part at the peak of an optimizer step; they add up to `learner`."""
        return {**self._state_parts(), **self._moment_parts()}

    def sampling_parts(self) -> dict[str, float]:
        """Bytes by part while responses are sampled; they add up to `sampling`."""
        return {**self._state_parts(), "sampler": self.sampler}

    def _state_parts(self) -> dict[str, float]:
        return {
            "weights": self.weights,
            "master weights": self.master_weights,
            "optimizer states": self.optimizer,
            "reference model": self.reference,
            "communication buffers": self.buffers,
        }

    def _moment_parts(self) -> dict[str, float]:
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


def memory(
    architecture: Architecture, config: RunConfig, sharding: Sharding, batch: PassShape, device_memory: float, *, is_cpu: bool
) -> Memory:
    """The memory of one device of a run.

    Args:
        architecture: the model's shape.
        config: the run.
        sharding: how states are spread.
        batch: one of its micro-batches.
        device_memory: bytes of one device, of which vLLM takes its share.
        is_cpu: whether it is a processor.
    """
    whole, trained = weight_bytes(architecture, config), trained_parameters(architecture, config)
    is_low_rank = config.learner.lora.rank > 0
    element = BYTES[config.model.dtype]
    own = trained * FLOAT if is_low_rank else 0  # PEFT keeps its matrices in float32, beside the weights
    keeps = keeps_masters(config, sharding.has_deepspeed)
    gradient = element
    if keeps:  # a master takes over its weight's gradient, which DDP needs until the step
        gradient = FLOAT + (element if sharding.processes > 1 else 0)
    gradients = float(own or trained * gradient)
    owned = sharding.share if sharding.has_deepspeed else float  # what DeepSpeed's optimizer has is spread over processes
    on_device = sharding.offload == "none" or not sharding.has_deepspeed
    weights = float(whole + own)
    if sharding.stage == 3:
        weights = 0.0 if sharding.offload == "all" else sharding.share(weights)
    return Memory(
        weights=weights,
        master_weights=owned(trained * FLOAT) if (sharding.has_deepspeed or keeps) and on_device else 0.0,
        gradients=owned(gradients),
        optimizer=owned(2 * trained * moment_bytes(config, sharding.has_deepspeed)) if on_device else 0.0,
        kept=kept_activations(architecture, config, batch),
        log_probs=log_prob_bytes(architecture, config, batch),
        reference=float(whole) if needs_reference(config.learner, config.reward) else 0.0,
        buffers=_buffers(whole, float(own or trained * element), element, sharding),
        sampler=sampler_bytes(architecture, config, sharding, batch, device_memory, is_cpu=is_cpu),
        head_gradient=0.0 if is_low_rank else float(architecture.embedding_parameters * (FLOAT if keeps else element)),
        sampler_stays=config.rollout.engine == "vllm" and not config.rollout.vllm.sleep,
        is_first=batch.is_first,
    )


def weight_bytes(architecture: Architecture, config: RunConfig) -> int:
    """Bytes of one whole copy of the model's weights."""
    return architecture.num_parameters * BYTES[config.model.dtype]


def trained_parameters(architecture: Architecture, config: RunConfig) -> int:
    """Parameters that get a gradient: all of them, or those of the low-rank update."""
    lora = config.learner.lora
    if not lora.rank:
        return architecture.num_parameters
    adapted = [shape for name, shape in architecture.linears.items() if lora.target in ("all-linear", name)]
    return architecture.num_layers * lora.rank * sum(inputs + outputs for inputs, outputs in adapted)


def keeps_masters(config: RunConfig, deepspeed: bool) -> bool:
    """Whether the learner keeps float32 copies of bfloat16 weights; DeepSpeed has its own, and low-rank updates are float32."""
    learner = config.learner
    return config.model.dtype == "bfloat16" and learner.master_weights and not learner.lora.rank and not deepspeed


def moment_bytes(config: RunConfig, deepspeed: bool) -> float:
    """Bytes of one of AdamW's moments per parameter: in the type of the weights it changes, float32 with master weights."""
    if config.learner.optimizer == "adamw_8bit":
        return _MOMENT_BYTES_8BIT
    return FLOAT if deepspeed or config.learner.lora.rank or keeps_masters(config, deepspeed) else BYTES[config.model.dtype]


def resume_bytes(architecture: Architecture, config: RunConfig, sharding: Sharding) -> float:
    """Bytes of what a checkpoint holds beside the model, to go on from: trained parameters and moments, of all processes."""
    trained, moments = trained_parameters(architecture, config), 2 * moment_bytes(config, sharding.has_deepspeed)
    if sharding.has_deepspeed:
        return weight_bytes(architecture, config) + trained * (FLOAT + moments)
    in_float32 = config.learner.lora.rank or keeps_masters(config, sharding.has_deepspeed)
    return trained * ((FLOAT if in_float32 else BYTES[config.model.dtype]) + moments)


def _buffers(weights: float, gradients: float, element: int, sharding: Sharding) -> float:
    if sharding.stage == 3:
        return min(weights, sharding.live_elements * element) + min(gradients, sharding.bucket_elements * element)
    if sharding.has_deepspeed:
        return 2 * min(gradients, sharding.bucket_elements * element)
    return gradients if sharding.processes > 1 else 0  # the buckets of DistributedDataParallel


def sampler_bytes(
    architecture: Architecture, config: RunConfig, sharding: Sharding, batch: PassShape, device_memory: float, *, is_cpu: bool
) -> float:
    """Bytes of the sampler: vLLM's share of the device, or of `decode` the key-value cache with room to grow, and the logits.

    `decode` joins the matrices of a small model, and on a processor packs them.
    """
    from rlzoo.rollout.decode import GROWTH

    settings, element = config.rollout, compute_bytes(config)
    if settings.engine == "vllm":
        return 0 if settings.vllm.server else settings.vllm.gpu_memory_utilization * device_memory
    responses = max(1, settings.num_prompts * settings.group_size // sharding.processes)
    rows = min(settings.batch_size, responses)
    cache = rows * batch.length * architecture.kv_bytes(element)
    logits = rows * architecture.vocab_size * _SAMPLER_BYTES_PER_LOGIT
    copy = weight_bytes(architecture, config) if sharding.stage == 3 else 0
    joined = architecture.num_layers * architecture.layer_matrix_parameters * element
    packed = joined + architecture.embedding_parameters * element if is_cpu else 0
    return GROWTH * cache + logits + copy + (joined + packed if joined <= joined_bytes() else 0)
