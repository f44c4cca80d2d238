"""The attacks, in one line each where possible."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import threading
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

from tests.faults.harness import DONE, REFUSED, VARIANTS, Attack, Case, Command, attack, resumable, says_finished

EVALUATE = ("eval", "{run}", "--suite", "arithmetic", "--limit", "6", "--k", "2", "--max-new-tokens", "8", "--set", "rollout.batch_size=4",
            "--no-mlflow", "--output", "{box}/evaluation")  # fmt: skip
REPLAY = ("replay", "{run}", "--clip", "gspo,grpo", "--report", "{box}/replay.html")
COMPARE = ("compare", "{run}", "--report", "{box}/compare.html")


# damage


def flip(name: str):
    """Flip one bit in a file of the newest checkpoint."""
    return lambda case: case.edit(
        case.newest() / name,
        lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    )


def metrics(change):
    """Change lines of ``metrics.jsonl``, which are passed and returned as a list of bytes with line ends."""
    return lambda case: case.edit("metrics.jsonl", lambda data: b"".join(change(data.splitlines(keepends=True))))


def away(name: str):
    """Remove something from the run directory."""

    def remove(case: Case) -> None:
        path = case.run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def every_checkpoint(do):
    def damage(case: Case) -> None:
        for folder in sorted(case.run.glob("checkpoints/step-*")):
            do(folder)

    return damage


def spoiled(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def unfinished(case: Case) -> None:
    """Add an unfinished checkpoint of a killed process of this run."""
    key = json.loads((case.run / "run.json").read_text())["id"][:16]
    shutil.copytree(case.newest(), case.run / f"checkpoints/.step-000005.{key}.part")


def checkpoints_elsewhere(case: Case) -> None:
    (case.run / "checkpoints").rename(case.box / "elsewhere")
    (case.run / "checkpoints").symlink_to(case.box / "elsewhere")
    case.is_watched = False


def no_state(case: Case) -> None:
    shutil.rmtree(case.newest() / "state")


def pasted_from(variant: str):
    """Replace the newest checkpoint with another run's."""

    def paste(case: Case) -> None:
        other = case.box.parent / f"{variant}-finished" / "run" / "checkpoints"
        newest = case.newest()
        shutil.rmtree(newest)
        shutil.copytree(sorted(other.iterdir())[-1], newest)

    return paste


def immutable(name: str, flag: str = "+i"):
    """Use ``chattr``, which also applies to root, unlike permissions."""

    def change(case: Case) -> None:
        path = case.run / name
        subprocess.run(["chattr", flag, str(path)], check=True)
        case.undone_by(lambda: subprocess.run(["chattr", flag.replace("+", "-"), str(path)], check=True))

    return change


