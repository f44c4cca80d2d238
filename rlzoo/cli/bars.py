"""Progress bars for long-running commands."""

from __future__ import annotations

import sys
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from rlzoo.cli.console import Plain

REFRESHES = 2  # refreshes per second
TOTAL = "all steps"  # name of the bar that shows the sum of the other bars
MEMORY = 3600.0  # seconds of history for estimating the remaining time, because a large model's step can take minutes


class TimeLeft(TimeRemainingColumn):
    """A bar's remaining time. The bar `TOTAL` shows the longest remaining time of any bar."""

    def render(self, task: Task) -> Text:
        """Format the remaining time."""
        tasks = task.fields["bars"].tasks if task.description == TOTAL else [task]
        return super().render(max(tasks, key=lambda one: one.time_remaining or 0.0))


class Bars(Progress):
    """Progress bars that are shown only on a terminal. Printed and logged lines appear above them."""

    def __init__(self, console: Plain, *columns: ProgressColumn, is_quiet: bool = False, **options: Any) -> None:
        self._bars: dict[str, TaskID] = {}
        time = (TimeElapsedColumn(), TextColumn("left"), TimeLeft())
        words = (TextColumn("{task.description}"), TextColumn("{task.fields[words]}"))
        usual = (words[0], BarColumn(16), MofNCompleteColumn(), *time, words[1])
        super().__init__(
            *(columns or usual),
            console=console,
            disable=is_quiet or not console.is_screen,
            refresh_per_second=REFRESHES,
            speed_estimate_period=MEMORY,
            redirect_stderr=sys.stderr.isatty(),  # do not redirect stderr if it is a file
            **options,
        )

    def reach(self, name: str, completed: int, total: int, words: str = "") -> None:
        """Update a bar. The first call with a name creates the bar and starts measuring its speed."""
        if name not in self._bars:
            self._bars[name] = self.add_task(name, total=total, words="", bars=self)
            self.advance(self._bars[name], completed)
        self.update(self._bars[name], completed=completed, total=total, words=words)

    def remove(self, name: str) -> None:
        """Remove a bar if it exists."""
        if name in self._bars:
            self.remove_task(self._bars.pop(name))
