"""A run's plan: how many steps and tokens, the memory of a device, an estimate of the time, and the disk it fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import needs_reference
from rlzoo.planner.architecture import Architecture
from rlzoo.planner.devices import Devices
from rlzoo.planner.memory import Memory, PassShape, Sharding, memory, micro_batch, resume_bytes, rows_per_step, weight_bytes

LEARNER_UTILISATION = 0.4
"""Share of a device's FLOP/s that forward and backward passes are taken to reach: ours, an assumption."""
SAMPLER_UTILISATION = 0.5
"""Share of a device's memory bandwidth that decoding is taken to reach: ours, an assumption."""

_TEXT_BYTES = 5  # of a response's text in JSON, per token: about what English and LaTeX come to
_ID_BYTES, _LOG_PROB_BYTES = 8, 4


@dataclass(frozen=True, slots=True)
class Prompts:
    """The longest of a task's prompts.

    Example:
        ``Prompts(longest=256, counted=True)``
    """

    longest: int  # tokens
    counted: bool  # by the model's tokenizer; False: estimated from the length of the text


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will take, if every prompt and response is as long as it may be.

    Example:
        ``make_plan(config, architecture, parse_devices("8xH100"), Prompts(256, True)).memory.peak``
    """

    config: RunConfig
    architecture: Architecture | None  # None: the model's shape is not known, so nothing that follows from it is
    devices: Devices
    sharding: Sharding
    prompts: Prompts
    batch: PassShape
    memory: Memory | None = None
    flops: dict[str, float] | None = None  # of a step, by "learner" and "rollout", over all devices
    seconds: tuple[float | None, float | None] = (None, None)  # of a step: learning, sampling; None: not known
    disk: dict[str, float] | None = None  # bytes of the run directory, by "checkpoints", "rollouts" and "replay"

    @property
    def responses(self) -> int:
        """Responses of one step."""
        return self.config.rollout.num_prompts * self.config.rollout.group_size

    @property
    def updates(self) -> int:
        """Optimizer steps of one step."""
        return self.config.learner.num_minibatches * self.config.learner.num_epochs

    @property
    def passes(self) -> int:
        """Micro-batches of an optimizer step on one process, if they are all like `batch`."""
        return -(-rows_per_step(self.config, self.sharding.processes) // self.batch.rows)

    @property
    def device_memory(self) -> float:
        """Bytes that one process may use."""
        return self.devices.share(self.sharding.processes)

    @property
    def host_loading(self) -> float:
        """Bytes in the memory of all machines together while the model is loaded: every process reads all weights."""
        return self.sharding.processes * weight_bytes(self.architecture, self.config) if self.architecture else 0

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON can hold it: counts, bytes and seconds."""
        steps, memory = self.config.steps, None
        if self.memory is not None:
            by_part = {"learner": self.memory.learning, "sampling": self.memory.sampling}
            totals = {name: {**parts, "total": sum(parts.values())} for name, parts in by_part.items()}
            memory = {**totals, "available": self.device_memory, "host_while_loading": self.host_loading}
        return {
            "steps": steps,
            "optimizer_steps": steps * self.updates,
            "responses": steps * self.responses,
            "response_tokens_at_most": steps * self.responses * self.batch.response,
            "prompt_tokens": {"longest": self.prompts.longest, "counted": self.prompts.counted},
            "processes": self.sharding.processes,
            "zero_stage": self.sharding.stage,
            "devices": {"name": self.devices.name, "count": self.devices.count, "memory_bytes": self.devices.memory},
            "parameters": self.architecture.num_parameters if self.architecture else None,
            "micro_batch": {"rows": self.batch.rows, "tokens": self.batch.tokens, "per_optimizer_step": self.passes},
            "memory_bytes": memory,
            "flops_per_step": self.flops,
            "estimated_seconds_per_step": dict(zip(("learner", "rollout"), self.seconds, strict=True)),
            "disk_bytes": self.disk,
        }


