"""Environments in parallel: an error in one environment fails only its own episode."""

import re
from functools import partial

import pytest

from rlzoo import RunConfig, UserError
from rlzoo.tasks.environments import Host
from rlzoo.tasks.environments.environment import Observation, state_id
from rlzoo.tasks.problem import Problem
from tests.rules import few
from tests.tasks.environments.games import Careless, Counting, Odd, Unavailable, Words


def played(kind, problems, workers, timeout=20.0, turns=3):
    """Return the rewards of each episode by turn, and why it failed."""
    host = Host(kind, workers=workers, timeout=timeout)
    try:
        numbers, seen = host.begin([Problem(problem, "") for problem in problems], [0] * len(problems))
        paid, failures = {number: [] for number in numbers}, dict.fromkeys(numbers, "")
        open_ones = []
        for number, each in zip(numbers, seen, strict=True):
            failures[number] = each.failure
            open_ones += [] if each.failure else [number]
        for turn in range(turns):
            answers = host.step(dict.fromkeys(open_ones, f"w{turn}"))
            for number, each in zip(list(open_ones), answers, strict=True):
                failures[number] = each.failure
                if each.failure or each.done:
                    open_ones.remove(number)
                if not each.failure:
                    paid[number].append(each.reward)
        host.end(numbers)
    finally:
        host.close()
    return list(paid.values()), list(failures.values())


BAD = {
    "raise": r"ValueError: no such move \(.*games\.py:\d+\)",
    "crash": r"the worker process was killed \(SIGKILL\)",
    "leave": r"SystemExit: 3 \(.*games\.py:\d+\)",
    "memory": r"MemoryError \(.*games\.py:\d+\)",
    "no start": r"RuntimeError: the board is broken \(.*games\.py:\d+\)",
    "hang": "took longer than 1 s",
}


@pytest.mark.parametrize("bad", few(BAD, 3))
def test_a_failed_episode_does_not_affect_others(bad):
    problems = ["good", "good", bad, "good", "good", "good"]
    paid, failures = played(Counting, problems, workers=2, timeout=1.0 if bad == "hang" else 20.0)
    assert re.fullmatch(BAD[bad], failures[2])
    assert [paid[place] for place in (0, 1, 3, 4, 5)] == [[1.0, 1.0, 1.0]] * 5
    assert [failures[place] for place in (0, 1, 3, 4, 5)] == [""] * 5
    assert paid[2] == ([] if bad == "no start" else [1.0])


def test_an_environment_that_cannot_be_created_is_reported_in_one_line():
    with pytest.raises(UserError, match=r"^the environment cannot start: boards is not installed: pip install boards$"):
        played(Unavailable, ["good"], workers=1)


def test_an_episode_that_cannot_be_replayed_fails_if_its_worker_dies():
    paid, failures = played(Careless, ["good", "crash", "good"], workers=1)
    # the second crashes in its second turn, after the first has taken its own and before the third
    assert [len(each) for each in paid] == [2, 1, 1]
    assert (
        failures[0]
        == failures[2]
        == "another episode ended the worker process, and the replay of this episode gave different results"
    )


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("nothing", "step did not return a tuple (messages, reward, done, info)"),
        ("number", "step did not return a tuple (messages, reward, done, info)"),
        ("pair", "step did not return a tuple (messages, reward, done, info)"),
        ("no role", "expected a string, or messages with a role and content"),
        ("no number", "the reward is 'much', not a finite number"),
        ("not finite", "the reward is nan, not a finite number"),
        ("too much", "returned 1,200,000 characters (at most 200,000)"),
        ("info", "returned the info [1]; expected a mapping whose 'state', if present, is a string"),
        ("state", "returned the info {'state': 5}; expected a mapping whose 'state', if present, is a string"),
        ("done", "returned done='no'; expected True or False"),
        ("reward in words", "the reward is '1.0', not a finite number"),
        ("huge", "the reward is 1000"),
        ("escape", r"ValueError: red \x1b[31m"),
    ],
)
@pytest.mark.parametrize("workers", few([0, 1]))
def test_an_invalid_observation_is_reported(what, problem, workers):
    _, failures = played(Odd, [what, "good"], workers)
    assert problem in failures[0]
    assert failures[1] == ""


def test_episodes_are_the_same_with_and_without_workers():
    kind = partial(Words, turns=4)
    results = []
    for workers in (0, 1, 3):
        host = Host(kind, workers=workers, timeout=20.0)
        numbers, seen = host.begin([Problem(str(index), "") for index in range(5)], list(range(5)))
        later = host.step(dict.fromkeys(numbers, "w5 w6"))
        results.append(([each.text for each in seen], [(each.text, each.reward, each.state, each.numbers) for each in later]))
        host.close()
    assert results[0] == results[1] == results[2]
    assert results[0][1][0][1] == 0.2


def test_observations_are_validated_and_text_becomes_a_user_message():
    seen = Observation.checked("higher", 1, 0, {"found": True, "note": "a", "bad": float("inf")})
    assert seen.messages == ({"role": "user", "content": "higher"},)
    assert (seen.reward, seen.done, dict(seen.numbers)) == (1.0, False, {"found": 1.0})
    assert seen.state == state_id("higher") != state_id("lower")
    assert Observation.checked("x", info={"state": "higher"}).state == seen.state
    assert Observation.checked({"role": "tool", "content": "4"}).messages == ({"role": "tool", "content": "4"},)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ("tests.tasks.environments.games:Nothing", "has no 'Nothing'"),
        ("tests.tasks.environments.games", "expected module:Class"),
        ("random:Random", "has no method 'reset'; an environment needs reset(problem, seed) and step(message)"),
        ("tests.tasks.environments.games:os", "expected a class or a function, got an object of type module"),
    ],
)
def test_an_object_that_is_not_an_environment_is_refused_in_one_line(environment, problem):
    with pytest.raises(UserError, match=r"^task.environment=") as told:
        RunConfig.compose(clip="grpo", overrides=["task.name=environment", f"task.environment={environment}"])
    assert problem in str(told.value)
