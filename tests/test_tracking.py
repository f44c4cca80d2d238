"""MLflow is told in the background: a slow store holds nothing up, nothing is lost, and what fails is heard."""

import time

import mlflow
import pytest

from rlzoo.tracking import Tracker


def history(run_id, name):
    return [(metric.step, metric.value) for metric in mlflow.MlflowClient().get_metric_history(run_id, name)]


def test_a_slow_store_holds_nothing_up_and_gets_everything(monkeypatch):
    whole = mlflow.log_metrics

    def slow(*arguments, **options):
        time.sleep(0.2)
        whole(*arguments, **options)

    with Tracker("slow", "run", tags={"seed": "0"}, params={"a": {"b": 1}}) as tracker:
        monkeypatch.setattr(mlflow, "log_metrics", slow)
        started = time.perf_counter()
        for step in range(5):
            tracker.log(step, {"reward/mean": step / 10})
        tracker.set_tag("warnings", "none")
        tracker.log_completions([{"step": 1, "text": "2"}])
        assert time.perf_counter() - started < 0.2
    run = mlflow.get_run(tracker.run_id)
    assert history(tracker.run_id, "reward/mean") == [(step, step / 10) for step in range(5)]
    assert (run.info.status, run.data.tags["warnings"], run.data.params) == ("FINISHED", "none", {"a.b": "1"})
    assert [file.path for file in mlflow.MlflowClient().list_artifacts(tracker.run_id)] == ["completions.json"]
    assert len(mlflow.search_runs(experiment_names=["slow"])) == 1, "the thread logs to the run, not to one of its own"


def a_run(work):
    """The run's status, and what was raised, in a store that takes no metrics."""
    tracker = Tracker("broken", "run", tags={}, params={})
    try:
        with tracker:
            work(tracker)
    except (mlflow.MlflowException, KeyError) as error:
        return mlflow.get_run(tracker.run_id).info.status, repr(error)
    return mlflow.get_run(tracker.run_id).info.status, None


@pytest.fixture
def _broken(monkeypatch):
    def broken(*arguments, **options):
        raise mlflow.MlflowException("no space left")

    monkeypatch.setattr(mlflow, "log_metrics", broken)


@pytest.mark.usefixtures("_broken")
def test_a_call_that_failed_is_raised_by_the_next_or_at_the_end():
    reached = []

    def goes_on(tracker):
        tracker.log(1, {"reward/mean": 0.5})
        time.sleep(0.5)
        tracker.set_tag("warnings", "none")
        reached.append("behind the next call")

    expected = ("FAILED", "MlflowException('no space left')")
    assert a_run(goes_on) == expected
    assert a_run(lambda tracker: tracker.log(1, {"reward/mean": 0.5})) == expected
    assert reached == []


@pytest.mark.usefixtures("_broken")
def test_the_runs_own_failure_is_not_hidden_by_the_stores():
    def fails(tracker):
        tracker.log(1, {"reward/mean": 0.5})
        raise KeyError("ours")

    assert a_run(fails) == ("FAILED", "KeyError('ours')")
