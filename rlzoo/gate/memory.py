"""Estimates the peak memory that the learner, the reference model and the sampler use on one device."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass

from rlzoo.config.engines import engine_of
from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import LaunchConfig, needs_reference
from rlzoo.gate.architecture import Architecture, Forward, find_architecture
from rlzoo.gate.devices import Devices
from rlzoo.learner.log_probs import logits_per_chunk
from rlzoo.learner.micro_batches import max_tokens
from rlzoo.models.pretrained import naming
from rlzoo.models.processes import zero_settings
from rlzoo.rollout.episodes import Limits
from rlzoo.rollout.open_responses import rounded

FLOAT = 4  # size of a float32 in bytes
BYTES = {"float32": 4, "bfloat16": 2}
_SAMPLER_BYTES_PER_LOGIT = 5 * FLOAT  # `draw` holds the logits, their scaled, shifted and exponentiated copies, and blocks
_BUCKET = 5e8  # DeepSpeed's reduce_bucket_size, in elements
_LIVE = 1e9  # DeepSpeed's stage3_max_live_parameters
_PERSISTENT = 1e5  # DeepSpeed's stage3_param_persistence_threshold: smaller tensors are gathered only after an optimizer step


@dataclass(frozen=True, slots=True)
class PassShape:
    """The dimensions of a micro-batch, the unit of one forward and backward pass."""

    rows: int
    length: int  # number of tokens in the longest row, including its prompt, response and observations
    response: int  # number of tokens that the model chose in the longest row

    @property
    def tokens(self) -> int:
        """Number of tokens in the micro-batch, including padding."""
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the model's states are sharded across processes."""

    processes: int
    stage: int = 0  # ZeRO stage; 0 without ZeRO
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    is_fsdp: bool = False

    @property
    def shards_weights(self) -> bool:
        """Whether the weights are sharded (ZeRO-3, FSDP2)."""
        return self.is_fsdp or self.stage == 3

    @classmethod
    def of(cls, launch: LaunchConfig, processes: int) -> Sharding:
        """Read the sharding from launch settings.

        Raises:
            UserError: ``launch.deepspeed`` is neither a stage nor a DeepSpeed configuration file.
        """
        zero = zero_settings(launch)
        off = {name for name, section in zero.items() if isinstance(section, dict) and section.get("device", "none") != "none"}
        return cls(processes, int(zero.get("stage", 0)), bool(off), "offload_param" in off, launch.fsdp)


@dataclass(frozen=True, slots=True)
class Memory:
    """One device's memory usage in bytes, by component."""

    states: dict[str, float]  # always allocated
    step: dict[str, float]  # additional memory at the peak of an optimizer step
    sampler: float
    offloaded: float = 0.0  # the reference model, if it is on the device only while it computes log-probs

    @property
    def learning(self) -> dict[str, float]:
        """Memory usage in bytes, by component, at the peak of an optimizer step."""
        return {**self.states, **self.step}

    @property
    def sampling(self) -> dict[str, float]:
        """Memory usage in bytes, by component, while sampling."""
        return {**self.states, "sampler": self.sampler}

    @property
    def peak(self) -> float:
        """The device's peak memory usage in bytes."""
        return max(sum(self.learning.values()), sum(self.sampling.values()), sum(self.states.values()) + self.offloaded)


def rows_per_step(config: RunConfig, processes: int) -> int:
    """Return the maximum number of responses per process in one optimizer step."""
    responses = config.rollout.num_prompts * config.rollout.group_size
    return math.ceil(math.ceil(responses / config.learner.num_minibatches) / processes)


