"""Environments from verifiers, driven turn by turn."""

import sys

import pytest
from rlzoo_verifiers import Verifiers, _loaded

from rlzoo.core.errors import UserError
from rlzoo.tasks.problem import Problem
from tests.tasks.environments.page import check_training, train, write_file
from tests.training.short import lines

EPISODE = Problem("episode 0:0", "")
ENDING = """
class Task(vf.Task):
    {hook}


class Set(vf.Taskset[Task]):
    def load(self):
        yield Task(vf.TaskData(prompt="Go."), self.config.task)


__all__ = ["Set"]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_file("verifiers", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    _loaded.cache_clear()
    for name in ("sums", "refused"):
        sys.modules.pop(name, None)


def test_the_seed_picks_the_task(folder):
    first = [Verifiers("sums").reset(EPISODE, seed) for seed in (0, 80, 172)]  # of 81 tasks, 1 + 1, 1 + 2, ..., 9 + 9
    questions = [f"What is {each}? Answer with just the number." for each in ("1 + 1", "9 + 9", "2 + 2")]
    assert first == [[{"role": "user", "content": question}] for question in questions]


@pytest.mark.parametrize(("seed", "answer"), [(0, "2"), (3, "It is 1 + 4 = 5."), (15, "2 + 7 is 9.")])
def test_a_right_first_answer_ends_the_episode(folder, seed, answer):
    environment = Verifiers("sums")
    environment.reset(EPISODE, seed)
    assert environment.step(answer) == ([], 1.0, True, {"turns": 1.0})


def test_concurrent_episodes_are_independent(folder):
    first, second = Verifiers("sums"), Verifiers("sums")
    first.reset(EPISODE, 0)
    second.reset(EPISODE, 1)
    again = [{"role": "user", "content": "That is wrong. Try again."}]
    assert first.step("3") == (again, 0.0, False, {})
    assert second.step("3") == ([], 1.0, True, {"turns": 1.0})
    assert first.step("three") == ([], 0.0, True, {"turns": 2.0})


def test_an_episode_can_be_abandoned(folder):
    environment = Verifiers("sums")
    environment.reset(EPISODE, 0)
    environment.close()
    environment.close()


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("NEEDS_CONTAINER = True", "needs a container"),
        ("async def setup(self, trace, runtime): pass", "needs a runtime"),
        ("@vf.reward\n    async def right(self, runtime) -> float: return 1.0", "needs a runtime"),
    ],
)
def test_what_needs_more_than_text_is_refused(folder, hook, said):
    (folder / "refused.py").write_text("import verifiers.v1 as vf\n" + ENDING.format(hook=hook))
    with pytest.raises(UserError, match=said):
        Verifiers("refused").reset(EPISODE, 0)


@pytest.mark.parametrize(("name", "said"), [("", "missing"), ("nowhere", "cannot load it")])
def test_a_missing_taskset_is_refused(name, said):
    with pytest.raises(UserError, match=said):
        Verifiers(name)


@pytest.mark.environments
def test_the_example_on_the_page_trains(tmp_path, model):
    write_file("verifiers", tmp_path)
    path, rows = train("verifiers", tmp_path, model)
    check_training(path, rows)
    for step, row in enumerate(rows, 1):
        ended = [each for each in lines(path / "rollouts" / f"{step:06}.jsonl") if each["finished"]]
        assert row["env/turns"] == pytest.approx(sum(len(each["turns"]) for each in ended) / len(ended))
