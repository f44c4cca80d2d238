"""Trains the runs of a sweep with Slurm, on nodes that share a file system with this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlzoo.core.errors import UserError
from rlzoo.journal.tracking.uploads import SWEEP
from rlzoo.lab.sweep import Child, Ended, Look, SweepProcess, log_of, run_children
from rlzoo.models.machine import LAUNCHED

TRIES = 3  # maximum number of times that a run is started; it is resumed if Slurm ended it or its node was lost
MOST_JOBS = 64  # default maximum number of runs at once, including those that wait in Slurm's queue
ERRORS = (1, 2)  # exit codes of `rlzoo train` that a rerun does not change; if a node is lost, srun exits with 0

# starts a command in a folder, unless the file system is not shared; arguments: the run's log file, the folder, the command
SHARED = """
test -w "$0" || { echo "rlzoo: $0 does not exist on $(hostname); --on slurm needs a shared file system" >&2; exit 2; }
cd "$1" && shift && exec "$@"
"""


class Slurm:
    """The resources of each run, and the maximum number of runs at once. Other options are set by srun's variables."""

    def __init__(self, cpus: int = 1, gpus: int = 0, jobs: int | None = None) -> None:
        """Check that Slurm can be reached and has the required resources.

        Raises:
            UserError: Slurm cannot be reached or lacks the resources; the message is Slurm's.
        """
        if shutil.which("srun") is None:
            raise UserError("--on slurm: srun is not installed here; start the command on a machine of the cluster")
        self.jobs, self.cpus = jobs or MOST_JOBS, cpus
        self.srun = ["srun", "--ntasks=1", f"--cpus-per-task={cpus}", "--exact", "--mpi=none"]
        self.srun += [f"--gpus={gpus}"] if gpus else []
        if "SLURM_JOB_ID" not in os.environ:  # in an allocation, runs are steps of its job
            tested = subprocess.run([*self.srun, "--test-only", "true"], check=False, capture_output=True, text=True)
            if tested.returncode:
                raise UserError(f"--on slurm: {'; '.join(tested.stderr.splitlines()).replace('srun: error: ', '')}")

    def run(self, children: Sequence[Child], look: Look, ended: Ended) -> list[Child]:
        """Run every unfinished child, and then rerun those that Slurm ended; see `rlzoo.lab.sweep.run_children`."""
        codes: dict[str, int] = {}

        def note(child: Child, code: int) -> None:
            codes[child.name] = code
            ended(child, code)

        rest = children
        for _ in range(TRIES):
            failed = run_children(rest, look, note, self.jobs, self._start)
            rest = [child for child in failed if codes.get(child.name) not in ERRORS]
        return [child for child in children if not child.is_finished]

    def _start(self, child: Child, environment: dict[str, str]) -> SweepProcess:
        """Start or resume a child, whose output goes to ``logs/``."""
        log = log_of(child).resolve()
        words = [sys.executable, "-P", "-m", "rlzoo", "train", *child.arguments, *(["--resume"] if child.is_begun else [])]
        variables = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        variables |= {"OMP_NUM_THREADS": str(self.cpus), SWEEP: str(child.path.parent)}
        command = [*self.srun, f"--job-name={child.name}", "sh", "-c", SHARED, str(log), str(Path.cwd()), *words]
        with log.open("ab") as file:
            process = _Srun(command, env=variables, stdout=file, stderr=file, start_new_session=True)
        return SweepProcess(child, environment, process, time.monotonic())


class _Srun(subprocess.Popen[bytes]):
    """A process with the interface of `multiprocessing.Process`. srun passes SIGTERM on to the run, which saves and exits."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def join(self) -> None:
        self.wait()
