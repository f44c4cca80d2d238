"""What every test gets: an MLflow store of its own and no hub; and runs that many tests look at."""

import logging

import pytest

from rlzoo.lab.recorded import RecordedRun
from tests.quick import quick_run


@pytest.fixture(autouse=True)
def own_store(tmp_path_factory, monkeypatch):
    store = tmp_path_factory.mktemp("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}/mlflow.db")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.getLogger("alembic").setLevel(logging.ERROR)
    return store


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of four steps, the weights of its second and fourth kept."""
    return quick_run(tmp_path_factory.mktemp("lab") / "fspo", "fspo", "checkpoint.keep_for_replay=2")


@pytest.fixture(scope="session")
def recorded(trained):
    """What it recorded."""
    return RecordedRun.read(trained.path)


@pytest.fixture(scope="session")
def trained_adaptive(tmp_path_factory):
    """A run of four steps with an adaptive rule."""
    return quick_run(tmp_path_factory.mktemp("lab") / "adaptive", "fspo-adaptive")
