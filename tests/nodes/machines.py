"""Two machines: network namespaces with a virtual cable between them, host names of their own, and separate file systems."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path("/mnt/rlzoo-node")  # every machine has its own
PORT = "29511"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LIMIT = 300  # seconds


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def why_not():
    """Return why two machines cannot be made here, or None."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "iptables", "unshare") if shutil.which(name) is None]
    return f"{missing[0]} is not installed (Debian: iproute2, iptables, util-linux)" if missing else None


class Machines:
    """Two machines, numbered 0 and 1. A file system is a folder here, and `FOLDER` there."""

    number = 0  # of the machines of this process

    def __init__(self, folder):
        Machines.number += 1
        self.folders = [folder / f"machine-{number}" for number in range(2)]
        self.names = [f"rlzoo-{os.getpid()}-{Machines.number}-{number}" for number in range(2)]
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", "rz0", "netns", self.names[0], "type", "veth", "peer", "name", "rz1", "netns", self.names[1])
        for number, (name, place) in enumerate(zip(self.names, self.folders, strict=True)):
            place.mkdir(parents=True)
            ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"rz{number}")
            ip("-n", name, "link", "set", "lo", "up")
        self.connect()
        FOLDER.mkdir(exist_ok=True)
        self.running, self.logs = [], {}

    def close(self):
        self.kill()
        for name in self.names:
            ip("netns", "delete", name)

    def connect(self, is_up=True):
        for number, name in enumerate(self.names):
            ip("-n", name, "link", "set", f"rz{number}", "up" if is_up else "down")

    def lose(self, share):
        """Lose this share of the packets that arrive at either machine."""
        rule = ["-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"]
        for number, name in enumerate(self.names):
            action = ["-A" if share else "-F", "INPUT", *(["-i", f"rz{number}", *rule] if share else [])]
            subprocess.run(["ip", "netns", "exec", name, "iptables", *action], check=True)

    def num_bytes(self):
        """Return how many bytes machine 0 has sent and received."""
        folder = "/sys/class/net/rz0/statistics"
        command = ["ip", "netns", "exec", self.names[0], "cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes"]
        return sum(map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))

    def start(self, number, *words, environment=()):
        """Start a command on a machine, in its file system; its output goes to a log."""
        log = self.logs[number] = self.folders[number].with_name(f"machine-{number}-{len(self.running)}.log")
        enter = f"hostname machine-{number}; mount --bind {shlex.quote(str(self.folders[number]))} {FOLDER}; cd {FOLDER}"
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RLZOO_", "MLFLOW_"))},
            "PYTHONPATH": f".:{ROOT}:{ROOT / 'plugins'}",
            "GLOO_SOCKET_IFNAME": f"rz{number}",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **dict(environment),
        }
        command = [
            "ip",
            "netns",
            "exec",
            self.names[number],
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            f'{enter}; exec "$@"',
            "sh",
        ]
        with log.open("w") as output:
            process = subprocess.Popen([*command, *words], env=variables, stdout=output, stderr=output)
        self.running.append(process)
        return process

    def rank(self, number, *words, environment=(), launcher=()):
        """Start `rlzoo train` on a machine, as one of two ranks."""
        group = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}"]
        torchrun = ["torchrun", *group, f"--master-port={PORT}"]
        kind = {"DS_ACCELERATOR": "cpu"} if any("zero" in word for word in words) else {}
        environment = {**kind, **dict(environment)}
        return self.start(number, *(launcher or torchrun), "-m", "rlzoo", "train", *words, environment=environment)

    def command(self, id_):
        """Return the command line of a process, or "" if it has ended."""
        return _command(id_)

    def signal(self, number, what):
        """Send a signal to the training process on a machine, or SIGTERM to its launcher, as a scheduler does."""
        commands = {int(id_): _command(id_) for id_ in ip("netns", "pids", self.names[number]).split()}
        launcher = [id_ for id_, command in commands.items() if "bin/torchrun" in command and "python" in command]
        trainer = [id_ for id_, command in commands.items() if " -m rlzoo train" in command and id_ not in launcher]
        os.kill((launcher if what == signal.SIGTERM else trainer)[0], what)

    def log(self, number):
        """Return what the last command on a machine printed."""
        return self.logs[number].read_text()

    def kill(self):
        for name in self.names:
            for id_ in ip("netns", "pids", name).split():
                os.kill(int(id_), signal.SIGKILL)
        for process in self.running:
            process.wait()


def _command(id_):
    try:
        return Path("/proc", id_, "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def wait(processes, limit=LIMIT):
    """Wait for processes, and return their exit codes and the seconds until the last one ended."""
    start = time.monotonic()
    codes = [process.wait(max(0.1, limit - (time.monotonic() - start))) for process in processes]
    return codes, time.monotonic() - start
