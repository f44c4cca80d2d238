"""Sets up training in several processes by creating the accelerator and splitting rows among ranks."""

from __future__ import annotations

import gc
import logging
import os
import resource
import shutil
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rlzoo.config.sections import LaunchConfig, LearnerConfig
from rlzoo.core.errors import RunError, UserError, did_you_mean, shown
from rlzoo.support.parsing import UnreadableError, parse_json
from rlzoo.support.reading import read_text

if TYPE_CHECKING:
    from accelerate import Accelerator

Item = TypeVar("Item")

logger = logging.getLogger("rlzoo")

STAGES = {"zero2": 2, "zero3": 3}

MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # Accelerate reads them too
NO = ("", "0", "f", "false", "n", "no", "off")
PATIENCE = 10.0  # seconds after which a rank reports that it is still waiting for the others


def make_accelerator(launch: LaunchConfig, learner: LearnerConfig, *, dtype: str = "float32") -> Accelerator:
    """Return this process's accelerator, connected to the accelerators of the other processes.

    Args:
        launch: requested launch settings.
        learner: learner settings. With autocast, matrix products use bfloat16, and DeepSpeed keeps bfloat16 weights in
            addition to float32 master weights.
        dtype: data type of the model's weights.

    Raises:
        UserError: the accelerator does not match the requested settings.
    """
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    _clean_environment()
    _detach_earlier_accelerators(launch)
    torch.set_float32_matmul_precision("high" if learner.tf32 else "highest")  # overrides torch's environment variable
    bf16 = learner.autocast == "bfloat16"
    options: dict[str, Any] = {"mixed_precision": "bf16" if bf16 else "no"}
    if launch.deepspeed is not None:
        settings = deepspeed_settings(launch, bf16=bf16 or dtype == "bfloat16", max_grad_norm=learner.max_grad_norm)
        _prepare_environment()
        if not torch.cuda.is_available():
            os.environ.pop("ACCELERATE_USE_CPU", None)  # otherwise, Accelerate would not use DeepSpeed
        # without an explicit backend, each process on a CPU would train alone
        handlers = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
        plugin = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=False)
        options = {"deepspeed_plugin": plugin, "kwargs_handlers": handlers}
    where = "rank {} of {}, at {}:{}".format(*map(os.environ.get, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")))
    notice = threading.Timer(PATIENCE, logger.error, [f"waiting for the other ranks ({where})"])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        notice.start()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
            accelerator = Accelerator(**options)
    except torch.distributed.DistError as error:
        raise RunError(f"the other ranks cannot be reached ({where}): {error}") from error
    finally:
        notice.cancel()
    if launch.deepspeed is not None:
        # otherwise, transformers would shard every model that it loads, including the sampler's
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
    elif launch.fsdp and not torch.distributed.is_initialized():  # a single process has no launcher
        backend = "nccl" if accelerator.device.type == "cuda" else "gloo"
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # torch does not export it to type checkers
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    _check(accelerator, launch)
    return accelerator


def _clean_environment() -> None:
    """Remove the variables that would change how Accelerate trains, because only the run's settings should do so."""
    removed = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("ACCELERATE_")}
    removed.pop("ACCELERATE_USE_DEEPSPEED", None)  # launch.deepspeed agrees with it
    if removed.pop("ACCELERATE_USE_CPU", "").lower() not in NO:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    usual = (*NO, "1", "none", "default")  # values that Accelerate's launcher sets if nothing is configured
    ignored = sorted(name for name, value in removed.items() if value.lower() not in usual)
    if ignored and os.environ.get("RANK", "0") == "0":
        logger.warning("ignoring %s in the environment: the run's settings decide this", ", ".join(ignored))
    if os.environ.get("WORLD_SIZE") == "1":
        os.environ.pop("LOCAL_RANK", None)  # one process needs no group and therefore no address


def leave_process_group() -> None:
    """Wait for the other processes and destroy the process group, if there is one.

    Otherwise, a thread of the group may abort this process while Python exits, and the launcher would then kill the others.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # sharded parameters are in reference cycles and keep the group alive
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _detach_earlier_accelerators(launch: LaunchConfig) -> None:
    """Give the next accelerator its own settings, without changing earlier accelerators in this process.

    Accelerate keeps one state per process and rejects a second accelerator with another precision. An existing process group
    is reused.

    Raises:
        UserError: an earlier run used DeepSpeed, which stays active until the process ends.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    earlier = AcceleratorState._shared_state.get("distributed_type")
    if earlier is DistributedType.DEEPSPEED and launch.deepspeed is None:
        raise UserError(
            "launch.deepspeed=null: an earlier run in this process used DeepSpeed, which stays active until the process ends; "
            "set launch.deepspeed to zero2 or zero3, or start this run in a separate process"
        )
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state = {}  # replaced rather than cleared, because earlier accelerators still refer to the old dict


def deepspeed_settings(launch: LaunchConfig, *, bf16: bool, max_grad_norm: float | None) -> dict[str, Any]:
    """Return DeepSpeed's configuration, which is the configured stage or file with the learner's settings added.

    Raises:
        UserError: the file does not exist, or it contains settings that belong to the learner.
    """
    assert launch.deepspeed is not None, "only called with DeepSpeed"
    return {
        **_settings(launch.deepspeed),
        "zero_optimization": zero_settings(launch),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # the learner decides when a step is complete
        "gradient_clipping": max_grad_norm or 0.0,
        "bf16": {"enabled": bf16},
        "steps_per_print": 2**31,
    }


def zero_settings(launch: LaunchConfig) -> dict[str, Any]:
    """Return the ``zero_optimization`` section for DeepSpeed, including ``launch.offload``, or {} without DeepSpeed.

    Raises:
        UserError: ``launch.deepspeed`` is neither a stage nor a DeepSpeed configuration file.
    """
    if launch.deepspeed is None:
        return {}
    zero: dict[str, Any] = dict(_settings(launch.deepspeed)["zero_optimization"])
    if launch.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if launch.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    return zero


def shards_weights(launch: LaunchConfig) -> bool:
    """Return whether the weights are sharded across processes (ZeRO-3, FSDP2)."""
    return launch.fsdp or zero_settings(launch).get("stage") == 3


def _settings(name: str) -> dict[str, Any]:
    if name in STAGES:
        return {"zero_optimization": {"stage": STAGES[name]}}
    allowed = f"allowed: {', '.join(STAGES)}, or a JSON file"
    try:
        text = read_text(name)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"launch.deepspeed={shown(name)}: no such file ({allowed}){did_you_mean(name, STAGES)}") from error
    try:
        settings = parse_json(text)
    except UnreadableError as error:
        raise UserError(f"launch.deepspeed={name!r}: not JSON: {error} ({allowed})") from error
    if not isinstance(settings, dict) or not isinstance(settings.setdefault("zero_optimization", {"stage": 0}), dict):
        raise UserError(f"launch.deepspeed={name!r}: the file must contain DeepSpeed's settings as one JSON object")
    for key in ("optimizer", "scheduler", "fp16"):
        if key in settings:
            raise UserError(
                f"launch.deepspeed={name!r}: the file sets {key!r}, which the learner's settings determine; remove it"
            )
    return settings


