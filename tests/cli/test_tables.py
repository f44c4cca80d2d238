"""Numbers in tables keep their digits and their sign."""

import pytest

from rlzoo.cli.tables import interval, number, signed


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
