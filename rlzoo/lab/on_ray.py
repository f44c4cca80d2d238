"""Trains the runs of a sweep on a Ray cluster, copying their directories back while they train."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlzoo.core.errors import RunError, UserError, one_line
from rlzoo.core.plugin_files import plugin_files
from rlzoo.gate.fingerprint import user_files
from rlzoo.journal.checkpoints import discard, own_state
from rlzoo.journal.state import identity
from rlzoo.journal.tracking.uploads import SWEEP, tracking_uri
from rlzoo.lab.sweep import POLL, Child, Ended, Look, log_of
from rlzoo.models.machine import LAUNCHER
from rlzoo.support.atomic import replacing, temporary_path
from rlzoo.support.extras import require_extra

RUN = "run"  # run directory on a worker
TRIES = 3  # maximum number of times that a run is started; it is restarted if its node is lost
LONGEST_END = 600.0  # seconds that the runs have for saving and exiting after Ctrl-C or SIGTERM
FILES = dict[str, bytes]  # by relative path

logger = logging.getLogger("rlzoo")


class Runner:
    """A Ray actor that trains one run in a temporary folder on its node."""

    def __init__(self, files: FILES, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """Write the files into a new folder, and start the command in it."""
        self.folder = Path(tempfile.mkdtemp(prefix="rlzoo-ray-"))
        write(self.folder, files)
        self._known = self._sent = {name: _stamp(self.folder / name) for name in files}
        command = [sys.executable, "-P", "-m", "rlzoo", "train", *words]
        own = {**variables, LAUNCHER: str(os.getpid())}  # the run ends with this process
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
            )

    def poll(self, was_received: bool) -> tuple[int | None, FILES, list[str]]:
        """Return the exit code, and the files added, changed or removed since the last call whose reply was received."""
        self._known = self._sent if was_received else self._known
        code = self._process.poll()  # before the files are read, so that the last call includes all of them
        # checkpoints first: the metrics of every step up to a copied checkpoint are then copied too
        tops = (self.folder / RUN / "checkpoints", self.folder / RUN)
        paths = [Path(folder, name) for top in tops for folder, _, names in os.walk(top) for name in names]
        stamps: dict[str, tuple[int, int]] = {}
        files: FILES = {}
        for path in (*paths, self.folder / "log"):
            name = path.relative_to(self.folder).as_posix()
            with suppress(FileNotFoundError):  # the file was removed meanwhile; `os.walk` skips a folder that was
                if name in stamps or "/." in f"/{name}":
                    continue
                stamps[name] = _stamp(path)
                if stamps[name] != self._known.get(name):
                    files[name] = path.read_bytes()
        gone = [name for name in self._known if name.startswith(f"{RUN}/") and name not in stamps]
        self._sent = stamps
        return code, files, gone

    def stop(self) -> None:
        """Ask the run to save a checkpoint and exit."""
        self._process.terminate()

    def remove(self) -> None:
        """Remove the folder of a run that has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _ray() -> Any:
    import ray.util.scheduling_strategies  # type: ignore[import-not-found,unused-ignore]

    return ray


def _nodes() -> list[dict[str, Any]]:
    return [node for node in _ray().nodes() if node["Alive"]]


