"""The console of all commands, which prints text without markup, and the log."""

from __future__ import annotations

import logging
import shutil
import sys
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from rlzoo.support.printable import printable

_JOINED = "\0"  # replaces a space at which a line must not be folded

# use the terminal's own colours, since rich's defaults suit dark terminals, and none for text
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
    """A console without markup or highlighting.

    On a terminal, lines are folded between words. A command at the end of a line is not folded, so that it can be copied.
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
        """Return whether lines can be redrawn; False for a file or a pipe, even if FORCE_COLOR is set."""
        return self.is_terminal and not self.is_dumb_terminal and self.file.isatty()


def folded(text: str, width: int) -> str:
    """Fold lines that are too long between words; a command at the end stays on one line.

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


def show_log(level: int) -> None:
    """Print the log to stderr: messages of rlzoo from this level up, and warnings of other libraries."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Stderr()])
    logging.getLogger("rlzoo").setLevel(level)


def print_error(text: str) -> None:
    """Print to the current stderr, above any progress bars; on a terminal, fold lines and escape control characters."""
    stream = sys.stderr
    if stream.isatty():
        text = folded(printable(text, keep="\n"), shutil.get_terminal_size().columns)
    stream.write(f"{text}\n")
    stream.flush()


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_error(self.format(record))
        except Exception:  # handlers of the logging module must not raise
            self.handleError(record)
