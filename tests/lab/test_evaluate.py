"""Evaluation writes the same bytes however often it is interrupted, gives consistent results, and logs nothing twice."""

import json
import os
import shutil

import mlflow
import pytest
import yaml
from safetensors.torch import load_file, save_file

from rlzoo.core.errors import UserError
from rlzoo.journal.manifest import seal
from rlzoo.lab.evaluation import EvaluationConfig, evaluate
from rlzoo.lab.evaluation_directory import Answered, EvaluationDirectory
from rlzoo.measure.at_k import Completion, estimates, means
from rlzoo.models.pretrained import local_model
from rlzoo.tasks.problem import Problem
from tests.quick import quick_run

SIX = ["rollout.group_size=4", "rollout.max_new_tokens=64", "rollout.batch_size=8"]  # two problems per batch


def config(*overrides, suites=("arithmetic",), limit=6, model="embedded", **settings):
    return EvaluationConfig.compose(model, [*SIX, *overrides], suites=suites, limit=limit, **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An evaluation that was never interrupted."""
    return evaluate(config(), tmp_path_factory.mktemp("whole") / "eval")


def completions(folder, suite="arithmetic"):
    return (folder / "completions" / f"{suite}.jsonl").read_bytes()


def error_of(*arguments, **settings):
    with pytest.raises(UserError) as caught:
        evaluate(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_results_follow_from_the_completions(whole):
    rows = [json.loads(line) for line in completions(whole.path).splitlines()]
    assert [row["problem"] for row in rows] == list(range(6))
    rewards = [[float(item["response"].rpartition("#")[2] == row["answer"]) for item in row["completions"]] for row in rows]
    assert [[item["reward"] for item in row["completions"]] for row in rows] == rewards
    (result,) = whole.results
    assert result.num_problems == 6
    assert 0 < result.estimates["mean@4"].value < 1
    assert result.estimates["mean@4"].value == pytest.approx(sum(map(sum, rewards)) / 24)
    assert result.estimates["pass@4"].value == pytest.approx(sum(map(max, rewards)) / 6)
    assert json.loads((whole.path / "results.json").read_text()) == json.loads(json.dumps(whole.as_dict()))


@pytest.mark.parametrize("stop_at", [2, 4])
def test_a_resumed_evaluation_writes_the_same_bytes(tmp_path, whole, stop_at):
    def report(suite, done, total, so_far):
        if done == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(config(), tmp_path / "eval", progress=report)
    kept = completions(tmp_path / "eval")
    assert kept.count(b"\n") == stop_at
    assert completions(whole.path).startswith(kept)
    seen = []
    evaluate(config(), tmp_path / "eval", progress=lambda suite, done, total, so_far: seen.append(done))
    assert seen == list(range(stop_at, 7, 2))  # existing completions are not sampled again
    assert completions(tmp_path / "eval") == completions(whole.path)


def test_one_process_at_a_time_writes_to_an_evaluation(tmp_path, whole):
    refused = []

    def report(suite, done, total, so_far):
        if done == 2:
            refused.append(error_of(config(), tmp_path / "eval"))

    evaluate(config(), tmp_path / "eval", progress=report)
    assert refused == [f"directory '{tmp_path}/eval' is in use by process {os.getpid()}; stop it, or wait until it ends"]
    assert completions(tmp_path / "eval") == completions(whole.path)


def test_a_concurrently_started_evaluation_keeps_its_settings(tmp_path):
    first, second = config().settings(), config(seed=1).settings()
    EvaluationDirectory(tmp_path / "eval").check(second)  # there is nothing yet
    lock = EvaluationDirectory(tmp_path / "eval").create(first)
    with pytest.raises(UserError, match="is in use by process"):
        EvaluationDirectory(tmp_path / "eval").create(second)
    lock.release()
    with pytest.raises(UserError, match="created with different settings: seed"):
        EvaluationDirectory(tmp_path / "eval").create(second)
    assert yaml.safe_load((tmp_path / "eval" / "settings.yaml").read_text())["seed"] == 0
    EvaluationDirectory(tmp_path / "eval").create(first).release()


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the embedded model, sealed as a checkpoint of a run."""
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    shutil.copytree(local_model("embedded"), folder)
    (folder / "clip.json").write_text("{}")
    (folder / "state").mkdir()
    (folder / "state" / "state.json").write_text("{}")
    seal(folder)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_checkpoint_that_has_changed_since_it_was_saved_is_refused(tmp_path, checkpoint, name):
    content = bytearray((checkpoint / name).read_bytes())
    content[-2] ^= 1
    (checkpoint / name).write_bytes(content)
    message = f"checkpoint {str(checkpoint)!r} differs from what the run saved: {name} was changed; restore it"
    for model in (checkpoint, checkpoint.parent.parent):  # a run directory stands for its last checkpoint
        assert error_of(config(model=str(model)), tmp_path / "eval").startswith(message)
    assert not (tmp_path / "eval").exists()
    with pytest.raises(UserError, match=f"{name} was changed"):
        quick_run(tmp_path / "other", "fspo", f"model.path={checkpoint}")


def test_a_checkpoint_without_its_training_state_is_evaluated(tmp_path, checkpoint, whole):
    shutil.rmtree(checkpoint / "state")
    evaluate(config(model=str(checkpoint)), tmp_path / "eval")
    assert completions(tmp_path / "eval") == completions(whole.path)


@pytest.mark.parametrize("lines", [0, 1, 3])  # a batch is two problems
def test_a_truncated_line_is_generated_again(tmp_path, whole, lines):
    everything = completions(whole.path).splitlines(keepends=True)
    folder = tmp_path / "eval"
    (folder / "completions").mkdir(parents=True)
    (folder / "settings.yaml").write_text((whole.path / "settings.yaml").read_text())
    (folder / "completions" / "arithmetic.jsonl").write_bytes(b"".join(everything[:lines]) + everything[lines][:50])
    seen = []
    evaluate(config(), folder, progress=lambda suite, done, total, so_far: seen.append(done))
    assert completions(folder) == b"".join(everything)
    # the same batches: a partly finished one is sampled again as a whole
    assert seen == sorted({lines, *range(lines // 2 * 2 + 2, 7, 2)})


def test_every_row_draws_the_same_numbers_in_any_batch(tmp_path, whole):
    evaluate(config("rollout.batch_size=16"), tmp_path / "eval")
    assert completions(tmp_path / "eval") == completions(whole.path)


def test_more_problems_can_be_added_and_fewer_requested(tmp_path, whole):
    folder = tmp_path / "eval"
    evaluate(config(limit=4), folder)
    evaluate(config(), folder)
    assert completions(folder) == completions(whole.path)
    first = evaluate(config(limit=2), folder)
    assert first.results[0].num_problems == 2
    assert completions(folder) == completions(whole.path)


def test_another_seed_draws_other_responses(tmp_path, whole):
    other = evaluate(config(seed=1), tmp_path / "eval")
    assert completions(other.path) != completions(whole.path)


@pytest.mark.parametrize(
    ("overrides", "settings", "named"),
    [
        (["rollout.temperature=0.5"], {}, "rollout.temperature (was 1.0, now 0.5)"),
        (["model.dtype=bfloat16"], {}, "model.dtype (was float32, now bfloat16)"),
        ([], {"seed": 5}, "seed (was 0, now 5)"),
    ],
)
def test_other_settings_are_refused(whole, overrides, settings, named):
    before = completions(whole.path)
    message = error_of(config(*overrides, **settings), whole.path)
    assert message == (
        f"--output {str(whole.path)!r} was created with different settings: {named}; "
        "use the same settings to resume, or choose another --output"
    )
    assert completions(whole.path) == before


def test_a_model_that_was_replaced_is_refused(tmp_path):
    model = shutil.copytree(local_model("embedded"), tmp_path / "model")
    evaluate(config(model=str(model), limit=2), tmp_path / "eval")
    evaluate(config(model=str(model), limit=2), tmp_path / "eval")
    weights = load_file(model / "model.safetensors")
    save_file({name: 0.5 * weight for name, weight in weights.items()}, model / "model.safetensors", {"format": "pt"})
    assert "different settings: files_of_the_model" in error_of(config(model=str(model), limit=2), tmp_path / "eval")


def test_other_problems_are_refused(tmp_path):
    rows = [{"question": "3+5", "answer": "8"}, {"question": "2+2", "answer": "4"}]
    file = tmp_path / "arithmetic.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(config(data=tmp_path), tmp_path / "eval")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    assert "line 1 does not match the problem in suite 'arithmetic'" in error_of(config(data=tmp_path), tmp_path / "eval")
    lines = tmp_path / "eval" / "completions" / "arithmetic.jsonl"
    lines.write_text("{}\n")
    assert f"{lines} line 1 is not a record of completions" in error_of(config(data=tmp_path), tmp_path / "eval")


def test_settings_are_written_and_hold_what_decides_a_completion(whole):
    settings = yaml.safe_load((whole.path / "settings.yaml").read_text())
    assert set(settings) == {"model", "rollout", "seed"}
    assert settings["rollout"]["group_size"] == 4
    assert "num_prompts" not in settings["rollout"]


def test_results_are_logged_once_under_names_that_mlflow_accepts(tmp_path, whole):
    first = evaluate(config(limit=2), tmp_path / "eval", experiment="evaluations")
    again = evaluate(config(limit=2), tmp_path / "eval", experiment="evaluations")
    assert again.mlflow_run_id == first.mlflow_run_id
    assert evaluate(config(limit=2), tmp_path / "eval").mlflow_run_id == first.mlflow_run_id
    more = evaluate(config(limit=4), tmp_path / "eval", experiment="evaluations")
    assert more.mlflow_run_id != first.mlflow_run_id
    run = mlflow.get_run(first.mlflow_run_id)
    (result,) = first.results
    assert run.info.status == "FINISHED"
    assert run.data.metrics["eval/arithmetic/mean_at_4"] == result.estimates["mean@4"].value
    assert run.data.metrics["eval/arithmetic/pass_at_2_ci_high"] == result.estimates["pass@2"].interval[1]
    assert run.data.metrics["eval/arithmetic/maj_at_4"] == result.estimates["maj@4"].value
    assert run.data.params["rollout.group_size"] == "4"
    assert run.data.tags["kind"] == "evaluation"


def test_a_run_directory_resolves_to_its_last_checkpoint(trained, tmp_path):
    result = evaluate(config(model=str(trained.path), limit=2), tmp_path / "eval")
    assert result.config.model.path == str(trained.path / "checkpoints" / "step-000004")


def test_another_model_answers_the_problems_of_a_run(trained, tmp_path):
    theirs, ours = (evaluate(own(trained, *more, limit=4), tmp_path / str(len(more))) for more in (["model.path=embedded"], []))
    assert theirs.config.model.path == "embedded"
    rows = [[json.loads(line) for line in completions(one.path, "task").splitlines()] for one in (theirs, ours)]
    questions, answers = ([[row[key] for row in side] for side in rows] for key in ("question", "completions"))
    assert questions[0] == questions[1]
    assert answers[0] != answers[1]


def test_a_damaged_line_of_completions_is_reported(tmp_path):
    directory, problems = EvaluationDirectory(tmp_path), [Problem("1+1?", "2")]
    directory.create({})
    for line in (b"\xff\n", b"[" * 5000 + b"\n", b'{"question": "1+1?", "answer": "2", "completions": [{"response": 1}]}\n'):
        (tmp_path / "completions" / "mine.jsonl").write_bytes(line)
        with pytest.raises(UserError, match=r"mine.jsonl line 1 is not a record of completions"):
            directory.read("mine", problems)
    rows = [Answered("1+1?", "2", (Completion("2", 1.0, 0, 1, True),) * (1 + place)) for place in range(2)]
    (tmp_path / "completions" / "mine.jsonl").write_text("".join(row.to_line(0) for row in rows))
    with pytest.raises(UserError, match=r"mine.jsonl line 2 is inconsistent with line 1"):
        directory.read("mine", problems * 2)


def test_a_limit_above_the_number_of_problems_is_reported(tmp_path, caplog):
    (tmp_path / "arithmetic.jsonl").write_text('{"question": "1+2", "answer": "3"}\n{"question": "2+2", "answer": "4"}\n')
    for limit, warnings in ((2, []), (3, ["--limit 3 exceeds the number of problems in suite 'arithmetic', 2"])):
        caplog.clear()
        evaluate(config(limit=limit, data=tmp_path), tmp_path / f"eval-{limit}")
        assert [record.getMessage() for record in caplog.records if record.name == "rlzoo"] == warnings


REWARD = """
def parts(problem, response):
    if len(response) % 5 == 0:
        raise ValueError("no grade")
    return {"short": -len(response) / 10, "right": float(response.endswith("#" + problem.answer))}


def right(problem, response):
    return float(response.endswith("#" + problem.answer))
"""
NAMED = ["task.reward=parts_for_eval:parts", "reward.weights.right=2", "task.template='{question}='"]


def own(run, *overrides, k=4, **settings):
    return EvaluationConfig.compose(str(run.path), [f"rollout.group_size={k}", *overrides], **settings)


@pytest.mark.parametrize(
    ("overrides", "is_binary"),
    [
        ([], True),
        pytest.param(NAMED, False, marks=pytest.mark.long),
        pytest.param(["task=guess", "model.path=embedded-guess", "rollout.max_turns=3"], False, marks=pytest.mark.long),
    ],
)
def test_a_run_is_evaluated_on_its_own_task_as_the_run_evaluates_itself(tmp_path, monkeypatch, overrides, is_binary):
    (tmp_path / "parts_for_eval.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    settings = ["eval.num_problems=7", "eval.num_samples=4", "eval.temperature=0.9", "rollout.max_new_tokens=40"]
    run = quick_run(tmp_path / "run", "fspo", *settings, *overrides, steps=1, seed=3)
    result = evaluate(own(run), tmp_path / "eval")
    (task,), last = result.results, run.metrics[-1]
    mean = task.estimates["mean@4"]
    assert (task.suite, task.num_problems) == ("task", 7)
    # the same random numbers, problems, limits, rewards and environments
    assert mean.value == pytest.approx(last["eval/accuracy"], abs=1e-6)
    assert task.failed == pytest.approx(last["eval/failed"])
    assert mean.interval[0] < mean.value < mean.interval[1]
    assert ("pass@4" in task.estimates) == is_binary == ("maj@4" in task.estimates) == (task.no_answer is not None)
    assert completions(result.path, "task").count(b"\n") == 7
    # a rerun reads; another number of problems adds some; a checkpoint stands for its run
    assert evaluate(own(run), tmp_path / "eval").as_dict() == result.as_dict()
    (checkpoint,) = (run.path / "checkpoints").glob("step-000001")
    other = EvaluationConfig.compose(str(checkpoint), ["rollout.group_size=4"], limit=2)
    assert evaluate(other, tmp_path / "other").results[0].num_problems == 2
    with pytest.raises(UserError, match=r"different settings: task.seed"):
        evaluate(own(run, "task.seed=5"), tmp_path / "eval")


def test_an_evaluation_is_compared_with_an_earlier_one_of_the_same_problems(tmp_path, whole, caplog):
    before = {file: file.read_bytes() for file in whole.path.rglob("*") if file.is_file()}
    result = evaluate(config("rollout.temperature=0.3"), tmp_path / "eval", against=whole.path)
    ours, theirs, found = result.results[0].estimates, whole.results[0].estimates, result.differences["arithmetic"]
    for name, change in found.items():
        assert change.value == pytest.approx(ours[name].value - theirs[name].value)
        assert change.interval[0] < change.value < change.interval[1]
    assert list(found) == list(ours)
    assert f"--against {whole.path}: rollout.temperature (was 1.0, now 0.3) differs" in caplog.text
    assert json.loads((result.path / "results.json").read_text())["differences"] == result.as_dict()["differences"]
    # a file that another process is writing to is not repaired, and nothing else is touched
    file = whole.path / "completions" / "arithmetic.jsonl"
    file.write_bytes(before[file] + b'{"problem": 6')
    same = evaluate(config(), tmp_path / "same", against=whole.path)
    assert file.read_bytes() == before[file] + b'{"problem": 6'
    assert {change.value for change in same.differences["arithmetic"].values()} == {0}
    file.write_bytes(before[file])
    assert before == {file: file.read_bytes() for file in whole.path.rglob("*") if file.is_file()}
    assert "it answers 6 of the 8 problems of 'arithmetic'" in error_of(config(limit=8), tmp_path / "more", against=whole.path)
    assert "is not an evaluation directory" in error_of(config(), tmp_path / "none", against=tmp_path)
    assert not (tmp_path / "more").exists()


def test_evaluations_with_different_rewards_are_not_compared(trained, tmp_path, monkeypatch, caplog):
    (tmp_path / "reward_for_eval.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    evaluate(own(trained, limit=2), tmp_path / "before")
    other = own(trained, "task.reward=reward_for_eval:right", limit=2)
    assert "task.reward (was None, now reward_for_eval:right) differs" in error_of(
        other, tmp_path / "after", against=tmp_path / "before"
    )
    evaluate(other, tmp_path / "graded")
    (tmp_path / "reward_for_eval.py").write_text(f"{REWARD}\n# edited\n")
    evaluate(own(trained, "task.reward=reward_for_eval:right", limit=2), tmp_path / "edited", against=tmp_path / "graded")
    assert "files_of_the_task.file reward_for_eval.py (was " in caplog.text


def test_the_mean_of_rewards_beyond_one_has_a_t_interval_by_hand():
    # means 2 and -1 of the graded responses; 0.5 +- 12.706 * (1.5 * sqrt(2)) / sqrt(2)
    rows = [(3.0, 1.0), (-1.0, None), (None, None)]
    problems = [tuple(Completion("", reward, None, 1, True) for reward in row) for row in rows]
    found = estimates(problems, votes=False)
    assert list(found) == ["mean@2"]
    assert found["mean@2"].value == means(problems, votes=False)["mean@2"] == 0.5
    assert found["mean@2"].interval == pytest.approx((0.5 - 12.7062 * 1.5, 0.5 + 12.7062 * 1.5), rel=1e-5)
    assert means(problems[2:], votes=False) == {}


def test_a_model_without_a_run_needs_a_suite_and_a_task_needs_held_out_problems(tmp_path, trained):
    for model in ("embedded", str(tmp_path)):
        with pytest.raises(UserError, match=r"is not a run: add --suite NAME, or use the task of a run"):
            EvaluationConfig.compose(model, [])
    with pytest.raises(UserError, match="an evaluation has only the sections model, rollout and task"):
        own(trained, "learner.lr=1")
    with pytest.raises(UserError, match=r"an evaluation has only the sections model and rollout$"):
        own(trained, "task.template='{question}'", suites=("arithmetic",))
