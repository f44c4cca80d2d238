"""The floating-point operations of a step, and from them an estimate of its time."""

from __future__ import annotations

from dataclasses import dataclass

from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import needs_reference
from rlzoo.planner.activations import PassShape
from rlzoo.planner.architecture import Architecture
from rlzoo.planner.devices import Devices

LEARNER_UTILISATION = 0.4
"""Share of a device's FLOP/s that forward and backward passes are taken to reach: ours, an assumption."""
SAMPLER_UTILISATION = 0.5
"""Share of a device's memory bandwidth that decoding is taken to reach: ours, an assumption."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one step, over all devices, with every response as long as it may be.

    Example:
        ``work.learner / (devices.count * devices.flops)`` is the least time the learner's part can take, in seconds.
    """

    learner: float
    rollout: float


def work(architecture: Architecture, config: RunConfig, batch: PassShape) -> Work:
    """The operations of one step.

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
    return Work(learner=learner, rollout=body + head)


def body_flops(architecture: Architecture, length: int) -> float:
    """Operations of one row's forward pass without the head."""
    matrices = 2 * architecture.num_layers * architecture.layer_matrix_parameters * length
    attention = 4 * architecture.num_layers * architecture.query_size * length**2
    return matrices + attention


def learner_seconds(step: Work, devices: Devices, processes: int) -> float | None:
    """Estimated seconds of the learner's part of a step; None where the devices' speed is not known."""
    if devices.flops is None:
        return None
    return step.learner / (processes * devices.flops * LEARNER_UTILISATION)


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
