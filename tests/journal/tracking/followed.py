"""The directory of a run of three steps, and what a store received from it."""

import json
from dataclasses import replace

import mlflow

from rlzoo.journal.tracking.description import NOTE
from rlzoo.journal.tracking.sync import Sync
from rlzoo.journal.tracking.uploads import Upload, run_id_of, tracking_uri


def three_steps(tmp_path):
    """Create the directory of a three-step run in an empty directory."""
    (tmp_path / "figures" / "completions").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "figures" / "completions" / "step-2.html").write_bytes(b"a page")
    for step in range(3):
        add_row(tmp_path, step)
    record = Upload.new(
        "tests",
        "mine",
        tags={"clip": "fspo", "git_commit": "", NOTE: "**mine**"},
        params={"clip": {"width": 1}},
        files=("config.yaml", "metrics.jsonl"),
    )
    record.write(tmp_path)
    return tmp_path


def add_row(directory, step, **metrics):
    row = {"step": step, "time/clock": 1000.5 + step, "reward/mean": step / 10, "clip_length_bin_0_ci_low": 0.1, **metrics}
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def end(directory, **changes):
    changes = {"status": "FINISHED", "ended": 2000.0, "step": 2, "metrics": {"reward": 0.5}, **changes}
    replace(Upload.read(directory), **changes).write(directory)


def send(directory, *, is_over=True):
    sync = Sync(directory, tracking_uri())
    sync.send(is_over=is_over)
    return sync


def store():
    return mlflow.MlflowClient(tracking_uri())


def told(directory):
    return store().get_run(run_id_of(directory))


def history(directory, name="reward/mean"):
    points = store().get_metric_history(run_id_of(directory), name)
    return [(point.step, point.value, point.timestamp) for point in points]
