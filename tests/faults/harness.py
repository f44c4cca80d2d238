"""Attacks on runs, and the laws that hold after each of them.

An attack damages a copy of a prepared run, or runs commands in a hostile way. `judge` then runs the next command and checks
every law. The sandbox always has the same path, because a run's configuration contains absolute paths.

Laws for every attack:
    - A command exits with 0, 1, 2, 130 or 143, in time, in bounded memory and without a traceback; an error is one line.
    - Files that rlzoo did not write are neither changed nor deleted.
    - The newest resumable checkpoint, and metrics and rollouts up to its step, are still in the run directory.
    - The run then finishes with the metrics, rollouts and weights of the uninterrupted run, bit for bit. If a command reported
      an error, it does so once the damage is undone.
    - No process survives, and there is no partial output next to the run directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.training.short import lines, without_times
from tests.zygote import Zygote

ALLOWED = (0, 1, 2, 130, 143)
MARKER = "RLZOO_ATTACKED_BY"
MEMORY = 2 * 2**30
"""Memory limit of a command in bytes; a run of the embedded model takes 0.6 GB."""
PATIENCE = 20.0
"""Time limit in seconds for the processes of a command to exit after it."""

STEPS, EVERY = 8, 2
DONE, REFUSED, EITHER = "done", "refused", "either"
SMALL = ("rollout.num_prompts=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "eval.num_problems=0",
         "learner.lr=1e-3", "learner.num_minibatches=2", f"checkpoint.every={EVERY}", "tracking.mlflow=false")  # fmt: skip

REWARD = """\
import time
from pathlib import Path

GATE = Path(__file__).with_name("gate")


def reward(problem, response):
    while GATE.exists():  # closed by an attack, to hold a run within a step
        time.sleep(0.01)
    return float(response.strip()[:1] == problem.answer[:1]) + len(response) / 100
"""
RULE = """\
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlzoo import ClipPolicy, Width, hookimpl, ops


GATE = Path(__file__).with_name("gate")


class MyRule(ClipPolicy):
    name = "my-rule"
    paper = "none"
    scope = "sequence"
    width: Annotated[float, Width()] = Field(0.01, gt=0, description="half-width of the band")

    def __call__(self, inputs):
        while GATE.exists():
            time.sleep(0.01)
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ops.ratio_band(self.width, self.width, None, like=log_ratio))


@hookimpl
def rlzoo_clip_policies():
    return [MyRule]
"""


@dataclass(frozen=True)
class Variant:
    """A kind of run to attack: its arguments for ``rlzoo train``, and the user's files that it needs."""

    settings: tuple[str, ...] = ()
    task: tuple[str, ...] = ("task.num_operands_max=3",)
    words: tuple[str, ...] = ()
    clip: str = "fspo"
    steps: int = STEPS
    files: dict[str, str] = field(default_factory=dict)


def some_problems(first: int) -> str:
    return "".join(
        json.dumps({"question": f"{a}+{b}", "answer": str(a + b)}) + "\n" for a in range(first, 10) for b in range(10)
    )


VARIANTS = {
    "plain": Variant(),
    "adaptive": Variant(("learner.schedule=cosine", "learner.kl_coef=0.01", "rollout.max_staleness=1"), clip="fspo-adaptive"),
    "long": Variant(("rollout.num_prompts=8", "rollout.group_size=8", "checkpoint.every=3"), steps=24),
    "lora": Variant(("learner.lora.rank=4",)),
    "mlflow": Variant(("tracking.mlflow=true",)),
    "reward": Variant(("task.reward=my_reward:reward", "task.timeout=60"), files={"my_reward.py": REWARD}),
    "plugin": Variant(words=("--plugin", "my_rule.py"), clip="my-rule", files={"my_rule.py": RULE}),
    "data": Variant(
        task=("task.name=math_file", "task.path=problems.jsonl", "task.template='{question}='", "task.reward=my_reward:reward"),
        files={"problems.jsonl": some_problems(0), "my_reward.py": REWARD},
    ),
    "two": Variant(words=("--processes", "2")),
}