def on_a_disk(options: str):
    """Put the run directory on a separate file system; undone by making it large and writable."""

    def move(case: Case) -> None:
        disk = case.mount(case.box / "disk", "size=64m")
        if case.run.exists():
            shutil.copytree(case.run, disk / "run")
            shutil.rmtree(case.run)
        case.run, case.is_watched = disk / "run", False
        used = sum(path.stat().st_size for path in disk.rglob("*") if path.is_file())
        size = options.format(used=used // 1024 + 600)
        subprocess.run(["mount", "-o", f"remount,{size}", str(disk)], check=True)

        case.undone_by(lambda: subprocess.run(["mount", "-o", "remount,rw,size=64m,nr_inodes=0", str(disk)], check=True))

    return move


# where and how commands run


def named(name: str):
    """Give a run directory this name from the start."""

    def do(case: Case) -> None:
        case.run = case.box / name

    return do


def moved_to(name: str):
    return lambda case: case.move(name)


def from_elsewhere(case: Case) -> None:
    case.cwd = case.box / "other"
    case.cwd.mkdir()


def cwd_deleted(case: Case) -> None:
    case.is_watched, case.cwd = False, case.box / "gone"
    case.cwd.mkdir()
    command = case.start(*case.resuming())
    case.cwd.rmdir()
    command.wait()
    case.cwd = case.box


def poisoned(case: Case) -> None:
    """Add modules with names of the standard library to the current directory; they must not be imported."""
    for module in (
        "pickle",
        "string",
        "hmac",
        "random",
        "torch",
        "rlzoo",
        "json",
        "multiprocessing",
        "mlflow",
        "sitecustomize",
    ):
        case.plant(
            f"{module}.py", f"open({str(case.box / 'poisoned')!r}, 'a').write('{module} ')\nraise SystemExit('poisoned')\n"
        )
    case.planted[case.box / "poisoned"] = "missing"


def stopping_clock(jump: float):
    """Let the wall clock jump by this many seconds, back and forth, ten times a second."""

    def do(case: Case) -> None:
        text = f"import time\nreal = time.time\ntime.time = lambda: real() + {jump} * (int(real() * 10) % 2)\n"
        case.plant("site/sitecustomize.py", text)
        case.environment["PYTHONPATH"] = str(case.box / "site")

    return do


def streams(**names: str):
    """Replace standard streams with a device."""

    def do(case: Case) -> None:
        for name, file in names.items():
            setattr(case, name, file)

    return do


def limited(**limits: int):
    return lambda case: case.limits.update(limits)


def shell(case: Case, script: str, seconds: float = 90.0) -> None:
    """Run a pipeline around a command; ``RLZOO`` is replaced by the command that trains."""
    python = Path(psutil.Process().exe()).name
    assert python
    command = " ".join(f"'{word}'" for word in (str(rlzoo_script()), *case.training()))
    done = subprocess.run(
        ["bash", "-c", script.replace("RLZOO", command)], cwd=case.box, env=case.environment, capture_output=True, text=True,
        timeout=seconds, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    case.is_watched = False
    assert "Traceback" not in done.stderr, done.stderr[-1500:]


def rlzoo_script() -> Path:
    import sys

    return Path(sys.executable).parent / "rlzoo"


def was_finished(case: Case, command: Command) -> str | None:
    """Whether the run finished without being resumed."""
    return None if says_finished(case.run) else "the run did not end by itself"


# signals


def at_row(row: int, *numbers: int, pause: float = 0.0):
    """Send signals to a run that has this many rows, some seconds apart."""

    def do(case: Case) -> None:
        command = case.start(*case.training())
        case.reach(command, row)
        for number in numbers:
            command.signal(number)
            time.sleep(pause)
        command.wait()

    return do


def in_a_checkpoint(*numbers: int, pause: float = 0.0):
    """Send signals while a checkpoint is written."""

    def do(case: Case) -> None:
        command = case.start(*case.training())
        case.within_a_checkpoint(command)
        for number in numbers:
            command.signal(number)
            time.sleep(pause)
        command.wait()

    return do


def terminal_closed(case: Case) -> None:
    """Close the window in which a run shows its progress."""
    ours, theirs = os.openpty()
    case.stdin = case.stdout = case.stderr = os.ttyname(theirs)
    command = case.start(*case.training())
    reader = threading.Thread(target=lambda: read_all(ours), daemon=True)
    reader.start()
    case.reach(command, 4)
    os.close(theirs)
    os.close(ours)
    command.signal(signal.SIGHUP)  # as the kernel does when the terminal is closed
    command.wait(30)
    case.stdin, case.stdout, case.stderr = os.devnull, "", ""
    assert resumable(case.run), "nothing was saved"


def read_all(descriptor: int) -> None:
    """Read the output and discard it."""
    with contextlib.suppress(OSError):
        while os.read(descriptor, 65536):
            pass


def after_seconds(seconds: float, number: int):
    """Send a signal a fixed time after the start, regardless of what the run is doing."""

    def do(case: Case) -> None:
        command = case.start(*case.training())
        time.sleep(seconds)
        command.signal(number)
        command.wait()

    return do


def twice_in_steps(number: int, times: int):
    """Stop immediately within a step with two signals, and resume, several times."""

    def do(case: Case) -> None:
        case.is_watched = False
        for turn in range(times):
            before = max(resumable(case.run))
            command = case.start(*case.resuming())
            if turn == 0:
                case.reach(command, case.rows() + 1)
            case.hold(command)
            command.signal(number)
            time.sleep(1.2)
            command.signal(number)
            command.wait(30)
            case.let_go()
            assert max(resumable(case.run), default=-1) >= before, f"after stop {turn + 1}: {resumable(case.run)}"

    return do


def killed_in_resume(times: int):
    """``kill -9`` at different moments of resuming, many times."""

    def do(case: Case) -> None:
        case.is_watched = False
        for turn in range(times):
            command = case.start(*case.resuming())
            time.sleep(0.15 * (turn % 8))
            command.kill()

    return do


def stopped_and_continued(row: int, seconds: float):
    def do(case: Case) -> None:
        command = case.start(*case.training())
        case.reach(command, row)
        command.signal(signal.SIGSTOP)
        time.sleep(seconds)
        command.signal(signal.SIGCONT)
        assert command.wait().code == 0, command.err

    return do


def stopped_in_a_checkpoint(case: Case) -> None:
    command = case.start(*case.training())
    case.within_a_checkpoint(command)
    command.signal(signal.SIGSTOP)
    time.sleep(1)
    command.signal(signal.SIGCONT)
    assert command.wait().code == 0, command.err


def a_worker(case: Case, number: int) -> None:
    """Send a signal to the grading worker of a run that is held in grading."""
    case.is_watched = False
    command = case.start(*case.resuming())
    case.reach(command, case.rows() + 1)
    case.hold(command)
    for process in case.children():
        if process.pid != command.pid:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
    case.let_go()
    command.wait(60)


def run_killed_in_a_reward(case: Case) -> None:
    """Kill the run while a reward hangs; its worker must not survive."""
    case.is_watched = False
    command = case.start(*case.resuming())
    case.hold(command)
    command.kill()
    until = time.monotonic() + 15
    while case.children() and time.monotonic() < until:
        time.sleep(0.2)
    assert not case.children(), f"left: {[process.cmdline() for process in case.children()]}"
    case.let_go()


def two_at_once(case: Case) -> None:
    case.is_watched = False
    first, second = case.start(*case.resuming()), case.start(*case.resuming())
    codes = {first.wait().code, second.wait().code}
    assert 0 in codes, first.err + second.err
    assert codes <= {0, 2}


# two processes


def ranks(case: Case) -> dict[int, psutil.Process]:
    found = {}
    for process in case.children():
        with contextlib.suppress(psutil.Error):
            if "RANK" in process.environ():
                found[int(process.environ()["RANK"])] = process
    return found


def of_two(who: int | None, *numbers: int, pause: float = 0.0, row: int = 2):
    """Send signals to a rank, or to the launcher, of a run in two processes."""

    def do(case: Case) -> None:
        command = case.start(*case.training(steps=40))
        case.reach(command, row + 1)
        victim = psutil.Process(command.pid) if who is None else ranks(case)[who]
        for number in numbers:
            victim.send_signal(number)
            time.sleep(pause)
        if numbers[-1] == signal.SIGCONT:
            command.signal(signal.SIGTERM)
        command.wait(80)

    return do


# sweeps

SWEEP = ("sweep", "--clip", "fspo,gspo", "--seeds", "1", "--jobs", "2", "--output", "{box}/sweep", "--steps", "4",
         "--set", "rollout.num_prompts=4", "--set", "rollout.group_size=4", "--set", "rollout.max_new_tokens=16",
         "--set", "tracking.mlflow=false", "--set", "eval.num_problems=0")  # fmt: skip


def sweep_is_whole(case: Case, command: Command) -> str | None:
    for name in ("fspo-0", "gspo-0"):
        file = case.box / "sweep" / name / "summary.json"
        if not file.exists() or not json.loads(file.read_text())["finished"]:
            return f"{name} did not finish: {command.err[-300:]}"
        rows = [json.loads(line)["step"] for line in (file.parent / "metrics.jsonl").read_text().splitlines()]
        if rows != sorted(set(rows)):
            return f"{name} holds steps {rows}"
    return None


def sweep_stopped(number: int, seconds: float = 0.0):
    """Signal the sweep once a child has a row, and then immediately repeat the same command."""

    def do(case: Case) -> None:
        case.is_watched = False
        words = [*case.words(SWEEP)]
        words[words.index("--steps") + 1] = "4"
        command = case.start(*words)
        until = time.monotonic() + 60
        while not list((case.box / "sweep").glob("*/metrics.jsonl")) and command.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        command.signal(number)
        command.wait(60)
        time.sleep(seconds)

    return do


def sweep_child_killed(case: Case) -> None:
    case.is_watched = False
    command = case.start(*case.words(SWEEP))
    until = time.monotonic() + 60
    while time.monotonic() < until:
        holders = [file.read_text().strip() for file in (case.box / "sweep").glob("*/.lock")]
        if holders and holders[0]:
            os.kill(int(holders[0]), signal.SIGKILL)
            break
    assert command.wait().code == 1, "a run that was killed is not a success"


# tracking


def store(do, *, begin=None):
    """Disturb MLflow's store while the run is held."""

    def attacked(case: Case) -> None:
        case.is_watched = False
        database = case.box / "mlflow.db"
        command = case.start(*case.resuming())
        case.reach(command, case.rows() + 1)
        command.signal(signal.SIGSTOP)
        do(case, database)
        command.signal(signal.SIGCONT)
        assert command.wait(80).code == 0, command.err

    return attacked


def locked_store(case: Case, database: Path) -> None:
    connection = sqlite3.connect(database, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    threading.Timer(3, connection.close).start()


def follower_killed(case: Case, database: Path) -> None:
    for process in case.children():
        with contextlib.suppress(psutil.Error):
            if "rlzoo.journal.tracking.follow" in process.cmdline():
                process.kill()


class Endless:
    """A server that responds without end, drips bytes, or does not respond."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.stopped = False
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while not self.stopped:
                connection, _ = self.socket.accept()
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(65536)
            if self.kind == "silent":
                while not self.stopped:
                    time.sleep(0.1)
                return
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{")
            while not self.stopped:
                connection.sendall(b" " * (1 if self.kind == "dripping" else 2**20))
                time.sleep(0.2 if self.kind == "dripping" else 0)


def server(kind: str):
    """A tracking server that misbehaves; a run with it ends within the time limit of the attack."""

    def do(case: Case) -> None:
        made = Endless(kind)
        case.is_watched = False
        case.environment["MLFLOW_TRACKING_URI"] = made.address
        held = [0]

        def watch() -> None:
            while not made.stopped:
                for process in case.children():
                    with contextlib.suppress(psutil.Error):
                        held[0] = max(held[0], process.memory_info().rss)
                time.sleep(0.2)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            command = case.start(*case.resuming()).wait(case.seconds)
        finally:
            made.stopped = True
            made.socket.close()
            thread.join()
            case.environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{case.box}/mlflow.db"
        assert command.code == 0, command.err
        assert held[0] < 1.5 * 2**30, f"a process held {held[0] / 2**30:.1f} GB"

    return do


# the user's code


def reward_that(text: str, *settings: str, code: int = 0, says: str = ""):
    """Run four steps with a user's misbehaving reward; its output must not break ``--json``."""

    def do(case: Case) -> None:
        case.plant("my_reward.py", f"import os, sys, time\n{text}\n")
        words = [*case.training(case.box / "hostile", steps=4), "--json"]
        for setting in ("task.timeout=0.5", *settings):
            words += ["--set", setting]
        command = case.rlzoo(*words)
        assert command.code == code, f"ended with {command.code}: {command.err[-800:]}"
        assert says in command.err, command.err[-800:]

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        for line in command.out.splitlines():
            json.loads(line, parse_constant=refuse)
        file = case.box / "hostile" / "metrics.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            json.loads(line, parse_constant=refuse)

    return do


def one_in(number: int, what: str) -> str:
    """A reward that runs a statement for some of the responses."""
    return f"def reward(problem, response):\n    if len(response) % {number} == 0:\n        {what}\n    return len(response) / 10\n"


def edited_rule(case: Case) -> None:
    case.edit(
        case.box / "my_rule.py", lambda text: text.replace(b"0.01, gt=0", b"0.02, gt=0").replace(b"None, like", b"None, like")
    )


def other_formula(case: Case) -> None:
    case.edit(case.box / "my_rule.py", lambda text: text.replace(b"self.width, self.width", b"self.width / 9, self.width"))


def edited(name: str, before: str, after: str):
    return lambda case: case.edit(case.box / name, lambda text: text.replace(before.encode(), after.encode()))


def settings(**changes: object):
    """Edit ``config.yaml`` by hand between stop and resume."""

    def change(case: Case) -> None:
        for key, (old, new) in changes.items():
            text = (case.run / "config.yaml").read_text()
            assert f"{key}: {old}" in text, key
            (case.run / "config.yaml").write_text(text.replace(f"{key}: {old}", f"{key}: {new}", 1))

    return change


# evaluation


def an_evaluation(case: Case) -> Command:
    case.is_watched = False
    return case.rlzoo(*case.words(EVALUATE))


def evaluation_killed(case: Case) -> None:
    case.is_watched = False
    command = case.start(*case.words(EVALUATE))
    until = time.monotonic() + 30
    while not (case.box / "evaluation").exists() and command.poll() is None and time.monotonic() < until:
        time.sleep(0.001)
    command.signal(signal.SIGKILL)
    command.wait()


def evaluation_with(name: str, change):
    def do(case: Case) -> None:
        assert an_evaluation(case).code == 0
        found = sorted((case.box / "evaluation").rglob(name))
        assert found, sorted((case.box / "evaluation").rglob("*"))
        for path in found:
            change(path)

    return do


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\x00\xff garbage\n")


def nan_weights(case: Case) -> None:
    path = case.newest() / "model.safetensors"
    save_file({name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def header(path: Path) -> None:
    """A safetensors file whose header claims a size of 2^62 bytes."""
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


READ_AT_THE_START = ("HF_HUB_OFFLINE", "HOME", "LANG", "MPLBACKEND", "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONIOENCODING",
                     "PYTHONOPTIMIZE", "PYTHONWARNINGS")  # fmt: skip


RUN_DIRECTORY = [
    attack("nothing at all", lambda case: None, expect=DONE, quick=True),
    attack("a finished run resumed", lambda case: None, expect=DONE, begin="finished"),
    attack("a text file in checkpoints", lambda case: case.plant("run/checkpoints/notes.txt"), expect=DONE, quick=True),
    attack(".DS_Store everywhere", lambda case: [case.plant(f"run/{name}.DS_Store") for name in ("", "checkpoints/", "rollouts/")], expect=DONE, quick=True),
    attack("a copy of a checkpoint named best-copy", lambda case: shutil.copytree(case.newest(), case.run / "checkpoints/best-copy"), expect=DONE, quick=True),
    attack("hidden folders of the user's in checkpoints", lambda case: [case.plant(f"run/checkpoints/{name}/HEAD") for name in (".git", ".ipynb_checkpoints", ".mine")], expect=DONE, quick=True),
    attack("the user's files under names of temporary checkpoints", lambda case: [case.plant(f"run/checkpoints/.step-{step:06d}.{name}/mine") for step in (0, 2, 4, 6) for name in ("part", "former", "0123456789abcdef.part", "0123456789abcdef.former")], expect=DONE),
    attack("checkpoints that were not finished", unfinished, check=lambda case, command: str(next(case.run.glob("checkpoints/*aside*"), "")), expect=DONE),
    attack("notes in rollouts", lambda case: [case.plant(f"run/rollouts/{name}") for name in ("notes.txt", "000099.txt", "000099.csv", ".hidden")], expect=DONE, quick=True),
    attack("summary.json missing", away("summary.json"), expect=DONE),
    attack("summary.json of garbage", lambda case: case.edit("summary.json", lambda data: b"\xff{"), expect=DONE),
    attack("config.yaml missing", away("config.yaml"), expect=REFUSED),
    attack("config.yaml empty", lambda case: case.edit("config.yaml", lambda data: b""), expect=REFUSED),
    attack("config.yaml cut in two", lambda case: case.edit("config.yaml", lambda data: data[: len(data) // 2]), expect=REFUSED),
    attack("another learning rate in config.yaml", settings(lr=("0.001", "0.1"))),
    attack("another rule in config.yaml", settings(name=("fspo", "gspo"))),
    attack("fewer steps in config.yaml", settings(steps=("8", "2"))),
    attack("metrics.jsonl missing", away("metrics.jsonl"), expect=REFUSED, quick=True),
    attack("metrics.jsonl with a cut-off last line", lambda case: case.edit("metrics.jsonl", lambda data: data + b'{"step": 5, "rew'), expect=DONE),
    attack("metrics.jsonl cut in the middle", lambda case: case.edit("metrics.jsonl", lambda data: data[: len(data) // 2]), expect=REFUSED),
    attack("metrics.jsonl without a line", metrics(lambda rows: [*rows[:2], *rows[3:]])),
    attack("metrics.jsonl with zeros appended, as after a power cut", lambda case: case.edit("metrics.jsonl", lambda data: data + bytes(512))),
    attack("rollouts missing", away("rollouts")),
    attack("a step's rollouts missing", away("rollouts/000002.jsonl")),
    attack("checkpoints missing", away("checkpoints"), expect=REFUSED, quick=True),
    attack("checkpoints as a link to another disk", checkpoints_elsewhere, expect=DONE),
    attack("the newest checkpoint missing", lambda case: shutil.rmtree(case.newest()), expect=DONE, quick=True),
]  # fmt: skip

CHECKPOINTS = [
    *(attack(f"one bit of {name}", flip(name), expect=DONE, says="changed")
      for name in ("model.safetensors", "state/optimizer.safetensors", "state/state.json", "state/policy.json", "tokenizer.json")),
    attack("one bit of the manifest", flip("manifest.json"), expect=DONE),
    attack("the manifest missing", lambda case: (case.newest() / "manifest.json").unlink(), expect=DONE),
    attack("weights cut off", lambda case: cut(case.newest() / "model.safetensors"), expect=DONE),
    attack("weights missing", lambda case: (case.newest() / "model.safetensors").unlink(), expect=DONE),
    attack("state missing", no_state, expect=DONE),
    attack("every checkpoint damaged", every_checkpoint(spoiled), expect=REFUSED, quick=True),
    attack("a checkpoint of another rule pasted in", pasted_from("adaptive"), beside=("adaptive",)),
    attack("a low-rank checkpoint with one bit changed", flip("model.safetensors"), on="lora", expect=DONE),
    attack("an adaptive rule's state changed", flip("clip.json"), on="adaptive", expect=DONE),
]  # fmt: skip


DISKS = [
    attack("metrics.jsonl that cannot be changed", immutable("metrics.jsonl"), expect=REFUSED),
    attack("checkpoints that cannot be changed", immutable("checkpoints"), expect=REFUSED),
    attack("a run directory that cannot be changed", immutable(""), expect=REFUSED),
    attack("files of 500 kB at most", limited(RLIMIT_FSIZE=500_000), expect=REFUSED, quick=True),
    attack("32 open files at most", limited(RLIMIT_NOFILE=32)),
    attack("a full disk while training", on_a_disk("size={used}k"), expect=REFUSED, says="[Nn]o space"),
    attack("a new run on a full disk", on_a_disk("size=100k"), begin="nothing", then=("new",), expect=REFUSED, says="[Nn]o space"),
    attack("a disk without inodes", on_a_disk("nr_inodes=60"), expect=REFUSED),
    attack("a read-only disk", on_a_disk("ro"), expect=REFUSED, says="[Rr]ead-only"),
    attack("a disk that becomes read-only in the middle of the run", lambda case: becomes_read_only(case), on="reward", expect=DONE),
    attack("an empty mount point as output", lambda case: mount_point(case), begin="nothing", then=("new",), expect=DONE),
]  # fmt: skip


def becomes_read_only(case: Case) -> None:
    on_a_disk("size=64m")(case)
    disk = case.run.parent
    command = case.start(*case.resuming())
    case.reach(command, case.rows() + 1)
    case.hold(command)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=False)
    case.let_go()
    command.wait()
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert command.code in (0, 1), command.err


def mount_point(case: Case) -> None:
    case.run = case.mount(case.box / "volume", "size=64m")
    case.is_watched = False


def linked_output(case: Case) -> None:
    (case.box / "empty").mkdir()
    case.run = case.box / "link"
    case.run.symlink_to(case.box / "empty")
    case.is_watched = False


def in_the_current_directory(case: Case) -> None:
    case.cwd = case.box / "here"
    case.cwd.mkdir()
    case.run, case.is_watched = case.cwd, False
    case.rlzoo(*case.training(Path()))


PLACES = [
    attack("moved", moved_to("elsewhere/run"), expect=DONE, quick=True),
    attack("renamed to have spaces and quotes", moved_to("my 'run' \"no 1\" [bold]x[/bold] %s {0}"), expect=DONE),
    attack("renamed in Unicode", moved_to("прогон-模型-🦊"), expect=DONE),
    attack("renamed to a name that is not UTF-8", moved_to(os.fsdecode(b"run-\xff\xfe"))),
    attack("resumed from another directory", from_elsewhere, expect=DONE, quick=True),
    attack("resumed through a link", lambda case: through_a_link(case), expect=DONE),
    attack("a parent that does not exist", named("a/b/c/run"), begin="nothing", then=("new",), expect=DONE),
    attack("output named in Unicode", named("прогон-🦊"), begin="nothing", then=("new",), expect=DONE),
    attack("output that is not UTF-8", named(os.fsdecode(b"run-\xff")), begin="nothing", then=("new",)),
    attack("output of 300 characters", named("x" * 300), begin="nothing", then=("new",), expect=REFUSED),
    attack("output in a file", lambda case: (case.plant("file"), named("file/run")(case)), begin="nothing", then=("new",), expect=REFUSED),
    attack("output that holds a file of the user's", lambda case: case.plant("run/thesis.tex"), begin="nothing", then=("new",), expect=REFUSED, same=False),
    attack("output that is a link to an empty folder", linked_output, begin="nothing", then=("new",)),
    attack("output that is the current directory", in_the_current_directory, begin="nothing", then=(), same=False),
]  # fmt: skip


def through_a_link(case: Case) -> None:
    (case.box / "link").symlink_to(case.run)
    case.is_watched = False
    assert case.rlzoo(*case.resuming(case.box / "link")).code == 0


ENVIRONMENT = [
    *(attack(f"{name}={value!r}", lambda case: None, fresh=name in READ_AT_THE_START, environment=((name, value),), same=name != "OMP_NUM_THREADS")
      for name, value in (
          ("OMP_NUM_THREADS", "abc"), ("OMP_NUM_THREADS", "-3"), ("RANK", "1"), ("WORLD_SIZE", "2"), ("RANK", "abc"),
          ("LOCAL_RANK", "7"), ("TERM", "dumb"), ("COLUMNS", "1"), ("COLUMNS", "abc"), ("LANG", "C"), ("PYTHONIOENCODING", "ascii"),
          ("HOME", None), ("HOME", "/nonexistent"), ("HOME", "/proc"), ("TMPDIR", "/nonexistent"), ("PYTHONOPTIMIZE", "2"),
          ("WORLD_SIZE", "many"), ("CUDA_VISIBLE_DEVICES", "abc"), ("RLZOO_PLUGINS", "nothing-of-this-name"), ("PYTHONHASHSEED", "7"), ("TZ", "Nowhere/Here"),
          ("FORCE_COLOR", "1"), ("HF_HUB_OFFLINE", "maybe"), ("ACCELERATE_MIXED_PRECISION", "fp16"), ("MASTER_PORT", "x"),
          ("ACCELERATE_USE_DEEPSPEED", "true"), ("MPLBACKEND", "nonsense"), ("PYTHONWARNINGS", "error"),
          ("RLZOO_LAUNCHER", "1"), ("PATH", ""),
      )),
    attack("a home that cannot be written", lambda case: read_only_home(case), fresh=True),
    attack("leftovers of a launcher", lambda case: None, environment=(("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")), fresh=True, seconds=60),
    attack("modules of Python's names in the current directory", poisoned, fresh=True, on="reward", expect=DONE),
    attack("the current directory deleted", cwd_deleted),
    attack("a clock that jumps by an hour", stopping_clock(3600), fresh=True, on="reward", expect=DONE),
    attack("a clock that jumps back by a day", stopping_clock(-86400), fresh=True, on="reward", expect=DONE),
    attack("stdout full", streams(stdout="/dev/full"), check=was_finished),
    attack("stderr full", streams(stderr="/dev/full"), check=was_finished),
    attack("| head -1", lambda case: shell(case, "RLZOO | head -1"), then=("resume",), begin="nothing", check=was_finished, expect=DONE),
    attack("--json | head -1", lambda case: shell(case, "RLZOO --json | head -1"), begin="nothing", expect=DONE),
    attack("in the background of a shell that exits", lambda case: shell(case, "RLZOO >/dev/null 2>&1 & sleep 3; exit"), begin="nothing", then=("resume",)),
]  # fmt: skip


def read_only_home(case: Case) -> None:
    home = case.mount(case.box / "home", "size=64k")
    subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
    case.environment["HOME"], case.is_watched = str(home), False


NINE, TERM, INT, STOP, CONT, HUP, QUIT = (
    signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGCONT, signal.SIGHUP, signal.SIGQUIT,
)  # fmt: skip
SIGNALS = [
    *(attack(f"kill -9 after {seconds} s", after_seconds(seconds, NINE), on="long", begin="nothing")
      for seconds in (0.05, 0.3, 0.6, 1.0, 1.5, 2.2)),
    *(attack(f"kill -9 at row {row}", at_row(row, NINE), on="long", begin="nothing") for row in (1, 2, 4, 9)),
    attack("kill -9 within a checkpoint", in_a_checkpoint(NINE), on="long", begin="nothing"),
    attack("kill -9 within a low-rank run", at_row(4, NINE), on="lora", begin="nothing"),
    attack("kill -9 within an adaptive run that samples ahead", at_row(4, NINE), on="adaptive", begin="nothing"),
    attack("kill -9 while resuming, eight times", killed_in_resume(8), on="plain"),
    *(attack(f"{name} after {seconds} s", after_seconds(seconds, number), on="long", begin="nothing")
      for name, number in (("Ctrl-C", INT), ("SIGTERM", TERM)) for seconds in (0.05, 0.4, 0.8)),
    attack("Ctrl-C in a step", at_row(4, INT), on="long", begin="nothing"),
    attack("Ctrl-C twice in a tenth of a second", at_row(4, INT, INT, pause=0.1), on="long", begin="nothing"),
    attack("Ctrl-C five times", at_row(4, *[INT] * 5, pause=0.02), on="long", begin="nothing"),
    attack("SIGTERM, then Ctrl-C", at_row(4, TERM, INT, pause=0.05), on="long", begin="nothing"),
    attack("Ctrl-C within a checkpoint", in_a_checkpoint(INT), on="long", begin="nothing"),
    attack("Ctrl-C three times within a checkpoint", in_a_checkpoint(INT, INT, INT, pause=0.01), on="long", begin="nothing"),
    attack("the terminal closed", terminal_closed, on="long", begin="nothing"),
    attack("SIGHUP in a step", at_row(4, HUP), on="long", begin="nothing"),
    attack("SIGTERM within a low-rank run", at_row(3, TERM), on="lora", begin="nothing"),
    attack("Ctrl-C twice at once in learning, once", twice_in_steps(INT, 1), on="plugin"),
    attack("Ctrl-C twice at once in learning, in three steps", twice_in_steps(INT, 3), on="plugin"),
    attack("SIGTERM twice at once in learning, in three steps", twice_in_steps(TERM, 3), on="plugin"),
    attack("Ctrl-C twice at once in grading, in three steps", twice_in_steps(INT, 3), on="reward"),
    attack("SIGSTOP and SIGCONT in a step", stopped_and_continued(4, 2), on="long", begin="nothing", expect=DONE),
    attack("SIGSTOP and SIGCONT in a checkpoint", stopped_in_a_checkpoint, on="long", begin="nothing", expect=DONE),
    attack("two resumes at once", two_at_once, expect=DONE),
    attack("the grading worker killed", lambda case: a_worker(case, NINE), on="reward", same=False),
    attack("the grading worker stopped and continued", lambda case: worker_stopped(case), on="reward"),
    attack("kill -9 of a run whose reward hangs", run_killed_in_a_reward, on="reward"),
    attack("kill -9 of rank 0 of two", of_two(0, NINE), kills_a_rank=True, on="two", begin="nothing", expect=DONE, same=False),
    attack("kill -9 of rank 1 of two", of_two(1, NINE), kills_a_rank=True, on="two", begin="nothing", expect=DONE, same=False),
    attack("kill -9 of the launcher of two", of_two(None, NINE), on="two", begin="nothing", expect=DONE, same=False),
    attack("SIGSTOP and SIGCONT of a rank of two", of_two(1, STOP, CONT, pause=3), on="two", begin="nothing", expect=DONE, same=False),
    attack("Ctrl-C to the launcher of two", of_two(None, INT), on="two", begin="nothing", expect=DONE, same=False),
    attack("a sweep killed with kill -9 while its runs go", sweep_stopped(NINE), then=SWEEP, expect=DONE, check=sweep_is_whole, seconds=150),
    attack("a sweep stopped with SIGTERM while its runs go", sweep_stopped(TERM), then=SWEEP, expect=DONE, check=sweep_is_whole, seconds=150),
    attack("a sweep stopped with Ctrl-C while its runs go", sweep_stopped(INT), then=SWEEP, expect=DONE, check=sweep_is_whole, seconds=150),
    attack("a run of a sweep killed", sweep_child_killed, then=SWEEP, expect=DONE, check=sweep_is_whole, seconds=150),
]  # fmt: skip


def worker_stopped(case: Case) -> None:
    """Stop a worker for a second, less than the time limit of an answer."""
    case.is_watched = False
    command = case.start(*case.resuming())
    case.reach(command, case.rows() + 1)
    case.hold(command)
    workers = [process for process in case.children() if process.pid != command.pid]
    for number in (STOP, CONT):
        for process in workers:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        case.let_go()
        time.sleep(1)
    command.wait(60)


TRACKING = [
    attack("mlflow.db deleted in the middle", store(lambda case, database: database.unlink(missing_ok=True)), on="mlflow", expect=DONE, then=("sync", "{run}")),
    attack("mlflow.db cut in two in the middle", store(lambda case, database: cut(database) if database.exists() else None), on="mlflow", then=("resume",)),
    attack("mlflow.db locked for a while", store(locked_store), on="mlflow", expect=DONE, then=("sync", "{run}")),
    attack("the tracking process killed", store(follower_killed), on="mlflow", expect=DONE, then=("sync", "{run}")),
    attack("the tracking folder missing", away("tracking"), on="mlflow"),
    attack("the tracking record of garbage", lambda case: [path.write_bytes(b"\xff{") for path in (case.run / "tracking").glob("*.json")], on="mlflow"),
    attack("MLFLOW_TRACKING_URI of no kind", lambda case: None, on="mlflow", environment=(("MLFLOW_TRACKING_URI", "gopher://x"),), expect=DONE),
    attack("MLFLOW_TRACKING_URI where nobody listens", lambda case: None, on="mlflow", environment=(("MLFLOW_TRACKING_URI", "http://127.0.0.1:1"),), expect=DONE),
    attack("a tracking server that drips", server("dripping"), on="mlflow", expect=DONE, then=("sync", "{run}"), seconds=150),
    attack("a tracking server that says nothing", server("silent"), on="mlflow", expect=DONE, then=("sync", "{run}"), seconds=150),
]  # fmt: skip

CODE = [
    attack("a reward that raises now and then", reward_that(one_in(4, "raise ValueError('no')"), "reward.max_failed=1"), on="reward", begin="nothing", then=(), same=False),
    attack("a reward that raises KeyboardInterrupt", reward_that(one_in(4, "raise KeyboardInterrupt"), "reward.max_failed=1"), on="reward", begin="nothing", then=(), same=False),
    attack("a reward that leaves", reward_that(one_in(4, "os._exit(3)"), "reward.max_failed=1"), on="reward", begin="nothing", then=(), same=False),
    attack("a reward that kills its parent's group", reward_that(one_in(4, "os.kill(os.getpid(), 9)"), "reward.max_failed=1"), on="reward", begin="nothing", then=(), same=False),
    attack("a reward that raises what cannot be pickled", reward_that("class Odd(Exception):\n    def __init__(self, a, b):\n        super().__init__(a)\n        self.f = lambda: 0\n" + one_in(4, "raise Odd(1, 2)"), "reward.max_failed=1"), on="reward", begin="nothing", then=(), same=False),
    attack("a reward that prints", reward_that("def reward(problem, response):\n    print('x' * 100)\n    os.write(1, b'raw')\n    os.system('echo shell')\n    return len(response) / 10"), on="reward", begin="nothing", then=(), same=False),
    attack("a reward that hangs now and then", reward_that(one_in(7, "time.sleep(3600)"), "reward.max_failed=1", "task.timeout=0.2"), on="reward", begin="nothing", then=(), same=False),
    attack("a reward that forks", reward_that(one_in(4, "os.fork() or time.sleep(3600)"), "reward.max_failed=1", "task.timeout=0.2"), on="reward", begin="nothing", then=(), same=False),
    attack("a reward of NaN", reward_that("def reward(problem, response):\n    return float('nan')", code=1), on="reward", begin="nothing", then=(), same=False),
    attack("a reward that eats memory", reward_that(one_in(4, "x = bytearray(2**30)"), "reward.max_failed=1", "task.timeout=10"), on="reward", begin="nothing", then=(), same=False),
    attack("a reward that ignores SIGTERM and hangs", reward_that("import signal\n" + one_in(4, "signal.signal(15, signal.SIG_IGN); time.sleep(3600)"), "reward.max_failed=1", "task.timeout=0.2"), on="reward", begin="nothing", then=(), same=False),
    attack("the reward's file deleted before resuming", lambda case: (case.box / "my_reward.py").unlink(), on="reward", expect=REFUSED),
    attack("the reward's file with a syntax error", lambda case: (case.box / "my_reward.py").write_text("def reward(:"), on="reward", expect=REFUSED),
    attack("the plugin deleted before resuming", lambda case: (case.box / "my_rule.py").unlink(), on="plugin"),
    attack("the plugin's default changed before resuming", edited_rule, on="plugin"),
    attack("the plugin's formula changed before resuming", other_formula, on="plugin", says="my_rule"),
    attack("the plugin with a syntax error", lambda case: (case.box / "my_rule.py").write_text("class ("), on="plugin", expect=REFUSED),
    attack("the plugin given again", lambda case: None, on="plugin", then=("resume", "--plugin", "my_rule.py"), expect=DONE),
    attack("a comment added to the plugin", lambda case: case.edit(case.box / "my_rule.py", lambda text: text + b"\n# a comment\n"), on="plugin"),
    attack("--plugin . with the output inside", lambda case: None, on="plugin", begin="nothing", then=("new", "--plugin", "."), seconds=60, same=False),
    attack("the data changed", edited("problems.jsonl", '"answer": "7"', '"answer": "8"'), on="data", expect=REFUSED),
    attack("the data in another order", lambda case: case.edit(case.box / "problems.jsonl", lambda text: b"".join(text.splitlines(True)[::-1])), on="data", expect=REFUSED),
    attack("the data deleted", lambda case: (case.box / "problems.jsonl").unlink(), on="data", expect=REFUSED),
    attack("the data with a line of garbage", lambda case: case.edit(case.box / "problems.jsonl", lambda text: text + b"\xff\x00{\n"), on="data", expect=REFUSED),
    attack("a question with characters that the model lacks", lambda case: case.edit(case.box / "problems.jsonl", lambda text: text.replace(b"1+1", "☃+1".encode())), on="data", begin="nothing", then=("new",), same=False),
]  # fmt: skip

COMMANDS = [
    attack("eval of a folder that is missing", lambda case: None, then=("eval", "{box}/missing", *EVALUATE[2:]), expect=REFUSED),
    attack("eval of a file", lambda case: case.plant("model.bin"), then=("eval", "{box}/model.bin", *EVALUATE[2:]), expect=REFUSED),
    attack("eval of a run", lambda case: None, then=EVALUATE, expect=DONE),
    attack("eval of a low-rank run", lambda case: None, then=EVALUATE, expect=DONE, on="lora"),
    attack("eval of a run without checkpoints", away("checkpoints"), then=EVALUATE, expect=REFUSED),
    attack("eval of weights that were cut off", lambda case: [cut(path) for path in case.run.glob("checkpoints/*/model.safetensors")], then=EVALUATE, expect=REFUSED),
    attack("eval of weights that are NaN", nan_weights, then=EVALUATE),
    attack("eval with a suite of no name", lambda case: None, then=("eval", "{run}", "--suite", "nothing", "--no-mlflow"), expect=REFUSED),
    attack("eval with a suite file of garbage", lambda case: case.plant("data/arithmetic.jsonl", b"\xff\x00"), then=(*EVALUATE, "--data", "{box}/data"), expect=REFUSED),
    attack("eval into a file", lambda case: case.plant("evaluation"), then=EVALUATE, expect=REFUSED),
    attack("eval into a folder of the user's", lambda case: case.plant("evaluation/thesis.tex"), then=EVALUATE),
    attack("eval into the run directory", lambda case: None, then=(*EVALUATE[:-1], "{run}"), expect=REFUSED),
    attack("eval killed and started again", evaluation_killed, then=EVALUATE, expect=DONE),
    attack("eval twice", an_evaluation, then=EVALUATE, expect=DONE),
    attack("eval again after its completions were cut off", evaluation_with("*.jsonl", cut), then=EVALUATE),
    attack("eval again after garbage was appended", evaluation_with("*.jsonl", grown), then=EVALUATE),
    attack("replay of a run", lambda case: None, then=REPLAY, expect=DONE),
    attack("replay of a folder that is missing", lambda case: None, then=("replay", "{box}/missing", "--clip", "gspo"), expect=REFUSED),
    attack("replay without rollouts", away("rollouts"), then=REPLAY, expect=REFUSED),
    attack("replay of rollouts that were cut off", lambda case: cut(case.run / "rollouts/000002.safetensors"), then=REPLAY),
    attack("replay with a note among the rollouts", lambda case: case.plant("run/rollouts/notes.safetensors"), then=REPLAY),
    attack("replay with a report over a file of the user's", lambda case: case.plant("replay.html"), then=REPLAY, expect=REFUSED, says="is not an rlzoo report"),
    attack("compare with a report over a file of the user's", lambda case: case.plant("compare.html"), then=COMPARE, begin="finished", expect=REFUSED, says="is not an rlzoo report"),
    attack("replay with a report over a folder", lambda case: (case.box / "replay.html").mkdir(), then=REPLAY, expect=REFUSED),
    attack("replay onto a full disk", lambda case: (case.mount(case.box / "disk", "size=4k")), then=(*REPLAY[:-1], "{box}/disk/replay.html")),
    attack("compare of a run", lambda case: None, then=COMPARE, begin="finished", expect=DONE),
    attack("compare of a run without metrics", away("metrics.jsonl"), then=COMPARE),
    attack("compare of metrics that are garbage", lambda case: grown(case.run / "metrics.jsonl"), then=COMPARE),
    attack("sync of a run that was never tracked", lambda case: None, then=("sync", "{run}"), expect=REFUSED),
    attack("sync of a folder that is missing", lambda case: None, then=("sync", "{box}/missing"), expect=REFUSED),
    attack("sync of a file", lambda case: case.plant("file"), then=("sync", "{box}/file"), expect=REFUSED),
    attack("sync of a tracked run", lambda case: None, on="mlflow", then=("sync", "{run}"), expect=DONE),
    attack("ui for everybody", lambda case: None, then=("ui", "--host", "0.0.0.0"), expect=REFUSED),
    attack("ui at no address", lambda case: None, then=("ui", "--host", "no.such.host.invalid"), expect=REFUSED),
    attack("ui with its checks switched off", lambda case: None, then=("ui",), environment=(("MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE", "true"),), expect=REFUSED),
    attack("calibrate over a file of the user's", lambda case: case.plant("mine.yaml"), then=("calibrate", "--clip", "fspo", "--output", "{box}/mine.yaml"), expect=REFUSED),
    attack("a sweep in a run directory", lambda case: None, then=(*SWEEP[:8], "{run}", *SWEEP[9:]), expect=REFUSED),
    attack("a sweep beside files of the user's", lambda case: [case.plant(f"sweep/{name}") for name in ("thesis.tex", "logs/mine.txt", "fspo-1/mine.txt")], then=SWEEP, check=sweep_is_whole, expect=DONE, seconds=150),
    attack("a sweep where a run's place is taken", lambda case: case.plant("sweep/fspo-0/mine.txt"), then=SWEEP, seconds=150),
    attack("train over the run", lambda case: None, then=("new",), expect=REFUSED, quick=True),
    attack("resume with another learning rate", lambda case: None, then=("resume", "--set", "learner.lr=0.5"), expect=REFUSED),
    attack("resume with fewer steps than are done", lambda case: None, then=("resume", "--steps", "1")),
    attack("resume without an output", lambda case: None, then=("train", "--resume"), expect=REFUSED),
    attack("resume of an empty folder", lambda case: (case.box / "empty").mkdir(), then=("train", "--resume", "--output", "{box}/empty"), expect=REFUSED),
    attack("resume with a dry run", lambda case: None, then=("resume", "--dry-run"), expect=DONE),
]  # fmt: skip

ATTACKS: list[Attack] = [*RUN_DIRECTORY, *CHECKPOINTS, *DISKS, *PLACES, *ENVIRONMENT, *SIGNALS, *TRACKING, *CODE, *COMMANDS]
assert all(attack.on in VARIANTS for attack in ATTACKS)
