"""A run that was stopped after a checkpoint and resumed equals the run that was never stopped."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import rlzoo
from rlzoo import RunConfig, UserError
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.journal.state import RunState, identity
from rlzoo.support.atomic import temporary_path
from tests.quick import QUICK
from tests.training.short import interrupted, lines, make_teacher, quick, resumes_after, without_times

CASES = {
    "fspo": (),
    "fspo-adaptive": (),
    "ahead": ("rollout.max_staleness=1", "rollout.top_p=0.9"),
    "ahead-and-dynamic": ("rollout.max_staleness=1", "rollout.dynamic_sampling=3", "eval.num_problems=0"),
    "bfloat16": ("model.dtype=bfloat16", "learner.schedule=linear", "eval.num_problems=0"),
    "opd": ("rollout.max_staleness=1", "eval.num_problems=0"),
    "critic": ("clip.advantage=gae", "critic.lr=1e-3", "critic.warmup_steps=3", "critic.updates=2", "learner.schedule=linear"),
    "lora": ("learner.lora.rank=4", "learner.kl_coef=0.01", "learner.schedule=cosine"),
}


def config(name, folder, **settings):
    clip = "grpo" if name == "critic" else name if name.startswith(("fspo", "opd")) else "fspo"
    overrides = ["tracking.mlflow=false", "checkpoint.every=2", *CASES[name]]
    if name == "opd":
        overrides.append(f"model.reference={make_teacher(folder.parent / 'teacher')}")
    return quick(folder, clip=clip, steps=4, overrides=overrides, **settings)


def drop_operands(overrides):
    """Remove the settings of the shipped task, which other tasks do not have."""
    return [*overrides, "rollout.max_new_tokens=10"]


QUICK_CASES = ("fspo-adaptive", "critic")


@pytest.mark.parametrize(
    "name", [name if name in QUICK_CASES else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_a_resumed_run_equals_an_uninterrupted_run(name, tmp_path):
    whole = rlzoo.train(config(name, tmp_path / "whole"))
    stopped = config(name, tmp_path / "stopped")
    seen = []

    def stop(step, metrics):
        seen.append(step)
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rlzoo.train(stopped, stop)
    with resumes_after(2, stopped.output):
        result = rlzoo.train(stopped, lambda step, metrics: seen.append(step), resume=True)
    assert seen == [0, 1, 2, 3, 3, 4]
    assert without_times(result.metrics) == without_times(whole.metrics)
    assert [row["step"] for row in lines(result.path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    critic = ("critic/model.safetensors", "critic/value_head.safetensors", "state/critic/optimizer.safetensors")
    for file in ("model.safetensors", "state/optimizer.safetensors", *(critic if name == "critic" else ())):
        got, expected = (load_file(run.path / "checkpoints" / "step-000004" / file) for run in (result, whole))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in expected)
    for step in (3, 4):
        got, expected = (load_file(run.path / "rollouts" / f"{step:06d}.safetensors") for run in (result, whole))
        assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_resuming_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--resume: .* is not a run directory: it has no config.yaml"):
        rlzoo.train(config("fspo", tmp_path), resume=True)


@pytest.mark.long
def test_a_run_stopped_before_its_first_periodic_checkpoint_resumes_from_that_of_step_0(tmp_path):
    whole = rlzoo.train(config("fspo", tmp_path / "whole"))
    interrupted(config("fspo", tmp_path / "run"), 1)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if (path / "state").exists()] == ["step-000000"]
    with resumes_after(0, tmp_path / "run"):
        result = rlzoo.train(config("fspo", tmp_path / "run"), resume=True)
    assert without_times(result.metrics) == without_times(whole.metrics)
    assert [row["step"] for row in lines(result.path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


@pytest.mark.long
def test_a_truncated_metrics_line_is_discarded(tmp_path):
    whole = rlzoo.train(config("fspo", tmp_path / "run"))
    rows = (whole.path / "metrics.jsonl").read_text().splitlines()
    (whole.path / "metrics.jsonl").write_text("\n".join(rows[:4]) + "\n" + rows[4][:100])
    shutil.rmtree(whole.path / "checkpoints" / "step-000004")
    with resumes_after(2, tmp_path / "run"):
        again = rlzoo.train(config("fspo", tmp_path / "run"), resume=True)
    assert without_times(again.metrics) == without_times(whole.metrics)


@pytest.mark.long
def test_state_accumulated_over_steps_is_resumed(tmp_path):
    narrow = ["clip.width_low=1e-6", "clip.width_high=1e-6", "clip.width_ceiling=1e-6"]  # the third step warns about it

    def settings(name):
        overrides = [*QUICK, "checkpoint.every=2", *narrow]
        return RunConfig.compose(clip="fspo", steps=4, overrides=overrides, output=tmp_path / name)

    whole = rlzoo.train(settings("whole"))
    rlzoo.train(settings("run"))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    with resumes_after(2, tmp_path / "run"):
        again = rlzoo.train(settings("run"), resume=True)
    assert repr(again.profile) == repr(whole.profile)  # may contain NaN
    summaries = [json.loads((result.path / "summary.json").read_text()) for result in (whole, again)]
    assert summaries[0]["warnings"] == summaries[1]["warnings"] == ["saturated"]
    assert summaries[0]["metrics"] == summaries[1]["metrics"]


@pytest.mark.long
def test_a_run_does_not_resume_with_different_data(tmp_path):
    pytest.importorskip("math_verify")
    data = tmp_path / "sums.jsonl"
    rows = [{"question": f"{a}+{b}=", "answer": f"#### {a + b}"} for a in range(1, 9) for b in range(1, 9)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        "task.name=math_file", f"task.path={data}", "task.template='{question}'", "tracking.mlflow=false", "eval.num_problems=4"
    ]  # fmt: skip
    rlzoo.train(quick(tmp_path / "run", clip="rloo", steps=1, overrides=drop_operands(overrides)))
    rows[40]["answer"] = "#### 1"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        UserError, match=r"--resume: file .*sums\.jsonl has changed since the run started; training problems has"
    ):
        rlzoo.train(quick(tmp_path / "run", clip="rloo", steps=2, overrides=drop_operands(overrides)), resume=True)


@pytest.mark.long
def test_the_checkpoint_with_the_best_evaluation_is_kept(tmp_path):
    overrides = ["tracking.mlflow=false", "checkpoint.every=1", "checkpoint.keep=1", "eval.every=1", "learner.lr=3e-3"]
    result = rlzoo.train(quick(tmp_path / "run", steps=4, overrides=overrides))
    accuracy = [row["eval/accuracy"] for row in result.metrics]
    best = max(range(5), key=lambda step: (accuracy[step], step))
    assert best != 4, "the test needs a run that gets worse"
    kept = sorted(path.name for path in (result.path / "checkpoints").iterdir())
    assert kept == [f"step-00000{best}", "step-000004"]


@pytest.mark.long
def test_a_resumed_run_continues_the_same_mlflow_run(tmp_path):
    import mlflow

    first = rlzoo.train(quick(tmp_path / "run", steps=2))
    longer = rlzoo.RunConfig.compose([tmp_path / "run" / "config.yaml"], steps=3)
    with resumes_after(2, first.path):
        second = rlzoo.train(longer, resume=True)
    assert second.mlflow_run_id == first.mlflow_run_id
    history = mlflow.MlflowClient().get_metric_history(first.mlflow_run_id, "reward/mean")
    assert [point.step for point in history] == [1, 2, 3]


@pytest.mark.long
def test_an_incomplete_checkpoint_is_not_resumed_from(tmp_path):
    result = rlzoo.train(config("fspo", tmp_path / "run"))
    newest = result.path / "checkpoints" / "step-000004"
    shutil.copytree(newest, temporary_path(newest.with_name("step-000006"), identity(result.path)))
    (newest / "state" / "state.json").unlink()  # like a run stopped within step 4
    assert json.loads((newest.with_name("step-000002") / "state" / "state.json").read_text())["step"] == 2
    with resumes_after(2, tmp_path / "run"):
        again = rlzoo.train(config("fspo", tmp_path / "run"), resume=True)
    assert without_times(again.metrics) == without_times(result.metrics)


def test_damaged_state_or_metrics_are_reported(tmp_path):
    (tmp_path / "state.json").write_text('{"step": "two"}')
    with pytest.raises(UserError, match=r"state.json' is not a valid run state: step: input should be a valid integer"):
        RunState.read(tmp_path)
    run = RunDirectory.create(tmp_path / "run", "")
    (run.path / "rollouts" / "notes.txt").write_text("mine")
    (run.path / "rollouts" / "000003.jsonl").write_text("")
    for step in (1, 2):
        run.save_evaluation(step, [[1.0, None]])
    (run.path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "a": 2.0}\n{"step": 2}\n{"ste')  # killed while writing
    assert run.cut_after(1) == [{}, {"a": 2.0}]
    assert [file.name for file in (run.path / "rollouts").iterdir()] == ["notes.txt"]
    assert [file.name for file in (run.path / "evaluations").iterdir()] == ["000001.json"]
    assert json.loads((run.path / "superseded/1/evaluations/000002.json").read_text()) == {"rewards": [[1.0, None]]}
    run.close()


@pytest.mark.long
def test_a_run_that_skipped_updates_resumes_with_its_learning_rate(tmp_path):
    settings = ["rollout.num_prompts=2", "rollout.group_size=2", "rollout.max_new_tokens=8", "learner.schedule=linear",
                "tracking.mlflow=false", "eval.num_problems=0", "checkpoint.every=2"]  # fmt: skip

    def configured(folder):
        return RunConfig.compose(clip="fspo", overrides=settings, steps=4, output=folder)

    whole = rlzoo.train(configured(tmp_path / "whole"))
    assert any(row.get("learner/skipped") for row in whole.metrics), "equal rewards teach nothing"
    interrupted(configured(tmp_path / "stopped"), 3)
    with resumes_after(2, tmp_path / "stopped"):
        resumed = rlzoo.train(configured(tmp_path / "stopped"), resume=True)
    assert without_times(resumed.metrics) == without_times(whole.metrics)
