"""Figures show their data, escape it, and are reproducible."""

import math
import re

import pytest

from rlzoo.measure.figures import Series, forest, lines, plot_by_length, svg

RAGGED = {"one": Series((8, 16, math.nan), (0.1, math.nan, 0.3), (0.05, 0.1, 0.2), (0.2, 0.3, 0.4)), "none": Series((), ())}


def many(number):
    return {f"rule {index}": Series((8, 16, 32), (0.1, 0.2, 0.1 + index / 100)) for index in range(number)}


@pytest.mark.parametrize("plot", [plot_by_length, lambda s: lines(s, xlabel="x", ylabel="y")])
def test_every_series_is_in_the_legend_and_missing_points_are_left_out(plot):
    text = svg(plot(RAGGED | many(24)))
    for label in (*RAGGED, *many(24)):
        assert f">{label}</text>" in text or f">{label}<" in text


def test_twenty_four_series_differ_in_colour_marker_or_style():
    (axes,) = plot_by_length(many(24)).axes
    curves = [container.lines[0] for container in axes.containers]
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in curves}
    assert len(looks) == 24


def test_a_profile_has_a_logarithmic_axis_and_its_intervals():
    figure = plot_by_length({"one": Series((10, 20), (0.1, 0.2), (0.05, 0.1), (0.2, 0.4))})
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert axes.get_ylim()[0] == 0
    segments = axes.collections[0].get_segments()
    assert [(low, high) for (_, low), (_, high) in segments] == [(pytest.approx(0.05), pytest.approx(0.2)), (0.1, 0.4)]


def test_a_forest_has_its_rows_from_the_top_and_takes_unknown_intervals():
    (axes,) = forest([("first", 0.5, (0.4, 0.6)), ("second", 0.3, None)], xlabel="score").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    assert axes.get_yticks().tolist() == [2, 1]


def test_labels_are_shown_as_they_are():
    text = svg(plot_by_length({"_hidden $x$ <script>": Series((1, 2), (1, 2))}, title="a $b$ c"))
    assert "<script>" not in text
    assert "_hidden $x$ &lt;script&gt;" in text
    assert "a $b$ c" in text


@pytest.mark.filterwarnings("error")
def test_a_name_of_any_length_leaves_room_for_the_data():
    name = "fspo-" + "x" * 250 + "-seed-7"
    series = {name: Series((8, 16), (0.1, 0.2)), "short": Series((8, 16), (0.1, 0.2))}
    for figure in (
        plot_by_length(series, title=name),
        lines(series, xlabel="x", ylabel="y"),
        forest([(name, 0.5, (0.4, 0.6))], xlabel="x"),
    ):
        text = svg(figure)
        assert f">fspo-{'x' * 12}…{'x' * 11}-seed-7<" in text
        (axes,) = figure.axes
        assert axes.get_position().width > 1 / 3


def test_equal_figures_have_equal_bytes_and_different_figures_have_different_ids():
    first, again = (svg(plot_by_length(RAGGED)) for _ in range(2))
    other = svg(plot_by_length(many(2)))
    assert first == again
    assert not set(re.findall(r'\bid="([^"]+)"', first)) & set(re.findall(r'\bid="([^"]+)"', other))
    for text in (first, other):
        used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', text))
        assert used <= set(re.findall(r'\bid="([^"]+)"', text))
        assert text.startswith("<svg")


def test_the_value_axis_of_a_profile_starts_at_zero():
    (axes,) = plot_by_length({"one": Series((9, 160), (0.0, 0.3), (0.0, 0.2), (0.02, 0.4))}).axes
    assert axes.get_ylim()[0] == 0


def test_lengths_between_two_powers_of_two_have_ticks():
    text = svg(plot_by_length({"one": Series((18, 24), (0.1, 0.2))}))
    assert ">18<" in text
    assert ">24<" in text


def test_a_length_of_zero_is_left_out():
    (axes,) = plot_by_length({"one": Series((0, 8), (0.1, 0.2))}).axes
    assert axes.lines[0].get_xdata().tolist() == [8.0]


def test_a_legend_of_many_leaves_the_data_most_of_the_width():
    figure = lines({f"rule-with-a-name-{index}": Series((1, 2), (1, 2)) for index in range(24)}, xlabel="x", ylabel="y")
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().width > 0.6


def test_drawn_twice_one_figure_gives_the_same_bytes():
    figure = plot_by_length(many(4), title="title")
    assert svg(figure) == svg(figure)


def test_labels_like_references_and_axes_with_dollar_signs_are_shown_literally():
    text = svg(lines({'id="x" url(#a)': Series((1, 2), (1, 2))}, xlabel=r"$\foo$", ylabel="y"))
    assert '>id="x" url(#a)<' in text
    assert r">$\foo$<" in text
