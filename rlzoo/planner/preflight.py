"""What would stop a run after it has begun, found before: each as one line that says what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.planner.architecture import Architecture, find_architecture, tokenizer_file
from rlzoo.planner.devices import Devices
from rlzoo.planner.memory import weight_bytes
from rlzoo.planner.plan import Plan
from rlzoo.planner.prompts import Prompts, longest_prompt
from rlzoo.training import checks
from rlzoo.training.checks import check_run, missing_libraries


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of a run once nothing was found wrong with it.

    Example:
        ``check(config).prompts.longest``
    """

    processes: int
    missing: list[str]  # lines on what this machine lacks, of a run for another one
    architecture: Architecture | None
    prompts: Prompts


def check(config: RunConfig, named: Devices | None = None, *, resume: bool = False) -> Checked:
    """Refuse what would stop a run after it has begun; `rlzoo train` asks, with and without ``--dry-run``.

    Args:
        config: the run.
        named: the devices to plan for; None for this machine.
        resume: whether the run directory is there already.

    Raises:
        UserError: one line for the first mistake found.
    """
    processes = num_processes(config, named)
    check_run(config, processes=processes, resume=resume, here=named is None)
    architecture = find_architecture(config.model.path)
    prompts = longest_prompt(config, tokenizer_file(config.model.path))
    check_length(config, architecture, prompts)
    return Checked(processes, list(missing_libraries(config)), architecture, prompts)


def num_processes(config: RunConfig, named: Devices | None) -> int:
    """How many processes will compute the run: as set, as a launcher has started, or one for each device named.

    Raises:
        UserError: more than the devices named.
    """
    if named and config.launch.processes is None and not os.environ.get("WORLD_SIZE", "").isdigit():
        return named.count
    processes = checks.num_processes(config)
    if named and processes > named.count:
        raise UserError(
            f"launch.processes={processes}: more than the {named.count} devices of --devices; one process takes one"
        )
    return processes


def uneven_shares(config: RunConfig, processes: int) -> Iterator[str]:
    """A line for each division that leaves processes waiting for others; what they compute is right all the same."""
    rollout, learner = config.rollout, config.learner
    if rollout.num_prompts % processes:
        given = f"rollout.num_prompts={rollout.num_prompts}"
        yield f"{given}: {processes} processes cannot share them equally, some wait for others"
    responses, parts = rollout.num_prompts * rollout.group_size, learner.num_minibatches * processes
    if processes > 1 and responses % parts:
        yield (
            f"learner.num_minibatches={learner.num_minibatches}: {responses} responses cannot be cut into as many equal parts "
            f"for each of {processes} processes, some wait for others"
        )


def check_length(config: RunConfig, architecture: Architecture | None, prompts: Prompts) -> None:
    """Refuse responses that go beyond the positions of the model or of vLLM.

    Raises:
        UserError: in one line.
    """
    new, limit = config.rollout.max_new_tokens, config.rollout.vllm.max_model_len
    about = "" if prompts.counted else "about "
    needed = f"with prompts of up to {about}{prompts.longest} tokens, {prompts.longest + new} positions are needed"
    if architecture is not None and prompts.longest + new > architecture.max_length:
        raise UserError(
            f"rollout.max_new_tokens={new}: {needed}, and model {config.model.path!r} has {architecture.max_length}; "
            f"{_at_most(architecture.max_length - prompts.longest)}"
        )
    if config.rollout.engine == "vllm" and limit is not None and prompts.longest + new > limit:
        raise UserError(f"rollout.vllm.max_model_len={limit}: {needed}; raise it, or leave it out for the model's own")


def check_disk(plan: Plan) -> None:
    """Refuse a run that will fill the disk.

    Raises:
        UserError: in one line.
    """
    if plan.disk is None:
        return
    folder = plan.config.output or Path("runs")
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if plan.disk.total > free:
        need = plan.disk
        raise UserError(
            f"output directory {str(folder)!r}: {shown(need.total)} are needed (checkpoints {shown(need.checkpoints)}, "
            f"rollouts at most {shown(need.rollouts)}, weights for replay {shown(need.replay)}) and {shown(free)} are free; "
            "name another with --output, or lower checkpoint.keep or checkpoint.keep_for_replay"
        )


def check_memory(plan: Plan) -> None:
    """Refuse a run that cannot fit its devices.

    Raises:
        UserError: in one line.
    """
    if plan.memory is None or plan.architecture is None:
        return
    config, memory, there = plan.config, plan.memory, plan.device_memory
    if memory.peak > there:
        parts = memory.learner_parts() if memory.learner >= memory.sampling else memory.sampling_parts()
        largest = sorted(parts.items(), key=lambda part: part[1], reverse=True)[:3]
        most = ", ".join(f"{name} {shown(size)}" for name, size in largest)
        raise UserError(
            f"model.path={config.model.path!r}: a process needs {shown(memory.peak)} and {plan.devices.name} has "
            f"{shown(there)} for it (most: {most}); {_remedy(plan)}"
        )
    if config.rollout.engine == "vllm" and not config.rollout.vllm.server:
        weights = weight_bytes(plan.architecture, config)
        response = plan.batch.length * plan.architecture.kv_bytes(2)
        if weights + response > memory.sampler:
            raise UserError(
                f"rollout.vllm.gpu_memory_utilization={config.rollout.vllm.gpu_memory_utilization}: {shown(memory.sampler)} do "
                f"not hold vLLM's weights ({shown(weights)}) and the cache of one response ({shown(response)}); raise it"
            )


def shown(size: float) -> str:
    """Bytes as a text of three digits or more: 950 MB, 12.3 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def _remedy(plan: Plan) -> str:
    config, held = plan.config, plan.memory
    if held is not None and held.learner <= plan.device_memory:
        return f"lower rollout.{'vllm.gpu_memory_utilization' if config.rollout.engine == 'vllm' else 'batch_size'}"
    ways = {
        "learner.gradient_checkpointing=true": not config.learner.gradient_checkpointing,
        f"learner.max_tokens_per_micro_batch={plan.batch.length}": plan.batch.rows > 1,
        "launch.deepspeed=zero3 on more processes": config.launch.deepspeed != "zero3",
        "launch.offload=optimizer": config.launch.deepspeed is not None and config.launch.offload == "none",
        "learner.lora.rank=32": not config.learner.lora.rank,
    }
    return f"set {', '.join(way for way, helps in ways.items() if helps)}, or plan for more devices, such as --devices 8xH100"


def _at_most(tokens: int) -> str:
    return f"set it to {tokens} at most" if tokens > 0 else "the prompts alone are too long"
