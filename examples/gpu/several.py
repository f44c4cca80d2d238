"""Part ``several``: checks that several processes compute the same weights as one process for every kind of sharding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from examples.gpu.data import distance
from examples.gpu.rows import AbsentError, Case, Outcome, Setting
from examples.gpu.several_worker import start, three_updates
from rlzoo.config.sections import LaunchConfig
from rlzoo.core.errors import UserError
from rlzoo.gate.launch import check_launch

ROOT = Path(__file__).parents[2]
LAUNCHES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2": {"deepspeed": "zero2"},
    "zero3": {"deepspeed": "zero3"},
    "fsdp2": {"fsdp": True},
}
"""Settings under ``launch`` for each case. If the installed torch lacks something that they need, the row says so."""
ALLOWED = 1e-3
"""Maximum distance between the weights, relative to the distance by which one process moved them."""
AT_MOST = 8


def shared(setting: Setting, launch: str) -> Outcome:
    """Take three updates on all GPUs (or with two processes on a CPU) and with one process, and compare the weights."""
    settings = LAUNCHES[launch]
    try:
        check_launch(LaunchConfig.model_validate(settings))
    except UserError as error:
        raise AbsentError(str(error)) from error
    if "deepspeed" in settings and find_spec("deepspeed") is None:
        raise AbsentError("DeepSpeed is not installed")
    processes = min(torch.cuda.device_count(), AT_MOST) if setting.device == "cuda" else 2
    if processes < 2:
        raise AbsentError("this machine has only one GPU")
    file = Path(tempfile.mkdtemp(prefix="rlzoo-gpu-")) / "weights.safetensors"
    launched(file, processes, settings, setting)
    from safetensors.torch import load_file

    found, wanted, before = load_file(file), three_updates({}, setting.quick), start(setting.quick)
    # use the change in the weights, because relative to the weights themselves, even a run without training would pass
    moved = {name: wanted[name].double() - before[name].double() for name in found}
    error = {name: found[name].double() - before[name].double() for name in found}
    apart = distance(error, moved)
    values = {"error": apart, "allowed": ALLOWED, "processes": processes}
    return Outcome(f"{processes} processes: relative L2 error {apart:.1e}", values, passed=apart <= ALLOWED)


def launched(file: Path, processes: int, settings: dict[str, Any], setting: Setting) -> None:
    """Run the worker in several processes, started the way ``rlzoo train --processes`` starts them."""
    options = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1", "--main_process_port", "0"]
    plain = ["--mixed_precision", "no", "--dynamo_backend", "no"]
    launch = json.dumps({"processes": processes, **settings})
    worker = ["-m", "examples.gpu.several_worker", str(file), launch, json.dumps(setting.quick)]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, *plain, *worker]
    extensions = setting.models / "torch-extensions"  # for DeepSpeed; a killed build leaves a lock that nobody releases
    for lock in extensions.glob("**/lock"):
        lock.unlink()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TORCH_EXTENSIONS_DIR": str(extensions)}
    if setting.device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1"}
        environment |= {"ACCELERATE_USE_CPU": "true"} if "deepspeed" not in settings else {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")


CASES = [
    Case(f"several-{name}", f"{name} against one process, float32", f"{ALLOWED:.0e}", partial(shared, launch=name))
    for name in LAUNCHES
]
