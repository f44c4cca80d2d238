"""Checks settings, launch, packages, disk and memory before anything is loaded or written."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from rlzoo.config.engines import engine_of
from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import needs_reference
from rlzoo.core.errors import UserError
from rlzoo.gate.devices import Devices
from rlzoo.gate.launch import check_launch, check_launcher
from rlzoo.gate.memory import weight_bytes
from rlzoo.gate.plan import Plan
from rlzoo.journal.manifest import check_model
from rlzoo.journal.recorded import Recording
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.models.pretrained import local_model, naming
from rlzoo.models.processes import shards_weights
from rlzoo.support.extras import how_to_install


def usual_output(config: RunConfig) -> Path:
    """Return a default run directory. Its unique name consists of the rule, task, seed, time and random digits."""
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    return Path("runs") / f"{config.clip.name}-{config.task.name.replace(':', '-')}-{config.seed}-{stamp}"


@dataclass(frozen=True, slots=True)
class Start:
    """The circumstances in which a run would start."""

    processes: int
    resume: bool = False  # whether the run continues from its directory
    here: bool = True  # whether the run starts on this machine, which is then checked too

    @classmethod
    def of(cls, config: RunConfig, *, resume: bool = False, devices: Devices | None = None) -> Start:
        """Return how a run would start on this machine, or on other ``devices`` with one process per device.

        Raises:
            UserError: there are more processes than devices.
        """
        started = os.environ.get("WORLD_SIZE", "")
        number = devices.count if devices else int(started) if started.isdigit() else 1
        processes = config.launch.processes or number or 1
        if devices and processes > devices.count:
            more = f"launch.processes={processes}: more than the {devices.count} devices of --devices"
            raise UserError(f"{more}; each process needs a device")
        return cls(processes, resume, devices is None)


def check_settings(config: RunConfig, start: Start) -> None:
    """Run all checks that are possible before anything is loaded.

    Raises:
        UserError: a setting would cause an error later in the run; the message describes the first problem in one line.
    """
    config.refuse_redacted()
    if config.output is not None and os.environ.get("RANK", "0") == "0":
        (RunDirectory.check_begun if start.resume else RunDirectory.check_free)(config.output)
    rollout, number = config.rollout, start.processes
    if rollout.num_prompts < number:
        raise UserError(
            f"rollout.num_prompts={rollout.num_prompts}: fewer than the {number} processes, so some would have nothing "
            f"to sample; set it to at least {number}"
        )
    engine = engine_of(rollout)
    if engine.recording:
        _check_recording(config, engine.recording)
    if engine.is_remote and rollout.max_staleness > 1 and number > 1:
        raise UserError(
            f"rollout.max_staleness={rollout.max_staleness}: with a {engine.title} server, {number} processes would change its "
            "weights at different times; set it to 0 or 1, use one process, or choose another rollout.engine"
        )
    samples_adapter = config.learner.lora.rank > 0 and not rollout.max_staleness and not shards_weights(config.launch)
    if rollout.graphs == "on" and samples_adapter:
        raise UserError("rollout.graphs=on: a model with an adapter (learner.lora.rank) has no fused steps; set it to auto")
    check_launch(config.launch)
    if start.here:
        check_launcher(config.launch)
        for problem in missing_libraries(config):
            raise UserError(problem)
    (check_model if start.here else local_model)(config.model.path)
    name, needs, reference = config.estimator.name, config.estimator.needs, config.model.reference
    if reference is None and "ref_log_probs" in needs:
        raise UserError(f"model.reference=null: advantage {name!r} needs a teacher; set it to a model with the same tokenizer")
    if (critic := config.critic.model) is not None:
        with naming("critic.model"):
            (check_model if start.here else local_model)(critic)
    if reference is not None:
        if not needs_reference(config.learner, config.reward, config.clip, config.estimator):
            advice = "set learner.kl_coef or reward.kl_coef, or choose a rule or an advantage that needs ref_log_probs"
            raise UserError(f"model.reference={reference!r}: nothing in this run reads its log-probs; {advice}")
        with naming("model.reference"):
            (check_model if start.here else local_model)(reference)


def _check_recording(config: RunConfig, recording: Recording) -> None:
    """Check that recorded rollouts have enough steps for a run and contain the values that it needs."""
    path, number, correction = config.rollout.recorded, len(recording.files), config.correction
    if config.steps > (most := number * config.rollout.recorded_epochs):
        passes = f"{path!r} has {number} steps (rollout.recorded_epochs={config.rollout.recorded_epochs})"
        raise UserError(f"steps={config.steps}: {passes}; set steps to at most {most}, or raise rollout.recorded_epochs")
    if buffer := config.reward.overlong_buffer:
        raise UserError(f"reward.overlong_buffer={buffer:g}: recorded rewards already include any penalty; set it to 0")
    is_compared = correction is not None or config.clip.ratio_to_sampler
    needed = {"rewards": True, "rollout_log_probs": is_compared, "finished": config.reward.overlong_filtering}
    for name in sorted(recording.absent):
        if needed[name] or name in config.clip.needs | config.estimator.needs:
            otherwise = ", or set correction=none" if name == "rollout_log_probs" and correction else ""
            raise UserError(f"a rollout file of {path!r} lacks {name}, which this run uses; record them{otherwise}")


def remarks(config: RunConfig) -> Iterator[tuple[int, str]]:
    """Yield remarks that the user should see even if a run is valid, with their logging levels."""
    learner, steps, correction = config.learner, config.rollout.max_staleness, config.correction
    num_updates = config.steps * learner.num_minibatches * learner.num_epochs
    if 0 < num_updates < learner.warmup_updates:
        yield logging.WARNING, f"learner.warmup_updates={learner.warmup_updates}: the run has fewer updates ({num_updates})"
    if learner.num_minibatches * learner.num_epochs == 1:
        yield (
            logging.WARNING,
            "clip is inert: one update per rollout, so every ratio is 1; raise learner.num_minibatches or learner.num_epochs",
        )
    if config.model.dtype == "bfloat16" and not (learner.master_weights or learner.lora.rank or config.launch.deepspeed):
        yield logging.INFO, "bfloat16 weights without float32 copies: updates below 0.4% of a weight are lost to rounding"
    if steps < 2 and config.rollout.recorded is None:
        return
    if correction is not None:
        pairs = correction.model_dump().items()
        settings = ", ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in pairs)
        applied = f"correction={correction.name} ({settings}) reweights them; correction=none turns it off"
    elif config.clip.ratio_to_sampler:
        applied = f"the ratio of {config.clip.name} is relative to the sampler, so no correction is needed"
    else:
        applied = "no correction reweights them (correction=none)"
    age = f"rollout.max_staleness={steps}: responses are up to {steps} steps old"
    age = age if config.rollout.recorded is None else "rollout.engine=recorded: the responses come from the recorded sampler"
    yield logging.INFO, f"{age}; {applied}"


def missing_libraries(config: RunConfig) -> Iterator[str]:
    """Yield one line for each optional library that the run needs and that is not installed."""
    launch, learner, engine = config.launch, config.learner, engine_of(config.rollout)
    wanted = {
        "deepspeed": (launch.deepspeed is not None, f"launch.deepspeed={launch.deepspeed!r}", how_to_install("deepspeed")),
        engine.library: (bool(engine.library), f"rollout.engine={config.rollout.engine!r}", engine.install),
        "peft": (learner.lora.rank > 0, f"learner.lora.rank={learner.lora.rank}", how_to_install("lora")),
        "gguf": ("smollm2" in (config.model.path, config.model.reference), "model 'smollm2'", how_to_install("gguf")),
    }
    for library, (is_wanted, setting, command) in wanted.items():
        if is_wanted and importlib.util.find_spec(library) is None:
            yield f"{setting}: {library} is not installed: {command}"
    if launch.deepspeed and not torch.cuda.is_available() and not shutil.which(os.environ.get("CXX", "c++")):
        yield f"launch.deepspeed={launch.deepspeed!r}: on a CPU, DeepSpeed needs a C++ compiler: install g++, or set CXX"


def shortages(plan: Plan) -> Iterator[str]:
    """Yield one line for each resource that the run may exhaust: disk space, memory, or the engine's share of the memory."""
    folder = plan.config.output or Path("runs")
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if plan.disk is not None and plan.is_here and sum(plan.disk.values()) > free:
        need = {name: shown(size) for name, size in {**plan.disk, "all": sum(plan.disk.values())}.items()}
        yield (
            f"output directory {str(folder)!r}: {need['all']} is needed (checkpoints {need['checkpoints']}, "
            f"rollouts at most {need['rollouts']}), but only {shown(free)} is free; "
            "choose another with --output, or lower checkpoint.keep"
        )
    if problem := memory_problem(plan):
        yield f"{problem}; {_remedy(plan)}"


