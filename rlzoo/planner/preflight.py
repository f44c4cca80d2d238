"""Checks a run before it starts, and reports the first mistake in one line that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rich.filesize import decimal

from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.planner.architecture import Architecture, find_architecture, model_file
from rlzoo.planner.devices import Devices
from rlzoo.planner.memory import weight_bytes
from rlzoo.planner.plan import Plan, Prompts
from rlzoo.rollout.prompts import encoded
from rlzoo.training.checks import check_run, num_processes

LOOKED_AT = 2000  # maximum number of training prompts to read, so that planning is fast
_COUNTED = 16  # how many of the longest texts are tokenized to find the longest prompt
_BYTES_PER_TOKEN = 2  # assumed without a tokenizer; lower than for English (4) or LaTeX (3), so that lengths are overestimated
_TEMPLATE_TOKENS = 64  # allowance for a chat template's own tokens


def check(config: RunConfig, named: Devices | None = None, *, resume: bool = False) -> tuple[int, Architecture | None, Prompts]:
    """Raise UserError for a mistake that would stop a run later; called by `rlzoo train`, with or without ``--dry-run``.

    Args:
        config: configuration of the run.
        named: the devices to plan for, one per process; None for this machine.
        resume: whether the run directory already exists.

    Returns:
        The number of processes, the model's architecture if it is known, and the length of the prompts.

    Raises:
        UserError: the first mistake found.
    """
    processes = config.launch.processes or (named.count if named else num_processes(config))
    if named and processes > named.count:
        given = f"launch.processes={processes}: more than the {named.count} devices of --devices"
        raise UserError(f"{given}; each process needs a device")
    check_run(config, processes=processes, resume=resume, here=named is None)
    architecture, prompts = find_architecture(config.model.path), longest_prompt(config)
    check_length(config, architecture, prompts)
    return processes, architecture, prompts


def longest_prompt(config: RunConfig) -> Prompts:
    """Return the length of the longest prompt among the first `LOOKED_AT` training prompts and all evaluation prompts.

    Tokens are counted if the model's tokenizer is available locally, and otherwise estimated from the text.
    """
    task = config.task
    problems = task.train_problems(0, min(LOOKED_AT, config.steps * config.rollout.num_prompts))
    if config.eval.num_problems:
        problems = problems + task.held_out_problems(config.eval.num_problems)
    texts = sorted(task.prompts(problems), key=len, reverse=True)[:_COUNTED]
    template = _TEMPLATE_TOKENS if config.model.chat_template else 0
    if template and task.host is not None and task.host.tools:  # the template describes the tools before the first message
        template += -(-len(json.dumps(task.host.tools).encode()) // _BYTES_PER_TOKEN)
    tokenizer = model_file(config.model.path, "tokenizer.json", download=False)
    if tokenizer is None:
        return Prompts(template + max(-(-len(text.encode()) // _BYTES_PER_TOKEN) for text in texts), counted=False)
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    return Prompts(template + max(len(encoded(encoder.encode, text).ids) for text in texts), counted=True)


def check_length(config: RunConfig, architecture: Architecture | None, prompts: Prompts) -> None:
    """Raise UserError if prompts and responses exceed the maximum sequence length of the model or of vLLM."""
    new, limit = config.rollout.max_new_tokens, config.rollout.vllm.max_model_len
    about = "" if prompts.counted else "about "
    needed = f"with prompts of up to {about}{prompts.longest} tokens, a sequence length of {prompts.longest + new} is needed"
    if architecture is not None and prompts.longest + new > architecture.max_length:
        left = architecture.max_length - prompts.longest
        advice = f"set rollout.max_new_tokens to at most {left}" if left > 0 else "the prompts alone are too long"
        has = f"model {config.model.path!r} accepts at most {architecture.max_length}"
        raise UserError(f"rollout.max_new_tokens={new}: {needed}, but {has}; {advice}")
    if config.rollout.engine == "vllm" and limit is not None and prompts.longest + new > limit:
        raise UserError(f"rollout.vllm.max_model_len={limit}: {needed}; raise it, or remove it to use the model's own limit")


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
