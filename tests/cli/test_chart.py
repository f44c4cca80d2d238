"""The chart in the terminal: every bin's bar is in proportion, at 80 columns, with or without line-drawing characters."""

import dataclasses
import io
import math

import numpy as np
import pytest

from rlzoo.cli.chart import clip_by_length, clip_in_words
from rlzoo.cli.console import Plain
from rlzoo.lab.replay import replay
from rlzoo.measure.intervals import Clusters
from rlzoo.measure.profile import Fractions


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


def test_the_summary_lists_lengths_whose_clip_rate_differs_significantly(profile):
    sides = dataclasses.replace(
        profile.both,
        fraction=(0.05, 0.1, 0.1, 0.1, 0.1, 0.22),
        low=(0.02, 0.06, 0.06, 0.06, 0.06, 0.15),
        high=(0.09, 0.15, 0.15, 0.15, 0.15, 0.3),
    )
    edges = (1, 8, 16, 32, 64, 128, 256)
    found = clip_in_words(dataclasses.replace(profile, both=sides, clip_fraction=0.1, edges=edges, lre=None))
    assert found == (
        "Clipped more often than the average response: 129-256 tokens (2.2 times). "
        "Clipped less often than the average response: 1-8 tokens (0.5 times). No difference was shown at other lengths."
    )
    assert clip_in_words(dataclasses.replace(profile, clip_fraction=0.0)) == "Nothing was clipped."


def test_absent_evidence_is_not_called_equal_clipping(profile):
    # eight responses, with the fractions 0, 0, 1, 0 and .33 by length
    rows = np.array([0, 0, 1, 2, 3, 4, 4, 4]), np.array([0.0, 0, 0, 1, 0, 1, 0, 0])
    low, high = (tuple(ends) for ends in Clusters.of(*rows, np.arange(8)).proportions())
    sides = Fractions((2, 1, 1, 1, 3, 0), (0.0, 0.0, 1.0, 0.0, 1 / 3, math.nan), low, high)
    lre = Clusters.of(*rows, np.arange(8)).reweighting()
    few = dataclasses.replace(profile, both=sides, clip_fraction=0.25, edges=(1, 8, 16, 32, 64, 128, 256), lre=lre)
    said, bound = clip_in_words(few).removesuffix(".").rsplit(" ", 1)
    assert said == "No difference between lengths was shown; the length error may be as large as"
    assert float(bound) > 0.5