def memory_problem(plan: Plan) -> str | None:
    """Describe how a process would run out of memory, or how the engine's share would be too small, or return None."""
    if plan.memory is None or plan.architecture is None or plan.forward is None:
        return None
    config, memory, room = plan.config, plan.memory, plan.device_memory
    if memory.peak > room:
        parts = max(memory.learning, memory.sampling, key=lambda parts: sum(parts.values()))
        largest = sorted(parts.items(), key=lambda part: part[1], reverse=True)[:3]
        most = ", ".join(f"{name} {shown(size)}" for name, size in largest)
        return (
            f"model.path={config.model.path!r}: a process needs {shown(memory.peak)}, but {plan.devices.name} has "
            f"{shown(room)} for it (the largest parts: {most})"
        )
    engine, weights = engine_of(config.rollout), weight_bytes(plan.architecture, config)
    response = plan.forward.cache / plan.batch.rows
    if engine.device_share and weights + response > memory.sampler:
        return (
            f"{engine.memory_setting}={engine.device_share}: {shown(memory.sampler)} cannot hold {engine.title}'s weights "
            f"({shown(weights)}) and the cache for one response ({shown(response)})"
        )
    return None


def shown(size: float) -> str:
    """Format a number of bytes with a unit, as in 12.3 GB."""
    return decimal(int(size))


