"""Slurm and SkyPilot train on two machines: the scripts of docs/how-to/cluster.md, and a sweep with ``--on slurm``."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from rlzoo.support.parsing import parse_yaml
from tests.nodes.machines import ADDRESSES, FOLDER, ROOT, Machines, ip, wait, why_not
from tests.training.short import QUICK, lines, without_times

DAEMONS = ("munged", "slurmctld", "slurmd")
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
needs_slurm = pytest.mark.skipif(not all(map(shutil.which, DAEMONS)), reason="needs Debian's packages slurm-wlm and munge")

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
SlurmdTimeout=10
SelectType=select/linear
NodeName=machine-0 NodeAddr={ADDRESSES[0]} CPUs=2
NodeName=machine-1 NodeAddr={ADDRESSES[1]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""
HOSTS = f"127.0.0.1 localhost\n{ADDRESSES[0]} machine-0\n{ADDRESSES[1]} machine-1\n"
ENVIRONMENT = {"SLURM_CONF": f"{FOLDER}/slurm.conf"}


SETTINGS = " ".join(f"--set {setting}" for setting in (*QUICK, "tracking.mlflow=false"))


def documented(language, begin):
    """Return the code block of the page that begins with these words; its run is short, on the shipped model."""
    text = (ROOT / "docs/how-to/cluster.md").read_text()
    (block,) = (each for each in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if each.startswith(begin))
    return block.replace("--config paper/qwen3-8b", SETTINGS).replace("$HOME/runs/qwen", f"{FOLDER}/run")


def slurm_script(*options, steps):
    """Return the script for two nodes with one CPU each instead of GPUs."""
    script = (
        documented("bash", "#!/bin/bash").replace(" --gpus-per-node=8", "").replace("--nproc-per-node=8", "--nproc-per-node=1")
    )
    script = script.replace("--signal=TERM@300", " ".join(options) or "--signal=TERM@300")
    return script.replace("launch.processes=16", f"launch.processes=2 --steps {steps}")


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


def wait_for_the_controller(machines):
    for _ in range(30):
        if machines.start(0, "sinfo", environment=ENVIRONMENT).wait(60) == 0:
            break
        time.sleep(1)


def submit(machines, script):
    """Submit a script on machine 0, and wait for its end; returns what it printed."""
    (machines.folders[0] / "job.sh").write_text(script)
    wait_for_the_controller(machines)
    # every machine has its own interface, but Slurm gives the job the variables of machine 0
    words = ["env", "-u", "GLOO_SOCKET_IFNAME", "sbatch", "--wait", "--output=job.log", "job.sh"]
    machines.start(0, *words, environment=ENVIRONMENT).wait(400)
    return (machines.folders[0] / "job.log").read_text()


@needs_slurm
def test_the_slurm_script_trains_on_two_machines(cluster):
    log = submit(cluster, slurm_script(steps=2))
    run = cluster.folders[0] / "run"
    assert len(lines(run / "metrics.jsonl")) == 3, log
    assert not (cluster.folders[1] / "run").exists()


@needs_slurm
def test_the_run_is_saved_before_the_time_limit_of_slurm(cluster):
    log = submit(cluster, slurm_script("--signal=TERM@60", "--time=2", steps=5000))
    run = cluster.folders[0] / "run"
    done = len(lines(run / "metrics.jsonl")) - 1
    assert done > 0, log
    assert (run / "checkpoints" / f"step-{done:06d}").is_dir(), log


def sweep(machines, folder, *words):
    """Start a sweep of four runs on machine 0, with the runs on both machines."""
    sets = [word for setting in (*QUICK, "checkpoint.every=1", "tracking.mlflow=false") for word in ("--set", setting)]
    command = ["python", "-m", "rlzoo", "sweep", "--clip", "fspo,grpo", "--seeds", "2", "--steps", "30", *sets, *words]
    return machines.start(0, "env", "-C", str(folder), *command, environment=ENVIRONMENT)


def rows(folder):
    return {path.parent.name: without_times(lines(path)) for path in sorted(folder.glob("*/metrics.jsonl"))}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The metrics of a sweep on one machine."""
    machines = Machines(tmp_path_factory.mktemp("alone"))
    code = sweep(machines, machines.folders[0], "--output", "local", "--jobs", "2").wait(600)
    assert code == 0, machines.log(0)
    machines.close()
    return rows(machines.folders[0] / "local")


def is_training(machines):
    return any("rlzoo train" in machines.command(id_) for name in machines.names for id_ in ip("netns", "pids", name).split())


@needs_slurm
@pytest.mark.parametrize("fault", [None, "machine lost", "stopped", "killed"])
def test_a_sweep_with_slurm_has_the_numbers_of_a_local_one(local, cluster, tmp_path, fault):
    wait_for_the_controller(cluster)
    words = ("--output", "slurm", "--on", "slurm")
    process = sweep(cluster, tmp_path, *words)
    while fault and len(list((tmp_path / "slurm").glob("*/checkpoints/step-*"))) < 2:
        assert process.poll() is None, cluster.log(0)
        time.sleep(0.1)
    if fault == "machine lost":
        for id_ in ip("netns", "pids", cluster.names[1]).split():
            os.kill(int(id_), signal.SIGKILL)
        assert wait([process], limit=600)[0] == [1], cluster.log(0)
    if fault in ("stopped", "killed"):
        process.send_signal(signal.SIGTERM if fault == "stopped" else signal.SIGKILL)
        assert wait([process])[0] == [143 if fault == "stopped" else -signal.SIGKILL], cluster.log(0)
        while is_training(cluster):
            assert fault == "killed"
            time.sleep(0.1)
        logs = [path.read_text() for path in (tmp_path / "slurm" / "logs").iterdir()]
        assert sum("stopped after step" in log for log in logs) == 2, logs  # two more runs were waiting
    if fault:
        process = sweep(cluster, tmp_path, *words)
    assert wait([process], limit=600)[0] == [0], cluster.log(0)
    assert rows(tmp_path / "slurm") == local


@needs_slurm
def test_slurm_runs_nothing_without_the_resources_or_a_shared_file_system(cluster):
    wait_for_the_controller(cluster)
    assert sweep(cluster, cluster.folders[0], "--on", "slurm", "--cpus", "64").wait(60) == 2
    assert cluster.log(0).startswith("rlzoo: --on slurm: ")
    assert sweep(cluster, FOLDER, "--on", "slurm", "--output", "s", "--jobs", "2").wait(120) == 1
    logs = [path.read_text() for path in (cluster.folders[0] / "s" / "logs").iterdir()]
    assert any("does not exist on machine-1; --on slurm needs a shared file system" in log for log in logs), logs


def test_the_script_of_skypilot_trains_on_two_machines(tmp_path):
    machines = Machines(tmp_path)
    script = parse_yaml(documented("text", "num_nodes"))["run"].replace("--output", "--steps 2 --output")
    told = {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "1", "NODE_IPS": "\n".join(ADDRESSES)}
    variables = {f"SKYPILOT_{name}": value for name, value in told.items()}
    codes, _ = wait(
        [
            machines.start(number, "bash", "-c", script, environment={**variables, "SKYPILOT_NODE_RANK": str(number)})
            for number in range(2)
        ]
    )
    assert codes == [0, 0], machines.log(0)
    assert len(lines(machines.folders[0] / "run" / "metrics.jsonl")) == 3
    machines.close()
