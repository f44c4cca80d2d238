"""The markup-free console that all commands print to, and the handler that prints the log."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from rlzoo.core.errors import printable

# rich's default colours suit only dark terminals, so use the terminal's own colours and leave text uncoloured
THEME = Theme(
    {
        "bar.complete": "green",
        "bar.finished": "green",
        "bar.back": "dim",
        "progress.download": "none",
        "progress.elapsed": "dim",
        "progress.remaining": "none",
        "table.title": "bold",
    }
)


class Plain(Console):
    """A console without markup or highlighting. It leaves wrapping to the terminal, so a copied command stays on one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, theme=THEME, **options)
        if not (self.is_terminal or self.is_jupyter or "COLUMNS" in os.environ):
            self.width = 1000  # so that tables are not folded in a file or a pipe

    def print(self, *objects: Any, **options: Any) -> None:
        """Print text without markup, highlighting or wrapping, and print anything else as rich does."""
        if all(isinstance(item, str | Text) for item in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)

    @property
    def is_screen(self) -> bool:
        """Return whether lines can be redrawn; False for a file or a pipe, even if FORCE_COLOR is set."""
        return self.is_terminal and not self.is_dumb_terminal and self.file.isatty()


def show_log(level: int) -> None:
    """Print the log to stderr: rlzoo's messages at this level or above, and warnings from other libraries."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Stderr()])
    logging.getLogger("rlzoo").setLevel(level)


def print_error(text: str) -> None:
    """Print text to stderr with control characters escaped. While a display is live, rich prints the text above it."""
    print(printable(text, keep="\n"), file=sys.stderr, flush=True)


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_error(self.format(record))
        except Exception:  # a logging handler must not raise
            self.handleError(record)
