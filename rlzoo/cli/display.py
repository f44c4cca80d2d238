"""What every command shows things on: a console that prints text as it is, and bars for work that takes a while."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import wrap
from typing import Any

from rich.console import Console
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
from rich.text import Text
from rich.theme import Theme

REFRESHES = 2
"""Times a second that what is drawn on a screen is drawn anew, however often it changes."""

NARROW = 78
"""Columns of a screen, below which bars leave something out."""

_JOINED = "\0"  # instead of a space at which no line is folded

MEMORY = 3600.0
"""Seconds that the time left is reckoned from: a step of a large model takes minutes."""

# the terminal's own colours, and none for what is read: rich's defaults are for dark terminals
THEME = Theme(
    {
        "bar.complete": "green",
        "bar.finished": "green",
        "bar.back": "dim",
        "progress.download": "none",
        "progress.elapsed": "dim",
        "progress.remaining": "none",
        "table.header": "bold",
        "table.title": "bold",
    }
)


class Plain(Console):
    """A console that prints text as it is: brackets are no markup, and what looks like a number has no colour.

    On a screen a line is folded between words, and a command at its end stays whole, to be copied; elsewhere a line is a line.

    Example:
        ``Plain(stderr=True).print("saved in [here]")``
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, theme=THEME, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print lines as described above, and anything else as rich does."""
        if all(isinstance(each, str | Text) for each in objects):
            options.setdefault("soft_wrap", True)
            objects = tuple(self._folded(each) if isinstance(each, str) else each for each in objects)
        super().print(*objects, **options)

    @property
    def is_screen(self) -> bool:
        """Whether lines can be drawn over: not in a file or a pipe, whatever FORCE_COLOR says of its colours."""
        return self.is_terminal and not self.is_dumb_terminal and self.file.isatty()

    def _folded(self, text: str) -> str:
        return folded(text, self.width) if self.file.isatty() else text


def folded(text: str, width: int) -> str:
    """Lines folded between words where they are longer than a screen; a command at the end stays in one line, to be copied.

    Example:
        >>> print(folded("stopped after step 3; resume with: rlzoo train --resume --output runs/mine", 40))
        stopped after step 3; resume with:
        rlzoo train --resume --output runs/mine
    """
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def _parts(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    words, colon, command = line.rpartition(": rlzoo ")
    whole = f"{words}: rlzoo{_JOINED}{command.replace(' ', _JOINED)}" if colon else line
    indent = " " * (len(line) - len(line.lstrip()))
    parts = wrap(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [part.replace(_JOINED, " ") for part in parts]


def printable(text: str, keep: str = "") -> str:
    r"""A text that others wrote, with control characters as escapes: it cannot move the cursor, nor hide or turn what follows.

    Example:
        >>> print(printable("a\x1b[2Jb"))
        a\x1b[2Jb
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )


class Bars(Progress):
    """Bars on a screen, and nothing elsewhere; what is printed and logged meanwhile stands above them.

    Example:
        ``with Bars(console, *timed(console)) as bars: bars.update(bars.add_task("", total=3), completed=1)``
    """

    def __init__(self, console: Plain, *columns: ProgressColumn, is_quiet: bool = False, is_passing: bool = False) -> None:
        self.is_drawn = console.is_screen and not is_quiet
        self._begun: set[TaskID] = set()
        super().__init__(
            *columns,
            console=console,
            disable=not self.is_drawn,
            transient=is_passing,
            refresh_per_second=REFRESHES,
            speed_estimate_period=MEMORY,
            redirect_stderr=sys.stderr.isatty(),  # into a file it goes as before
        )

    def reach(self, bar: TaskID, completed: int, **fields: Any) -> None:
        """Say how far something is; from the first time on its speed is measured, and its bar is shown."""
        if bar not in self._begun:
            self._begun.add(bar)
            self.start_task(bar)
            self.advance(bar, completed)  # from here on its speed is measured
        self.update(bar, completed=completed, visible=True, **fields)


def timed(console: Plain) -> tuple[ProgressColumn, ...]:
    """Columns of a bar, how much is done of how much, and the time it has taken and will take; on a narrow screen the half."""
    left = (TextColumn("left"), TimeRemainingColumn())
    if console.width < NARROW:
        return MofNCompleteColumn(), *left
    return BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), *left


@contextmanager
def counted(*, is_quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while something is worked out; told what is being done, how much of it is, and of how much."""
    columns = (TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn())
    with Bars(Plain(stderr=True), *columns, is_quiet=is_quiet, is_passing=True) as bars:
        bar = bars.add_task("", total=None, start=False, visible=False)
        yield lambda what, done, total: bars.reach(bar, done, description=what, total=total)


def show_log(level: int) -> None:
    """Print what is logged to stderr: ours from a level on, of other libraries warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Stderr()])
    logging.getLogger("rlzoo").setLevel(level)


def tell(text: str) -> None:
    """Print to what stderr is now, which while bars are drawn is above them: on a screen folded, without control characters."""
    stream = sys.stderr
    if stream.isatty():
        text = folded(printable(text, keep="\n"), shutil.get_terminal_size().columns)
    stream.write(f"{text}\n")
    stream.flush()


class _Stderr(logging.Handler):
    """Tells every record."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tell(self.format(record))
        except Exception:  # as every handler of the logging module does
            self.handleError(record)