@dataclass(frozen=True)
class Attack:
    """One attack: its effect on a case, and the expected result of the next command.

    Example:
        ``attack("a text file in checkpoints", lambda case: case.plant("run/checkpoints/notes.txt"), expect=DONE)``
    """

    name: str
    do: Callable[[Case], object]
    then: tuple[str, ...] = (
        "resume",
    )  # words of the command; "resume", "again" and "new" mean `rlzoo train`; () for no command
    expect: str = EITHER
    says: str = ""  # a regular expression that the output must match
    on: str = "plain"  # the variant
    beside: tuple[str, ...] = ()  # further variants whose runs it needs
    begin: str = "stopped"  # "stopped", "finished", or "nothing"
    quick: bool = False  # part of the ordinary suite
    environment: tuple[tuple[str, str | None], ...] = ()
    fresh: bool = False  # a new interpreter, for attacks on its start-up
    seconds: float = 90.0
    # the launcher then exits with 137, and others may print a traceback of the communication library
    kills_a_rank: bool = False
    same: bool = True  # the run ends like the uninterrupted one
    check: Callable[[Case, Command], str | None] = lambda case, command: None  # one more law; returns what is wrong


class Command:
    """A command that is running or has ended."""

    def __init__(self, case: Case, words: Sequence[str], pid: int, look: Callable[[int], list[int] | None]) -> None:
        self.case, self.words, self.pid, self._look = case, list(words), pid, look
        self.code: int | None = None
        self.memory = 0
        self.files: tuple[Path | None, Path | None] = (None, None)

    def poll(self) -> int | None:
        if self.code is None and (found := self._look(self.pid)) is not None:
            self.code, self.memory = found
        return self.code

    def wait(self, seconds: float = 90.0) -> Command:
        until = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > until:
                self.kill()
                raise AssertionError(f"{self.words} still ran after {seconds:.0f} s; it printed: {self.err[-1500:]}")
            time.sleep(0.005)
        return self

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """``kill -9`` only this process."""
        self.signal(signal.SIGKILL)
        self.wait(20)

    @property
    def out(self) -> str:
        return self._printed(0)

    @property
    def err(self) -> str:
        return self._printed(1)

    def _printed(self, index: int) -> str:
        file = self.files[index]
        return file.read_text(errors="replace") if file is not None and file.exists() else ""  # it may not exist yet


