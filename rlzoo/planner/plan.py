"""A run's plan: how many steps and tokens, the memory of a device, an estimate of the time, and the disk it fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlzoo.config.run_config import RunConfig
from rlzoo.planner.activations import PassShape, micro_batches, rows_per_step
from rlzoo.planner.architecture import Architecture
from rlzoo.planner.devices import Devices
from rlzoo.planner.memory import Memory, memory, resume_bytes, weight_bytes
from rlzoo.planner.prompts import Prompts
from rlzoo.planner.sharding import Sharding
from rlzoo.planner.work import Work, learner_seconds, rollout_seconds, work

_TEXT_BYTES = 5  # of a response's text in JSON, per token: about what English and LaTeX come to
_ID_BYTES, _LOG_PROB_BYTES = 8, 4


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes that a run leaves in its directory.

    Example:
        ``disk.checkpoints + disk.rollouts + disk.replay``
    """

    checkpoints: float  # while the last one is written
    rollouts: float  # at most
    replay: float  # the weights kept for replay

    @property
    def total(self) -> float:
        """All of it."""
        return self.checkpoints + self.rollouts + self.replay


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
    memory: Memory | None
    work: Work | None
    learner_seconds: float | None
    rollout_seconds: float | None
    disk: Disk | None

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
        return self.devices.memory / (self.sharding.processes if self.devices.is_cpu else 1)

    @property
    def host_loading(self) -> float:
        """Bytes in the memory of all machines together while the model is loaded: every process reads all weights."""
        return self.sharding.processes * weight_bytes(self.architecture, self.config) if self.architecture else 0

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON can hold it: counts, bytes and seconds."""
        steps, tokens = self.config.steps, self.responses * self.batch.response
        return {
            "steps": steps,
            "optimizer_steps": steps * self.updates,
            "responses": steps * self.responses,
            "response_tokens_at_most": steps * tokens,
            "prompt_tokens": {"longest": self.prompts.longest, "counted": self.prompts.counted},
            "processes": self.sharding.processes,
            "zero_stage": self.sharding.stage,
            "devices": {"name": self.devices.name, "count": self.devices.count, "memory_bytes": self.devices.memory},
            "parameters": self.architecture.num_parameters if self.architecture else None,
            "micro_batch": {"rows": self.batch.rows, "tokens": self.batch.tokens, "per_optimizer_step": self.passes},
            "memory_bytes": self._memory_dict(),
            "flops_per_step": {"learner": self.work.learner, "rollout": self.work.rollout} if self.work else None,
            "estimated_seconds_per_step": {"learner": self.learner_seconds, "rollout": self.rollout_seconds},
            "disk_bytes": self._disk_dict(),
        }

    def _memory_dict(self) -> dict[str, Any] | None:
        if self.memory is None:
            return None
        return {
            "learner": {**self.memory.learner_parts(), "total": self.memory.learner},
            "sampling": {**self.memory.sampling_parts(), "total": self.memory.sampling},
            "available": self.device_memory,
            "host_while_loading": self.host_loading,
        }

    def _disk_dict(self) -> dict[str, float] | None:
        if self.disk is None:
            return None
        return {"checkpoints": self.disk.checkpoints, "rollouts": self.disk.rollouts, "replay": self.disk.replay}


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
    batches = micro_batches(config, architecture, prompts.longest, processes, is_cpu=devices.is_cpu)
    batch = batches[0]
    if architecture is None:
        return Plan(config, None, devices, sharding, prompts, batch, None, None, None, None, None)
    device_memory = devices.memory / (processes if devices.is_cpu else 1)
    choices = (memory(architecture, config, sharding, each, device_memory, is_cpu=devices.is_cpu) for each in batches)
    held = max(choices, key=lambda choice: choice.peak)
    step = work(architecture, config, batch)
    kv_room = device_memory - held.states
    if config.rollout.engine == "vllm":
        kv_room = held.sampler - weight_bytes(architecture, config)
    return Plan(
        config=config,
        architecture=architecture,
        devices=devices,
        sharding=sharding,
        prompts=prompts,
        batch=batch,
        memory=held,
        work=step,
        learner_seconds=learner_seconds(step, devices, processes),
        rollout_seconds=rollout_seconds(architecture, config, batch, devices, processes, kv_room),
        disk=disk(architecture, config, batch, sharding),
    )


def disk(architecture: Architecture, config: RunConfig, batch: PassShape, sharding: Sharding) -> Disk:
    """The bytes of a run directory: checkpoints, rollouts as they are recorded, and weights kept for replay."""
    weights, settings = weight_bytes(architecture, config), config.checkpoint
    saved = 1 + (config.steps - 1) // settings.every if settings.every else 1
    most = settings.keep + 1 + bool(config.eval.num_problems and config.eval.every)  # one being written; the best
    updates = config.learner.num_minibatches * config.learner.num_epochs
    kept = config.steps // settings.keep_for_replay * updates if settings.keep_for_replay else 0
    log_probs = 2 + config.learner.num_epochs  # the sampler's, the old policy's, and those at each pass
    response = batch.response * (log_probs * _LOG_PROB_BYTES + _TEXT_BYTES) + batch.length * _ID_BYTES
    return Disk(
        checkpoints=(weights + resume_bytes(architecture, config, sharding)) * min(saved, most),
        rollouts=config.steps * config.rollout.num_prompts * config.rollout.group_size * response,
        replay=weights * kept,
    )
