"""The plan for a run: steps, tokens, memory per device and disk space."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlzoo.config.run_config import RunConfig
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
    traffic,
    weight_bytes,
)

_TEXT_BYTES = 5  # bytes of JSON text per response token, which is about right for English and LaTeX
_TURN_BYTES = 128  # bytes of JSON per turn, excluding the turn's text
_ID_BYTES, _KEPT_ID_BYTES, _LOG_PROB_BYTES = 8, 4, 4


@dataclass(frozen=True, slots=True)
class Prompts:
    """The length of a task's longest prompt."""

    longest: int  # length in tokens
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
    is_here: bool = True  # whether the run uses the devices and the disk of this machine

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

    @cached_property
    def forward(self) -> Forward | None:
        """The cost of a forward pass on a full micro-batch."""
        with suppress(Exception):  # the computation of some models depends on the data
            return self.architecture.forward(self.config, self.batch.rows, self.batch.length) if self.architecture else None
        return None

    @cached_property
    def memory(self) -> Memory | None:
        """Estimated memory use of one device."""
        if self.architecture is None or self.forward is None:
            return None
        return memory(self.architecture, self.forward, self.config, self.sharding, self.batch, self.devices)

    @property
    def traffic(self) -> float | None:
        """Number of bytes that each process sends to other processes in one step; None for a run with a critic."""
        if self.architecture is None or self.config.has_critic:
            return None
        return traffic(self.architecture, self.config, self.sharding, self.passes, is_cpu=self.devices.is_cpu)

    @cached_property
    def disk(self) -> dict[str, float] | None:
        """Maximum size of the run directory in bytes, split into checkpoints and rollouts."""
        if self.architecture is None:
            return None
        config, weights, settings = self.config, weight_bytes(self.architecture, self.config), self.config.checkpoint
        saved = 1 + (config.steps - 1) // settings.every if settings.every else 1
        most = (
            settings.keep + 1 + bool(config.eval.num_problems and config.eval.every)
        )  # plus the checkpoint being written and the best checkpoint
        # the log-probs of the sampler, the old policy and each epoch, and the critic's values
        log_probs = 2 + config.learner.num_epochs + config.has_critic
        response = self.batch.response * (log_probs * _LOG_PROB_BYTES + _TEXT_BYTES) + self.batch.length * _ID_BYTES
        if config.rollout.top_k is not None:  # the tokens kept by top-k; the number kept by top-p is not known in advance
            response += self.batch.response * (config.rollout.top_k + 1) * _KEPT_ID_BYTES
        if config.task.host is not None:  # turn IDs, the transcript, and the text of each turn
            tokens = self.batch.response + self.observed
            response += tokens * (_ID_BYTES + _TEXT_BYTES) + self.observed * _TEXT_BYTES
            response += config.rollout.max_turns * _TURN_BYTES
        return {
            "checkpoints": (weights + resume_bytes(self.architecture, config, self.sharding.stage > 0)) * min(saved, most),
            "rollouts": config.steps * self.responses * response,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the plan's counts and sizes in bytes as a JSON-serialisable dict."""
        steps, memory = self.config.steps, None
        if self.memory is not None:
            by_part = {"learner": self.memory.learning, "sampling": self.memory.sampling}
            totals = {name: {**parts, "total": sum(parts.values())} for name, parts in by_part.items()}
            memory = {**totals, "available": self.device_memory}
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
            "disk_bytes": self.disk,
            "network_bytes_per_step": self.traffic,
        }
