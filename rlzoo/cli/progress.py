"""A run while it trains: curves on a screen, else a line or a JSON object per step, or nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rlzoo.cli.bars import Bars
from rlzoo.cli.console import Plain, printable
from rlzoo.cli.curves import SHOWN, Curves

SPEED = "throughput/tokens_per_second"


class Screen(Bars):
    """A view of a run that stays in place: a bar with the time left, and the metrics so far as curves.

    At the end the curves stay, without the bar; nothing stays of a run without a step.

    Example:
        ``with Screen(console, "a run", steps=40) as screen: train(config, screen.show)``
    """

    def __init__(self, console: Plain, title: str, steps: int, run: Path | None = None) -> None:
        self._plain, self._title, self._run = console, printable(title), run
        self._curves, self._ending = Curves(), ""
        columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        super().__init__(console, BarColumn(None), *columns, TextColumn("{task.fields[words]}"), expand=True)
        self._steps = steps
        self._starting = self.add_task("", total=steps, words="starting")

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one step's metrics into the view; step 0 begins a run."""
        if step == 0:
            self._curves = Curves()
        if not self._bars:
            self.remove_task(self._starting)
            self._plain.print(self._title, style="bold")
            self._add_steps_before(step)
        self._curves.add(metrics)
        self.reach("steps", step, self._steps, f"{metrics[SPEED]:,.0f} tok/s" if SPEED in metrics else "")

    def _add_steps_before(self, step: int) -> None:
        """Of a run that is resumed."""
        if step > 0 and self._run is not None:
            from rlzoo.journal.run_directory import read_metrics

            for row in read_metrics(self._run / "metrics.jsonl"):
                if row["step"] < step:
                    self._curves.add(row)

    def stop(self) -> None:
        """Leave the curves without the bar."""
        (task,) = self.tasks
        self._ending = f"{task.completed:.0f} of {task.total:.0f} steps in {timedelta(seconds=int(task.elapsed or 0))}"
        self.live.transient = not self._bars
        super().stop()

    def get_renderables(self) -> list[RenderableType]:
        """What is drawn, called several times a second."""
        top = Text(self._ending) if self._ending else self.make_tasks_table(self.tasks)
        room = len(SHOWN) if self._ending else max(0, self._plain.height - 2)
        return [top, *list(self._curves.lines(self._plain))[:room]]


class Lines:
    """A line per step, for a file or a pipe.

    Example:
        ``train(config, Lines(console, "a run", steps=40).show)``
    """

    def __init__(self, console: Plain, title: str, steps: int) -> None:
        self._console, self._title, self._steps = console, printable(title), steps

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one step's metrics."""
        if self._title:
            self._console.print(self._title)
            self._title = ""
        words = [f"{each.word} {each.number(metrics[each.metric])}" for each in SHOWN if each.metric in metrics]
        words += [f"{metrics[SPEED]:,.0f} tok/s"] if SPEED in metrics else []
        self._console.print("  ".join([f"step {step}/{self._steps}", *words]))


@contextmanager
def shown(
    console: Plain,
    title: str,
    steps: int,
    *,
    is_quiet: bool = False,
    as_json: bool = False,
    run: Path | None = None,
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Show a run inside the block, as fits where the output goes; call the result with each step and its metrics.

    Args:
        console: what to print on.
        title: of the run.
        steps: how many it has.
        is_quiet: show nothing.
        as_json: print a JSON object per step, as in ``metrics.jsonl``; null for numbers that JSON does not have.
        run: its directory, with the steps before if it is resumed.
    """

    def print_json(step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        console.out(json.dumps({"step": step, **finite}), highlight=False)

    if is_quiet:
        yield lambda step, metrics: None
    elif as_json:
        yield print_json
    elif console.is_screen:
        with Screen(console, title, steps, run) as screen:
            yield screen.show
    else:
        yield Lines(console, title, steps).show
