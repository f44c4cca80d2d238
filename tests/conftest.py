"""What every test gets: an MLflow store of its own and no hub."""

import logging

import pytest


@pytest.fixture(autouse=True)
def own_store(tmp_path_factory, monkeypatch):
    store = tmp_path_factory.mktemp("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}/mlflow.db")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.getLogger("alembic").setLevel(logging.ERROR)
    return store
