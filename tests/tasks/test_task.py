"""Laws of every task: how it is built, dumped, and graded by a user's reward."""

import subprocess
import sys
import textwrap
import time

import pytest
import yaml

from rlzoo import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.support.extras import how_to_install
from rlzoo.tasks import build_task
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import is_held_out


def error_of(**settings):
    with pytest.raises(UserError) as caught:
        build_task(settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def reward_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)

    return write


NAMES = "arithmetic, environment, guess, math_file, reasoning_gym:<dataset>, tools, <module>:<Class>"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("arithmetik", "; did you mean 'arithmetic'?"),
        ("arithmetic:x", "; did you mean 'arithmetic'?"),
        ("reasoning_gym", "; did you mean 'reasoning_gym:<dataset>'?"),
        ("reasoning_gym:", "; did you mean 'reasoning_gym:<dataset>'?"),
        (7, ""),
    ],
)
def test_an_unknown_task_gets_the_allowed_names_and_the_closest(name, hint):
    assert error_of(name=name) == f"unknown task {name!r} (allowed: {NAMES}){hint}"


def test_the_name_of_a_task_may_end_with_one_of_its_settings():
    tasks = {"sums:<operand_max>": "rlzoo.tasks.arithmetic:ArithmeticTask"}
    assert build_task({"name": "sums:5"}, tasks).operand_max == 5
    with pytest.raises(UserError, match=r"^task.operand_max=7: remove this setting; task.name='sums:5' sets it too$"):
        build_task({"name": "sums:5", "operand_max": 7}, tasks)


def test_a_task_without_a_name_is_an_error():
    assert error_of(seed=1) == f"task.name is missing (allowed: {NAMES})"


def test_an_unknown_setting_gets_the_closest_name():
    assert error_of(name="arithmetic", operand_maxx=5) == "unknown key 'task.operand_maxx'; did you mean 'task.operand_max'?"
    message = error_of(name="arithmetic", zzz=5)
    assert message.startswith("unknown key 'task.zzz' (allowed: template, reward, timeout, reward_concurrency, seed, ")


def test_a_setting_of_the_wrong_type_names_the_key():
    assert error_of(name="arithmetic", seed="x").startswith("task.seed='x': ")
    assert error_of(name="arithmetic", seed=-1).startswith("task.seed=-1: ")


def test_a_template_needs_the_question():
    assert error_of(name="arithmetic", template="Q:") == "task.template='Q:': must contain {question}"


def test_a_prompt_keeps_other_braces_of_the_template():
    task = build_task({"name": "arithmetic", "template": "{question} Use \\boxed{} or {answer}."})
    assert task.prompt(Problem("3+5", "8")) == "3+5 Use \\boxed{} or {answer}."


TASKS = [
    {"name": "arithmetic", "operand_max": 20, "answer_marker": "=>"},
    {"name": "guess", "turns": 8, "highest": 99},
    {"name": "reasoning_gym:chain_sum", "options": {"max_terms": 4}},
    {"name": "examples.lab.recurrence:RecurrenceTask", "digits": 3, "multiplier_max": 2},
]
all_tasks = pytest.mark.parametrize("settings", TASKS, ids=lambda settings: settings["name"])


@all_tasks
def test_train_problems_depend_on_seed_and_index_only(settings):
    task, same, other = (build_task({**settings, "seed": seed}) for seed in (3, 3, 4))
    eight = task.train_problems(496, 8)  # across the boundary of two datasets that reasoning-gym generates
    assert task.train_problems(496, 4) + task.train_problems(500, 4) == eight == same.train_problems(496, 8)
    assert other.train_problems(496, 8) != eight


@all_tasks
def test_every_seed_is_evaluated_on_the_same_distinct_problems(settings):
    problems = build_task({**settings, "seed": 1}).held_out_problems(100)
    assert len(set(problems)) == 100
    assert build_task({**settings, "seed": 2}).held_out_problems(100) == problems
    assert build_task(settings).held_out_problems(20) == problems[:20]


@all_tasks
def test_the_dump_of_a_task_builds_an_equal_task(settings):
    task = build_task({**settings, "seed": 5})
    assert task.name == settings["name"]
    for mode in ("python", "json"):
        assert build_task({"name": task.name, **task.model_dump(mode=mode)}) == task != build_task(settings)


def test_a_task_is_frozen():
    task = build_task({"name": "arithmetic"})
    with pytest.raises(ValueError, match="frozen"):
        task.seed = 3


def test_a_custom_reward_is_found_in_the_current_directory(reward_module):
    reward_module("own_reward_a", "def length(problem, response):\n    return len(response) - int(problem.answer)\n")
    with build_task({"name": "arithmetic", "reward": "own_reward_a:length"}) as task:
        # 4 characters - 8 = -4; no characters - 17 = -17
        assert task.grade([Problem("3+5", "8"), Problem("3+5+9", "17")], ["four", ""]) == [-4.0, -17.0]
        assert build_task({"name": task.name, **task.model_dump(mode="json")}) == task


