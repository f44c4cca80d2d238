"""The scripts that send a run's metrics to other trackers send all of them; a tracker that is not installed is skipped."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.short import QUICK

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "other-trackers.md"
ROWS = [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.75}]


def from_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / "first"))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars("reward/mean")]


def from_wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, points = file.read_bytes()[7:], []
    while data:  # a checksum, the size, the type and a record
        end = 7 + int.from_bytes(data[4:6], "little")
        items = Record.FromString(data[7:end]).history.item
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        points += [(row["step"], row["reward/mean"])] if "reward/mean" in row else []
        data = data[end:]
    return points


def from_trackio(folder):
    with sqlite3.connect(folder / "trackio" / "rlzoo.db") as database:
        rows = [
            (step, json.loads(metrics)) for step, metrics in database.execute("select step, metrics from metrics order by step")
        ]
    return [(step, metrics["reward/mean"]) for step, metrics in rows if "reward/mean" in metrics]


def test_a_callback_follows_a_run(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    script = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1].replace(
        "steps=2", f"steps=2, overrides={QUICK}"
    )
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "followed"))
    events.Reload()
    logged = {point.step: point.value for point in events.Scalars("reward/mean")}
    rows = map(json.loads, (tmp_path / "runs" / "followed" / "metrics.jsonl").read_text().splitlines())
    assert logged == pytest.approx({row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row})
    assert len(logged) == 2


@pytest.mark.parametrize("read", [from_tensorboard, from_wandb, from_trackio])
def test_a_script_sends_every_step(read, tmp_path):
    library = read.__name__.removeprefix("from_")
    python = os.environ.get(f"{library.upper()}_PYTHON", sys.executable)
    if python == sys.executable:
        pytest.importorskip(library)
    script, *_ = (text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if f"{library}" in text)
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("clip: {name: mine}\n")
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    offline = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(  # noqa: PLW1510
        [python, "-c", script], cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert read(tmp_path) == [(1, 0.25), (2, 0.75)]
