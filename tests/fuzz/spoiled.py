"""Strategies for bad input: random input, and corrupted real input."""

import copy
import json
from contextlib import contextmanager

from hypothesis import strategies as st

MEGABYTE = 10**6
PIECES = [
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[31m", b"\r\n", b"\n", b"\t", b"\xe2\x80\xa8", b"\xef\xbb\xbf"),
    *(b"[", b"]", b"{", b"}", b'"', b"'", b"\\", b":", b",", b"- ", b"#", b"&a ", b"*a", b"!!int ", b"? ", b"|\n", b"%", b"@"),
    *(b"NaN", b"-Infinity", b"null", b"true", b"-1", b"0", b"1e999", b"99999999999999999999", b"0x" + b"f" * 5000, b"9" * 5000),
    *(b"2001-99-99", b"!!bool maybe", b"!!timestamp x", b"!!binary x", b"!!float x", b'!!int ""', b"!!python/name:os.system"),
    *(b"&a [*a]", b"[" * 2000, b"{a: " * 300, b"- " * 2000, b"\\ud800", b"\\boxed{", b"####", b"<<: "),
]
HUGE = [
    b"9" * MEGABYTE,
    b"a" * MEGABYTE,
    b"[" * MEGABYTE,
    b" " * MEGABYTE,
    b"\n" * MEGABYTE,
    b'"' * MEGABYTE,
    b"- a\n" * (MEGABYTE // 4),
]
ODD_TEXTS = [
    *(
        "",
        " ",
        "\n",
        "\x00",
        "\ud800",
        "\x1b[2J",
        "a\nb",
        "\u2028",
        "é" * 300,
        "x" * 5000,
        "/",
        "..",
        "~",
        "~nobody-here",
        "a/" * 200,
    ),
    *(
        "$x$",
        "$\\frac",
        "null",
        "None",
        "nan",
        "1e5",
        "{question}",
        "%s",
        "{0}",
        "arithmetic",
        "math_file",
        "fspo",
        "zero3",
        "grpo",
        "__class__",
    ),
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([2**31, -(2**63), 2**64, 10**30, 10**400, -1]),
    st.floats(),
    st.sampled_from(ODD_TEXTS),
    st.text(max_size=20),
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["name", "a", "", "clip"]), inner, max_size=4),
    max_leaves=8,
)
_REMOVED = object()


@st.composite
def spoiled_bytes(draw, good):
    """Return a real input in which one to four pieces were cut, doubled, changed or inserted; rarely a megabyte."""
    data = draw(st.sampled_from(good))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.sampled_from([1, 1, 2, 8, 40, 400])))
        kind = draw(st.integers(0, 99))
        if kind < 12:
            data = data[:begin]
        elif kind < 30:
            data = data[:begin] + data[end:]
        elif kind < 42:
            data = data[:end] + data[begin:end] * draw(st.sampled_from([1, 2, 50])) + data[end:]
        elif kind < 60:
            data = data[:begin] + draw(st.binary(min_size=1, max_size=4)) + data[end:]
        elif kind < 99:
            data = data[:begin] + draw(st.sampled_from(PIECES)) + data[end if kind < 80 else begin :]
        else:
            data = data[:begin] + draw(st.sampled_from(HUGE)) + data[begin:]
    return data


@st.composite
def spoiled_trees(draw, good):
    """Return nested settings in which one to three values were replaced, removed, wrapped or renamed."""
    tree = copy.deepcopy(draw(st.sampled_from(good)))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        kind = draw(st.integers(0, 9))
        value = holder[key]
        if kind < 6:
            holder[key] = draw(trees)
        elif kind < 7:
            holder[key] = [value]
        elif kind < 8:
            holder[key] = {draw(st.sampled_from(["name", "", "x"])): value}
        else:
            del holder[key]
            if kind == 9 and isinstance(holder, dict):
                holder[draw(st.sampled_from(ODD_TEXTS) | st.text(max_size=10))] = value
    return tree


def _places(tree):
    for key, value in list(tree.items()) if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


def as_json(tree):
    """Format a line of JSON, with NaN and lone surrogates as Python writes them."""
    return json.dumps(tree)


def spoiled_json(good):
    """Return a JSON file with an error in its bytes or its content."""
    return spoiled_bytes([good]) | spoiled_trees([json.loads(good)]).map(lambda tree: json.dumps(tree).encode())


@contextmanager
def holding(file, content):
    """Replace a file's content inside the block."""
    good = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(good)
