"""Options and output handling that several commands share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer

from rlzoo.cli.console import Plain
from rlzoo.core.errors import UserError

logger = logging.getLogger("rlzoo")

Plugins = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="PATH", help="Plugin to load: a .py file or a folder; may be repeated.")
]
Configs = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="NAME|FILE",
        help="Name of a shipped config, or a YAML file; may be repeated (later configs override earlier ones).",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as learner.lr=1e-5."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Csv = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="CSV file for the table; further tables go to FILE-NAME.csv.")
]
Latex = Annotated[Path | None, typer.Option("--latex", metavar="FILE", help="LaTeX file for the tables.")]
MatchBySign = Annotated[
    bool, typer.Option("--match-by-sign", help="Match the clip fraction separately for negative and positive advantages.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only warnings and the final result.")]


def check_rule_names(names: Iterable[str]) -> None:
    """Raise `UserError` for a well-known rule name that the zoo lacks. The message suggests the right name."""
    if "ppo" in names:
        raise UserError("there is no rule 'ppo'; did you mean 'grpo', which has PPO's clip?")


def names_in(option: str, text: str, wanted: str) -> tuple[str, ...]:
    """Split an option's value at commas; raise `UserError` if it contains no name."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UserError(f"{option} {text!r}: expected {wanted}")
    return names


class Lasting:
    """A text stream that switches to /dev/null when the pipe's reader is gone or, if it ``survives_full``, the disk is full."""

    def __init__(self, stream: TextIO, *, survives_full: bool = True) -> None:
        self._stream, self._survived = stream, OSError if survives_full else BrokenPipeError

    def write(self, text: str) -> int:
        """Write the text if possible."""
        with self._attempt():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        with self._attempt():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except self._survived as error:
            with suppress(OSError), Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if not isinstance(error, BrokenPipeError) and self._stream is sys.__stdout__:
                logger.warning("output cannot be written (%s): continuing without it", error.strerror)


On = Annotated[
    str, typer.Option("--on", metavar="local|ray|slurm", help="Where to run: on this machine, on a Ray cluster, or with Slurm.")
]
Cpus = Annotated[int, typer.Option(min=1, help="With --on ray or slurm: number of CPUs and threads for each run.")]
Gpus = Annotated[int, typer.Option(min=0, help="With --on ray or slurm: number of GPUs for each run.")]


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let a command continue when its output cannot be written."""
    output, errors = (cast(TextIO, Lasting(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(output), redirect_stderr(errors):
        yield


@contextmanager
def loading(*, is_quiet: bool = False) -> Iterator[None]:
    """Show a status line on a terminal while the block imports libraries, which takes several seconds."""
    console = Plain(stderr=True)
    is_shown = console.is_screen and not is_quiet
    with console.status("starting", spinner="line") if is_shown else nullcontext():
        yield
