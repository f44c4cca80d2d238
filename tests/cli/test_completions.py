"""Responses in the terminal are printed as written, but cannot control the terminal."""

import io
import json

import pytest

from rlzoo.cli.completions import LONGEST, completions, is_due
from rlzoo.cli.console import Plain

ROW = {"group": 0, "question": "1+1", "answer": "2", "response": "2", "length": 3, "reward": 1.0, "finished": True}


@pytest.fixture
def printed(tmp_path):
    """Print the responses of a step that was recorded with the given rows."""

    def show(*rows, number=2, width=80):
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        lines = [json.dumps({**ROW, **row}, ensure_ascii=False) + "\n" for row in rows]
        (tmp_path / "rollouts" / "000003.jsonl").write_text("".join(lines), encoding="utf-8")
        file = io.StringIO()
        Plain(file=file, width=width, force_terminal=True).print(completions(tmp_path, 3, number))
        return file.getvalue()

    return show


def plain(text):
    return text.replace("\x1b[0m", "").replace("\x1b[2m", "").replace("\x1b[1m", "")


def test_responses_of_a_real_run_are_those_it_recorded(trained):
    rows = [json.loads(line) for line in (trained.path / "rollouts" / "000002.jsonl").read_text().splitlines()]
    file = io.StringIO()
    Plain(file=file, width=80).print(completions(trained.path, 2, len(rows)))
    lines = [line.rstrip().split(maxsplit=1) for line in file.getvalue().splitlines() if line.strip()]
    assert [words[1] for words in lines if words[0] == "question"] == [row["question"] for row in rows]
    rewards = [line.partition("reward ")[2].partition(",")[0] for line in file.getvalue().splitlines() if "reward " in line]
    assert [float(reward) for reward in rewards] == [row["reward"] for row in rows]


def test_a_few_are_drawn_the_same_ones_every_time(printed):
    rows = [{"response": f"number {index}"} for index in range(50)]
    once = printed(*rows, number=3)
    assert once == printed(*rows, number=3)
    assert once.count("number ") == 3
    assert printed(*rows[:2], number=3).count("number ") == 2  # fewer responses than requested: all are printed


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x1b]52;c;AAAA\x07", "\r", "\x9b2J", "\u202e", "\x08", "\u2028", "\x85"])
@pytest.mark.parametrize("key", ["question", "response"])
def test_control_characters_do_not_reach_the_terminal(printed, key, evil):
    text = plain(printed({key: f"before {evil}after"}))
    assert evil not in text
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "before" in text
    assert "after" in text


def test_brackets_in_a_response_are_no_markup(printed):
    text = plain(printed({"response": "[bold red]7[/] and [link=http://x]this[/link] :warning:"}))
    assert "[bold red]7[/] and [link=http://x]this[/link] :warning:" in text


def test_lines_of_a_response_stay_and_fit(printed):
    text = plain(printed({"response": f"one\ntwo {'long ' * 40}"}, width=60))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60
    assert [line.split()[-1] for line in lines if "one" in line] == ["one"]
    assert any(line.strip().startswith("two long") for line in lines)


def test_a_long_response_is_cut_and_says_so(printed):
    text = plain(printed({"response": "x" * (LONGEST + 1234)}, width=200))
    assert text.count("x") == LONGEST
    assert "... 1,234 more characters" in text.replace("\n", " ")


def test_what_cannot_be_read_is_said_and_ends_nothing(tmp_path, printed):
    assert "cannot be shown" in completions(tmp_path / "none", 3, 1)
    text = printed({"length": None, "finished": None, "reward": "\x1b[2Jmuch"})
    assert "cannot be shown" in text
    assert "\x1b[2J" not in text


def test_they_are_printed_after_the_first_step_the_last_and_about_every_tenth():
    assert [step for step in range(41) if is_due(step, 40)] == [1, *range(4, 41, 4)]
    assert [step for step in range(4) if is_due(step, 3)] == [1, 2, 3]
    assert [step for step in range(26) if is_due(step, 25)] == [1, *range(2, 25, 2), 25]
