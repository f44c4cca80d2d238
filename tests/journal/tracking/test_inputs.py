"""The datasets of a run in MLflow are the data that it used."""

import json

import mlflow
import pytest

from rlzoo.journal.state import read_fingerprint
from rlzoo.journal.tracking.uploads import tracking_uri
from rlzoo.tasks.task import is_held_out
from tests.quick import quick_run


def used(result):
    """Return MLflow's dataset, and its source as MLflow reads it, by context."""
    inputs = mlflow.MlflowClient(tracking_uri()).get_run(result.mlflow_run_id).inputs.dataset_inputs
    return {given.tags[0].value: (given.dataset, mlflow.data.get_source(given).to_dict()) for given in inputs}


def test_generated_questions_are_told_by_their_settings(tmp_path):
    settings = ["tracking.mlflow=true", "eval.num_problems=5", "task.num_operands_max=4"]
    result = quick_run(tmp_path / "run", "fspo", *settings, steps=2)
    data = used(result)
    train, source = data["train"]
    fingerprint = read_fingerprint(tmp_path / "run")["training problems"]
    assert (train.name, train.digest) == ("arithmetic", fingerprint[:12])
    assert json.loads(train.profile) == {"num_rows": 24}  # 2 steps of 12 prompts
    assert source["tags"]["num_operands_max"] == 4
    held_out, _ = data["eval"]
    assert json.loads(held_out.profile) == {"num_rows": 5}
    assert held_out.digest != train.digest


def test_a_file_of_questions_is_told_by_its_path(tmp_path):
    pytest.importorskip("math_verify")
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(40)))
    settings = ["tracking.mlflow=true", "task.name=math_file", f"task.path={file}", "task.template='{question}'"]
    result = quick_run(tmp_path / "run", "fspo", *settings, steps=1)
    (context,) = data = used(result)
    train, source = data[context]
    assert (context, train.name, train.source_type) == ("train", "sums.jsonl", "local")
    assert source == {"uri": str(file)}
    fingerprint = read_fingerprint(tmp_path / "run")["training problems"]
    assert train.digest == fingerprint[:12]
    held_out = sum(1 for n in range(40) if is_held_out(f"{n}+1="))
    assert 0 < held_out < 40
    assert json.loads(train.profile) == {"num_rows": 40 - held_out}
