"""Shows the progress of a run as curves on a terminal or in a notebook, or as one line or one JSON object per step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rlzoo.cli.bars import Bars
from rlzoo.cli.console import Plain
from rlzoo.core.errors import printable

if TYPE_CHECKING:
    from rlzoo.config.run_config import RunConfig
    from rlzoo.training.after_step import Observer
    from rlzoo.training.train import RunResult

SPEED = "throughput/tokens_per_second"
WIDEST, NARROWEST = 40, 8  # width of a sparkline in characters
SIGNS, ASCII_SIGNS = "▁▂▃▄▅▆▇█", ".:-=+*#@"


class View(NamedTuple):
    """The callbacks that show a run. `step` is called after each step, and `stage` is called before any work between steps."""

    step: Callable[[int, Mapping[str, float]], None]
    stage: Callable[[str], None] | None = None


class Shown(NamedTuple):
    """A metric and how it is shown."""

    metric: str
    label: str  # its name on a terminal
    word: str  # its name in a progress line
    digits: int = 3

    def number(self, value: float) -> str:
        """Format a value with the metric's number of decimal places."""
        return f"{value:,.{self.digits}f}"


SHOWN = (
    Shown("reward/mean", "reward", "reward"),
    Shown("eval/accuracy", "held-out accuracy", "accuracy"),
    Shown("clip/fraction", "clip fraction", "clip"),
    Shown("fairness/lre_max", "length error, LRE", "lre"),
    Shown("learner/entropy", "entropy", "entropy"),
    Shown("response/length_mean", "response length", "length", digits=1),
    Shown("critic/explained_variance", "critic's explained variance", "explained"),  # only in runs with a critic
)


def metrics_shown(held_out: str) -> tuple[Shown, ...]:
    """Return `SHOWN` with the held-out score labelled ``held_out``, which is ``"accuracy"`` or ``"reward"``."""
    score = f"held-out {held_out}"
    score_shown = SHOWN[1]._replace(label=score, word="accuracy" if held_out == "accuracy" else score)
    return (SHOWN[0], score_shown, *SHOWN[2:])


class Curves:
    """The history of the metrics in `SHOWN`, each drawn as a sparkline with its first and last values."""

    def __init__(self, held_out: str = "accuracy") -> None:
        self._values: dict[Shown, list[float]] = {shown: [] for shown in metrics_shown(held_out)}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add one step's metrics. A metric that was not measured keeps its last value."""
        for shown, values in self._values.items():
            value = metrics.get(shown.metric, math.nan)
            values.extend([value] if math.isfinite(value) else values[-1:])

    def lines(self, console: Plain) -> Iterator[Text]:
        """Yield one line, no wider than the console, for each metric that was measured."""
        measured = [(shown, values) for shown, values in self._values.items() if values]
        rows = [(shown.label, shown.number(values[0]), shown.number(values[-1]), values) for shown, values in measured]
        label, first, last = (max((len(row[column]) for row in rows), default=0) for column in range(3))
        width = min(WIDEST, max(NARROWEST, console.width - label - first - last - 7))
        signs, arrow = (SIGNS, "→") if console.encoding.startswith("utf") else (ASCII_SIGNS, "->")
        for name, begin, now, values in rows:
            line = Text(f"{name:<{label}}  {sparkline(values, width, signs):<{width}}  ", no_wrap=True)
            line.append(f"{begin:>{first}} {arrow} ", style="dim").append(f"{now:>{last}}", style="bold")
            line.truncate(console.width)
            yield line


def sparkline(values: Sequence[float], width: int, signs: str = SIGNS) -> str:
    """Draw values as a row of characters. Each character shows the mean of roughly the same number of values.

    Example:
        >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
        '▁▂▃▄▅▆▇█'
    """
    means = [chunk.mean() for chunk in np.array_split(values, min(width, len(values)))]
    low, high = min(means), max(means)
    scale = (len(signs) - 1) / (high - low) if high > low else 0.0
    return "".join(signs[round((mean - low) * scale)] for mean in means)