def _remedy(plan: Plan) -> str:
    """Return the smallest changes that are enough, of at most three settings."""
    config, launch, number = plan.config, plan.config.launch, plan.processes
    shards = launch.deepspeed == "zero3" or launch.fsdp
    ways: list[tuple[str, str, Any]] = [
        *([] if shards else [("launch", "deepspeed", "zero3")]),
        *([] if shards or launch.deepspeed else [("launch", "fsdp", True)]),
        ("learner", "gradient_checkpointing", True),
        ("learner", "max_tokens_per_micro_batch", plan.batch.length),
        *([("launch", "offload", "optimizer")] if launch.deepspeed and launch.offload == "none" else []),
        ("rollout", "engine", "hf"),
        *(("rollout", "batch_size", size) for size in (64, 4)),
        *(("rollout.vllm", "gpu_memory_utilization", share) for share in (0.3, 0.5, 0.75)),
        *([] if config.learner.lora.rank else [("learner.lora", "rank", 32)]),
        *([] if plan.is_here else [("launch", "processes", 4 * number), ("launch", "processes", 16 * number)]),
    ]
    enough: dict[float, str] = {}
    combinations = itertools.chain(*(itertools.combinations(ways, size) for size in (1, 2, 3)))
    for chosen in sorted(combinations, key=lambda chosen: any(key == "processes" for _, key, _ in chosen)):  # more devices last
        if len(enough) == 3 or (enough and len(chosen) == 3):
            break
        changed = functools.reduce(_changed, chosen, config)
        other = replace(plan, config=changed, processes=changed.launch.processes or number)
        if other.memory is not None and not memory_problem(other):
            words = [f"{where}.{key}={str(value).lower()}" for where, key, value in chosen]
            where = f" with --devices {other.processes}x{plan.devices.name.replace(' ', '')}" * (other.processes > number)
            enough.setdefault(other.memory.peak, f"{' and '.join(words)}{where}")
    options = " or ".join(f"{words} ({shown(peak)})" for peak, words in enough.items())
    return f"set {options}" if options else "plan for larger devices, such as --devices 8xH200"


def _changed(config: RunConfig, way: tuple[str, str, Any]) -> RunConfig:
    """Return the configuration with a setting of a section replaced."""
    (where, _, inner), key, value = way[0].partition("."), *way[1:]
    section = getattr(config, where)
    if inner:
        key, value = inner, getattr(section, inner).model_copy(update={key: value})
    return config.model_copy(update={where: section.model_copy(update={key: value})})
