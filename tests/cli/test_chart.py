"""The chart in the terminal: every bin's bar is in proportion, at 80 columns, with or without line-drawing characters."""

import dataclasses
import io

import pytest

from rlzoo.cli.chart import clip_by_length
from rlzoo.cli.console import Plain
from rlzoo.lab.replay import replay


@pytest.fixture
def profile(recorded):
    return replay(recorded, recorded.own_rule).profile


def drawn(profile, encoding="utf-8", width=80):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Plain(file=stream, width=width)
    console.print(clip_by_length(profile, console))
    stream.seek(0)
    return stream.read().splitlines()


@pytest.mark.long
def test_every_bin_has_a_row_with_its_lengths_fraction_and_interval(profile):
    title, *rows = drawn(profile)
    assert title.strip() == "clip fraction by response length, all steps"
    assert len(rows) == sum(count > 0 for count in profile.both.count)
    for row, share in zip(rows, profile.both.fraction, strict=True):
        assert f"{share:.3f}".removeprefix("0") in row
        assert len(row) <= 80


def test_bars_are_in_proportion(profile):
    rows = drawn(profile)[1:]
    start = min(row.index(next(sign for sign in row if sign in "━├┼")) for row in rows)
    ends = [row.index("┼") - start for row in rows]
    longest = max(profile.both.high)
    for end, share in zip(ends, profile.both.fraction, strict=True):
        assert end == pytest.approx(40 * share / longest, abs=0.51)


def test_a_terminal_without_line_drawing_gets_ascii_characters(profile):
    assert "".join(drawn(profile, "ascii")).isascii()


def test_bins_do_not_overlap(profile):
    # a bin up to 13.67 tokens contains 13 but not 14, which begins the next bin
    edges = (9.0, 13.67, *(20.0 + k for k in range(len(profile.edges) - 2)))
    rows = drawn(dataclasses.replace(profile, edges=edges))[1:]
    assert rows[0].split()[0] == "9-13"
    assert rows[1].split()[0] == "14-20"
