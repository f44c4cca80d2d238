"""A batch is filled with prompts whose responses differ in reward, in order and within a limit."""

import pytest

import rlzoo
from tests.training.short import lines, quick, without_times

ALTERNATING = """
import itertools

calls = itertools.count()


def note(problem):
    with open(__name__ + ".txt", "a") as file:
        file.write(problem.question + "\\n")


def pay(problem, response):
    note(problem)
    return float(next(calls) % 2)


def pay_for_even(problem, response):  # a sum that begins with an odd number is always right
    return 1.0 if int(problem.question[0]) % 2 and not note(problem) else pay(problem, response)
"""


def paid(folder, module, function, monkeypatch, **settings):
    """Return a run with rewards that the test decides, and the questions in grading order."""
    (folder / f"{module}.py").write_text(ALTERNATING)
    monkeypatch.chdir(folder)
    overrides = [f"task.reward={module}:{function}", "eval.num_problems=0", "tracking.mlflow=false"]
    overrides += [f"rollout.{key}={value}" for key, value in settings.items()]
    config = quick(folder / f"{module}-out", overrides=overrides)
    result = rlzoo.train(config)
    asked = (folder / f"{module}.txt").read_text().splitlines()[::4]  # four responses each
    assert asked == [problem.question for problem in seeded(config).train_problems(0, len(asked))], "skipped or repeated"
    return result, asked


def seeded(config):
    return config.task.model_copy(update={"seed": config.seed})


def test_dynamic_sampling_replaces_groups_of_equal_rewards_with_fresh_prompts(tmp_path, monkeypatch):
    result, asked = paid(tmp_path, "pay_some", "pay_for_even", monkeypatch, dynamic_sampling=9)
    rounds = [int(row["rollout/rounds"]) for row in result.metrics[1:]]
    assert len(asked) == 8 * sum(rounds)
    place = 0
    for step, (count, row) in enumerate(zip(rounds, result.metrics[1:], strict=True), start=1):
        sampled = asked[8 * place : 8 * (place + count)]
        place += count
        kept = [line["question"] for line in lines(result.path / "rollouts" / f"{step:06d}.jsonl")][::4]
        assert count > 1
        assert kept == [question for question in sampled if int(question[0]) % 2 == 0][:8]
        assert row["rollout/dropped_groups"] == sum(int(question[0]) % 2 for question in sampled)
        assert (row["reward/mean"], row["reward/zero_std_groups"]) == (0.5, 0.0)


@pytest.mark.long
def test_dynamic_sampling_leaves_a_batch_that_is_full_as_it_is(tmp_path, monkeypatch):
    plain, asked = paid(tmp_path, "pay_all_1", "pay", monkeypatch)
    again, _ = paid(tmp_path, "pay_all_2", "pay", monkeypatch, dynamic_sampling=3)
    assert len(asked) == 16
    assert [row.pop("rollout/rounds") for row in again.metrics[1:]] == [1, 1]
    assert [row.pop("rollout/dropped_groups") for row in again.metrics[1:]] == [0, 0]
    assert without_times(again.metrics) == without_times(plain.metrics)
    assert "rollout/rounds" not in plain.metrics[1]


def test_dynamic_sampling_ends_at_its_bound_and_fills_up(tmp_path, monkeypatch):
    (tmp_path / "generous_too.py").write_text("def pay(problem, response):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    overrides = ["task.reward=generous_too:pay", "tracking.mlflow=false", "rollout.dynamic_sampling=2"]
    row = rlzoo.train(quick(tmp_path / "out", steps=1, overrides=overrides)).metrics[1]
    assert (row["rollout/rounds"], row["rollout/dropped_groups"], row["reward/zero_std_groups"]) == (3, 16, 1)
    texts = lines(tmp_path / "out" / "rollouts" / "000001.jsonl")
    assert len(texts) == 32
    assert len({text["response"] for text in texts}) > 1