def _missing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not Path(path).is_absolute() or not Path(path).exists()]


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@dataclass
class Cluster:
    """A Ray cluster, and the resources that each run needs on one of its nodes."""

    cpus: int = 1
    gpus: int = 0
    capacity: int = field(init=False)  # maximum number of concurrent runs

    def __post_init__(self) -> None:
        """Connect to the cluster.

        Raises:
            UserError: the cluster cannot be reached, or no node has enough resources for a run.
        """
        require_extra("ray", "ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray = _ray()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            ray.init(os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"--on ray: no cluster can be reached ({one_line(str(error)).partition('. ')[0]}); start one with `ray start "
                "--head`, or set RAY_ADDRESS"
            ) from error
        finally:
            for number, handler in handlers.items():  # Ray replaces these handlers
                signal.signal(number, handler)
        nodes = [node["Resources"] for node in _nodes()]
        fits = [
            min([node.get("CPU", 0) // self.cpus, *([node.get("GPU", 0) // self.gpus] if self.gpus else [])]) for node in nodes
        ]
        self.capacity = int(sum(fits))
        if not self.capacity:
            there = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
            raise UserError(
                f"--on ray: a run needs {self.cpus} CPUs and {self.gpus} GPUs, and no node has them (nodes: {there}); lower "
                "--cpus or --gpus"
            )

    def check(self, children: Sequence[Child]) -> None:
        """Raise UserError if a node lacks a model or a file that is not sent with the runs."""
        here = Path.cwd().resolve()
        files = {file for child in children for file in user_files(child.config) if not file.resolve().is_relative_to(here)}
        models = {path for child in children for path in (child.config.model.path, child.config.model.reference) if path}
        needed = sorted({str(file) for file in files} | {path for path in models if Path(path).exists()})
        ray = _ray()
        missing = ray.remote(num_cpus=0)(_missing)
        for node in _nodes():
            there = missing.options(
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            )
            if names := ray.get(there.remote(needed)):
                raise UserError(
                    f"--on ray: {names[0]!r} does not exist on the node {node['NodeManagerHostname']}; models, and files "
                    "outside the current directory, need an absolute path that all nodes can read"
                )

    def run(self, children: Sequence[Child], look: Look, ended: Ended) -> list[Child]:
        """Run every unfinished child, and wait for all of them; see `rlzoo.lab.sweep.run_children`.

        A run whose node is lost is resumed on another node from the copy of its directory.
        """
        ray = _ray()
        waiting = [child for child in children if not child.is_finished]
        self.check(waiting)
        tries = dict.fromkeys((child.name for child in children), 0)
        runners: dict[str, tuple[Child, Any]] = {}
        polls: dict[Any, str] = {}
        actor: Any = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_restarts=0, max_task_retries=0)(Runner)

        def collect(seconds: float) -> None:
            for ready in ray.wait(list(polls), num_returns=len(polls), timeout=seconds)[0] if polls else ():
                child, runner = runners[polls.pop(ready)]
                try:
                    code, files, gone = ray.get(ready)
                except ray.exceptions.ActorUnavailableError:  # for now; if its node is lost, Ray soon reports it as dead
                    polls[runner.poll.remote(False)] = child.name
                    continue
                except ray.exceptions.RayError as error:
                    del runners[child.name]
                    ray.kill(runner)  # if it still exists, so that the run does not continue in two places
                    logger.warning("%s was lost: %s", child.name, one_line(str(error).strip().rpartition("\n")[2]))
                    waiting.insert(0, child)
                    continue
                store(child, files, gone)
                if code is None:
                    polls[runner.poll.remote(True)] = child.name
                else:
                    ray.get(runner.remove.remote())
                    ray.kill(runner)
                    del runners[child.name]
                    ended(child, code)

        try:
            while waiting or runners:
                while waiting and len(runners) < self.capacity:
                    child = waiting.pop(0)
                    tries[child.name] += 1
                    if tries[child.name] > TRIES:
                        raise RunError(f"{child.name} was lost {TRIES} times; rerun the command to resume it")
                    runner = actor.remote(*package(child, self.cpus))
                    runners[child.name] = child, runner
                    polls[runner.poll.remote(True)] = child.name
                time.sleep(POLL)
                collect(POLL)
                look([child for child, _ in runners.values()])
        finally:
            end, waiting[:] = time.monotonic() + LONGEST_END, []
            for _, runner in runners.values():
                runner.stop.remote()
            # an exception may be raised while a reply is handled, whose run is then no longer polled
            polls |= {runner.poll.remote(False): name for name, (_, runner) in runners.items() if name not in polls.values()}
            while runners and time.monotonic() < end:
                collect(POLL)
        return [child for child in children if not child.is_finished]


def package(child: Child, cpus: int) -> tuple[FILES, list[str], dict[str, str]]:
    """Return what is sent to a run's node: files (the user's and the run directory's), the command, and environment variables.

    The files are plugins, configs, and the code and data that the settings name. They keep their paths relative to the current
    directory. Files that ``.gitignore`` excludes are sent too.

    Raises:
        UserError: a config or plugin is outside the current directory, so that it would have no path on the node.
    """
    here = Path.cwd().resolve()
    words, paths = list[str](), [file for file in user_files(child.config) if file.resolve().is_relative_to(here)]
    for option, given in zip(child.arguments[::2], child.arguments[1::2], strict=True):
        value = given
        if option in ("--config", "--plugin") and Path(given).exists():
            paths += plugin_files(Path(given)).values()
            value = _relative(Path(given), here)
        if option != "--plugin" or not child.is_begun:  # a run that is resumed has copies of its plugins
            words += [option, RUN if option == "--output" else value]
    files = {_relative(path, here): path.read_bytes() for path in paths}
    if child.is_begun:
        copies = (path for path in child.path.rglob("*") if path.is_file() and not path.name.startswith("."))
        files |= {f"{RUN}/{path.relative_to(child.path).as_posix()}": path.read_bytes() for path in copies}
        words.append("--resume")
    sweep = str(child.path.parent.resolve())
    return files, words, {"OMP_NUM_THREADS": str(cpus), "MLFLOW_TRACKING_URI": tracking_uri(), SWEEP: sweep}


def _relative(path: Path, folder: Path) -> str:
    try:
        return path.resolve().relative_to(folder).as_posix()
    except ValueError:
        raise UserError(
            f"--on ray: {str(path)!r} is not sent to the nodes, because it is outside the current directory; copy it "
            "into this directory, or start the command elsewhere"
        ) from None


def store(child: Child, files: FILES, gone: Sequence[str]) -> None:
    """Update the copy of a run directory and its log. A checkpoint is renamed into place when it is complete."""
    own = {name.removeprefix(f"{RUN}/"): content for name, content in files.items() if name.startswith(f"{RUN}/")}
    if "log" in files:
        log_of(child).write_bytes(files["log"])
    write(child.path, {name: content for name, content in own.items() if name in ("run.json", "config.yaml")})
    if not child.is_begun:
        return
    key = identity(child.path)
    for name in sorted({"/".join(name.split("/")[:2]) for name in own if name.startswith("checkpoints/")}):
        folder, temporary = child.path / name, temporary_path(child.path / name, key)
        shutil.rmtree(temporary, ignore_errors=True)
        write(temporary, {path.removeprefix(f"{name}/"): own.pop(path) for path in list(own) if path.startswith(f"{name}/")})
        if folder.exists():
            discard(folder, child.path)
        temporary.replace(folder)
    write(child.path, own)
    for name in {"/".join(name.split("/")[1:3]) for name in gone if name.startswith(f"{RUN}/checkpoints/")}:
        if own_state(child.path / name, child.path) is not None:
            discard(child.path / name, child.path)


def write(folder: Path, files: FILES) -> None:
    """Write files into a folder, each one atomically."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder / name, "ray") as temporary:
            temporary.write_bytes(content)
