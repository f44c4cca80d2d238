"""The output of every command is plain text, wrapped only on a screen, without control sequences from untrusted input."""

import io
import itertools
import logging
import os
import sys

import pytest

from rlzoo.cli.bars import TOTAL, Bars, TimeLeft
from rlzoo.cli.console import Plain, show_log
from rlzoo.core.errors import printable

LONG = "clip is inert: nothing was clipped for 10 steps; narrow clip.width_low, or find a width with `rlzoo calibrate`"
STOPPED = "stopped after step 3 of 40; resume with: rlzoo train --resume --output runs/fspo-arithmetic-0-20261122-054750"


def test_lines_written_to_a_file_are_not_wrapped():
    file = io.StringIO()
    Plain(file=file, width=20).print(LONG)
    assert file.getvalue() == f"{LONG}\n"


def test_brackets_numbers_and_colons_are_text():
    file = io.StringIO()
    Plain(file=file, force_terminal=True).print("[bold]3[/] :warning: /tmp/a")
    assert file.getvalue() == "[bold]3[/] :warning: /tmp/a\n"


@pytest.mark.parametrize(
    "text", ["a\x1b[2Jb", "\x1b]0;title\x07", "over\rwritten", "\x9b31m", "\u202eturned", "a\u200bb", "\ud800", "\t"]
)
def test_control_characters_are_escaped(text):
    shown = printable(text)
    assert shown.isprintable()
    assert "\\" in shown
    assert printable("grüße 数学 ∑") == "grüße 数学 ∑"


def test_a_pipe_is_not_a_screen_even_with_force_color(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as file:
        assert not Plain(file=file).is_screen


def test_a_dumb_terminal_is_not_a_screen(a_terminal, monkeypatch):
    a_terminal(60, 20)
    assert Plain().is_screen
    monkeypatch.setenv("TERM", "dumb")
    assert not Plain().is_screen


def test_printed_and_logged_lines_appear_above_the_bars(a_terminal, monkeypatch):
    screen = a_terminal(60, 20)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    show_log(logging.INFO)
    console = Plain()
    with Bars(console) as bars:
        bars.reach("problems", 0, 3)
        bars.refresh()
        logging.getLogger("rlzoo").warning(STOPPED)
        print("to stderr \x1b[31mby another library", file=sys.stderr)
        console.print(LONG)
        bars.reach("problems", 2, 3)
        bars.refresh()
    console.print("the end")
    screen.wait_for("the end")
    *above, drawn, after = screen.text.split("\n")
    assert (
        "\n".join(above)
        == "\n".join(
            [
                *(STOPPED[:60], STOPPED[60:]),  # the terminal's own wrapping, which is not part of copied text
                "to stderr by another library",
                *(LONG[:60], LONG[60:]),
            ]
        )
    )
    assert "2/3" in drawn
    assert after == "the end"
    assert screen.is_cursor_shown


def test_a_warning_cannot_send_terminal_control_sequences(a_terminal, monkeypatch):
    screen = a_terminal(60, 20)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    show_log(logging.INFO)
    logging.getLogger("rlzoo").warning("the server said %s", "\x1b[2J\x1b[Hnothing\u202e")
    screen.wait_for("nothing")
    assert screen.text == r"the server said \x1b[2J\x1b[Hnothing\u202e"


def test_transient_bars_disappear_when_their_work_is_done(a_terminal):
    screen = a_terminal(60, 20)
    with Bars(Plain(stderr=True), transient=True) as bars:
        bars.reach("matching", 1, 4)
        bars.refresh()
    Plain().print("the end")
    screen.wait_for("the end")
    assert screen.text == "the end"


def test_quiet_bars_are_not_drawn(a_terminal):
    screen = a_terminal(60, 20)
    with Bars(Plain(stderr=True), is_quiet=True) as bars:
        bars.reach("matching", 1, 4)
        bars.refresh()
    Plain().print("the end")
    screen.wait_for("the end")
    assert screen.frames[-1] == "the end"
    assert not any("matching" in frame for frame in screen.frames)


def test_the_time_left_of_a_total_is_at_least_that_of_each_part():
    clock = itertools.count()
    with Bars(Plain(), is_quiet=True, get_time=lambda: next(clock)) as bars:
        for done in range(5):  # "slow" has done 4 of 100 steps, but everything together 44 of 140
            bars.reach("slow", done, 100)
            bars.reach(TOTAL, 11 * done, 140)
        slow, total = (TimeLeft().render(task).plain for task in bars.tasks)
        assert bars.tasks[0].time_remaining > bars.tasks[1].time_remaining
    assert total == slow


def test_colours_come_from_the_terminal_palette(a_terminal, monkeypatch):
    screen = a_terminal(60, 20)
    monkeypatch.setenv("COLORTERM", "truecolor")
    with Bars(Plain()) as bars:
        for done in (0, 1, 3):
            bars.reach("problems", done, 3)
            bars.refresh()
    Plain().print("the end")
    screen.wait_for("the end")
    assert {code for style in screen.styles for code in style.split(";")} <= {"", "0", "1", "2", "32"}
