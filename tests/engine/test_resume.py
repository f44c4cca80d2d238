"""A run that was stopped after a checkpoint and goes on is the run that was never stopped."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import rlzoo
from rlzoo import UserError
from rlzoo.engine.run_directory import RunDirectory
from rlzoo.engine.state import RunState
from tests.engine.test_loop import lines, quick, without_times

CASES = {
    "fspo": (),
    "fspo-adaptive": (),
    "ahead": ("rollout.max_staleness=1",),
    "lora": ("learner.lora.rank=4", "learner.kl_coef=0.01", "learner.schedule=cosine"),
}


def config(name, folder, **settings):
    clip = name if name.startswith("fspo") else "fspo"
    return quick(
        folder, clip=clip, steps=4, overrides=["tracking.mlflow=false", "checkpoint.every=2", *CASES[name]], **settings
    )


@pytest.mark.parametrize("name", CASES)
def test_going_on_from_a_checkpoint_gives_the_uninterrupted_run(name, tmp_path):
    whole = rlzoo.train(config(name, tmp_path / "whole"))
    stopped = config(name, tmp_path / "stopped")
    seen = []

    def stop(step, metrics):
        seen.append(step)
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rlzoo.train(stopped, stop)
    result = rlzoo.train(stopped, lambda step, metrics: seen.append(step), resume=True)
    assert seen == [0, 1, 2, 3, 3, 4]
    assert without_times(result.metrics) == without_times(whole.metrics)
    assert [row["step"] for row in lines(result.path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    for file in ("model.safetensors", "state/optimizer.safetensors"):
        got, expected = (load_file(run.path / "checkpoints" / "step-000004" / file) for run in (result, whole))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in expected)
    for step in (3, 4):
        got, expected = (load_file(run.path / "rollouts" / f"{step:06d}.safetensors") for run in (result, whole))
        assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path):
    with pytest.raises(UserError, match=r"--resume: no checkpoint to go on from in .*; checkpoint.every sets"):
        rlzoo.train(config("fspo", tmp_path), resume=True)


def test_mlflow_goes_on_with_the_same_run(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    first = rlzoo.train(quick(tmp_path / "run", steps=2))
    longer = rlzoo.RunConfig.compose([tmp_path / "run" / "config.yaml"], steps=3)
    second = rlzoo.train(longer, resume=True)
    assert second.mlflow_run_id == first.mlflow_run_id
    history = mlflow.MlflowClient().get_metric_history(first.mlflow_run_id, "reward/mean")
    assert [point.step for point in history] == [1, 2, 3]


def test_an_unfinished_checkpoint_is_not_gone_on_from(tmp_path):
    result = rlzoo.train(config("fspo", tmp_path / "run"))
    newest = result.path / "checkpoints" / "step-000004"
    shutil.copytree(newest, newest.with_name(".step-000006.part"))
    (newest / "state" / "state.json").unlink()  # as of a run stopped within step 4
    assert json.loads((newest.with_name("step-000002") / "state" / "state.json").read_text())["step"] == 2
    again = rlzoo.train(config("fspo", tmp_path / "run"), resume=True)
    assert without_times(again.metrics) == without_times(result.metrics)


def test_a_state_or_metrics_that_are_damaged_are_named(tmp_path):
    (tmp_path / "state.json").write_text('{"step": "two"}')
    with pytest.raises(UserError, match=r"state.json' is not what a run writes: step: input should be a valid integer"):
        RunState.read(tmp_path)
    run = RunDirectory.create(tmp_path / "run", "")
    (run.path / "rollouts" / "notes.txt").write_text("mine")
    (run.path / "rollouts" / "000003.jsonl").write_text("")
    (run.path / "metrics.jsonl").write_text('{"step": 1, "a": 2.0}\n{"step": 2, "a": null}\n{"ste')
    with pytest.raises(UserError, match=r"metrics.jsonl' line 2: 'a' is None, not a number"):
        run.cut_after(1)
    (run.path / "metrics.jsonl").write_text('{"step": 1, "a": 2.0}\n{"step": 2, "a": 3.0}\n{"ste')  # killed while writing
    assert run.cut_after(1) == [{"a": 2.0}]
    assert [file.name for file in (run.path / "rollouts").iterdir()] == ["notes.txt"]
    run.close()
