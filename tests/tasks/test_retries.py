"""Several tries at a single-turn problem."""

import pytest

from rlzoo.core.errors import UserError
from rlzoo.tasks import build_task
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import train_fingerprint
from tests.tasks.math_files import write

SUM = Problem("1+1", "2")


def rewards(answers, **settings):
    with build_task({"name": "retries", "inner": {"name": "arithmetic"}, **settings}) as task:
        environment = task.make()
        environment.reset(SUM, 0)
        return [environment.step(answer)[1:3] for answer in answers]


def test_the_reward_is_paid_once_and_less_for_later_tries():
    assert rewards(["#2"], discount=0.5) == [(1.0, True)]
    assert rewards(["#3", "#2"], discount=0.5) == [(0.0, False), (0.5, True)]
    assert rewards(["#3", "#4", "#2"], discount=0.5) == [(0.0, False), (0.0, False), (0.25, True)]
    assert rewards(["#3", "#4", "#5"], discount=0.5) == [(0.0, False), (0.0, False), (0.0, True)]


def partly(problem, response):
    return 0.4


def test_a_part_of_the_reward_is_paid_for_the_last_try_alone():
    inner = {"name": "arithmetic", "reward": "tests.tasks.test_retries:partly"}
    assert rewards(["a", "b"], inner=inner, tries=2) == [(0.0, False), (0.4, True)]
    assert rewards(["a"], inner=inner, tries=2, solved=0.4) == [(0.4, True)]


@pytest.mark.parametrize("inner", [{"name": "arithmetic"}, {"name": "reasoning_gym:letter_counting"}])
def test_problems_and_grades_are_those_of_the_other_task(inner):
    alone = build_task({**inner, "seed": 5})
    with build_task({"name": "retries", "inner": inner, "seed": 5, "tries": 2}) as task:
        assert task.train_problems(0, 3) == alone.train_problems(0, 3)
        assert task.held_out_problems(2) == alone.held_out_problems(2)
        problems = task.train_problems(0, 2)
        assert task.prompts(problems) == alone.prompts(problems)
        numbers, seen = task.host.begin(problems, [0, 0])
        assert [each.text for each in seen] == alone.prompts(problems)
        right = f"<answer>{problems[0].answer}</answer>" if "gym" in inner["name"] else f"#{problems[0].answer}"
        first = task.host.step({numbers[0]: right, numbers[1]: "no number"})
        assert [(each.reward, each.done, each.text) for each in first] == [(1.0, True, ""), (0.0, False, task.again)]
        (last,) = task.host.step({numbers[1]: "no number"})
        assert (last.reward, last.done, last.numbers) == (0.0, True, {"tries": 2.0, "solved": 0.0})


def test_a_changed_row_of_the_other_tasks_file_is_noticed(tmp_path):
    pytest.importorskip("math_verify")
    rows = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(400)]
    files = [write(tmp_path / "one.jsonl", rows), write(tmp_path / "other.jsonl", [*rows[:-1], {**rows[-1], "answer": 0}])]
    evaluation = write(tmp_path / "eval.jsonl", [{"question": "q", "answer": 1}])
    inner = [{"name": "math_file", "path": file, "eval_path": evaluation} for file in files]
    one, other = (train_fingerprint(build_task({"name": "retries", "inner": settings, "seed": 0})) for settings in inner)
    assert one != other


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"inner": {"name": "arithmetics"}}, "unknown task 'arithmetics'"),
        ({"inner": {"name": "retries", "inner": {"name": "arithmetic"}}}, "is already a multi-turn task"),
        ({"inner": {"name": "arithmetic"}, "reward": "math:sqrt"}, "task.inner.reward"),
        ({"inner": {"name": "arithmetic"}, "template": "{question}?"}, "task.inner.template"),
        ({"inner": {"name": "arithmetic"}, "tries": 0}, "task.tries"),
        ({}, "task.inner"),
    ],
)
def test_a_wrong_setting_is_refused(settings, said):
    with pytest.raises(UserError, match=said):
        build_task({"name": "retries", **settings})
