"""What every command prints on: a console that prints text as it is, and the log."""

from __future__ import annotations

import logging
import shutil
import sys
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

_JOINED = "\0"  # in place of a space at which no line is folded

# the terminal's own colours, and none for text that is read: rich's defaults are for dark terminals
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
    """A console without markup and highlighting.

    On a screen, lines are folded between words, and a command at the end of a line stays whole, to be copied.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, theme=THEME, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print lines as described above, and anything else as rich does."""
        if all(isinstance(each, str | Text) for each in objects):
            options.setdefault("soft_wrap", True)
            if self.file.isatty():
                objects = tuple(folded(each, self.width) if isinstance(each, str) else each for each in objects)
        super().print(*objects, **options)

    @property
    def is_screen(self) -> bool:
        """Whether lines can be drawn over: not in a file or a pipe, even if FORCE_COLOR is set."""
        return self.is_terminal and not self.is_dumb_terminal and self.file.isatty()


def folded(text: str, width: int) -> str:
    """Fold lines that are longer than a screen between words; a command at the end stays in one line.

    Example:
        >>> print(folded("stopped after step 3; resume with: rlzoo train --resume --output runs/mine", 40))
        stopped after step 3; resume with:
        rlzoo train --resume --output runs/mine
    """
    parts = []
    for line in text.split("\n"):
        words, colon, command = line.rpartition(": rlzoo ")
        whole = f"{words}: rlzoo{_JOINED}{command.replace(' ', _JOINED)}" if colon else line
        indent = " " * (len(line) - len(line.lstrip()))
        folds = wrap(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        parts += [fold.replace(_JOINED, " ") for fold in folds] if len(line) > width else [line]
    return "\n".join(parts)


def printable(text: str, keep: str = "") -> str:
    r"""Escape control characters in a text that others wrote: it cannot move the cursor, nor hide or turn what follows.

    Example:
        >>> print(printable("a\x1b[2Jb"))
        a\x1b[2Jb
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )


def show_log(level: int) -> None:
    """Print the log to stderr: rlzoo's from a level on, warnings of other libraries."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Stderr()])
    logging.getLogger("rlzoo").setLevel(level)


def print_error(text: str) -> None:
    """Print to the current stderr, which is above bars while they are drawn: on a screen folded, without control characters."""
    stream = sys.stderr
    if stream.isatty():
        text = folded(printable(text, keep="\n"), shutil.get_terminal_size().columns)
    stream.write(f"{text}\n")
    stream.flush()


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_error(self.format(record))
        except Exception:  # as every handler of the logging module does
            self.handleError(record)
