"""A run's final model in MLflow is uploaded once, and can be loaded by MLflow's transformers flavour."""

import shutil
from dataclasses import replace

import mlflow
import pytest
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from rlzoo.journal.tracking.model import final_checkpoint, model_files
from rlzoo.journal.tracking.record import Record, run_id_of, tracking_uri
from rlzoo.journal.tracking.sync import Sync
from tests.quick import quick_run


@pytest.fixture
def finished(trained, tmp_path):
    """The directory of a run of four steps that was not logged to any store."""
    folder = tmp_path / "run"
    shutil.copytree(trained.path, folder)
    record = Record.new("tests", "fspo: mine", tags={}, params={}, max_model_mb=100.0)
    replace(record, status="FINISHED", ended=2000.0, step=4).write(folder)
    return folder


def send(folder):
    Sync(folder, tracking_uri()).send(is_over=True)


def models():
    client = mlflow.MlflowClient(tracking_uri())
    experiment = client.get_experiment_by_name("tests").experiment_id
    return client.search_logged_models([experiment])


@pytest.mark.filterwarnings("default")  # from transformers and MLflow while loading
def test_the_model_of_a_run_is_loaded_and_generates(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    result = quick_run(tmp_path / "run", "fspo", "tracking.mlflow=true", steps=2)
    (model,) = models()
    assert (model.source_run_id, model.name, model.status) == (result.mlflow_run_id, "run", "READY")
    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", None)  # the next line sets a global
    mlflow.set_tracking_uri(tracking_uri())
    generate = mlflow.transformers.load_model(f"models:/{model.model_id}")
    (answer,) = generate("3+5+9=", max_new_tokens=12, do_sample=False)
    assert answer["generated_text"].startswith("3+5+9=8#1")  # 17 and most others are right before any training
    info = mlflow.models.get_model_info(f"models:/{model.model_id}")
    assert info.flavors.keys() == {"transformers", "python_function"}
    assert [column.type.name for column in (*info.signature.inputs, *info.signature.outputs)] == ["string", "string"]


def test_a_model_is_sent_once_whoever_sends_it(finished):
    send(finished)
    send(finished)
    (finished / "tracking" / "sent.json").unlink()  # killed before it was recorded
    send(finished)
    (model,) = models()
    run = mlflow.MlflowClient(tracking_uri()).get_run(run_id_of(finished))
    assert [(output.model_id, output.step) for output in run.outputs.model_outputs] == [(model.model_id, 4)]


CLIENT = mlflow.MlflowClient


@pytest.mark.parametrize(
    ("kind", "fails"),
    [(LocalArtifactRepository, "log_artifacts"), (CLIENT, "log_outputs"), (CLIENT, "finalize_logged_model")],
)
def test_a_model_that_was_sent_half_is_completed(finished, kind, fails, monkeypatch):
    def no_answer(*arguments):
        raise mlflow.MlflowException("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(kind, fails, no_answer)
        with pytest.raises(mlflow.MlflowException, match="no answer"):
            send(finished)
    assert [model.status for model in models()] == ["PENDING"]
    send(finished)
    (model,) = models()
    assert model.status == "READY"
    client = mlflow.MlflowClient(tracking_uri())
    assert len(client.get_run(run_id_of(finished)).outputs.model_outputs) == 1
    names = {item.path for item in client.list_logged_model_artifacts(model.model_id)}
    assert names == {"MLmodel", "components", "model", "python_env.yaml", "requirements.txt"}


@pytest.mark.parametrize("status", ["FAILED", "KILLED", "RUNNING"])
def test_a_run_that_did_not_come_to_its_end_has_no_model(finished, status):
    replace(Record.read(finished), status=status).write(finished)
    send(finished)
    assert models() == []


def test_a_model_that_is_too_large_stays_where_it_is(finished):
    size = sum(file.stat().st_size for file in model_files(finished / "checkpoints" / "step-000004")) / 1e6
    assert final_checkpoint(finished, 4, 1.01 * size) is not None
    assert final_checkpoint(finished, 4, 0.99 * size) is None
    assert final_checkpoint(finished, 4, 0.0) is None
    replace(Record.read(finished), max_model_mb=0.99 * size).write(finished)
    send(finished)
    assert models() == []


def test_neither_the_optimizers_state_nor_what_lies_outside_is_sent(finished):
    checkpoint = finished / "checkpoints" / "step-000004"
    private = finished.parent / "private.json"
    private.write_text("{}")
    (checkpoint / "linked.json").symlink_to(private)
    names = {file.name for file in model_files(checkpoint)}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {"linked.json", "state", "clip.json", "manifest.json"} & names
    outside = finished.parent / "outside"
    checkpoint.rename(outside)
    checkpoint.symlink_to(outside)
    assert final_checkpoint(finished, 4, 100.0) is None
