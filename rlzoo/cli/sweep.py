"""`rlzoo sweep`: starts the runs of a race, shows how far they are, and compares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.progress import TaskID, TextColumn

from rlzoo.cli.display import Bars, Plain, timed
from rlzoo.discovery import distinct
from rlzoo.errors import UserError
from rlzoo.journal.tracking.store import close_parent, open_parent
from rlzoo.lab.sweep import Child, Sweep, parse_seeds
from rlzoo.lab.workers import SweepProcess, run_children
from rlzoo.support.parsing import parse_json
from rlzoo.support.reading import SETTINGS, read_text


def run_sweep(
    *,
    clips: Sequence[str],
    seeds: str,
    grid: Sequence[str],
    configs: Sequence[str],
    overrides: Sequence[str],
    steps: int | None,
    output: Path | None,
    jobs: int | None,
    plugins: Sequence[str],
    dry_run: bool,
    is_quiet: bool = False,
) -> bool:
    """Run or finish a sweep; whether every run of it came to its end."""
    names = tuple(dict.fromkeys(name.strip() for name in clips if name.strip()))
    if not names:
        raise UserError(f"--clip {','.join(clips)!r}: give policies with commas between them; see `rlzoo clips list`")
    folder = output or Path("sweeps") / "-".join([*names[:4], *(["etc"] if len(names) > 4 else [])])
    if (folder / "config.yaml").exists():
        raise UserError(f"--output {str(folder)!r} is a run directory; a sweep needs a folder of its own")
    sweep = Sweep(folder, names, parse_seeds(seeds), tuple(configs), tuple(overrides), tuple(grid), distinct(plugins), steps)
    console = Plain()
    if dry_run:
        for child in sweep.children:
            console.print(f"{child.name}{'  (finished)' if child.is_finished else ''}")
        return True
    failed = _finish(sweep, jobs, console, is_quiet=is_quiet)
    if len(sweep.children) > len(failed):
        from rlzoo.cli.compare import compare

        compare([folder], as_json=False, report=None, is_quiet=is_quiet)
    for child in failed:
        console.print(f"{child.name} did not finish: see {folder / 'logs' / child.name}.log", style="red")
    return not failed


def _finish(sweep: Sweep, jobs: int | None, console: Plain, *, is_quiet: bool) -> list[Child]:
    """Do the runs that are not done, under one MLflow run; those that failed."""
    parent = parent_of(sweep)
    status = "FAILED"
    try:
        with SweepDisplay(console, sweep, is_quiet=is_quiet) as display:
            failed = run_children(sweep.children, jobs, parent, display.look, display.ended)
        status = "FAILED" if failed else "FINISHED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        console.print(f"stopped; the same command goes on where it was, in {sweep.folder}")
        raise
    finally:
        if parent:
            close_parent(parent, status)
    return failed


def parent_of(sweep: Sweep) -> str | None:
    """The MLflow run of a sweep, the same one when it goes on; None if its runs are not tracked."""
    tracking = sweep.children[0].config.tracking
    if not tracking.mlflow:
        return None
    file = sweep.folder / "sweep.json"
    if file.exists():
        try:
            return str(parse_json(read_text(file, SETTINGS))["mlflow_run_id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{str(file)!r} names no MLflow run; remove it to begin a new one") from error
    tags = {"kind": "sweep", "clip": ",".join(sweep.clips), "seed": ",".join(map(str, sweep.seeds))}
    run_id = open_parent(tracking.experiment, f"sweep {sweep.folder.name}", tags)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"mlflow_run_id": run_id}) + "\n", encoding="utf-8")
    return run_id


class SweepDisplay(Bars):
    """Bars for the whole and for each running child on a screen, and a line per ended child."""

    def __init__(self, console: Plain, sweep: Sweep, *, is_quiet: bool = False) -> None:
        self._sweep, self._is_quiet = sweep, is_quiet
        self._children: dict[str, TaskID] = {}
        super().__init__(
            console, TextColumn("{task.description}"), *timed(console), TextColumn("{task.fields[words]}"), is_quiet=is_quiet
        )
        self._whole = self.add_task("all steps", total=sweep.total_steps, words="")

    def look(self, running: Sequence[SweepProcess]) -> None:
        """Show how far the running children are."""
        done = sum(child.config.steps for child in self._sweep.children if child.is_finished)
        for worker in running:
            child, metrics = worker.child, worker.child.last_metrics()
            if child.name not in self._children:
                self._children[child.name] = self.add_task(child.name, total=child.config.steps, words="")
            step = int(metrics.get("step", 0))
            done += step
            words = f"reward {metrics['reward/mean']:.2f}" if "reward/mean" in metrics else ""
            self.reach(self._children[child.name], step, words=words)
        self.reach(self._whole, done)

    def ended(self, child: Child, code: int) -> None:
        """Say what came of a child."""
        if child.name in self._children:
            self.remove_task(self._children.pop(child.name))
        if self._is_quiet and child.is_finished:
            return
        finished = sum(other.is_finished for other in self._sweep.children)
        metrics = child.last_metrics()
        shown = {"accuracy": "eval/accuracy", "reward": "reward/mean", "clip": "clip/fraction"}
        words = "  ".join(f"{word} {metrics[name]:.3f}" for word, name in shown.items() if name in metrics)
        outcome = "finished" if child.is_finished else f"ended with exit code {code}"
        self.console.print(f"{child.name} {outcome}  {words}  ({finished} of {len(self._sweep.children)})")
