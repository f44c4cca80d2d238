"""Curves in the terminal match the numbers, and are at most as wide as the screen."""

import io
import math

import pytest

from rlzoo.cli.console import Plain
from rlzoo.cli.progress import SHOWN, SIGNS, Curves, sparkline


def console(width=80):
    return Plain(file=io.StringIO(), width=width)


def lines(rows, **options):
    curves = Curves()
    for row in rows:
        curves.add(row)
    return [line.plain for line in curves.lines(console(**options))]


def test_a_sparkline_spans_the_lowest_to_the_highest_value():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == SIGNS
    assert sparkline([7, 0, 3.4, 3.6], 8) == "█▁▄▅"  # 3.4 is nearest to the character for 3
    assert sparkline([5, 5, 5], 8) == "▁▁▁"


def test_values_that_exceed_the_width_are_averaged():
    # pairs (0, 2), (6, 8), (3, 5): means 1, 7, 4
    assert sparkline([0, 2, 6, 8, 3, 5], 3) == "▁█▅"
    assert len(sparkline(list(range(1000)), 40)) == 40


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_every_metric_of_a_real_run_has_a_line_that_fits(trained, width):
    drawn = lines(trained.metrics, width=width)
    measured = [shown for shown in SHOWN if any(shown.metric in row for row in trained.metrics)]
    assert len(measured) == 5  # the run has no held-out problems
    assert [line.split("  ")[0] for line in drawn] == [shown.label for shown in measured]
    assert max(map(len, drawn)) <= width
    assert len({len(line) for line in drawn}) == 1  # the numbers are aligned in columns
    for line, shown in zip(drawn, measured, strict=True):
        values = [row[shown.metric] for row in trained.metrics if shown.metric in row]
        if width >= 60:
            assert line.split()[-3:] == [shown.number(values[0]), "→", shown.number(values[-1])]


def test_a_metric_missing_from_a_step_keeps_its_last_value():
    (line,) = lines([{"eval/accuracy": 0.5}, {}, {}, {"eval/accuracy": 0.75}])
    assert line.split() == ["held-out", "accuracy", "▁▁▁█", "0.500", "→", "0.750"]


def test_non_finite_values_are_left_out():
    assert lines([{"reward/mean": math.nan}, {"reward/mean": math.inf}]) == []
    (line,) = lines([{"reward/mean": 1.0}, {"reward/mean": math.nan}])
    assert line.split()[-3:] == ["1.000", "→", "1.000"]


def test_curves_use_only_ascii_characters_where_the_terminal_has_no_others():
    ascii_only = Plain(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)
    curves = Curves()
    for value in (0.0, 0.5, 1.0):
        curves.add({"reward/mean": value})
    (line,) = curves.lines(ascii_only)
    assert line.plain.isascii()
    assert line.plain.split() == ["reward", ".+@", "0.000", "->", "1.000"]
