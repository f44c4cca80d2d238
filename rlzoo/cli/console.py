"""The markup-free console that all commands print to, and the handler that prints the log."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from rlzoo.measure.printable import printable
from rlzoo.training.signals import LAST

_JOINED = "\0"  # replaces a space at which a line must not be folded

# use the terminal's own colours, because rich's default colours suit only dark terminals; leave text uncoloured
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
        """Print text as the class docstring describes, and anything else as rich does."""
        if all(isinstance(each, str | Text) for each in objects):
            options.setdefault("soft_wrap", True)
            if self.file.isatty():
                objects = tuple(folded(each, self.width) if isinstance(each, str) else each for each in objects)
        super().print(*objects, **options)

    def print_docstring(self, text: str) -> None:
        """Print the docstring of a rule, an estimator or a correction; on a terminal, wrap its paragraphs at the width."""
        self.print(refilled(text, self.width) if self.file.isatty() else text)

    @property
    def is_screen(self) -> bool:
        """Return whether lines can be redrawn; False for a file or a pipe, even if FORCE_COLOR is set."""
        return self.is_terminal and not self.is_dumb_terminal and self.file.isatty()


def folded(text: str, width: int) -> str:
    """Fold long lines between words; a command at the end of a line stays on one line.

    Example:
        >>> print(folded("stopped after step 3; resume with: rlzoo train --resume --output runs/mine", 40))
        stopped after step 3; resume with:
        rlzoo train --resume --output runs/mine
    """
    parts = []
    for line in text.split("\n"):
        words, colon, command = line.rpartition(": rlzoo ")
        whole = f"{words}: rlzoo{_JOINED}{command.replace(' ', _JOINED)}" if colon else line
        folds = wrap(whole, width, subsequent_indent=_indent(line), break_long_words=False, break_on_hyphens=False)
        parts += [fold.replace(_JOINED, " ") for fold in folds] if len(line) > width else [line]
    return "\n".join(parts)


def refilled(text: str, width: int) -> str:
    """Wrap the paragraphs of a docstring at a width, without joining list items or the lines of a formula."""
    joined, is_formula = list[str](), False
    for line in text.splitlines():
        before = joined[-1] if joined else ""
        if line and not line.startswith(" "):
            is_formula = line == "Formula:"
        if line and before and not is_formula and _indent(line) == _indent(before) and not line.lstrip().startswith("- "):
            joined[-1] = f"{before} {line.lstrip()}"
        else:
            joined.append(line)
    filled = [wrap(line, width, subsequent_indent=_indent(line), break_long_words=False) or [""] for line in joined]
    return "\n".join("\n".join(lines) for lines in filled)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def show_log(level: int) -> None:
    """Print the log to stderr: rlzoo's messages at this level or above, and warnings from other libraries."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Stderr()])
    logging.getLogger("rlzoo").setLevel(level)


def print_error(text: str) -> None:
    """Print to the current stderr, above any progress bars; on a terminal, fold lines and escape control characters."""
    stream = sys.stderr
    if stream.isatty():
        text = folded(printable(text, keep="\n"), shutil.get_terminal_size().columns)
    stream.write(f"{text}\n")
    stream.flush()


@contextmanager
def last_words() -> Iterator[None]:
    """Until the block ends, hold back the last log record of a stopped run, so that it is printed below the live display."""
    held: list[logging.LogRecord] = []
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, _Stderr)]

    def passes(record: logging.LogRecord) -> bool:
        if is_last := getattr(record, LAST, False):
            held.append(record)
        return not is_last

    for handler in handlers:
        handler.addFilter(passes)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(passes)
            for record in held:
                handler.handle(record)


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_error(self.format(record))
        except Exception:  # a logging handler must not raise
            self.handleError(record)
