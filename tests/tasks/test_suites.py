"""Suites: their questions and order, and which answers are equal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlzoo.core.errors import UserError
from rlzoo.tasks.arithmetic import ArithmeticTask
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.suites import SUITES, find_suite

pytest.importorskip("math_verify")

from rlzoo.tasks.math_grading import MathGrader

ROWS = [{"problem": f"What is {n} + {n}?", "answer": 2 * n} for n in (5, 3, 9)]
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "lab" / "grade_references.py"


def write(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(timeout=5)
    yield grader
    grader.close()


def error_of(action, *arguments):
    with pytest.raises(UserError) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_problems_are_the_first_in_the_order_of_the_file(tmp_path):
    write(tmp_path / "math500.jsonl")
    assert [problem.answer for problem in SUITES["math500"].problems(tmp_path, None)] == ["10", "6", "18"]
    assert [problem.answer for problem in SUITES["math500"].problems(tmp_path, 2)] == ["10", "6"]
    assert SUITES["math500"].prompt(Problem("1+1?", "2")) == (
        "1+1?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


def test_a_local_copy_is_found_under_either_name(tmp_path):
    write(tmp_path / "gsm8k_test.jsonl")
    assert len(SUITES["gsm8k"].problems(tmp_path, None)) == 3
    write(tmp_path / "gsm8k.jsonl", ROWS[:1])  # the suite's own name first
    assert len(SUITES["gsm8k"].problems(tmp_path, None)) == 1


def test_any_file_of_the_folder_is_a_suite_of_mathematics(tmp_path):
    write(tmp_path / "mine.jsonl")
    suite = find_suite("mine", tmp_path)
    assert len(suite.problems(tmp_path, None)) == 3
    assert suite.template == SUITES["math500"].template


def test_errors_are_reported_in_one_line(tmp_path):
    allowed = "gsm8k, math500, amc23, aime24, aime25, arithmetic"
    assert error_of(find_suite, "math50", None) == f"unknown suite 'math50' (allowed: {allowed}); did you mean 'math500'?"
    assert "or NAME.jsonl in --data" in error_of(find_suite, "mine", tmp_path)
    write(tmp_path.parent / "mine.jsonl")
    assert "unknown suite '../mine'" in error_of(find_suite, "../mine", tmp_path)
    expected = f"suite 'gsm8k': no gsm8k.jsonl or gsm8k_test.jsonl in --data {str(tmp_path)!r}"
    assert error_of(SUITES["gsm8k"].problems, tmp_path, None) == expected
    write(tmp_path / "aime24.jsonl", [{"problem": "p"}])
    line = error_of(SUITES["aime24"].problems, tmp_path, None)
    assert "aime24.jsonl line 1: no column with the answer (columns found: problem; allowed: " in line


def test_sums_that_are_never_trained_on_are_a_suite_without_a_file():
    problems = SUITES["arithmetic"].problems(None, None)
    assert len(set(problems)) == len(problems) == 200
    assert problems[:5] == SUITES["arithmetic"].problems(None, 5)
    assert SUITES["arithmetic"].prompt(Problem("3+5", "8")) == "3+5="


def test_equal_sums_are_one_answer():
    responses = ["8#17", "9#18", "#17", "17", "1,2#018", ""]
    assert ArithmeticTask().answer_groups(responses, [1.0, 0, 1, 0, 0, 0]) == [0, 1, 0, None, 1, None]


@pytest.mark.long
def test_answers_that_are_the_same_mathematics_are_one_group(grader):
    responses = [
        "\\boxed{0.5}",  # 0, right
        "\\boxed{\\frac{1}{3}}",  # 1
        "so \\boxed{\\frac12}",  # right, like 0
        "\\boxed{2/6}",  # like 1
        "I do not know",  # no answer
        "\\boxed{}",  # no answer
        "it is 1/3.",  # without a box, like 1
        "\\boxed{7}",  # 7
        "#### 7",  # like 7
        "\\boxed{1/3}",  # like 1
    ]
    rewards = grader.grade([Problem("q", "1/2")] * len(responses), responses)
    assert rewards == [1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert grader.answer_groups(responses, rewards) == [0, 1, 0, 1, None, None, 1, 7, 7, 1]


@pytest.mark.long
def test_an_answer_that_hangs_equals_no_other():
    grader = MathGrader(timeout=1)
    try:
        assert grader.answer_groups(["\\boxed{9^{9^{9^9}}}", "\\boxed{3}"], [0.0, 0.0]) == [0, 1]
        assert grader.worker.num_failures == 1
    finally:
        grader.close()


@pytest.mark.parametrize(
    ("reference", "answer", "reward"),
    [
        ("52_8", "52_{8}", 1.0),
        ("52_8", "52", 1.0),
        ("4210_{5}", "4210_5", 1.0),
        ("104", "104.", 1.0),
        ("104", "$104$.", 1.0),
        ("\\frac{1}{2}", "0.5.", 1.0),
        ("073", "\\textbf{(073)}", 1.0),
        ("073", "\\textbf{(074)}", 0.0),
        ("\\text{Evelyn}", "\\text{evelyn}", 1.0),
        ("\\text{Evelyn}", "\\text{Levyne}", 0.0),  # an anagram is not a product of the same letters
        ("18", "18\\$", 1.0),
    ],
)
def test_inputs_that_are_difficult_for_math_verify(grader, reference, answer, reward):
    assert grader.grade([Problem("q", reference)], [f"\\boxed{{{answer}}}"]) == [reward]


@pytest.mark.skipif("RLZOO_DATA" not in os.environ, reason="RLZOO_DATA names no folder with the suites' files")
def test_references_are_judged_right_and_changed_ones_wrong():
    answer = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    rows = [line.strip("| ").split(" | ") for line in answer.stdout.splitlines()[2:]]
    counts = {(suite, what): tuple(map(int, count.split(" of "))) for suite, what, count in rows}
    assert counts["math500", "answers, judged right"] == counts["math500", "solutions, judged right"] == (500, 500)
    assert {counts[suite, "answers, judged right"] for suite in ("aime24", "aime25")} == {(30, 30)}
    assert counts["amc23", "answers, judged right"] == (40, 40)
    units = {("math500", "last number + 1, judged wrong")}  # two of them are the exponent of a unit, which is ignored
    assert {key for key, (right, of) in counts.items() if right != of} == units
    assert counts["math500", "last number + 1, judged wrong"] == (487, 489)
