"""YAML and JSON from outside: what is rejected, and that it is rejected immediately."""

import time

import pytest
import yaml

from rlzoo.support.parsing import DEEPEST, UnreadableError, dump_yaml, parse_json, parse_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{former}'] * 10)}]\n" for former, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1, 2\n", "line 2 "),
        ("!!int 1:30", "a value does not match its type"),
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
def test_ambiguous_yaml_is_refused(text, reason):
    with pytest.raises(UnreadableError, match=reason):
        parse_yaml(text)


def test_exponentially_expanding_aliases_are_refused_at_once():
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
def test_ambiguous_json_is_refused(text, reason):
    with pytest.raises(UnreadableError, match=reason):
        parse_json(text)
    assert parse_json('{"a": [1, "\\u00e9"]}') == {"a": [1, "é"]}


def test_a_repeated_key_is_refused_and_an_equal_one_elsewhere_is_not():
    assert parse_json('{"a": {"b": 1}, "c": [{"b": 1}, {"b": "{\\"b\\": 1"}]}')["c"][1] == {"b": '{"b": 1'}
    for text, key in (
        ('{"a": "}",\n "\\u0061": 1}', "a"),
        ('[{"x": 1}, {"x": {"y": 1, "z": [], "y": 2}}]', "y"),
        ('{"a,b": 1, "c": {}, "a,b": 2}', "a,b"),
    ):
        with pytest.raises(UnreadableError, match=f"^the key {key!r} occurs twice in one object$"):
            parse_json(text)


PLAIN = {
    "5e-4": 0.0005, "2E3": 2000.0, "3.e1": 30.0, "+.25": 0.25, "-7": -7, "007": 7, "0o20": 16, "0xfF": 255,
    "-.inf": -float("inf"),     "true": True, "TRUE": True, "False": False, "null": None, "~": None, "": None,
    "off": "off", "No": "No", "y": "y", "tRUE": "tRUE", "12:45": "12:45", "2_500": "2_500", "0b101": "0b101",
    "2024-02-30": "2024-02-30", "2024-02-03": "2024-02-03", "=": "=", "1e": "1e",
}  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_unquoted_values_have_the_types_of_yaml_1_2(text):
    for value in (parse_yaml(f"a: [{text or 'null'}, {{b: {text}}}]"), parse_yaml(f"a:\n- {text}\n- b: {text}\n")):
        for found in (value["a"][0], value["a"][1]["b"]):
            assert (type(found), found) == (type(PLAIN[text]), PLAIN[text])


@pytest.mark.parametrize("text", [*PLAIN, "<<", "n", "08", "1e400", "0o9", " x", "a: b", "- a", "#", "true\n"])
def test_written_strings_remain_strings_in_yaml_1_1_and_1_2(text):
    written = dump_yaml({text: [text, 1e-7, 1e30, True, None, -3]})
    assert parse_yaml(written) == yaml.safe_load(written) == {text: [text, 1e-7, 1e30, True, None, -3]}
    if text in ("y", "n"):  # booleans for some readers of YAML 1.1, though not for PyYAML
        assert f"'{text}'" in written


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a: 1\nb: 2\na: 3\n", (3, "'a'", 1)),
        ("a:\n  b: {c: 1}\n  d: 2\n  b: {e: 1}\n", (4, "'b'", 2)),
        ("a: [{x: 1,\n x: 2}]", (2, "'x'", 1)),
        ("'a': 1\n\n\na: 2", (4, "'a'", 1)),
        ("10: a\n0xa: b", (2, "10", 1)),
        ("? a\n: 1\n? a\n: 2", (3, "'a'", 1)),
        ("a: &a {x: 1}\nb:\n  <<: *a\n  <<: *a\n", (4, "'<<'", 3)),
    ],
)
def test_a_key_that_occurs_twice_is_refused_with_both_lines(text, lines):
    with pytest.raises(UnreadableError, match="line {} repeats the key {} of line {}".format(*lines)):
        parse_yaml(text)


def test_a_mapping_may_override_what_it_merges():
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {x: 3, <<: *b}\nd: [{x: 1}, {x: 2}]\n"
    found = parse_yaml(text)
    assert (found["b"], found["c"], found["d"]) == ({"x": 2, "y": 1}, {"x": 3, "y": 1}, [{"x": 1}, {"x": 2}])
