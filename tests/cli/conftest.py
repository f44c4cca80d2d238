"""Runs commands in their own directories, and writes plugin files for them."""

import sys
from contextlib import ExitStack

import pytest

from rlzoo.cli.main import main
from tests.cli.terminal import Pseudo

SOUND = '''
from typing import Annotated, ClassVar
from pydantic import Field
from rlzoo import ClipPolicy, Width, hookimpl, ops

class Plain(ClipPolicy):
    """Clips every token to a band; [brackets] stay.

    Formula:
        J = what it is
    """
    name, paper, scope = "plain", "arXiv 0000.00000", "token"
    watch: ClassVar = {"clip/fraction": "how much [is] clipped"}
    width: Annotated[float, Width()] = Field(0.25, gt=0, lt=1, description="half-width of the band [nats]")
    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.width, self.width, None, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)
'''
REVERSED = '''
import dataclasses

class Reversed(Plain):
    """Pushes every response the wrong way."""
    name = "reversed"
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return dataclasses.replace(result, objective=-result.objective)
'''
HOOK = """
@hookimpl
def rlzoo_clip_policies():
    return [{}]
"""


@pytest.fixture
def rlzoo(tmp_path, monkeypatch, capfd):
    """Run a command in this process, in its own directory; returns its exit code, stdout and stderr."""
    here = tmp_path / "here"
    here.mkdir()

    def run(*arguments):
        monkeypatch.chdir(here)
        monkeypatch.setenv("COLUMNS", "400")  # no line is wrapped
        monkeypatch.setattr(sys, "argv", ["rlzoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code or 0, *capfd.readouterr()

    return run


@pytest.fixture
def refused(rlzoo, tmp_path):
    """Run a command that must be rejected and must not write files; returns its one-line error."""

    def files():  # except for what Python itself writes next to a loaded plugin
        return sorted(path for path in (tmp_path / "here").rglob("*") if "__pycache__" not in path.parts)

    def run(*arguments):
        before = files()
        code, out, err = rlzoo(*arguments)
        assert code == 2
        assert out == ""
        assert err.startswith("rlzoo: ")
        assert err.count("\n") == 1, err
        assert files() == before
        return err.removeprefix("rlzoo: ").strip()

    return run


@pytest.fixture
def plugin(tmp_path):
    """Write a plugin file; returns its path."""

    def write(*parts, returned, name="mine.py"):
        file = tmp_path / "plugins" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(parts) + HOOK.format(returned))
        return file

    return write


@pytest.fixture
def a_terminal(monkeypatch):
    """Connect stdout and stderr to a terminal of the given size; returns what can be read there."""
    with ExitStack() as stack:

        def opened(columns, rows):
            monkeypatch.setenv("COLUMNS", str(columns))
            monkeypatch.setenv("LINES", str(rows))
            monkeypatch.setenv("TERM", "xterm-256color")
            terminal = stack.enter_context(Pseudo(columns, rows))
            file = stack.enter_context(open(terminal.theirs, "w", closefd=False))
            monkeypatch.setattr(sys, "stdout", file)
            monkeypatch.setattr(sys, "stderr", file)
            return terminal.screen

        yield opened
        monkeypatch.undo()
