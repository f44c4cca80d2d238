"""The Slurm script of the documentation trains on two machines, and saves the run before its time limit."""

import re
import shutil
import subprocess
import time

import pytest

from tests.nodes.machines import ADDRESSES, FOLDER, ROOT, Machines, why_not
from tests.training.short import QUICK, lines

DAEMONS = ("munged", "slurmctld", "slurmd")
pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(not all(map(shutil.which, DAEMONS)), reason="needs Debian's packages slurm-wlm and munge"),
]

SLURM = f"""
ClusterName=test
SlurmctldHost=machine-0({ADDRESSES[0]})
SlurmUser=root
StateSaveLocation={FOLDER}/state
SlurmdSpoolDir={FOLDER}/spool
SlurmctldPidFile={FOLDER}/slurmctld.pid
SlurmdPidFile={FOLDER}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/linear
NodeName=machine-0 NodeAddr={ADDRESSES[0]} CPUs=2
NodeName=machine-1 NodeAddr={ADDRESSES[1]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""
HOSTS = f"127.0.0.1 localhost\n{ADDRESSES[0]} machine-0\n{ADDRESSES[1]} machine-1\n"
ENVIRONMENT = {"SLURM_CONF": f"{FOLDER}/slurm.conf"}


def documented(settings, *options):
    """Return the script of docs/how-to/cluster.md for two machines without GPUs, with other settings."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash.*?)```", (ROOT / "docs/how-to/cluster.md").read_text(), re.DOTALL)
    script = script.replace(" --gpus-per-node=8", "").replace("--nproc-per-node=8", "--nproc-per-node=1")
    script = script.replace("--signal=TERM@300", " ".join(options) or "--signal=TERM@300")
    script = script.replace("launch.processes=16", "launch.processes=2").replace("$HOME/runs/qwen", f"{FOLDER}/run")
    return script.replace("--config paper/qwen3-8b", " ".join(f"--set {setting}" for setting in settings))


@pytest.fixture
def cluster(tmp_path):
    machines = Machines(tmp_path)
    (tmp_path / "hosts").write_text(HOSTS)
    subprocess.run(["mkdir", "-p", "/run/munge"], check=True)
    subprocess.run(["munged", "--force"], check=True)
    for number, daemons in enumerate((["slurmctld", "slurmd"], ["slurmd"])):
        folder = machines.folders[number]
        (folder / "slurm.conf").write_text(SLURM)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # loaded, but with these settings not used
        for name in ("state", "spool"):
            (folder / name).mkdir()
        for daemon in daemons:
            words = ["-D", *(["-N", f"machine-{number}"] if daemon == "slurmd" else [])]
            mount = f'mount --bind {tmp_path / "hosts"} /etc/hosts; exec "$@"'
            machines.start(number, "sh", "-c", mount, "sh", daemon, *words, environment=ENVIRONMENT)
    yield machines
    machines.close()
    subprocess.run(["munged", "--stop"], check=True)


def submit(machines, script):
    """Submit a script on machine 0 as soon as the controller answers, and wait for its end; returns what it printed."""
    (machines.folders[0] / "job.sh").write_text(script)
    for _ in range(30):
        if machines.start(0, "sinfo", environment=ENVIRONMENT).wait(60) == 0:
            break
        time.sleep(1)
    # every machine has its own interface, but Slurm gives the job the variables of machine 0
    words = ["env", "-u", "GLOO_SOCKET_IFNAME", "sbatch", "--wait", "--output=job.log", "job.sh"]
    machines.start(0, *words, environment=ENVIRONMENT).wait(400)
    return (machines.folders[0] / "job.log").read_text()


def test_the_documented_script_trains_on_two_machines(cluster):
    log = submit(cluster, documented([*QUICK, "tracking.mlflow=false", "steps=2"]))
    run = cluster.folders[0] / "run"
    assert len(lines(run / "metrics.jsonl")) == 3, log
    assert not (cluster.folders[1] / "run").exists()


def test_the_run_is_saved_before_the_time_limit(cluster):
    log = submit(cluster, documented([*QUICK, "tracking.mlflow=false", "steps=5000"], "--signal=TERM@60", "--time=2"))
    run = cluster.folders[0] / "run"
    done = len(lines(run / "metrics.jsonl")) - 1
    assert done > 0, log
    assert (run / "checkpoints" / f"step-{done:06d}").is_dir(), log