OWN_TASK = """
from typing import ClassVar
from pydantic import Field
from rlzoo.tasks import Task
from rlzoo.tasks.arithmetic import ArithmeticTask
from rlzoo.tasks.problem import Problem

class Echo(Task):
    width: int = Field(default=2, ge=1, description="letters in a word")

    def train_problems(self, start, count):
        return [Problem("x" * self.width + str(index), "x") for index in range(start, start + count)]

    def held_out_problems(self, count):
        return [Problem("y", "y")][:count]

    def _grade(self, problems, responses):
        return [float(response == problem.answer) for problem, response in zip(problems, responses)]

class Half(Task):
    def _grade(self, problems, responses):
        return []

class Named(Echo):
    name: ClassVar[str] = "named"

class Sums(ArithmeticTask):
    def prompt(self, problem):
        return "sum: " + super().prompt(problem)

def function():
    pass
"""


def test_only_grades_that_are_right_or_wrong_make_an_accuracy(reward_module):
    reward_module("own_task_s", OWN_TASK + "\ndef own(problem, response):\n    return 0.5\n")
    tools = ["task.name=tools", "task.tools=[rlzoo.tasks.environments.tools:calculator]", "task.problems.name=arithmetic"]
    accuracies = (["task.name=arithmetic"], ["task.name=own_task_s:Echo"], tools)
    rewards = (["task.name=guess"], ["task.reward=own_task_s:own"], [*tools, "task.problems.reward=own_task_s:own"])
    for score, choices in (("accuracy", accuracies), ("reward", rewards)):
        assert [RunConfig.compose(overrides=words).held_out_score for words in choices] == [score] * 3


def test_a_custom_task_is_a_class_and_its_dump_builds_an_equal_task(reward_module):
    reward_module("own_task_a", OWN_TASK)
    task = build_task({"name": "own_task_a:Echo", "width": 3, "seed": 1})
    assert task.name == "own_task_a:Echo"
    assert build_task({"name": task.name, **task.model_dump(mode="json")}) == task
    assert task.train_problems(0, 1) == [Problem("xxx0", "x")]
    assert task.grade(task.held_out_problems(5), ["y"]) == [1.0]
    config = RunConfig.compose(clip="grpo", overrides=["task.name=own_task_a:Echo", "task.width=4"])
    assert config.task.prompt(config.task.train_problems(7, 1)[0]) == "xxxx7"
    assert RunConfig.model_validate(yaml.safe_load(config.to_yaml())).task == config.task
    derived = build_task({"name": "own_task_a:Sums", "operand_max": 5})
    assert derived.name == "own_task_a:Sums"
    assert derived.prompt(Problem("1+2", "3")) == "sum: 1+2="


def test_every_error_in_a_custom_task_is_reported(reward_module, tmp_path):
    reward_module("own_task_b", OWN_TASK)
    start = "task.name='own_task_b:"
    assert error_of(name="own_task_b:Ecco") == f"{start}Ecco': own_task_b has no 'Ecco'; did you mean 'Echo'?"
    assert error_of(name="own_task_b:function") == f"{start}function': is not a subclass of rlzoo.tasks.Task"
    assert error_of(name="own_task_b:Half") == f"{start}Half': does not implement held_out_problems, train_problems"
    assert error_of(name="own_task_b:Named").startswith(f"{start}Named': defines its own name; ")
    assert error_of(name="own_task_0:Echo").startswith(
        f"task.name='own_task_0:Echo': cannot import 'own_task_0' from {tmp_path}"
    )
    assert error_of(name="own_task_b:Echo", width=0).startswith("task.width=0: ")
    assert error_of(name="own_task_b:Echo", widht=1).endswith("did you mean 'task.width'?")


FORM = "expected module:function, for example my_rewards:exact_match"


@pytest.mark.parametrize("reference", ["own", "own:", ":f", "a b:f", "own:f()", "..own:f"])
def test_a_reward_must_look_like_module_and_function(reference):
    assert error_of(name="arithmetic", reward=reference) == f"task.reward={reference!r}: {FORM}"


@pytest.mark.parametrize(
    ("reference", "advice"),
    [
        ("own.py:f", "write own:f"),
        ("./rewards/own.py:f", "write rewards.own:f"),
        ("own.py", "write own:NAME"),
        ("/home/me/own.py:f", "run rlzoo in the folder of the file, and write own:f"),
    ],
)
def test_a_reward_given_as_a_path_gets_a_hint_with_its_module(reference, advice):
    assert error_of(name="arithmetic", reward=reference) == f"task.reward={reference!r}: {FORM}; {advice}"


