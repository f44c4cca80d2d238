"""The plan for a run: steps, tokens, memory per device, estimated time and disk space."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlzoo.config.engines import engine_of
from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import needs_reference
from rlzoo.gate.architecture import Architecture, Forward
from rlzoo.gate.devices import Devices
from rlzoo.gate.memory import (
    Memory,
    PassShape,
    Sharding,
    memory,
    micro_batch,
    resume_bytes,
    rows_per_step,
    weight_bytes,
)

LEARNER_UTILISATION = 0.2  # share of a device's FLOP/s that learning achieved on an H100, see docs/reference/gpu.md
SAMPLER_UTILISATION = 0.5  # assumed share of a device's memory bandwidth that decoding achieves

_TEXT_BYTES = 5  # bytes of JSON text per response token, about right for English and LaTeX
_TURN_BYTES = 128  # bytes of JSON per turn, excluding the turn's text
_ID_BYTES, _KEPT_ID_BYTES, _LOG_PROB_BYTES = 8, 4, 4


@dataclass(frozen=True, slots=True)
class Prompts:
    """The length of a task's longest prompt."""

    longest: int  # tokens
    counted: bool  # whether the length was counted with the model's tokenizer; False if it was estimated from the text


@dataclass(frozen=True)
class Plan:
    """The resources that a run needs if every prompt and response has its maximum length.

    Values that depend on the model's architecture are None if the architecture is unknown.
    """

    config: RunConfig
    architecture: Architecture | None
    devices: Devices
    prompts: Prompts
    processes: int = 1  # one per device
    is_here: bool = True  # whether the devices, and the disk, are this machine's

    @cached_property
    def sharding(self) -> Sharding:
        """How the model's states are sharded across processes."""
        return Sharding.of(self.config.launch, self.processes)

    @cached_property
    def batch(self) -> PassShape:
        """A full micro-batch."""
        is_cpu = self.devices.is_cpu
        return micro_batch(self.config, self.architecture, self.prompts.longest, self.processes, is_cpu=is_cpu)

    @property
    def observed(self) -> int:
        """Number of tokens that an environment writes per response."""
        return max(0, self.batch.length - self.prompts.longest - self.batch.response)

    @property
    def responses(self) -> int:
        """Number of responses per step."""
        return self.config.rollout.num_prompts * self.config.rollout.group_size

    @property
    def updates(self) -> int:
        """Number of optimizer steps per rollout step."""
        return self.config.learner.num_minibatches * self.config.learner.num_epochs

    @property
    def passes(self) -> int:
        """Number of micro-batches per process in one optimizer step, if all micro-batches have the shape of `batch`."""
        return -(-rows_per_step(self.config, self.processes) // self.batch.rows)

    @property
    def device_memory(self) -> float:
        """Memory that one process may use, in bytes."""
        return self.devices.share(self.processes)

    @property
    def host_loading(self) -> float:
        """Host memory in bytes, across all machines, while the model loads; every process reads all weights."""
        return self.processes * weight_bytes(self.architecture, self.config) if self.architecture else 0

    @cached_property
    def forward(self) -> Forward | None:
        """The cost of a forward pass on a full micro-batch."""
        with suppress(Exception):  # what a model computes may depend on its data
            return self.architecture.forward(self.config, self.batch.rows, self.batch.length) if self.architecture else None
        return None

    @cached_property
    def memory(self) -> Memory | None:
        """Estimated memory use of one device."""
        if self.architecture is None or self.forward is None:
            return None
        return memory(self.architecture, self.forward, self.config, self.sharding, self.batch, self.devices)

    @cached_property
    def flops(self) -> dict[str, float] | None:
        """FLOPs of one step across all devices, for "learner" and "rollout".

        A product of (m, k) and (k, n) matrices counts as 2 m k n. A backward pass counts as two forward passes. Attention
        counts all pairs of tokens in a row, including masked pairs.
        """
        if self.architecture is None or self.forward is None:
            return None
        settings = self.config.learner
        body = self.responses * self.forward.flops / self.batch.rows
        head = self.responses * 2 * self.batch.response * self.architecture.embedding_parameters
        clip = self.config.clip
        forwards = 1 + needs_reference(settings, self.config.reward, clip) + settings.num_epochs * (clip.scope == "batch")
        passes = 3 + settings.gradient_checkpointing
        learner = (forwards + settings.num_epochs * passes) * body
        learner += (forwards + settings.num_epochs * 4) * head  # the backward pass recomputes chunks of logits
        return {"learner": learner, "rollout": body + head}

    @property
    def seconds(self) -> tuple[float | None, float | None]:
        """Estimated seconds per step for learning and for sampling; None if a device's speed is unknown, as that of a server.

        To sample a token, the host starts every layer's kernels, and the device reads all weights and the rows' caches. The
        memory left for the cache limits how many responses are sampled at once.
        """
        architecture, devices, held = self.architecture, self.devices, self.memory
        if architecture is None or self.forward is None or held is None or self.flops is None or devices.flops is None:
            return None, None
        speed = devices.flops * LEARNER_UTILISATION
        learning = self.flops["learner"] / (self.processes * speed)
        engine, row_cache = engine_of(self.config.rollout), self.forward.cache / self.batch.rows
        if devices.bandwidth is None or engine.is_remote:
            return learning, None
        kv_room = self.device_memory - sum(held.states.values())
        weights = weight_bytes(architecture, self.config)
        if engine.device_share is not None:
            kv_room = held.sampler - weights
        responses = max(1, self.responses // self.processes)
        at_once = int(max(1, min(responses, self.config.rollout.batch_size, kv_room // max(1, row_cache))))
        by_reading = (weights + at_once * row_cache / 2) / (devices.bandwidth * SAMPLER_UTILISATION)
        by_computing = at_once * self.forward.flops / self.batch.tokens / speed
        waves = -(-responses // at_once)
        by_starting = architecture.num_layers * engine.host_seconds
        chosen = self.batch.response * max(by_reading, by_computing, by_starting)
        return learning, waves * (chosen + self.observed * by_computing)  # observations are read in one pass

    @cached_property
    def disk(self) -> dict[str, float] | None:
        """Maximum size of the run directory in bytes, split into checkpoints, rollouts and weights for replay."""
        if self.architecture is None:
            return None
        config, weights, settings = self.config, weight_bytes(self.architecture, self.config), self.config.checkpoint
        saved = 1 + (config.steps - 1) // settings.every if settings.every else 1
        most = (
            settings.keep + 1 + bool(config.eval.num_problems and config.eval.every)
        )  # plus the checkpoint being written and the best checkpoint
        kept = config.steps // settings.keep_for_replay * self.updates if settings.keep_for_replay else 0
        log_probs = 2 + config.learner.num_epochs  # log-probs of the sampler, the old policy, and each epoch
        response = self.batch.response * (log_probs * _LOG_PROB_BYTES + _TEXT_BYTES) + self.batch.length * _ID_BYTES
        if config.rollout.top_k is not None:  # the tokens kept by top-k; the number kept by top-p is not known in advance
            response += self.batch.response * (config.rollout.top_k + 1) * _KEPT_ID_BYTES
        if config.task.host is not None:  # turn ids, the transcript, and the text of each turn
            tokens = self.batch.response + self.observed
            response += tokens * (_ID_BYTES + _TEXT_BYTES) + self.observed * _TEXT_BYTES
            response += config.rollout.max_turns * _TURN_BYTES
        return {
            "checkpoints": (weights + resume_bytes(self.architecture, config, self.sharding.stage > 0)) * min(saved, most),
            "rollouts": config.steps * self.responses * response,
            "replay": weights * kept,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the plan in JSON-serialisable form: counts, bytes and seconds."""
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
            "processes": self.processes,
            "zero_stage": self.sharding.stage,
            "fsdp": self.sharding.is_fsdp,
            "devices": {"name": self.devices.name, "count": self.devices.count, "memory_bytes": self.devices.memory},
            "parameters": self.architecture.num_parameters if self.architecture else None,
            "micro_batch": {"rows": self.batch.rows, "tokens": self.batch.tokens, "per_optimizer_step": self.passes},
            "memory_bytes": memory,
            "flops_per_step": self.flops,
            "estimated_seconds_per_step": dict(zip(("learner", "rollout"), self.seconds, strict=True)),
            "disk_bytes": self.disk,
        }