class Case:
    """The sandbox of one attack: the current directory of its commands, with the run directory ``run`` in it."""

    def __init__(self, zygote: Zygote, box: Path, variant: Variant) -> None:
        self.zygote, self.box, self.variant = zygote, box, variant
        self.run = box / "run"
        self.commands: list[Command] = []
        self.environment: dict[str, str] = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RLZOO_", "PYTHON", "PYTEST_", "COV_", "MLFLOW_"))
        }
        self.environment |= {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "MLFLOW_TRACKING_URI": f"sqlite:///{box}/mlflow.db",
            MARKER: str(box),
        }
        self.limits: dict[str, int] = {}
        self.stdin = os.devnull
        self.stdout = self.stderr = ""  # "": a file
        self.cwd = box
        self.fresh = False
        self.seconds = 90.0
        self.said: list[str] = []
        self.damaged: list[Path] = []  # prepared files that the attack has changed
        self.given_up: set[str] = set()  # rollout files that the attack has deleted
        self.planted: dict[Path, str] = {}
        self.mounted: list[Path] = []
        self.is_watched = True  # everything that an attack adds belongs to the user
        self.obstacles: list[Callable[[], object]] = []
        self.logs = box.parent / "logs"

    # building blocks of attacks

    def plant(self, name: str, content: bytes | str = b"mine\n") -> Path:
        """Write a file of the user, relative to the sandbox."""
        path = self.box / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.planted[path] = description(path)
        return path

    def mine(self, path: Path) -> Path:
        """Register a path and everything below it as the user's."""
        for each in [path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())]:
            self.planted[each] = description(each)
        return path

    def take_away(self, path: Path) -> None:
        """Remove something, as a user would to get it out of the way; it is not expected to remain."""
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for planted in [each for each in self.planted if each.is_relative_to(path)]:
            del self.planted[planted]

    def newest(self) -> Path:
        """The newest checkpoint."""
        return sorted(self.run.glob("checkpoints/step-*"))[-1]

    def edit(self, name: str | Path, change: Callable[[bytes], bytes]) -> None:
        """Change a file's bytes."""
        path = self.run / name
        path.write_bytes(change(path.read_bytes()))

    def mount(self, path: Path, options: str) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "rlzoo-attack", str(path)], check=True)
        self.mounted.append(path)
        return path

    def move(self, target: str | Path) -> Path:
        """Rename the run directory."""
        target = self.box / target
        target.parent.mkdir(parents=True, exist_ok=True)
        self.run.rename(target)
        before, self.run, self.is_watched = self.run, target, False

        def back() -> None:
            target.rename(before)
            self.run = before

        self.undone_by(back)
        return target

    def hold(self, command: Command) -> None:
        """Hold a run of variant ``reward`` in grading, or one of ``plugin`` in learning, until `let_go`."""
        (self.box / "gate").touch()
        rows = -1
        while command.poll() is None and rows != self.rows():
            rows = self.rows()
            time.sleep(0.6)

    def let_go(self) -> None:
        (self.box / "gate").unlink(missing_ok=True)

    def undone_by(self, action: Callable[[], object]) -> None:
        """What the user does after an error, in addition to restoring the run directory."""
        self.obstacles.append(action)

    # commands

    def training(self, path: Path | None = None, steps: int | None = None) -> list[str]:
        settings = [word for setting in (*SMALL, *self.variant.task, *self.variant.settings) for word in ("--set", setting)]
        words = ["train", "--clip", self.variant.clip, "--steps", str(steps or self.variant.steps), *self.variant.words]
        return [*words, *settings, "--output", str(path or self.run)]

    def resuming(self, path: Path | None = None) -> list[str]:
        return ["train", "--resume", "--output", str(path or self.run)]

    def words(self, then: Sequence[str]) -> list[str]:
        if then[0] == "new":
            return [*self.training(), *then[1:]]
        if then[0] == "resume":
            return [*self.resuming(), *then[1:]]
        return [word.replace("{run}", str(self.run)).replace("{box}", str(self.box)) for word in then]

    def start(self, *words: str) -> Command:
        """Start a command."""
        number = len(self.commands)
        self.logs.mkdir(exist_ok=True)
        files = [self.stdin]
        kept: list[Path | None] = []
        for stream, name in ((self.stdout, "out"), (self.stderr, "err")):
            file = self.logs / f"{number}.{name}" if stream == "" else None
            kept.append(file)
            files.append(str(file) if file else stream)
        if self.fresh:
            pid, look = self._new_interpreter(words, files)
        else:
            request = {"words": words, "files": files, "environment": self.environment, "folder": str(self.cwd)}
            pid, look = self.zygote.ask(request | {"limits": self.limits}), self.zygote.look
        command = Command(self, words, pid, look)
        command.files = (kept[0], kept[1])
        self.commands.append(command)
        return command

    def _new_interpreter(self, words: Sequence[str], files: Sequence[str]) -> tuple[int, Callable[[int], list[int] | None]]:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(open(file, mode)) for file, mode in zip(files, ("rb", "ab", "ab"), strict=True)]
            # a shell's background job starts with Ctrl-C ignored
            command = ["env", "--default-signal=INT", str(Path(sys.executable).parent / "rlzoo"), *words]
            process = subprocess.Popen(
                command, stdin=opened[0], stdout=opened[1], stderr=opened[2], env=self.environment, cwd=self.cwd,
                start_new_session=True,
            )  # fmt: skip

        def look(pid: int) -> list[int] | None:
            found, status, usage = os.wait4(pid, os.WNOHANG)
            if not found:
                return None
            process.returncode = os.waitstatus_to_exitcode(status)
            return [process.returncode, usage.ru_maxrss * 1024]

        return process.pid, look

    def rlzoo(self, *words: str) -> Command:
        """Run a command to completion."""
        return self.start(*words).wait(self.seconds)

    def resume(self) -> Command:
        return self.rlzoo(*self.resuming())

    def rows(self, path: Path | None = None) -> int:
        file = (path or self.run) / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if os.path.isfile(file) else 0

    def reach(self, command: Command, rows: int, path: Path | None = None) -> bool:
        """Wait until this many rows are written; returns False if the command ended before."""
        until = time.monotonic() + self.seconds
        while self.rows(path) < rows and command.poll() is None and time.monotonic() < until:
            time.sleep(0.001)
        return command.poll() is None

    def within_a_checkpoint(self, command: Command, path: Path | None = None) -> bool:
        """Wait until a checkpoint is being written."""
        folder, until = (path or self.run) / "checkpoints", time.monotonic() + self.seconds
        while command.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError):
                if any(name.startswith(".step-") for name in os.listdir(folder)):
                    return True
        return False

    # observations

    def children(self) -> list[psutil.Process]:
        """Return processes that this case's commands started, by the marker in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARKER) == str(self.box) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        alive = [command.pid for command in self.commands if command.poll() is None]
        return [*found, *(psutil.Process(pid) for pid in alive)]

    def clean(self) -> None:
        """Remove what an attack left: mounts, attributes and processes."""
        self.let_go()
        subprocess.run(["chattr", "-R", "-f", "-i", "-a", str(self.box)], check=False, capture_output=True)
        for process in self.children():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for command in self.commands:
            with contextlib.suppress(AssertionError):
                command.wait(20)
        for path in reversed(self.mounted):
            subprocess.run(["umount", "-l", str(path)], check=False)


def description(path: Path) -> str:
    """Return a description of a path that shows whether it was changed."""
    try:
        found = path.lstat()
    except OSError:
        return "missing"
    if stat.S_ISLNK(found.st_mode):
        return f"link to {os.readlink(path)}"
    if stat.S_ISREG(found.st_mode):
        return f"file {hashlib.sha256(path.read_bytes()).hexdigest()}" if found.st_size < 2**26 else f"file of {found.st_size}"
    return f"{stat.S_IFMT(found.st_mode):o}"


def contents(folder: Path) -> dict[Path, str]:
    """Return everything below a folder, without following links."""
    return {path: description(path) for path in walked(folder)}


def walked(folder: Path) -> Iterable[Path]:
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(where) / name


def resumable(run: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run: they have all files of the manifest, unchanged."""
    if not os.path.isdir(run / "checkpoints"):
        return []
    return sorted(
        int(folder.name[5:]) for folder in run.glob("checkpoints/step-[0-9][0-9][0-9][0-9][0-9][0-9]") if is_whole(folder)
    )