def test_every_error_in_a_reward_is_reported_when_the_task_is_built(reward_module, tmp_path):
    reward_module("own_reward_b", "exact = 3\ndef matches(problem):\n    return 1\n")
    reward_module("own_reward_c", "def broken(:\n")
    start = "task.reward='own_reward_{}: "
    missing = error_of(name="arithmetic", reward="own_reward_0:f")
    assert missing.startswith(start.format("0:f'") + f"cannot import 'own_reward_0' from {tmp_path} or ")
    broken = error_of(name="arithmetic", reward="own_reward_c:broken")
    assert broken.startswith(start.format("c:broken'") + "cannot import 'own_reward_c'")
    assert "invalid syntax" in broken
    assert error_of(name="arithmetic", reward="own_reward_b:match") == (
        start.format("b:match'") + "own_reward_b has no 'match'; did you mean 'matches'?"
    )
    assert error_of(name="arithmetic", reward="own_reward_b:exact") == (
        start.format("b:exact'") + "expected a function (problem, response) -> float, got an object of type int"
    )
    assert error_of(name="arithmetic", reward="own_reward_b:matches") == (
        start.format("b:matches'") + "must accept the arguments (problem, response): too many positional arguments"
    )


@pytest.mark.parametrize("returned", ["None", "'1.0'", "float('nan')", "float('inf')", "[1.0, 2.0]"])
def test_a_reward_must_return_a_finite_number(reward_module, returned):
    name = f"own_reward_{sum(returned.encode())}"
    reward_module(name, f"def f(problem, response):\n    return {returned}\n")
    with build_task({"name": "arithmetic", "reward": f"{name}:f"}) as task:
        assert task.grade([Problem("3+5", "8")], ["8"]) == [None]
        (grader,) = task.graders
        assert grader.num_failures == 1
        assert grader.last_failure.startswith("ValueError: the reward is ")
        assert grader.last_failure.endswith(", not a finite number")


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("{}", "the reward is {}; a mapping needs names"),
        ("{1: 0.5}", "the reward is {1: 0.5}; a mapping needs names"),
        ("{'a b': 0.5}", "a mapping needs names of 1 to 64 letters, digits, _ and -"),
        ("{'a': 1.0, 'b': None}", "the reward 'b' is None, not a finite number"),
        ("{'a': 2e6}", "the reward 'a' is 2000000.0, outside the allowed range"),
    ],
)
def test_named_rewards_have_plain_names_and_finite_values(reward_module, returned, problem):
    name = f"own_reward_{sum(returned.encode())}"
    reward_module(
        name, f"import numpy\ndef f(problem, response):\n    return {returned} if response else {{'a': numpy.float32(0.5)}}\n"
    )
    with build_task({"name": "arithmetic", "reward": f"{name}:f"}) as task:
        assert task.grade([Problem("3+5", "8")] * 2, ["8", ""]) == [None, {"a": 0.5}]
        assert problem in task.last_failure


def test_true_and_numpy_numbers_are_rewards(reward_module):
    reward_module("own_reward_d", "import numpy\ndef f(p, r):\n    return numpy.float32(0.5) if r else True\n")
    with build_task({"name": "arithmetic", "reward": "own_reward_d:f"}) as task:
        assert task.grade([Problem("3+5", "8")] * 2, ["x", ""]) == [0.5, 1.0]


def test_a_reward_that_hangs_or_crashes_fails_only_its_response(reward_module):
    code = """
    import os, time
    def f(problem, response):
        if response == "hang":
            time.sleep(600)
        if response == "exit":
            os._exit(3)
        return float(response)
    """
    reward_module("own_reward_e", textwrap.dedent(code))
    with build_task({"name": "arithmetic", "reward": "own_reward_e:f", "timeout": 1.0}) as task:
        started = time.monotonic()
        responses = ["0.25", "hang", "0.5", "exit", "one", "0.75"]
        assert task.grade([Problem("3+5", "8")] * 6, responses) == [0.25, None, 0.5, None, None, 0.75]
        assert time.monotonic() - started < 60
        (grader,) = task.graders
        assert grader.num_failures == 3
        said, _, place = grader.last_failure.partition(" (")
        assert said == "ValueError: could not convert string to float: 'one'"
        assert place.endswith("own_reward_e.py:8)")


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("reasoning_gym:chain_sum", "reasoning_gym", "reasoning-gym"),
        ("math_file", "math_verify", "math-verify"),
    ],
)
def test_a_missing_extra_is_reported_with_its_install_command(monkeypatch, name, library, extra):
    monkeypatch.setitem(sys.modules, library, None)  # Python itself records None for a module that cannot be imported
    assert error_of(name=name) == f"{library} is not installed: {how_to_install(extra)}"


def test_a_hub_data_set_needs_the_datasets_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert error_of(name="math_file") == f"datasets is not installed: {how_to_install('datasets')}"


def test_importing_tasks_does_not_import_heavy_libraries():
    code = (
        "import sys, rlzoo.tasks, rlzoo.tasks.math_file, rlzoo_reasoning_gym\n"
        "print(sorted({'torch', 'transformers', 'reasoning_gym', 'math_verify', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_one_question_in_eight_is_held_out():
    share = sum(is_held_out(f"{a}+{b}") for a in range(100) for b in range(100)) / 10_000
    assert abs(share - 1 / 8) < 0.02


def test_white_space_does_not_affect_the_held_out_split():
    questions = [f"{a} plus {b}" for a in range(20) for b in range(20)]
    assert [is_held_out(f"\n {question}\t".replace(" plus ", "\u2003plus\n")) for question in questions] == [
        is_held_out(question) for question in questions
    ]
