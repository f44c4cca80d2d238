"""An error is one line for any input."""

from rlzoo.core.errors import LONGEST_MESSAGE, UserError, shown


def test_a_refusal_is_one_line_of_bounded_length():
    assert str(UserError("no file 'a\nb\x1b[2J\ud800'")) == "no file 'a\\nb\\x1b[2J\\ud800'"
    long = str(UserError("begin " + "\0" * 10**6 + " end"))
    assert len(long) <= LONGEST_MESSAGE
    assert long.startswith("begin ")
    assert long.endswith(" end")


def test_given_values_are_shown_as_a_shortened_repr():
    assert [shown(value) for value in ("fast", 1.5, None, ["a"])] == ["'fast'", "1.5", "None", "['a']"]
    assert len(shown("9" * 10**6)) == 200
