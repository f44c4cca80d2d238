"""Fixtures: for every test, a separate MLflow store and no hub; and runs that many tests share."""

import fcntl
import gc
import logging
import os
import shutil
import signal
from importlib.metadata import version

import pytest

from rlzoo.lab.recorded import RecordedRun
from tests.quick import quick_run
from tests.zygote import Zygote

gc.set_threshold(50_000, 10, 10)  # as on the command line


@pytest.fixture
def interrupts():
    """Let Ctrl-C raise `KeyboardInterrupt`, because a shell's background job starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def empty_store(pytestconfig, tmp_path_factory):
    """The file of an MLflow store without runs, kept between sessions, because creating its tables takes seconds."""
    kept = pytestconfig.cache.mkdir("rlzoo") / f"mlflow-{version('mlflow')}.db"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker creates it, and the others wait
        if not kept.exists():
            from mlflow import MlflowClient

            created = tmp_path_factory.mktemp("empty") / "mlflow.db"
            MlflowClient(f"sqlite:///{created}").search_experiments()
            copy = kept.with_name(f"{os.getpid()}.db")
            shutil.copy(created, copy)
            copy.replace(kept)
    return kept


@pytest.fixture(scope="session")
def unused_stores(empty_store, tmp_path_factory):
    """Folders with a copy of the empty store that no test has changed; most tests leave theirs as it was."""
    logging.getLogger("alembic").setLevel(logging.ERROR)
    return []


def state(store):
    """Return the files of a store's folder with the inode, size and time of change of each."""
    return {
        file.name: (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for file in os.scandir(store)
        if (status := file.stat())
    }


@pytest.fixture(autouse=True)
def own_store(empty_store, unused_stores, tmp_path_factory, monkeypatch):
    if not unused_stores:
        store = tmp_path_factory.mktemp("mlflow")
        shutil.copy(empty_store, store / "mlflow.db")
        unused_stores.append((store, state(store)))
    store, before = unused_stores.pop()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}/mlflow.db")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield store
    if state(store) == before:
        unused_stores.append((store, before))
    else:
        shutil.rmtree(store, ignore_errors=True)  # each takes a megabyte


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of four steps."""
    return quick_run(tmp_path_factory.mktemp("lab") / "fspo", "fspo")


@pytest.fixture(scope="session")
def recorded(trained):
    """The recording of that run."""
    return RecordedRun.read(trained.path, own_code=True)


@pytest.fixture(scope="session")
def trained_adaptive(tmp_path_factory):
    """A run of four steps with an adaptive rule."""
    return quick_run(tmp_path_factory.mktemp("lab") / "adaptive", "fspo-adaptive")


@pytest.fixture(scope="session")
def zygote():
    """Starts commands in separate processes without the seconds that imports take."""
    made = Zygote()
    yield made
    made.close()
