"""Checks the launch settings and the environment variables that describe a launch."""

from __future__ import annotations

import os

import torch

from rlzoo.config.sections import LaunchConfig
from rlzoo.core.errors import UserError, shown
from rlzoo.models.machine import LAUNCHED
from rlzoo.models.processes import MPI_SIZES, NO, zero_settings


def check_launch(launch: LaunchConfig) -> None:
    """Raise UserError if the launch settings contradict each other."""
    if launch.fsdp and launch.deepspeed is not None:
        raise UserError(
            f"launch.fsdp=true and launch.deepspeed={shown(launch.deepspeed)} both shard the model; set launch.fsdp=false or "
            "launch.deepspeed=null"
        )
    if launch.fsdp and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        raise UserError(
            f"launch.fsdp=true needs torch 2.13 or newer, but torch {torch.__version__} is installed; upgrade it, or use "
            "launch.deepspeed=zero3"
        )
    if launch.deepspeed is None and launch.offload != "none":
        raise UserError(
            f"launch.offload={launch.offload!r}: offloading needs DeepSpeed; set launch.deepspeed to zero2 or zero3"
        )
    stage = zero_settings(launch).get("stage", 0)
    if launch.offload == "all" and stage != 3:
        raise UserError("launch.offload='all': parameters can be offloaded only with ZeRO-3; set launch.deepspeed=zero3")
    if launch.offload == "optimizer" and not stage:
        raise UserError(
            f"launch.offload='optimizer': launch.deepspeed={launch.deepspeed!r} sets no ZeRO stage of 1 or more, so "
            "nothing would be offloaded; set a stage in its zero_optimization section"
        )


def check_launcher(launch: LaunchConfig) -> None:
    """Raise UserError if the environment describes a launch that is impossible or that rlzoo does not support."""
    numbers = {name: os.environ[name] for name in (*LAUNCHED, *MPI_SIZES) if name in os.environ}
    if numbers.get("LOCAL_RANK") == "-1":  # no launcher
        del numbers["LOCAL_RANK"]
    for name, value in numbers.items():
        if not value.isdecimal() or str(int(value)) != value:
            raise UserError(f"the environment has {name}={shown(value)}, which is not a number; unset it")
    size = int(numbers.get("WORLD_SIZE", "1"))
    needed = {"RANK": ("WORLD_SIZE",), "LOCAL_RANK": ("RANK", "WORLD_SIZE")}
    needed |= {"WORLD_SIZE": ("RANK", "MASTER_ADDR", "MASTER_PORT")} if size > 1 else {}
    needed |= {name: ("WORLD_SIZE",) for name in MPI_SIZES if int(numbers.get(name, "1")) > 1}
    for name, other in ((name, other) for name, others in needed.items() for other in others):
        if name in numbers and other not in os.environ:
            raise UserError(
                f"the environment has {name}={numbers[name]}, as if a launcher had started this process, but no {other}; "
                f"unset {name}"
            )
    if "MASTER_ADDR" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ and not numbers:
        raise UserError(
            "Accelerate's launcher for CPUs has started this process without a rank, so that every process would train alone; "
            "launch with --multi_gpu, which also works on CPUs, or with torchrun"
        )
    for name, limit in {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}.items():
        rank, number = int(numbers.get(name, 0)), int(numbers.get(limit, size))
        if rank >= number:
            raise UserError(
                f"the environment has {name}={rank}, which must be below {limit}={number}; unset both if no launcher has "
                "started this process"
            )
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() not in NO:
        raise UserError("the launcher's configuration asks for FSDP; remove it there, and pass --fsdp")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() not in NO and launch.deepspeed is None:
        raise UserError(
            "the launcher's configuration asks for DeepSpeed; remove it there, and pass the stage or file with --deepspeed"
        )
