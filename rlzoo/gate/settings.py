"""Asks what can be asked before anything is loaded or written: settings, launch, packages, disk and memory."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.gate.launch import check_launch, check_launcher
from rlzoo.gate.memory import weight_bytes
from rlzoo.gate.plan import Plan
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.models.pretrained import local_model
from rlzoo.plugin_files import plugin_files
from rlzoo.support.extras import INSTALL_VLLM


def usual_output(config: RunConfig) -> Path:
    """Return the default run directory: rule, task, seed and time, and letters for runs that start in the same second."""
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    return Path("runs") / f"{config.clip.name}-{config.task.name.replace(':', '-')}-{config.seed}-{stamp}"


def num_processes(number: int | None) -> int:
    """Return the number of processes in the run: ``launch.processes``, or the number that a launcher has started."""
    started = os.environ.get("WORLD_SIZE", "")
    return number or (int(started) if started.isdigit() else 0) or 1


def check_settings(config: RunConfig, *, processes: int | None = None, resume: bool = False, here: bool = True) -> None:
    """Reject settings that would fail later in the run.

    Args:
        config: configuration of the run.
        processes: number of processes that will take part in the run; None for the result of `num_processes`.
        resume: whether the run is resumed, in which case its directory exists.
        here: whether the run will use this machine; if False, checks of this machine are skipped.

    Raises:
        UserError: the configuration has a problem; the message describes the first problem in one line.
    """
    config.refuse_redacted()
    if config.output is not None and os.environ.get("RANK", "0") == "0" and not resume:
        RunDirectory.check_free(config.output)
    check_launch(config.launch, config.learner)
    rollout, number = config.rollout, processes or num_processes(config.launch.processes)
    if rollout.num_prompts < number:
        raise UserError(
            f"rollout.num_prompts={rollout.num_prompts}: fewer than the {number} processes, so some would have nothing "
            f"to sample; set it to at least {number}"
        )
    if rollout.engine == "vllm" and rollout.vllm.server and rollout.max_staleness > 1 and number > 1:
        raise UserError(
            f"rollout.max_staleness={rollout.max_staleness}: with a vLLM server, {number} processes would change its weights "
            "at different times; set it to 0 or 1, use one process, or choose another rollout.engine"
        )
    if here:
        check_launcher(config.launch)
        for problem in missing_libraries(config):
            raise UserError(problem)
    local_model(config.model.path)
    for plugin in config.plugins:
        plugin_files(Path(plugin))


def missing_libraries(config: RunConfig) -> Iterator[str]:
    """Yield one line for each optional library that the run needs but that is not installed."""
    launch, rollout, learner = config.launch, config.rollout, config.learner
    wanted = {
        "deepspeed": (launch.deepspeed is not None, f"launch.deepspeed={launch.deepspeed!r}", "'rlzoo-llm[deepspeed]'"),
        "vllm": (rollout.engine == "vllm" and not rollout.vllm.server, "rollout.engine='vllm'", INSTALL_VLLM),
        "peft": (learner.lora.rank > 0, f"learner.lora.rank={learner.lora.rank}", "'rlzoo-llm[lora]'"),
        "bitsandbytes": (learner.optimizer == "adamw_8bit", "learner.optimizer='adamw_8bit'", "bitsandbytes"),
        "gguf": (config.model.path == "smollm2", "model.path='smollm2'", "'rlzoo-llm[gguf]'"),
    }
    for library, (is_wanted, setting, package) in wanted.items():
        if is_wanted and importlib.util.find_spec(library) is None:
            yield f"{setting}: {library} is not installed: pip install {package.removeprefix('pip install ')}"


def check_disk(plan: Plan) -> None:
    """Raise UserError if the run would fill the disk."""
    if plan.disk is None:
        return
    folder = plan.config.output or Path("runs")
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if sum(plan.disk.values()) > free:
        need = {name: shown(size) for name, size in {**plan.disk, "all": sum(plan.disk.values())}.items()}
        raise UserError(
            f"output directory {str(folder)!r}: {need['all']} is needed (checkpoints {need['checkpoints']}, "
            f"rollouts at most {need['rollouts']}, weights for replay {need['replay']}), but only {shown(free)} is free; "
            "choose another with --output, lower checkpoint.keep, or raise checkpoint.keep_for_replay "
            "(0 saves nothing for replay)"
        )


def check_memory(plan: Plan) -> None:
    """Raise UserError if the run does not fit on its devices."""
    if plan.memory is None or plan.architecture is None:
        return
    config, memory, there = plan.config, plan.memory, plan.device_memory
    if memory.peak > there:
        parts = max(memory.learning, memory.sampling, key=lambda parts: sum(parts.values()))
        largest = sorted(parts.items(), key=lambda part: part[1], reverse=True)[:3]
        most = ", ".join(f"{name} {shown(size)}" for name, size in largest)
        raise UserError(
            f"model.path={config.model.path!r}: a process needs {shown(memory.peak)}, but {plan.devices.name} has "
            f"{shown(there)} for it (the largest parts: {most}); {_remedy(plan)}"
        )
    if config.rollout.engine == "vllm" and not config.rollout.vllm.server:
        weights = weight_bytes(plan.architecture, config)
        response = plan.batch.length * plan.architecture.kv_bytes(2)
        if weights + response > memory.sampler:
            raise UserError(
                f"rollout.vllm.gpu_memory_utilization={config.rollout.vllm.gpu_memory_utilization}: {shown(memory.sampler)} "
                f"cannot hold vLLM's weights ({shown(weights)}) and the cache for one response ({shown(response)}); raise it"
            )


def shown(size: float) -> str:
    """Format a number of bytes with a unit, as in 12.3 GB."""
    return decimal(int(size))


def _remedy(plan: Plan) -> str:
    config, held = plan.config, plan.memory
    if held is not None and sum(held.learning.values()) <= plan.device_memory:
        return f"lower rollout.{'vllm.gpu_memory_utilization' if config.rollout.engine == 'vllm' else 'batch_size'}"
    ways = {
        "learner.gradient_checkpointing=true": not config.learner.gradient_checkpointing,
        f"learner.max_tokens_per_micro_batch={plan.batch.length}": plan.batch.rows > 1,
        "launch.deepspeed=zero3 on more processes": config.launch.deepspeed != "zero3" and not config.launch.fsdp,
        "launch.offload=optimizer": config.launch.deepspeed is not None and config.launch.offload == "none",
        "learner.lora.rank=32": not config.learner.lora.rank,
    }
    return f"set {', '.join(way for way, helps in ways.items() if helps)}, or plan for more devices, such as --devices 8xH100"
