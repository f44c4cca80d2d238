"""YAML and JSON from outside: what is rejected, and that it is rejected immediately."""

import time

import pytest

from rlzoo.support.parsing import DEEPEST, UnreadableError, parse_json, parse_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{former}'] * 10)}]\n" for former, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1, 2\n", "line 2 "),
        ("a: 2001-99-99", "a value does not match its type"),  # looks like a date
        ("!!bool maybe", "a value does not match its type"),
        ("!!timestamp x", "a value does not match its type"),
        ('!!int ""', "a value does not match its type"),
        ("9" * 5000, "a value does not match its type"),
        ("0x" + "f" * 5000, "thousands of digits"),
        ("- " * 5000, "nested deeper"),
        ("a: &a [*a]", "nested deeper"),
        ('"\\ud800"', "surrogate"),
        ("a" * 50_001, "characters are too many"),
    ],
)
def test_yaml_that_would_surprise_later_is_refused(text, reason):
    with pytest.raises(UnreadableError, match=reason):
        parse_yaml(text)


def test_aliases_that_make_much_of_little_are_refused_at_once():
    begin = time.perf_counter()
    with pytest.raises(UnreadableError, match="more than 100,000 values"):
        parse_yaml(BOMB)  # 10^9 values in 500 characters
    assert time.perf_counter() - begin < 1
    assert parse_yaml("a: &a {b: 1}\nc: *a") == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": }', "at column 7$"),
        ("[" * 100_000, "nested deeper"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "nested deeper"),
        ("9" * 5000, "4300 digits"),
        ('["\\ud800"]', "surrogate"),
    ],
)
def test_json_that_would_surprise_later_is_refused(text, reason):
    with pytest.raises(UnreadableError, match=reason):
        parse_json(text)
    assert parse_json('{"a": [1, "\\u00e9"]}') == {"a": [1, "é"]}


def test_a_repeated_key_is_refused_and_an_equal_one_elsewhere_is_not():
    assert parse_json('{"a": {"b": 1}, "c": [{"b": 1}, {"b": "{\\"b\\": 1"}]}')["c"][1] == {"b": '{"b": 1'}
    for text, key, line in (
        ('{"a": "}",\n "\\u0061": 1}', "a", ", again in line 2"),
        ('[{"x": 1}, {"x": {"y": 1,\n"z": [],\n"y": 2}}]', "y", ", again in line 3"),
        ('{"a,b": 1, "c": {}, "a,b": 2}', "a,b", ""),
    ):
        with pytest.raises(UnreadableError) as caught:
            parse_json(text)
        assert str(caught.value) == f"the key {key!r} occurs twice in one object{line}"