def _prepare_environment() -> None:
    """Set the environment variables that DeepSpeed needs, unless a launcher has set them."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise, DeepSpeed guesses the device and logs its guess
        logger.info("starting DeepSpeed; in a new environment, it first compiles an extension, which takes a few minutes")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="`torch.distributed.all_gather_into_tensor` is deprecated")  # DeepSpeed calls it
    if shutil.which("ninja") is None:  # ninja builds DeepSpeed's extensions and is installed next to this Python
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    from torch.utils.cpp_extension import get_default_build_root

    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).glob("**/lock"):
        logger.warning(
            "waiting for the process that builds %s; if there is none, stop this run and remove %s", lock.parent, lock
        )


def _check(accelerator: Accelerator, launch: LaunchConfig) -> None:
    """Check that the accelerator matches the launch settings. A misconfigured launch could silently train in one process."""
    if launch.deepspeed is not None and accelerator.distributed_type.value != "DEEPSPEED":
        raise UserError(
            f"launch.deepspeed={launch.deepspeed!r}, but Accelerate trains in mode {accelerator.distributed_type.value}; unset "
            "ACCELERATE_USE_CPU"
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    wanted, size = launch.processes or started, accelerator.num_processes
    if size != wanted:
        raise UserError(
            f"launch.processes={wanted}, but the training group has size {size} (mode {accelerator.distributed_type.value}, "
            f"processes started: {started}); use rlzoo train --processes {wanted}, or a launcher that starts that many "
            "processes"
        )


def deal(rows: Tensor, lengths: Sequence[int], num_shares: int) -> list[Tensor]:
    """Split rows among processes so that the total lengths per process are as even as possible.

    Args:
        rows: ``(R,)`` row numbers.
        lengths: length of every row in tokens.
        num_shares: number of processes.

    Returns:
        One tensor of row numbers for each process. Some tensors may be empty.
    """
    by_length = sorted(rows.tolist(), key=lambda row: lengths[row], reverse=True)
    turn = num_shares * 2
    # alternate the direction, so that no process always gets the longest row
    places = [min(place % turn, turn - 1 - place % turn) for place in range(len(by_length))]
    return [
        torch.tensor([row for row, place in zip(by_length, places, strict=True) if place == share], dtype=torch.long)
        for share in range(num_shares)
    ]


def peak_memory() -> int:
    """Return the peak memory so far, in bytes, of this process or, with a GPU, of torch's allocations on the GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gather(accelerator: Accelerator, items: list[Item]) -> list[Item]:
    """Concatenate the lists of all processes and return the result on every process."""
    if accelerator.num_processes == 1:
        return items
    from accelerate.utils import gather_object

    gathered: list[Item] = gather_object(items)
    return gathered