class Screen(Bars):
    """A live view of a run: a bar with the remaining time, and the metrics as curves.

    When the run ends, the curves stay on the terminal and the bar is removed. Nothing is left if no step was completed.
    """

    def __init__(self, console: Plain, title: str, steps: int, held_out: str = "accuracy") -> None:
        self._plain, self._title, self._held_out = console, printable(title), held_out
        self._curves, self._ending = Curves(held_out), ""
        columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        super().__init__(console, BarColumn(None), *columns, TextColumn("{task.fields[words]}"), expand=True)
        self._steps = steps
        self._starting = self.add_task("", total=steps, words="importing")

    def say(self, words: str) -> None:
        """Show what the run is doing between steps."""
        self.update(self._starting, words=words)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one step's metrics to the view. Step 0 begins a new run and clears the curves."""
        if step == 0:
            self._curves = Curves(self._held_out)
        if not self._bars:
            self._plain.print(self._title, style="bold")
            self._bars["steps"] = self._starting
            self.advance(self._starting, step)
        self._curves.add(metrics)
        self.reach("steps", step, self._steps, f"{metrics[SPEED]:,.0f} tok/s" if SPEED in metrics else "")

    def stop(self) -> None:
        """Stop the display. The curves stay, and the bar is removed."""
        (task,) = self.tasks
        self._ending = f"{task.completed:.0f} of {task.total:.0f} steps in {timedelta(seconds=int(task.elapsed or 0))}"
        self.live.transient = not self._bars
        super().stop()

    def get_renderables(self) -> list[RenderableType]:
        """Return the contents of the display. Rich calls this method several times per second."""
        top = Text(self._ending) if self._ending else self.make_tasks_table(self.tasks)
        room = len(SHOWN) if self._ending else max(0, self._plain.height - 2)
        return [top, *list(self._curves.lines(self._plain))[:room]]


@contextmanager
def shown(
    console: Plain,
    title: str,
    steps: int,
    held_out: str = "accuracy",
    *,
    is_quiet: bool = False,
    as_json: bool = False,
) -> Iterator[View]:
    """Show a run inside the block, in the form that suits the output.

    A terminal shows curves, and any other output shows one line per step. With ``as_json``, every step is printed as a JSON
    object in the format of ``metrics.jsonl``, with null for NaN and infinity. ``held_out`` is the name of the score that an
    evaluation measures.
    """
    titles, described = [printable(title)], metrics_shown(held_out)  # the title is printed with the first step

    def print_json(step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        console.out(json.dumps({"step": step, **finite}), highlight=False)

    def print_line(step: int, metrics: Mapping[str, float]) -> None:
        while titles:
            console.print(titles.pop())
        words = [f"{shown.word} {shown.number(metrics[shown.metric])}" for shown in described if shown.metric in metrics]
        words += [f"{metrics[SPEED]:,.0f} tok/s"] if SPEED in metrics else []
        console.print("  ".join([f"step {step}/{steps}", *words]))

    if is_quiet:
        yield View(lambda step, metrics: None)
    elif as_json:
        yield View(print_json)
    elif console.is_screen:
        with Screen(console, title, steps, held_out) as screen:
            yield View(screen.show, screen.say)
    else:
        yield View(print_line)


def train(config: RunConfig, observer: Observer | None = None, **options: Any) -> RunResult:
    """Train as `rlzoo.training.train.train` does. In a notebook, show the metrics as curves if no observer is given."""
    from rlzoo.training.train import train as train_run

    console = Plain()
    if observer is None and console.is_jupyter:
        from IPython.display import display

        curves, below = Curves(config.held_out_score), display({"text/plain": ""}, raw=True, display_id=True)

        def observer(step: int, metrics: Mapping[str, float]) -> None:
            curves.add(metrics)
            text = "\n".join([f"step {step} of {config.steps}", *map(str, curves.lines(console))])
            below.update({"text/plain": text}, raw=True)

    return train_run(config, observer, **options)
