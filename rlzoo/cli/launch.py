"""Starts a run in several processes with torch's launcher and exits with the code of the first process that fails."""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlzoo.cli.console import print_error
from rlzoo.config.run_config import RunConfig
from rlzoo.journal.tracking.description import COMMAND, typed_command
from rlzoo.models.machine import LAUNCHER, cores

STARTED_BY_A_LAUNCHER = "WORLD_SIZE"
"""Environment variable that every torch launcher sets."""

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def must_launch(config: RunConfig) -> bool:
    """Return whether the run needs several processes and no launcher has started them yet."""
    return (config.launch.processes or 1) > 1 and STARTED_BY_A_LAUNCHER not in os.environ


def launch(config: RunConfig, *, resume: bool = False, options: Sequence[str] = ()) -> None:
    """Run the configuration with ``launch.processes`` processes on this machine and wait for them.

    If a process fails, exit with the code of the first one that failed.
    """
    processes = config.launch.processes
    assert processes is not None, "checked by must_launch"
    config.refuse_redacted()
    with tempfile.TemporaryDirectory(prefix="rlzoo-launch-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(config.to_yaml(with_secrets=True), encoding="utf-8")  # no other user can read the folder
        command = ["-m", "rlzoo", "train", "--config", str(file), *options]
        if resume:
            command += ["--resume", "--output", str(config.output)]
        _run(processes, command, _environment(processes, config), config.output)


def end_with_the_launcher() -> None:
    """Kill this process when its launcher is killed (Linux only), because a single process cannot save the run."""
    launcher = os.environ.pop(LAUNCHER, None)  # child processes must not inherit it
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher has already ended
        os.kill(os.getpid(), signal.SIGKILL)


def _environment(processes: int, config: RunConfig) -> dict[str, str]:
    """Return environment variables for the processes, omitting variables that the user has already set."""
    import torch

    variables = {
        LAUNCHER: str(os.getpid()),
        COMMAND: typed_command(),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # seconds that the processes have to finish their step after a signal
        "PYTHONSAFEPATH": "1",  # otherwise, `python -m rlzoo` imports from the working directory first
        "OMP_NUM_THREADS": str(max(1, cores() // processes)),
    }
    if not torch.cuda.is_available():
        variables |= {"DS_ACCELERATOR": "cpu"} if config.launch.deepspeed else {"ACCELERATE_USE_CPU": "true"}
    return {name: value for name, value in variables.items() if name not in os.environ}


def _run(processes: int, command: list[str], environment: dict[str, str], output: Path | None) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*probe.getsockname())
    os.environ.update(environment)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # the launcher warns about every process that it ends
    # torchrun and Accelerate's launcher would read more settings from environment variables and files
    meeting: dict[str, Any] = {"rdzv_backend": "static", "rdzv_endpoint": address, "rdzv_configs": {"rank": 0}}
    one_machine = LaunchConfig(1, 1, processes, run_id="rlzoo", max_restarts=0, **meeting)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            elastic_launch(one_machine, sys.executable)("-u", *command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:  # the process has already printed the reason
            sys.exit(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        hint = "; the system kills processes when memory runs out" if name == "SIGKILL" else ""
        if output and (output / "config.yaml").is_file():
            hint += f"; resume with: rlzoo train --resume --output {shlex.quote(str(output))}"
        print_error(f"rlzoo: process {rank} of {processes} was killed ({name}), and the others were stopped{hint}")
        sys.exit(128 - failure.exitcode)
    except SignalException as error:
        sys.exit(128 + (signal.SIGINT if error.sigval == signal.SIGINT else signal.SIGTERM))