def make_plan(
    config: RunConfig, architecture: Architecture | None, devices: Devices, prompts: Prompts, processes: int = 1
) -> Plan:
    """The plan of a run on given devices.

    Args:
        config: the run.
        architecture: its model's shape; None if that is not known.
        devices: what it will run on.
        prompts: how long its prompts are.
        processes: how many compute it, one to a device.

    Raises:
        UserError: ``launch.deepspeed`` names a file that is none of DeepSpeed's settings.
    """
    sharding = Sharding.of(config.launch, processes)
    batch = micro_batch(config, architecture, prompts.longest, processes, is_cpu=devices.is_cpu)
    if architecture is None:
        return Plan(config, None, devices, sharding, prompts, batch)
    held = memory(architecture, config, sharding, batch, devices)
    flops = work(architecture, config, batch)
    kv_room = devices.share(processes) - sum(held.states.values())
    if config.rollout.engine == "vllm":
        kv_room = held.sampler - weight_bytes(architecture, config)
    learning = flops["learner"] / (processes * devices.flops * LEARNER_UTILISATION) if devices.flops else None
    sampling = rollout_seconds(architecture, config, batch, devices, processes, kv_room)
    files = disk(architecture, config, batch, has_deepspeed=sharding.stage > 0)
    return Plan(config, architecture, devices, sharding, prompts, batch, held, flops, (learning, sampling), files)


def work(architecture: Architecture, config: RunConfig, batch: PassShape) -> dict[str, float]:
    """Floating-point operations of one step, over all devices, with every response as long as it may be.

    A product of (m, k) and (k, n) counts 2 m k n. A backward pass counts two forward passes. Attention counts all pairs of
    tokens of a row, those that the mask hides too.
    """
    settings = config.learner
    responses = config.rollout.num_prompts * config.rollout.group_size
    body = responses * body_flops(architecture, batch.length)
    head = responses * 2 * batch.response * architecture.embedding_parameters
    forwards = 1 + needs_reference(config.learner, config.reward) + settings.num_epochs * (config.clip.scope == "batch")
    passes = 3 + settings.gradient_checkpointing
    learner = (forwards + settings.num_epochs * passes) * body
    learner += (forwards + settings.num_epochs * 4) * head  # chunks of logits are computed again in the backward pass
    return {"learner": learner, "rollout": body + head}


def body_flops(architecture: Architecture, length: int) -> float:
    """Operations of one row's forward pass without the head."""
    matrices = 2 * architecture.num_layers * architecture.layer_matrix_parameters * length
    attention = 4 * architecture.num_layers * architecture.query_size * length**2
    return matrices + attention


def rollout_seconds(
    architecture: Architecture, config: RunConfig, batch: PassShape, devices: Devices, processes: int, kv_room: float
) -> float | None:
    """Estimated seconds of sampling one step's responses: each token reads all weights and the cache of its row.

    Args:
        architecture: the model's shape.
        config: the run.
        batch: the longest rows.
        devices: what samples.
        processes: how many of them.
        kv_room: bytes of one device for the key-value cache, which decides how many responses are sampled at once.
    """
    if devices.flops is None or devices.bandwidth is None:
        return None
    responses = max(1, config.rollout.num_prompts * config.rollout.group_size // processes)
    row_cache = batch.length * architecture.kv_bytes(2)
    at_once = int(max(1, min(responses, kv_room // row_cache)))
    if config.rollout.engine == "hf":
        at_once = min(at_once, config.rollout.batch_size)
    weights = 2 * architecture.num_parameters
    by_reading = (weights + at_once * row_cache / 2) / (devices.bandwidth * SAMPLER_UTILISATION)
    by_computing = at_once * body_flops(architecture, batch.length) / batch.length / (devices.flops * LEARNER_UTILISATION)
    waves = -(-responses // at_once)
    return waves * batch.response * max(by_reading, by_computing)


def disk(architecture: Architecture, config: RunConfig, batch: PassShape, *, has_deepspeed: bool) -> dict[str, float]:
    """The bytes of a run directory: checkpoints while the last is written, recorded rollouts at most, weights for replay."""
    weights, settings = weight_bytes(architecture, config), config.checkpoint
    saved = 1 + (config.steps - 1) // settings.every if settings.every else 1
    most = settings.keep + 1 + bool(config.eval.num_problems and config.eval.every)  # one being written; the best
    updates = config.learner.num_minibatches * config.learner.num_epochs
    kept = config.steps // settings.keep_for_replay * updates if settings.keep_for_replay else 0
    log_probs = 2 + config.learner.num_epochs  # the sampler's, the old policy's, and those at each pass
    response = batch.response * (log_probs * _LOG_PROB_BYTES + _TEXT_BYTES) + batch.length * _ID_BYTES
    return {
        "checkpoints": (weights + resume_bytes(architecture, config, has_deepspeed)) * min(saved, most),
        "rollouts": config.steps * config.rollout.num_prompts * config.rollout.group_size * response,
        "replay": weights * kept,
    }
