"""The data, the description, tables and the machine's load are sent to MLflow once."""

import json

import mlflow
import pytest
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from rlzoo.journal.tracking.description import NOTE
from rlzoo.journal.tracking.uploads import run_id_of
from tests.journal.tracking.followed import end, history, send, store, told


def inputs(directory):
    found = [(given.dataset, {tag.key: tag.value for tag in given.tags}) for given in told(directory).inputs.dataset_inputs]
    return sorted(found, key=lambda pair: pair[0].name)


def test_the_data_is_told_with_its_fingerprint_and_where_it_is_from(directory):
    send(directory)
    (train, train_tags), (held_out, held_out_tags) = inputs(directory)
    assert (train.name, train.digest, train.source_type) == ("sums", "1" * 12, "code")
    assert (held_out.name, held_out.digest, json.loads(held_out.profile)) == ("sums.jsonl", "2" * 12, {"num_rows": 4})
    assert train_tags == {"mlflow.data.context": "train"}
    assert held_out_tags == {"mlflow.data.context": "eval"}
    assert mlflow.data.get_source(held_out).to_dict() == {"uri": "/data/sums.jsonl"}  # as MLflow itself reads it
    assert mlflow.data.get_source(train).to_dict() == {"tags": {"task": "sums"}}


@pytest.mark.parametrize("known", ["all", "nothing"])
def test_data_and_description_are_told_once(directory, known, monkeypatch):
    send(directory, is_over=False)
    store().set_tag(run_id_of(directory), NOTE, "what somebody thinks of it")
    if known == "nothing":
        (directory / "tracking" / "sent.json").unlink()
    calls = []
    monkeypatch.setattr(mlflow.MlflowClient, "log_inputs", lambda *given: calls.append(given))
    end(directory)
    send(directory)
    assert calls == []
    assert len(inputs(directory)) == 2
    assert told(directory).data.tags[NOTE] == "what somebody thinks of it"


def test_an_unchanged_table_is_not_sent_again(directory, monkeypatch):
    end(directory)
    send(directory)
    calls = []
    monkeypatch.setattr(LocalArtifactRepository, "log_artifact", lambda *given: calls.append(given))
    send(directory)
    assert calls == []


def add_load(directory, *samples):
    with (directory / "tracking" / "machine.jsonl").open("a") as file:
        for sample in samples:
            row = {"step": sample, "time/clock": 1000.0 + sample, "system/cpu_utilization_percentage": 10.0 * sample}
            file.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("known", ["all", "nothing"])
def test_the_machines_load_is_told_once(directory, known):
    add_load(directory, 0, 1)
    send(directory, is_over=False)
    if known == "nothing":
        (directory / "tracking" / "sent.json").unlink()
    add_load(directory, 2)
    end(directory)
    send(directory)
    name = "system/cpu_utilization_percentage"
    assert history(directory, name) == [(0, 0.0, 1000000), (1, 10.0, 1001000), (2, 20.0, 1002000)]
