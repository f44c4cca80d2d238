"""Tables on the terminal and in files."""

import math

import pytest

from rlzoo.cli.tables import check_files, interval, number, save_tables, signed
from rlzoo.core.errors import UserError
from rlzoo.measure.report import Table


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0321, ".032"),
        (-0.5, "-.500"),
        (10.5, "10.500"),
        (20.25, "20.250"),
        (100, "100.000"),
        (None, "-"),
        (float("nan"), "-"),
    ],
)
def test_numbers_keep_their_digits(value, written):
    assert number(value) == written


def test_differences_have_a_sign_and_intervals_two_ends():
    assert (signed(0.02), signed(-0.02), signed(None)) == ("+.020", "-.020", "-")
    assert (interval((0.1, 0.2)), interval((-0.2, -0.1)), interval(None)) == (".100 .200", "-.200 -.100", "-")


TABLE = Table(
    "a & b", ["rule", "mean", "95 %", "n"], [["x_y", 1 / 3, (0.1, 0.25), 1000], ["z", math.nan, None, 2]], "paired\nby seed"
)


def test_csv_has_all_digits_two_columns_for_an_interval_and_empty_cells_for_unknown_numbers(tmp_path):
    save_tables([TABLE, TABLE, Table("empty", ["rule"], [])], tmp_path / "t.csv", None)
    expected = "rule,mean,mean 95 % low,mean 95 % high,n\nx_y,0.3333333333333333,0.1,0.25,1000\nz,,,,2\n"
    assert (tmp_path / "t.csv").read_text() == (tmp_path / "t-a-b.csv").read_text() == expected
    assert len(list(tmp_path.iterdir())) == 2


def test_a_table_replaces_only_a_table_with_the_same_columns(tmp_path):
    file = tmp_path / "t.csv"
    for _ in range(2):
        save_tables([TABLE], file, None)
    file.write_text("rule,mine\n")
    with pytest.raises(UserError, match="is not an rlzoo table with these columns"):
        save_tables([TABLE], file, None)
    assert file.read_text() == "rule,mine\n"


def test_latex_is_rounded_and_escaped(tmp_path):
    save_tables([TABLE], None, tmp_path / "t.tex")
    lines = (tmp_path / "t.tex").read_text().splitlines()
    assert lines[2:] == [
        r"% a \& b: paired by seed",
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"rule & mean & mean 95 \% & n \\",
        r"\midrule",
        r"x\_y & 0.333 & 0.100 to 0.250 & 1,000 \\",
        r"z & -- & -- & 2 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="is not an rlzoo table"):
        check_files(None, tmp_path / "thesis.tex")


def test_a_report_in_another_format_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"x\.csv': a report is an HTML page; name it \.html, or use --csv"):
        check_files(None, None, tmp_path / "x.csv")