def micro_batch(
    config: RunConfig, architecture: Architecture | None, prompt: int, processes: int, *, is_cpu: bool = False
) -> PassShape:
    """Return the shape of a full micro-batch in an optimizer step, with prompts and responses of maximum length."""
    chosen, length = longest_response(config, architecture, prompt)
    depth = architecture.num_layers * architecture.hidden_size if architecture is not None else 1
    limit = max_tokens(config.learner.max_tokens_per_micro_batch, is_cpu=is_cpu, depth=depth)
    rows = max(1, min(rows_per_step(config, processes), limit // length))
    return PassShape(rows, length, chosen)


def longest_response(config: RunConfig, architecture: Architecture | None, prompt: int) -> tuple[int, int]:
    """Return two token counts for the longest response: tokens that the model chooses, and all tokens including the prompt.

    An environment's observations take up positions and memory, just like other tokens. An episode ends at the context limit.
    """
    rollout = config.rollout
    if config.task.host is None:
        return rollout.max_new_tokens, prompt + rollout.max_new_tokens
    limits = [architecture.max_length] if architecture and architecture.max_length else []
    if (accepted := engine_of(rollout).max_length) is not None:
        limits.append(accepted)
    return Limits.of(rollout, min(limits, default=sys.maxsize)).longest(prompt)


def memory(
    architecture: Architecture, forward: Forward, config: RunConfig, sharding: Sharding, batch: PassShape, devices: Devices
) -> Memory:
    """Estimate one device's memory use. ``batch`` is a full micro-batch, and ``forward`` is the cost of a pass on it."""
    has_deepspeed, processes = sharding.stage > 0, sharding.processes
    is_low_rank, keeps = config.learner.lora.rank > 0, _keeps_masters(config, has_deepspeed)
    trained, element = trained_parameters(architecture, config), BYTES[config.model.dtype]
    one_copy = weight_bytes(architecture, config)
    adapter = trained * FLOAT if is_low_rank else 0  # PEFT keeps its matrices in float32, in addition to the weights
    has_both = processes > 1 and not sharding.is_fsdp  # DDP keeps gradients in both data types until the step
    number = FLOAT + (element if has_both else 0) if keeps else element
    share = 1 / processes if has_deepspeed or sharding.is_fsdp else 1  # the optimizer is sharded across processes
    on_device = 0.0 if sharding.offloads_optimizer else share
    weights = float(one_copy + adapter)
    if sharding.shards_weights:
        has_none = sharding.offloads_weights or (sharding.is_fsdp and keeps)  # FSDP2 keeps only the master weights
        weights = 0.0 if has_none else weights / processes
    reference = reference_bytes(architecture, config)
    offloaded = reference if config.model.reference and config.model.reference_offload and not devices.is_cpu else 0.0
    states = {
        "weights": weights,
        "master weights": on_device * trained * FLOAT if has_deepspeed or keeps else 0.0,
        "optimizer states": on_device * 2 * trained * _trained_bytes(config, has_deepspeed),
        "reference model": reference - offloaded,
        "communication buffers": _fsdp_buffers(architecture, element)
        if sharding.is_fsdp
        else _buffers(one_copy, adapter or trained * element, element, sharding),
    }
    critic, critic_states, critic_gradients, _ = critic_bytes(architecture, config, has_deepspeed)
    if critic:  # sharded like the model
        whole = critic / processes if sharding.shards_weights else critic
        states["critic"] = whole + on_device * critic_states + (critic_gradients if has_both and not has_deepspeed else 0.0)
    # the embedding's gradient from a micro-batch is held separately while the other gradients are computed
    head = 0 if is_low_rank else architecture.embedding_parameters * (FLOAT if keeps else element)
    gradients = max(share * (adapter or trained * number) + head, share * critic_gradients)  # never both at the same time
    at_head, at_last_layer = activations(architecture, config, forward, batch.tokens)
    chunk = log_prob_bytes(architecture, config, batch, is_cpu=devices.is_cpu)
    in_head = at_head + chunk > at_last_layer
    step = {"gradients": gradients, "activations of a micro-batch": at_head if in_head else at_last_layer}
    step |= {"log-prob chunk": chunk} if in_head else {}
    has_graphs = config.rollout.graphs != "off" and not devices.is_cpu
    columns = rounded(batch.length) if has_graphs else batch.length
    sampler = _sampler(architecture, forward.cache / batch.tokens * columns, config, sharding, devices)
    if config.rollout.max_staleness or engine_of(config.rollout).is_resident:
        step["sampler"] = sampler  # the sampler works while the learner does, or keeps its memory
    return Memory(states, step, sampler, offloaded)


def weight_bytes(architecture: Architecture, config: RunConfig) -> int:
    """Return the size of one copy of the model's weights in bytes."""
    return architecture.num_parameters * BYTES[config.model.dtype]


def reference_bytes(architecture: Architecture, config: RunConfig) -> float:
    """Return the reference model's size in bytes. If its shape is unknown, it is assumed to be as large as the model."""
    named, is_needed = config.model, needs_reference(config.learner, config.reward, config.clip, config.estimator)
    with naming("model.reference"):
        teacher = find_architecture(named.reference) if is_needed and named.reference is not None else None
    if teacher is None:
        return float(is_needed * weight_bytes(architecture, config))
    dtype, stated = named.reference_dtype, getattr(teacher.config, "dtype", None)
    return float(teacher.num_parameters * (BYTES[dtype] if dtype else stated.itemsize if stated else FLOAT))


def critic_bytes(architecture: Architecture, config: RunConfig, has_deepspeed: bool) -> tuple[float, float, float, float]:
    """Return the sizes in bytes of the critic's weights, optimizer states, gradients and files; 0 without a critic.

    If the critic's shape is unknown, it is assumed to be as large as the model.
    """
    if not config.has_critic:
        return 0.0, 0.0, 0.0, 0.0
    with naming("critic.model"):
        own = (find_architecture(config.critic.model) if config.critic.model is not None else None) or architecture
    frozen = {name for name in own.parameter_sizes for pattern in config.critic.frozen if re.search(pattern, name)}
    trained = own.num_parameters - sum(own.parameter_sizes[name] for name in frozen)
    element = BYTES[config.model.dtype]
    number = FLOAT if config.learner.master_weights or has_deepspeed else element  # bytes of an optimized parameter
    weights, moments = own.num_parameters * element, trained * 2 * number
    masters = trained * number if number != element or has_deepspeed else 0
    return weights, moments + masters, trained * (element if has_deepspeed else number), weights + moments + trained * number


def trained_parameters(architecture: Architecture, config: RunConfig) -> int:
    """Return the number of trained parameters: all parameters, or those of the LoRA adapter."""
    lora = config.learner.lora
    if not lora.rank:
        return architecture.num_parameters
    targets = " ".join(lora.target)  # a regular expression is assumed to contain the names that it matches
    adapted = (sizes for name, *sizes in architecture.linears if name in targets or targets == "all-linear")
    return lora.rank * sum(map(sum, adapted))


def resume_bytes(architecture: Architecture, config: RunConfig, has_deepspeed: bool) -> float:
    """Return a checkpoint's size in bytes across all processes: its trained parameters and moments, but not the model."""
    number = 3 * _trained_bytes(config, has_deepspeed)  # the parameter and two moments
    more = float(weight_bytes(architecture, config)) if has_deepspeed else 0.0
    more += critic_bytes(architecture, config, has_deepspeed)[-1]
    return more + trained_parameters(architecture, config) * number


def traffic(architecture: Architecture, config: RunConfig, sharding: Sharding, passes: int, *, is_cpu: bool) -> float:
    """Estimate how many bytes a process sends to other processes in one step, for weights and gradients.

    In a ring, gathering or summing a tensor's shards costs each process almost the tensor's size; summing the whole tensor
    costs twice as much. On CPUs, gloo always sums whole tensors. ``passes`` is the number of micro-batches per process and
    optimizer step.
    """
    learner, element = config.learner, BYTES[config.model.dtype]
    updates, weights = learner.num_minibatches * learner.num_epochs, weight_bytes(architecture, config)
    gradients = trained_parameters(architecture, config) * (FLOAT if learner.lora.rank or sharding.is_fsdp else element)
    summed = gradients * (2 if is_cpu else 1)
    if not sharding.shards_weights:
        sent = updates * (passes * summed + gradients if sharding.stage else 2 * gradients)
    else:
        sizes = architecture.parameter_sizes.values()
        kept = 0 if sharding.is_fsdp else element * sum(size for size in sizes if size <= _PERSISTENT)
        # for two passes of every update, for the old log-probs of all minibatches but the first, and for the sampler's copy
        gathers = 2 * updates * passes + (learner.num_minibatches - 1) * passes + 1
        sent = updates * (passes * summed + kept) + gathers * (weights - kept)
    return sent * (1 - 1 / sharding.processes)


def _keeps_masters(config: RunConfig, has_deepspeed: bool) -> bool:
    """Return whether the learner keeps float32 master weights, which DeepSpeed and LoRA do not need."""
    learner = config.learner
    return config.model.dtype == "bfloat16" and learner.master_weights and not learner.lora.rank and not has_deepspeed


def _trained_bytes(config: RunConfig, has_deepspeed: bool) -> int:
    """Return the size in bytes of an optimized parameter, which is also the size of each of its moments."""
    in_float32 = has_deepspeed or config.learner.lora.rank or _keeps_masters(config, has_deepspeed)
    return FLOAT if in_float32 else BYTES[config.model.dtype]


def _buffers(weights: float, gradients: float, element: int, sharding: Sharding) -> float:
    bucket = min(gradients, _BUCKET * element)
    if sharding.stage == 3:
        return min(weights, _LIVE * element) + bucket
    if sharding.stage:
        return 2 * bucket
    return gradients if sharding.processes > 1 else 0.0  # buckets of DistributedDataParallel


def _fsdp_buffers(architecture: Architecture, element: int) -> float:
    """Return the size in bytes of FSDP2's buffers: the embeddings, the current and the next layer, and the largest gradient."""
    layer, layers = architecture.layer_parameters, architecture.num_layers
    rest = architecture.num_parameters - layers * layer
    return (rest + min(2, layers) * layer) * element + max(rest, layer) * FLOAT


def _compute_bytes(config: RunConfig) -> int:
    """Return the number of bytes per element in matrix multiplications."""
    return 2 if config.learner.autocast == "bfloat16" else BYTES[config.model.dtype]


def activations(architecture: Architecture, config: RunConfig, forward: Forward, tokens: int) -> tuple[float, float]:
    """Return the size in bytes of the activations at the two peaks of the backward pass: in the head and in the last layer.

    The backward pass of an MLP holds three gradients that are as large as its widest tensor.
    """
    widest = max((max(inputs, outputs) for _, inputs, outputs in architecture.linears), default=architecture.hidden_size)
    in_backward = 3 * widest * _compute_bytes(config) * tokens
    if not config.learner.gradient_checkpointing:
        return forward.saved, forward.saved + in_backward
    inputs = architecture.num_layers * architecture.hidden_size * BYTES[config.model.dtype] * tokens
    return inputs, inputs + forward.saved / architecture.num_layers + in_backward


def log_prob_bytes(architecture: Architecture, config: RunConfig, batch: PassShape, *, is_cpu: bool) -> float:
    """Return the size in bytes of one chunk of logits, including log-probs, probabilities and their product in float32."""
    chunk = max(1, logits_per_chunk(is_cpu=is_cpu) // architecture.vocab_size)
    tokens = min(chunk, batch.rows * batch.response)
    return tokens * architecture.vocab_size * (3 * FLOAT + _compute_bytes(config))


def _sampler(architecture: Architecture, row_cache: float, config: RunConfig, sharding: Sharding, devices: Devices) -> float:
    """Return the sampler's memory in bytes: an engine's share of the device, or the key-value cache and logits of `decode`.

    Under autocast, `decode` also holds bfloat16 copies of the matrices. A sampler that samples ahead has its own weights. On
    a CPU, each batch in such a sampler's queue holds another copy of the weights.
    """
    settings = config.rollout
    if (reserved := engine_of(settings).device_share) is not None:
        return reserved * devices.share(sharding.processes)
    responses = max(1, settings.num_prompts * settings.group_size // sharding.processes)
    logits = architecture.vocab_size * _SAMPLER_BYTES_PER_LOGIT
    copies = int(sharding.shards_weights or settings.max_staleness > 0)
    copies += max(0, settings.max_staleness - 1) if devices.is_cpu else 0
    element, layers = _compute_bytes(config), architecture.num_layers * architecture.layer_parameters
    cast = layers * element if element != BYTES[config.model.dtype] else 0
    cache = min(settings.batch_size, responses) * (row_cache + logits)
    return cache + copies * weight_bytes(architecture, config) + cast