def is_whole(folder: Path) -> bool:
    if not (folder / "manifest.json").is_file():
        return False
    try:
        files = json.loads((folder / "manifest.json").read_text())
        names = {"state/state.json", "model.safetensors"}
        return names <= files.keys() and all(
            (folder / name).is_file() and hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
            for name, digest in files.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def recorded(run: Path, until: int) -> set[str]:
    """Return what is kept of the steps up to ``until``: rows of metrics and rollouts, anywhere in the run directory."""
    found = set()
    for path in walked(run):
        is_metrics = path.name.startswith("metrics") and ".jsonl" in path.name
        if is_metrics and path.is_file() and not path.is_symlink() and path.stat().st_size < 2**26:
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= until:
                        found.add(f"row of step {row['step']}: {hashlib.sha256(line.encode()).hexdigest()[:12]}")
        if path.is_file() and re.fullmatch(r"[0-9]{6}\.(jsonl|safetensors)", path.name) and int(path.name[:6]) <= until:
            found.add(f"{path.name}: {description(path)}")
    return found


def problems_of(case: Case, command: Command, *, kills_a_rank: bool = False) -> list[str]:
    """Check the laws on how a command ended."""
    if kills_a_rank and command.code == 128 + signal.SIGKILL:
        return [] if "was killed (SIGKILL)" in command.err else ["does not name the process that was killed"]
    words = " ".join(word for word in command.words[:2] if not word.startswith("/"))
    found = []
    if command.code not in ALLOWED:
        found.append(f"{words} ended with {command.code}")
    if "Traceback (most recent call last)" in command.err:
        found.append(f"{words}: traceback: {command.err.strip().splitlines()[-1][:300]}")
    told = [line for line in command.err.splitlines() if line.startswith("rlzoo: ")]
    if command.code == 2 and command.files[1] is not None and len(told) != 1:
        found.append(f"{words}: refused in {len(told)} lines: {command.err[-600:]}")
    if command.memory > MEMORY:
        found.append(f"{words} held {command.memory / 2**30:.1f} GB")
    return found


def left_over(case: Case) -> list[str]:
    """Return the processes that still exist after a grace period."""
    until = time.monotonic() + PATIENCE
    while (alive := case.children()) and time.monotonic() < until:
        time.sleep(0.1)
    found = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            found.append(f"process left: {' '.join(process.cmdline())[:200]}")
    return found


def says_finished(run: Path) -> bool:
    """Whether ``summary.json`` says that the run is finished."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(json.loads((run / "summary.json").read_text()).get("finished"))
    return False


def changed(case: Case) -> list[str]:
    """Return the user's files that have changed."""
    found = {path.relative_to(case.box): description(path) for path, what in case.planted.items() if description(path) != what}
    return [f"{path}, which is the user's, is changed: {what[:20]}" for path, what in found.items()][:3]


def same(run: Path, whole: Path, steps: int, given_up: Iterable[str] = ()) -> list[str]:
    """Return how a run differs from the uninterrupted one."""
    try:
        rows, expected = lines(run / "metrics.jsonl"), lines(whole / "metrics.jsonl")
    except (OSError, ValueError) as error:
        return [f"metrics cannot be read: {error}"]
    if [row["step"] for row in rows] != list(range(steps + 1)):
        return [f"metrics hold steps {[row['step'] for row in rows]}"]
    pairs = zip(without_times(rows), without_times(expected), strict=True)
    found = [f"metrics differ at step {ours['step']}" for ours, theirs in pairs if ours != theirs][:1]
    newest = f"checkpoints/step-{steps:06d}"
    names = [f"{newest}/model.safetensors", f"{newest}/state/optimizer.safetensors", f"{newest}/clip.json"]
    names += [f"rollouts/{path.name}" for path in sorted((whole / "rollouts").iterdir()) if path.name not in given_up]
    if not json.loads((run / "summary.json").read_text()).get("finished"):
        found.append("summary.json says that it is not finished")
    return [*found, *(f"{name} differs" for name in names if description(run / name) != description(whole / name))][:4]


class Range:
    """Runs the attacks: keeps the prepared runs, and copies one into the sandbox for each attack."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        self.folder, self.box, self.zygote = folder, folder / "box", zygote
        self._prepared: set[str] = set()

    def _lay_out(self, template: Path | None, name: str) -> Case:
        shutil.rmtree(self.box, ignore_errors=True)
        shutil.rmtree(self.folder / "logs", ignore_errors=True)
        if template is None:
            self.box.mkdir()
            for file, text in VARIANTS[name].files.items():
                (self.box / file).write_text(text)
        else:
            shutil.copytree(template, self.box, symlinks=True)
        return Case(self.zygote, self.box, VARIANTS[name])

    def template(self, name: str, state: str) -> Path:
        return self.folder / f"{name}-{state}"

    def prepare(self, name: str) -> None:
        """Make the uninterrupted run, and the one that was stopped half-way."""
        if name in self._prepared:
            return
        steps = VARIANTS[name].steps
        case = self._lay_out(None, name)
        command = case.start(*case.training()).wait(240)
        assert command.code == 0, command.err[-3000:]
        assert left_over(case) == []
        self.box.rename(self.template(name, "finished"))
        for _ in range(10):
            case = self._lay_out(None, name)
            command = case.start(*case.training())
            case.reach(command, steps // 2)
            command.signal(signal.SIGTERM)
            command.wait(240)
            done = case.rows() - 1
            if command.code == 143 and steps // 2 - 1 <= done < steps - 1:
                break
        else:
            raise AssertionError(f"cannot stop a run half way: {command.code} {command.err[-2000:]}")
        assert len(resumable(case.run)) == 2
        assert left_over(case) == []
        self.box.rename(self.template(name, "stopped"))
        self._prepared.add(name)

    def begin(self, attack: Attack) -> Case:
        """Make a case for an attack."""
        for name in (*attack.beside, *((attack.on,) if attack.begin != "nothing" or attack.same else ())):
            self.prepare(name)
        case = self._lay_out(None if attack.begin == "nothing" else self.template(attack.on, attack.begin), attack.on)
        for name, value in attack.environment:
            if value is None:
                case.environment.pop(name, None)
            else:
                case.environment[name] = value.replace("{box}", str(self.box))
        case.fresh, case.seconds = attack.fresh, attack.seconds
        return case

    def judge(self, attack: Attack) -> None:
        """Attack, run the next command, and check the laws.

        Raises:
            AssertionError: lists every broken law.
        """
        case = self.begin(attack)
        try:
            broken = self._broken_laws(attack, case)
            printed = [
                f"$ {' '.join(each.words)[-160:]} -> {each.code}: {' | '.join(each.err.splitlines()[-3:])[-500:]}"
                for each in case.commands
            ]
            assert not broken, "\n".join(["", *broken, *printed])
        finally:
            case.clean()

    def _broken_laws(self, attack: Attack, case: Case) -> list[str]:
        whole = self.template(attack.on, "finished") / "run"
        prepared = contents(self.box)
        newest = max(resumable(case.run), default=None)
        attack.do(case)
        if case.is_watched and not case.commands:
            for path, what in contents(self.box).items():
                is_temporary = any(name.endswith(".part") for name in path.relative_to(self.box).parts)
                if prepared.get(path) is None and not is_temporary:
                    case.planted.setdefault(path, what)
        case.damaged = [path for path, what in prepared.items() if case.is_watched and description(path) != what]
        case.given_up = {
            path.name for path in prepared if path.parent.name == "rollouts" and os.path.isdir(case.run) and not path.exists()
        }
        usable = [step for step in resumable(case.run) if newest is None or step <= newest or case.commands]
        kept = recorded(case.run, max(usable)) if usable else set()
        standing = set(walked(self.box))
        broken: list[str] = []
        command = case.rlzoo(*case.words(attack.then)) if attack.then else case.commands[-1]
        for each in case.commands:
            broken += problems_of(case, each, kills_a_rank=attack.kills_a_rank) if each.code != -signal.SIGKILL else []
        said = command.out + command.err
        if attack.says and not re.search(attack.says, said):
            broken.append(f"does not say {attack.says!r}")
        if attack.expect == DONE and command.code != 0:
            broken.append(f"ended with {command.code}, not with 0")
        if attack.expect == REFUSED and command.code not in (1, 2):
            broken.append(f"ended with {command.code}, not refused")
        if command.code == 2 and attack.begin == "nothing" and not case.mounted:
            new = [str(path.relative_to(self.box)) for path in walked(self.box) if path not in standing]
            broken += [f"refused, and wrote {name}" for name in new if not name.startswith(("mlflow.db", "__pycache__"))][:2]
        if attack.then[:1] in (("resume",), ("new",)) and command.code == 0 and "--dry-run" not in attack.then:
            broken += [] if says_finished(case.run) else ["ended with 0, and summary.json does not say that it is finished"]
        broken += [wrong] if (wrong := attack.check(case, command)) else []
        broken += self._kept(case, usable, kept)
        if not attack.same:
            pass
        elif os.path.isfile(case.run / "config.yaml") or attack.begin != "nothing" or command.code != 0:
            broken += changed(case)
            broken += self._ends_well(attack, case, command, whole, prepared)
        broken += changed(case)
        broken += [f"left behind: {path.name}" for path in self.box.glob(".*.part*") if path not in standing]
        return list(dict.fromkeys([*broken, *left_over(case)]))

    def _kept(self, case: Case, usable: Sequence[int], kept: set[str]) -> list[str]:
        """Check that everything that could be resumed before the command can still be resumed."""
        if not usable:
            return []
        if max(resumable(case.run), default=-1) < max(usable):
            return [f"the checkpoint of step {max(usable)} is gone; there are {resumable(case.run)}"]
        lost = kept - recorded(case.run, max(usable))
        return [f"{len(lost)} records lost, such as {min(lost)}"] if lost else []

    def _ends_well(self, attack: Attack, case: Case, command: Command, whole: Path, prepared: dict[Path, str]) -> list[str]:
        """Check that the run ends like the uninterrupted one; after an error, once the damage is undone."""
        if command.code != 0:
            self._undo(attack, case, prepared)
        case.environment = {**case.environment, **{"HOME": os.environ.get("HOME", "/root"), "OMP_NUM_THREADS": "1"}}
        for name, _ in attack.environment:
            if name in os.environ:
                case.environment[name] = os.environ[name]
            elif name not in ("MLFLOW_TRACKING_URI", MARKER):
                case.environment.pop(name, None)
        case.limits, case.stdin, case.stdout, case.stderr, case.cwd = {}, os.devnull, "", "", self.box
        case.fresh = False
        if self._is_complete(case) and command.code == 0:
            return same(case.run, whole, case.variant.steps, case.given_up)
        if os.path.isfile(case.run / "config.yaml"):
            final = case.rlzoo(*case.resuming())
            if final.code != 0 and command.code == 0:  # a command that did not check the damaged files
                self._undo(attack, case, prepared)
                final = case.rlzoo(*case.resuming())
        else:
            case.run = self.box / "run"
            final = case.rlzoo(*case.training())
        if final.code != 0:
            return [f"cannot be resumed afterwards: {final.err.strip()[-600:]}"]
        return [*problems_of(case, final), *same(case.run, whole, case.variant.steps, case.given_up)]

    def _is_complete(self, case: Case) -> bool:
        return says_finished(case.run) and case.rows() > case.variant.steps

    def _undo(self, attack: Attack, case: Case, prepared: dict[Path, str]) -> None:
        """Restore what the attack removed or changed, and remove what it put in rlzoo's way."""
        for action in case.obstacles:
            action()
        if attack.begin == "nothing":
            return
        case.given_up = set()
        template = self.template(attack.on, attack.begin)
        for path in case.damaged:
            if description(path) == prepared[path]:
                continue
            relative = path.relative_to(self.box)
            if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and (template / relative).is_dir()):
                case.take_away(path)
            if (template / relative).is_dir():
                path.mkdir(parents=True, exist_ok=True)
            elif not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(template / relative, path)


def attack(name: str, do: Callable[[Case], object], **details: object) -> Attack:
    """Make one attack; see `Attack`."""
    return Attack(name, do, **details)
