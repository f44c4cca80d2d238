"""The progress display: curves that stay in place on a terminal of any size, and lines or JSON elsewhere."""

import io
import json
import math
import re
import sys
import time

import pytest

from rlzoo.cli.console import Plain
from rlzoo.cli.progress import SHOWN, Screen, shown

TITLE = "fspo on arithmetic, model embedded, seed 0"


def is_bar(line):
    return re.search(r"\d+/\d+ \d:\d\d:\d\d left", line)


def drawn(screen, rows, **more):
    """Show a real run's rows, with a pause after each."""
    with Screen(Plain(), TITLE, len(rows) - 1, **more) as display:
        for step, metrics in enumerate(rows):
            display.show(step, metrics)
            display.refresh()
            if screen.columns > 40:  # a narrower screen has no room for both numbers
                screen.wait_for(f"{step}/{len(rows) - 1} ")  # else a busy machine may read two frames at once
            if step == 2:
                print("a warning", file=sys.stderr)
    Plain().print("the end")
    screen.wait_for("the end")
    return screen.text.split("\n")


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (60, 20), (60, 5), (40, 10)])
def test_the_live_view_updates_in_place_and_leaves_the_curves(trained, a_terminal, size):
    screen = a_terminal(*size)
    rows = trained.metrics
    lines = drawn(screen, rows)
    title = [TITLE[start : start + size[0]] for start in range(0, len(TITLE), size[0])]
    assert lines[: len(title) + 1] == [*title, "a warning"]
    lines = lines[len(title) - 1 :]
    assert re.fullmatch(r"4 of 4 steps in 0:00:\d\d", lines[2])
    measured = [metric.label for metric in SHOWN if any(metric.metric in row for row in rows)]
    assert [line.split("  ")[0] for line in lines[3:-1]] == measured
    assert lines[-1] == "the end"
    assert screen.is_cursor_shown
    frames = [frame.split("\n") for frame in screen.frames]
    assert max(len(line) for frame in frames for line in frame) <= size[0]
    assert any(is_bar(line) for frame in frames for line in frame) or size[0] == 40
    for frame in frames:  # at most one bar, with the view below it
        assert sum(bool(is_bar(line)) for line in frame) <= 1


def test_a_run_that_fails_to_start_leaves_nothing_on_screen(a_terminal):
    screen = a_terminal(80, 24)
    with Screen(Plain(), TITLE, 40) as display:  # a run may fail here, for example because its directory is in use
        display.refresh()
        screen.wait_for("importing")
        display.say("loading embedded")
        screen.wait_for("loading embedded")
    Plain().print("the end")
    screen.wait_for("the end")
    assert screen.text == "the end"


def test_the_remaining_time_is_shown_from_the_first_step(a_terminal):
    a_terminal(80, 24)
    with Screen(Plain(), TITLE, 11) as display:
        display.show(0, {})
        (task,) = display.tasks
        display.get_time = lambda: time.monotonic() + 90  # a step takes a minute and a half
        display.show(1, {})
        assert task.time_remaining == pytest.approx(10 * 90, rel=0.05)


def test_a_new_pilot_starts_with_empty_curves(a_terminal):
    screen = a_terminal(80, 24)
    with Screen(Plain(), TITLE, 1) as display:
        for reward in (0.25, 0.75):
            display.show(0, {})
            display.show(1, {"reward/mean": reward})
    Plain().print("the end")
    screen.wait_for("the end")
    assert screen.text.split("\n")[-2].split() == ["reward", "▁", "0.750", "→", "0.750"]


def test_a_title_cannot_send_terminal_control_sequences(a_terminal):
    screen = a_terminal(80, 24)
    with Screen(Plain(), "model \x1b[2Jbad", 1) as display:
        display.show(0, {})
    screen.wait_for("bad")
    assert screen.text.split("\n")[0] == r"model \x1b[2Jbad"


def test_without_a_terminal_each_step_is_one_line(trained):
    file = io.StringIO()
    with shown(Plain(file=file), TITLE, 4) as view:
        for step, metrics in enumerate(trained.metrics):
            view.step(step, metrics)
    title, *lines = file.getvalue().splitlines()
    assert title == TITLE
    assert [line.split()[1] for line in lines] == [f"{step}/4" for step in range(5)]
    words = lines[1].split()
    for word, metric in (("reward", "reward/mean"), ("clip", "clip/fraction"), ("lre", "fairness/lre_max")):
        assert float(words[words.index(word) + 1]) == pytest.approx(trained.metrics[1][metric], abs=5e-4)


def test_json_lines_are_the_rows_of_the_run(trained):
    file = io.StringIO()
    rows = [dict(row) for row in trained.metrics]
    rows[1]["reward/mean"] = math.nan  # JSON has no NaN
    with shown(Plain(file=file, width=20), TITLE, 4, as_json=True) as view:
        for step, metrics in enumerate(rows):
            view.step(step, metrics)
    read = [json.loads(line, parse_constant=pytest.fail) for line in file.getvalue().splitlines()]
    rows[1]["reward/mean"] = None
    assert read == [{"step": step, **row} for step, row in enumerate(rows)]


def test_quiet_and_json_runs_show_no_live_view(trained, a_terminal):
    screen = a_terminal(80, 24)
    with shown(Plain(), TITLE, 4, is_quiet=True) as view:
        view.step(1, trained.metrics[1])
    with shown(Plain(), TITLE, 4, as_json=True) as view:
        view.step(0, {"reward/mean": 0.5})
    with shown(Plain(), TITLE, 4) as view:
        view.step(1, trained.metrics[1])
    Plain().print("the end")
    screen.wait_for("the end")
    json_line, title, first, *_ = screen.text.split("\n")
    assert json.loads(json_line) == {"step": 0, "reward/mean": 0.5}
    assert title == TITLE
    assert first.startswith("1 of 4 steps in ")
