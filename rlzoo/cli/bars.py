"""Bars for work that takes a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rlzoo.cli.console import Plain
from rlzoo.cli.tables import number
from rlzoo.lab.sweep import Child, Sweep
from rlzoo.lab.workers import SweepProcess

REFRESHES = 2  # per second
NARROW = 78  # columns of a screen below which bars leave something out
MEMORY = 3600.0  # seconds that the time left is estimated from: a step of a large model takes minutes


class Bars(Progress):
    """Bars on a screen, and nothing elsewhere; what is printed and logged meanwhile stands above them.

    Example:
        ``with Bars(console, *timed(console)) as bars: bars.update(bars.add_task("", total=3), completed=1)``
    """

    def __init__(self, console: Plain, *columns: ProgressColumn, is_quiet: bool = False, **options: Any) -> None:
        self.is_quiet = is_quiet
        self.is_drawn = console.is_screen and not is_quiet
        self._begun: set[TaskID] = set()
        super().__init__(
            *columns,
            console=console,
            disable=not self.is_drawn,
            refresh_per_second=REFRESHES,
            speed_estimate_period=MEMORY,
            redirect_stderr=sys.stderr.isatty(),  # a file gets it as before
            **options,
        )

    def reach(self, bar: TaskID, completed: int, **fields: Any) -> None:
        """Set how much is completed; the first call shows the bar and starts to measure its speed."""
        if bar not in self._begun:
            self._begun.add(bar)
            self.start_task(bar)
            self.advance(bar, completed)
        self.update(bar, completed=completed, visible=True, **fields)


def timed(console: Plain) -> tuple[ProgressColumn, ...]:
    """Columns: completed and total, elapsed and remaining time; on a narrow screen only the remaining time."""
    left = (TextColumn("left"), TimeRemainingColumn())
    if console.width < NARROW:
        return MofNCompleteColumn(), *left
    return BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), *left


@contextmanager
def counted(*, is_quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr inside the block; call the result with what is being done, how much is done, and of how much."""
    columns = (TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn())
    with Bars(Plain(stderr=True), *columns, is_quiet=is_quiet, transient=True) as bars:
        bar = bars.add_task("", total=None, start=False, visible=False)
        yield lambda what, done, total: bars.reach(bar, done, description=what, total=total)


class EvaluationDisplay(Bars):
    """A bar for each suite on a screen, a plain line per batch elsewhere."""

    def __init__(self, console: Plain, suites: Sequence[str], *, is_quiet: bool = False) -> None:
        columns = (TextColumn("{task.fields[suite]}"), *timed(console), TextColumn("{task.description}"))
        super().__init__(console, *columns, is_quiet=is_quiet)
        self._suites = {suite: self.add_task("", total=None, start=False, visible=False, suite=suite) for suite in suites}

    def show(self, suite: str, done: int, total: int, so_far: Mapping[str, float]) -> None:
        """Show how far a suite is."""
        words = "  ".join(f"{name} {number(value)}" for name, value in so_far.items())
        self.reach(self._suites[suite], done, total=total, description=words)
        if not self.is_drawn and not self.is_quiet:
            self.console.print(f"{suite} {done}/{total}  {words}".rstrip())


class SweepDisplay(Bars):
    """Bars for the whole and for each running child on a screen, and a line per ended child."""

    def __init__(self, console: Plain, sweep: Sweep, *, is_quiet: bool = False) -> None:
        columns = (TextColumn("{task.description}"), *timed(console), TextColumn("{task.fields[words]}"))
        super().__init__(console, *columns, is_quiet=is_quiet)
        self._sweep = sweep
        self._children: dict[str, TaskID] = {}
        self._whole = self.add_task("all steps", total=sweep.total_steps, words="")

    def look(self, running: Sequence[SweepProcess]) -> None:
        """Show how far the running children are."""
        done = sum(child.config.steps for child in self._sweep.children if child.is_finished)
        for child in (worker.child for worker in running):
            metrics = child.last_metrics()
            if child.name not in self._children:
                self._children[child.name] = self.add_task(child.name, total=child.config.steps, words="")
            step = int(metrics.get("step", 0))
            done += step
            words = f"reward {metrics['reward/mean']:.2f}" if "reward/mean" in metrics else ""
            self.reach(self._children[child.name], step, words=words)
        self.reach(self._whole, done)

    def ended(self, child: Child, code: int) -> None:
        """Print what became of a child."""
        if child.name in self._children:
            self.remove_task(self._children.pop(child.name))
        if self.is_quiet and child.is_finished:
            return
        finished = sum(other.is_finished for other in self._sweep.children)
        metrics = child.last_metrics()
        shown = {"accuracy": "eval/accuracy", "reward": "reward/mean", "clip": "clip/fraction"}
        words = "  ".join(f"{word} {metrics[name]:.3f}" for word, name in shown.items() if name in metrics)
        outcome = "finished" if child.is_finished else f"ended with exit code {code}"
        self.console.print(f"{child.name} {outcome}  {words}  ({finished} of {len(self._sweep.children)})")
