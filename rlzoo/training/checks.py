"""Checks a configuration before anything is loaded or written; shared by training and the dry run."""

from __future__ import annotations

import importlib.util
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.models.pretrained import local_model
from rlzoo.plugin_files import plugin_files
from rlzoo.processes import check_launch, check_launcher
from rlzoo.support.extras import INSTALL_VLLM


def usual_output(config: RunConfig) -> Path:
    """The default run directory, named after the policy, task, seed and time, and unique if several runs start at once."""
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    return Path("runs") / f"{config.clip.name}-{config.task.name.replace(':', '-')}-{config.seed}-{stamp}"


def num_processes(config: RunConfig) -> int:
    """The number of processes in the run: ``launch.processes``, or the number that a launcher has started."""
    started = os.environ.get("WORLD_SIZE", "")
    return config.launch.processes or (int(started) if started.isdigit() else 0) or 1


def check_run(config: RunConfig, *, processes: int | None = None, resume: bool = False, here: bool = True) -> None:
    """Reject a configuration that would fail later in the run.

    Args:
        config: configuration of the run.
        processes: number of processes that will take part in the run; None for the result of `num_processes`.
        resume: whether the run is resumed, in which case its directory exists.
        here: whether the run will use this machine; if False, checks of this machine are skipped.

    Raises:
        UserError: the configuration has a problem; the message describes the first problem in one line.
    """
    config.refuse_redacted()
    is_main = os.environ.get("RANK", "0") == "0"
    if config.output is not None and is_main and not resume:
        RunDirectory.check_free(config.output)
    check_launch(config.launch, config.learner)
    rollout, number = config.rollout, processes or num_processes(config)
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
    launch, rollout, rank = config.launch, config.rollout, config.learner.lora.rank
    wanted = {
        "deepspeed": (
            launch.deepspeed is not None,
            f"launch.deepspeed={launch.deepspeed!r}",
            "pip install 'rlzoo-llm[deepspeed]'",
        ),
        "vllm": (rollout.engine == "vllm" and not rollout.vllm.server, "rollout.engine='vllm'", INSTALL_VLLM),
        "peft": (rank > 0, f"learner.lora.rank={rank}", "pip install 'rlzoo-llm[lora]'"),
        "bitsandbytes": (
            config.learner.optimizer == "adamw_8bit",
            "learner.optimizer='adamw_8bit'",
            "pip install bitsandbytes",
        ),
        "gguf": (config.model.path == "smollm2", "model.path='smollm2'", "pip install 'rlzoo-llm[gguf]'"),
    }
    for library, (is_wanted, setting, command) in wanted.items():
        if is_wanted and importlib.util.find_spec(library) is None:
            yield f"{setting}: {library} is not installed: {command}"
