"""The data sets and the description are sent to MLflow once."""

import json

import mlflow
import pytest

from rlzoo.journal.tracking.description import NOTE
from rlzoo.journal.tracking.uploads import run_id_of
from tests.journal.tracking.followed import end, send, store, told


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
