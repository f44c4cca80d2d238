"""How a run is shown while it goes on: curves on a screen, a line per step elsewhere, JSON lines, or nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rlzoo.cli.curves import SHOWN, Curves
from rlzoo.cli.display import Bars, Plain, printable

SPEED = "throughput/tokens_per_second"


class Silent:
    """Shows nothing of a run that goes on.

    Example:
        ``with Silent() as display: train(config, display.show)``
    """

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step's metrics; step 0 is before the first update."""

    def say(self, told: RenderableType) -> None:
        """Show something else, such as a line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pass


class Lines(Silent):
    """A line per step, for a file or a pipe."""

    def __init__(self, console: Plain, title: str, steps: int) -> None:
        self._console, self._title, self._steps = console, printable(title), steps
        self._is_titled = False

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one step's metrics."""
        if not self._is_titled:
            self._console.print(self._title)
            self._is_titled = True
        words = [f"{each.word} {each.number(metrics[each.metric])}" for each in SHOWN if each.metric in metrics]
        words += [f"{metrics[SPEED]:,.0f} tok/s"] if SPEED in metrics else []
        self._console.print("  ".join([f"step {step}/{self._steps}", *words]))

    def say(self, told: RenderableType) -> None:
        """Print it."""
        self._console.print(told)


class JsonLines(Silent):
    """A JSON object per step, as in ``metrics.jsonl``; null for numbers that JSON does not have."""

    def __init__(self, console: Plain) -> None:
        self._console = console

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one step's metrics."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._console.out(json.dumps({"step": step, **finite}), highlight=False)


class Screen(Silent):
    """A view that stays where it is: a bar with the time left, and the metrics so far as curves.

    What else is printed or logged stands above it. At the end the curves stay, without the bar.
    """

    def __init__(self, console: Plain, title: str, steps: int, run: Path | None = None) -> None:
        self._console, self._title, self._run = console, printable(title), run
        self._view = _View(console, steps)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one step's metrics into the view."""
        if self._title:
            self._console.print(self._title, style="bold")
            self._title = ""
            self._go_on(step)
        if step == 0:
            self._view.begin()
        self._view.take(step, metrics)

    def __rich__(self) -> RenderableType:
        """The view as it is now."""
        return self._view.get_renderable()

    def _go_on(self, step: int) -> None:
        """Begin with what a run came to before it was stopped."""
        if step == 0 or self._run is None:
            return
        from rlzoo.journal.run_directory import read_metrics

        for row in read_metrics(self._run / "metrics.jsonl"):
            if row["step"] < step:
                self._view.curves.add(row)

    def say(self, told: RenderableType) -> None:
        """Print it above the view."""
        self._console.print(told)

    def __enter__(self) -> Self:
        self._view.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._view.end()


class _View(Bars):
    """The bar and the curves."""

    def __init__(self, console: Plain, steps: int) -> None:
        self.curves, self._ending = Curves(), ""
        self._bar_column = BarColumn()
        self._bar: TaskID | None = None
        columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        super().__init__(console, self._bar_column, *columns, TextColumn("{task.description}"))
        self._bar = self.add_task("starting", total=steps)

    def begin(self) -> None:
        """Forget the run that was shown before, as of a pilot."""
        self.curves = Curves()

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._bar is not None, "made with the view"
        self.curves.add(metrics)
        self.reach(self._bar, step, description=f"{metrics[SPEED]:,.0f} tok/s" if SPEED in metrics else "")

    def end(self) -> None:
        """Leave the curves without the bar; nothing, if there was no step."""
        (task,) = self.tasks
        seconds = int(task.elapsed or 0)
        spent = f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02}"
        self._ending = f"{task.completed:.0f} of {task.total:.0f} steps in {spent}"
        self.live.transient = task.description == "starting"
        self.stop()

    def get_renderables(self) -> list[RenderableType]:
        """What is drawn, called several times a second."""
        if self._bar is None:
            return []
        console = self.console
        assert isinstance(console, Plain), "given when it was made"
        room = max(0, console.height - 2)
        self._bar_column.bar_width = max(8, min(40, console.width - 48))
        top = Text(self._ending) if self._ending else self.make_tasks_table(self.tasks)
        return [top, *list(self.curves.lines(console))[: len(SHOWN) if self._ending else room]]


def display_for(
    console: Plain,
    title: str,
    steps: int,
    *,
    is_quiet: bool = False,
    as_json: bool = False,
    run: Path | None = None,
) -> Silent:
    """The way to show a run that fits where the output goes.

    Args:
        console: what to print on.
        title: of the run.
        steps: how many it has.
        is_quiet: show nothing.
        as_json: a JSON object per step.
        run: its directory, with the steps it goes on from, if there are any.
    """
    if is_quiet:
        return Silent()
    if as_json:
        return JsonLines(console)
    if console.is_screen:
        return Screen(console, title, steps, run)
    return Lines(console, title, steps)
