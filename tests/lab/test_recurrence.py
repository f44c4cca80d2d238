"""Laws of the recurrence task."""

import math

import pytest

from examples.lab.recurrence import worked_terms
from rlzoo.core.errors import UserError
from rlzoo.tasks import build_task
from rlzoo.tasks.problem import Problem

FIFTY_SIX = Problem("004c17,003c42,", "56")


def recurrence(**settings):
    return build_task({"name": "examples.lab.recurrence:RecurrenceTask", **settings})


def test_a_solution_worked_by_hand():
    # c is 3: 3*42+17 = 143, of which 43 stays; 3*43+42 = 171; 3*71+43 = 256
    assert list(worked_terms("004c17,003c42,")) == ["002c43,", "001c71,", "000#56"]
    assert list(worked_terms("2a5,1a9,")) == ["0#4"]  # 9+5 = 14
    assert list(worked_terms("002i0099,001i9990,")) == ["000#0009"]  # 9*9990+99 = 90009


def test_training_never_uses_a_held_out_question():
    # one digit, one multiplier and one step give 100 questions, so 3000 draws would include every held-out one if they could
    task = recurrence(digits=1, multiplier_max=1, steps_max=1)
    held_out, train = set(task.held_out_problems(1000)), set(task.train_problems(0, 3000))
    assert held_out
    assert not held_out & train
    assert len(held_out) + len(train) == 100


def test_worked_solutions_are_graded_right():
    task = recurrence(digits=3)
    problems = task.train_problems(0, 50)
    assert task.grade(problems, ["".join(worked_terms(problem.question)) for problem in problems]) == [1.0] * 50


@pytest.mark.parametrize("response", ["002c43,001c71,000#56", "#56", "000#43#56"])
def test_what_follows_the_last_marker_is_the_answer(response):
    assert recurrence().grade([FIFTY_SIX], [response]) == [1.0]


@pytest.mark.parametrize("response", ["", "56", "#", "#57", "#056", "#56,", "#56 ", "#56#", "#٥٦"])
def test_any_other_response_has_reward_0(response):
    assert recurrence().grade([FIFTY_SIX], [response]) == [0.0]


def test_a_leading_zero_belongs_to_the_answer():
    problem = Problem("002a04,001a03,", "07")
    assert recurrence().grade([problem] * 2, ["000#07", "000#7"]) == [1.0, 0.0]


def test_the_number_of_steps_is_log_uniform():
    # the share with at most k steps is log(k + 1) / log(251): .25, .50 and .75 at k = 3, 15 and 62
    counts = sorted(int(problem.question[7:10]) for problem in recurrence(seed=0).train_problems(0, 4000))
    assert (counts[0], counts[-1]) == (1, 250)
    shares = [sum(count <= most for count in counts) / 4000 for most in (3, 15, 62)]
    assert shares == pytest.approx([math.log(4, 251), math.log(16, 251), math.log(63, 251)], abs=0.03)


def test_a_fixed_number_of_steps_is_kept():
    for steps in (1, 7, 999):
        (problem,) = recurrence(steps_min=steps, steps_max=steps, seed=0).train_problems(0, 1)
        assert len(list(worked_terms(problem.question))) == steps


def test_ranges_that_contradict_each_other_are_an_error():
    with pytest.raises(UserError, match=r"^task\.steps_max=3 is below task\.steps_min=5$"):
        recurrence(steps_min=5, steps_max=3)
