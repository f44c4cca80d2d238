"""Runs whose reward returns named rewards: what they record, how they resume, and what they refuse."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rlzoo
from rlzoo import RunConfig, UserError
from rlzoo.core.errors import RunError
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.journal.tracking.rows import is_curve
from tests import oracle
from tests.rules import few
from tests.training.short import interrupted, lines, quick, resumes_after, without_times

REWARDS = """
import itertools

calls = itertools.count()


def parts(problem, response):
    if sum(response.encode()) % 5 == 0:
        raise ValueError("no grade")
    right = response.rpartition("#")[2].strip() == problem.answer
    return {"short": 1 - len(response) / 100, "right": float(right)}


async def later(problem, response):
    return parts(problem, response)


def turns(problem, response):  # always 1 in all; four responses to a prompt
    place = next(calls) % 4
    return {"a": place == 0, "b": place in (1, 2), "c": place == 3}


def renamed(problem, response):
    return {"short": 1.0} if next(calls) % 2 else {"long": 1.0}


def short_of_one(problem, response):
    return {"short": 1.0, "right": 0.0} if next(calls) else {"right": 1.0}


def unnamed_at_times(problem, response):
    return {"right": 1.0} if next(calls) else 1.0


def number(problem, response):
    return 1.0


def not_a_number(problem, response):
    return {"right": 1.0, "short": float("nan")}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that trains with a reward of `REWARDS`; the module is new for every test."""
    module = f"named_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)

    def config(reward, *overrides, name="out", **settings):
        more = [f"task.reward={module}:{reward}", "tracking.mlflow=false", *overrides]
        return quick(tmp_path / name, clip="grpo", overrides=more, **settings)

    return config


GDPO = ("clip.advantage=gdpo", "reward.weights.short=0.5", "reward.max_failed=0.9")


@pytest.mark.long
def test_named_rewards_are_in_every_record_and_survive_a_resume(run, tmp_path):
    settings = (*GDPO, "rollout.max_staleness=1", "checkpoint.every=1", "eval.num_problems=8", "rollout.num_prompts=6")
    whole = rlzoo.train(run("parts", *settings, steps=3, name="whole"))
    stopped = run("parts", *settings, steps=3, name="stopped")
    interrupted(stopped, 2)
    with resumes_after(1, stopped.output):
        result = rlzoo.train(stopped, resume=True)
    assert without_times(result.metrics) == without_times(whole.metrics)
    assert any(row["reward/failed"] > 0 for row in result.metrics[1:])
    for step in range(1, 4):
        name = f"rollouts/{step:06d}.safetensors"
        got, expected = (load_file(folder.path / name) for folder in (result, whole))
        assert all(torch.equal(got[key].nan_to_num(7.0), expected[key].nan_to_num(7.0)) for key in expected)
        assert_recorded(result.path, step, result.metrics[step])
    evaluated = result.metrics[3]
    sums = evaluated["eval/parts/right"] + 0.5 * evaluated["eval/parts/short"]
    assert evaluated["eval/accuracy"] == pytest.approx(sums, rel=1e-9)


def assert_recorded(path, step, metrics):
    """Compare the metrics, the text and the advantages of a step with the recorded named rewards."""
    file, texts = RolloutFile.load(path / f"rollouts/{step:06d}.safetensors"), lines(path / f"rollouts/{step:06d}.jsonl")
    assert set(file.reward_parts) == {"right", "short"}
    graded = ~file.rewards.isnan()
    parts = {name: values.double().numpy() for name, values in file.reward_parts.items()}
    np.testing.assert_allclose((parts["right"] + 0.5 * parts["short"])[graded], file.rewards[graded], rtol=1e-6)
    for name, values in parts.items():
        assert np.array_equal(np.isnan(values), ~graded.numpy())
        assert metrics[f"reward/parts/{name}"] == pytest.approx(np.nanmean(values), rel=1e-6)
        recorded = [text["reward_parts"][name] for text in texts if text["reward"] is not None]
        np.testing.assert_allclose(recorded, values[graded], rtol=1e-6)
    assert all("reward_parts" not in text for text in texts if text["reward"] is None)
    graded_parts = {name: values[graded.numpy()] for name, values in parts.items()}
    expected = oracle.gdpo(graded_parts, {"short": 0.5}, file.group_ids[graded].numpy())
    np.testing.assert_allclose(file.advantages[graded][:, None], expected, rtol=1e-4, atol=1e-5)
    assert is_curve("reward/parts/right")


@pytest.mark.long
def test_an_async_reward_and_the_page_of_completions_have_the_names(run, tmp_path):
    settings = (*GDPO, "tracking.mlflow=true", "eval.num_problems=0")
    result = rlzoo.train(run("later", *settings, steps=1))
    pages = list((result.path / "figures").rglob("completions.html"))
    assert len(pages) == 1
    assert "(right " in pages[0].read_text()
    assert ", short " in pages[0].read_text()


@pytest.mark.long
def test_groups_with_equal_sums_teach_gdpo_and_no_other_estimator(run):
    quiet = ("eval.num_problems=0", "rollout.dynamic_sampling=2")
    for advantage, rounds, equal in (("gdpo", 1, 0.0), ("group_norm", 3, 1.0)):
        result = rlzoo.train(run("turns", *quiet, f"clip.advantage={advantage}", steps=1, name=advantage))
        row = result.metrics[1]
        assert (row["rollout/rounds"], row["reward/zero_std_groups"], row["reward/std"]) == (rounds, equal, 0.0)
        assert ("learner/grad_norm" in row) is (advantage == "gdpo")
    # a name with weight 0 does not count
    weightless = [f"reward.weights.{name}=0" for name in "abc"]
    row = rlzoo.train(run("turns", *quiet, "clip.advantage=gdpo", *weightless, steps=1, name="weightless")).metrics[1]
    assert row["reward/zero_std_groups"] == 1.0


@pytest.mark.parametrize(
    ("reward", "settings", "problem"),
    few(
        [
            ("renamed", [], "returned rewards with long for one response and with short for another; return the same names"),
            ("short_of_one", [], "returned rewards with right for one response and with right, short for another"),
            ("unnamed_at_times", [], "returned rewards with no names for one response and with right for another"),
            (
                "number",
                ["clip.advantage=gdpo"],
                "advantage 'gdpo' needs named rewards, but task 'arithmetic' returned a number",
            ),
            ("number", ["reward.weights.right=2"], "has no reward named 'right' (its rewards have no names)"),
            (
                "turns",
                ["reward.weights.bb=2"],
                "reward.weights={'bb': 2.0}: task 'arithmetic' has no reward named 'bb' (names: a, b, c)",
            ),
            ("not_a_number", [], "the last failure: ValueError: the reward 'short' is nan, not a finite number"),
        ],
        2,
    ),
)
def test_inconsistent_names_end_the_run_in_one_line(run, reward, settings, problem):
    config = run(reward, *settings, "eval.num_problems=0", "rollout.num_prompts=2", "learner.num_minibatches=1", steps=1)
    with pytest.raises(RunError) as caught:
        rlzoo.train(config)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["clip.advantage=gdpo", "reward.overlong_buffer=0.2"], "the length penalty is not one of the named rewards"),
        (["clip.advantage=gdpo", "reward.kl_coef=0.1"], "advantage 'gdpo' does not accept per-token rewards"),
        (
            ["clip.advantage=gdpo", "task.name=guess"],
            "advantage 'gdpo' needs reward_parts, which task 'guess' does not provide",
        ),
        (["reward.weights.right=2", "task.name=guess"], "task 'guess' has several turns, and their rewards have no names"),
        (["reward.weights.right=two"], "reward.weights.right='two'"),
        (["reward.weights.right=.nan"], "reward.weights.right"),
    ],
)
def test_settings_that_do_not_suit_named_rewards_are_refused(settings, problem):
    with pytest.raises(UserError) as caught:
        RunConfig.compose(clip="grpo", overrides=settings)
    assert problem in str(caught.value)


def test_the_weights_are_settings_of_the_run():
    config = RunConfig.compose(clip="grpo", overrides=["reward.weights.right=2", "reward.weights={short: 0.5, right: 3}"])
    assert config.reward.weights == {"short": 0.5, "right": 3.0}
    assert json.loads(config.model_dump_json())["reward"]["weights"] == {"short": 0.5, "right": 3.0}
