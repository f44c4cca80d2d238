"""Trains the runs of a sweep with Slurm, on nodes that share a file system with this machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlzoo.core.errors import UserError
from rlzoo.journal.tracking.uploads import SWEEP
from rlzoo.lab.sweep import Child, Ended, Look, SweepProcess, log_of, run_children
from rlzoo.models.machine import LAUNCHED

MOST_JOBS = 64  # default maximum number of runs at once, including those that wait in Slurm's queue
PR_SET_PDEATHSIG = 1  # from linux/prctl.h

# starts a command in a folder, unless the file system is not shared; arguments: the run's log file, the folder, the command
SHARED = """
test -w "$0" || { echo "rlzoo: $0 does not exist on $(hostname); --on slurm needs a shared file system" >&2; exit 2; }
cd "$1" && shift && exec "$@"
"""


class Slurm:
    """The resources of each run, and the maximum number of runs at once. Every run is a job of its own."""

    def __init__(self, cpus: int = 1, gpus: int = 0, jobs: int | None = None) -> None:
        """Check that Slurm can be reached and has the required resources.

        Raises:
            UserError: Slurm cannot be reached or lacks the resources; the message is Slurm's.
        """
        if shutil.which("srun") is None or "SLURM_JOB_ID" in os.environ:
            raise UserError("--on slurm: start the command on a machine with Slurm's srun, outside of any job")
        self.jobs, self.cpus = jobs or MOST_JOBS, cpus
        self.srun = ["srun", "--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus}", "--mpi=none", "--disable-status"]
        self.srun += [f"--gpus={gpus}"] if gpus else []
        tested = subprocess.run([*self.srun, "--test-only", "true"], check=False, capture_output=True, text=True)
        if tested.returncode:
            reason = "; ".join(tested.stderr.splitlines()).replace("srun: error: ", "")
            raise UserError(f"--on slurm: srun cannot start a run with {cpus} CPUs and {gpus} GPUs: {reason}")

    def run(self, children: Sequence[Child], look: Look, ended: Ended) -> list[Child]:
        """Run every unfinished child, and wait for all of them; see `rlzoo.lab.sweep.run_children`."""
        return run_children(children, look, ended, self.jobs, self._start)

    def _start(self, child: Child, environment: dict[str, str]) -> SweepProcess:
        """Start or resume a child, whose output goes to ``logs/``. If the sweep is killed, the run saves and exits."""
        log = log_of(child).resolve()
        words = [sys.executable, "-P", "-m", "rlzoo", "train", *child.arguments, *(["--resume"] if child.is_begun else [])]
        command = [*self.srun, f"--job-name={child.name}", "sh", "-c", SHARED, str(log), str(Path.cwd()), *words]
        variables = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        variables |= {"OMP_NUM_THREADS": str(self.cpus), SWEEP: str(child.path.parent.resolve())}
        ends = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGINT)
        with log.open("ab") as file:
            srun = partial(_Srun, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            process = srun(command, start_new_session=True, preexec_fn=ends)
        return SweepProcess(child, environment, process, time.monotonic())


class _Srun(subprocess.Popen[bytes]):
    """A process with the interface of `multiprocessing.Process`."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def terminate(self) -> None:
        """Ask the run to save and exit. srun passes on only SIGINT; SIGTERM would kill the run."""
        self.send_signal(signal.SIGINT)

    def join(self) -> None:
        self.wait()
