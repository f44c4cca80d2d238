"""Laws of the arithmetic task."""

import zlib

import pytest

from rlzoo.core.errors import UserError
from rlzoo.tasks import build_task
from rlzoo.tasks.problem import Problem

TWENTY_THREE = Problem("3+5+9+6", "23")


def arithmetic(**settings):
    return build_task({"name": "arithmetic", **settings})


def grade(response, problem=TWENTY_THREE, **settings):
    (reward,) = arithmetic(**settings).grade([problem], [response])
    return reward


def test_seeds_do_not_share_a_shifted_order():
    one, two = arithmetic(seed=0).train_problems(0, 50), arithmetic(seed=1).train_problems(0, 50)
    assert len(set(one) & set(two)) < 10  # short sums repeat, long ones do not


def test_training_never_uses_a_held_out_question():
    # two numbers up to 9 give 81 questions, so 3000 draws would include every held-out one if they could
    task = arithmetic(num_operands_max=2)
    held_out = set(task.held_out_problems(1000))
    train = set(task.train_problems(0, 3000))
    assert held_out
    assert not held_out & train
    assert len(held_out) + len(train) == 81


def test_the_split_is_by_the_sum_without_its_equals_sign():
    # as for the shipped model: zlib.crc32(b"...") % 8 of the question, not of the prompt
    task = arithmetic(num_operands_max=2)
    assert {zlib.crc32(problem.question.encode()) % 8 for problem in task.held_out_problems(1000)} == {0}
    assert 0 not in {zlib.crc32(problem.question.encode()) % 8 for problem in task.train_problems(0, 500)}
    assert task.prompt(Problem("3+5", "8")) == "3+5="


def test_answers_are_the_sums_and_lengths_are_in_range():
    task = arithmetic(operand_max=3, num_operands_min=4, num_operands_max=6)
    lengths = set()
    for problem in task.train_problems(0, 300):
        numbers = [int(number) for number in problem.question.split("+")]
        assert int(problem.answer) == sum(numbers)
        assert set(numbers) <= {1, 2, 3}
        lengths.add(len(numbers))
    assert lengths == {4, 5, 6}


@pytest.mark.parametrize("response", ["8,17#23", "#23", "# 23 ", "#9#23", "#23\n", "no idea#+23", "#023"])
def test_the_integer_after_the_last_marker_is_the_answer(response):
    assert grade(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "", "23", "#", "#230", "#123", "#-23", "#23,", "#2 3", "#23#", "#23#24", "#23.0", "#2_3", "#24", "#23 or 24",
        "#٢٣", "#²³", "#２３", "#8,17,23", "#--23", "#0x17", "#" + "9" * 5000,
    ],
)  # fmt: skip
def test_any_other_response_has_reward_0(response):
    assert grade(response) == 0.0


def test_the_marker_can_be_any_text():
    assert grade("#24 Answer: 23", answer_marker="Answer:") == 1.0
    assert grade("#23", answer_marker="Answer:") == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("8, 17, 23", 1.0), ("it is 23.", 1.0), ("3+5+9+6=23", 1.0), ("17+23", 1.0), ("5-23", 1.0), ("23 then 24", 0.0),
        ("-23", 0.0), ("230", 0.0), ("7.23", 0.0), ("٢٣", 0.0), ("none", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_without_a_marker_the_last_integer_is_the_answer(response, reward):
    assert grade(response, answer_marker="") == reward


def test_ranges_that_contradict_each_other_are_an_error():
    with pytest.raises(UserError, match=r"^task\.num_operands_max=3 is below task\.num_operands_min=5$"):
        arithmetic(num_operands_min=5, num_operands_max=3)


def test_too_few_questions_to_split_are_an_error():
    with pytest.raises(UserError, match=r"^task\.operand_max=1 and task\.num_operands_max=2 allow too few"):
        arithmetic(operand_max=1, num_operands_max=2)
