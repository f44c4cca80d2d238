"""Commands that read or create runs, with unexpected content in directories and with output that nobody reads."""

import os
import shutil
from pathlib import Path

import pytest

import rlzoo
from rlzoo.cli.main import main
from rlzoo.cli.options import Lasting
from tests.training.short import QUICK, lines, quick

OVERRIDES = ["tracking.mlflow=false", "eval.num_problems=0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, empty_store):
    folder = tmp_path_factory.mktemp("strange")
    shutil.copy(empty_store, folder / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        return rlzoo.train(quick(folder / "run", overrides=["eval.num_problems=0"])).path


def litter(run):
    for folder in (run, run / "rollouts", run / "checkpoints", run / "tracking"):
        (folder / ".DS_Store").write_text("mine")
        (folder / ".part").write_text("mine")
        (folder / "notes.txt").write_text("mine")
    (run / "rollouts" / "._000001.safetensors").write_text("mine")


STRANGE = {"litter": litter, "no rollouts": lambda run: shutil.rmtree(run / "rollouts")}


@pytest.mark.long
@pytest.mark.parametrize("strange", STRANGE)
def test_commands_that_read_runs_ignore_or_refuse_a_damaged_run_in_one_line(strange, finished, tmp_path, monkeypatch, capfd):
    run = shutil.copytree(finished, tmp_path / "run")
    STRANGE[strange](run)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{finished.parent}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    evaluate = ["eval", str(run), "--suite", "arithmetic", "--k", "1", "--limit", "1", "--max-new-tokens", "4", "--no-mlflow"]
    for command in (
        ["replay", str(run), "--clip", "fspo"],
        ["compare", str(run)],
        ["sync", str(run)],
        evaluate,
        ["train", "--resume", "--output", str(run), "--set", "tracking.mlflow=false"],
    ):
        monkeypatch.setattr("sys.argv", ["rlzoo", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capfd.readouterr()
        assert "Traceback" not in output + errors, (command, errors)
        complaints = [line for line in errors.splitlines() if line.startswith("rlzoo: ")]
        assert len(complaints) == (ended.value.code == 2), (command, errors)
        assert ended.value.code in (0, 1, 2)


@pytest.mark.long
def test_output_that_nobody_reads_does_not_end_a_run(zygote, tmp_path):
    settings = [word for setting in [*QUICK, *OVERRIDES] for word in ("--set", setting)]
    words = ["train", "--clip", "fspo", "--steps", "1", "--output", "run", *settings]
    output, errors = tmp_path / "pipe", tmp_path / "errors"
    os.mkfifo(output)
    process = zygote.start(*words, folder=tmp_path, files=(os.devnull, output, errors))
    with output.open("rb") as reader:
        assert reader.readline()
    assert process.wait(200) == 0, errors.read_text()
    assert "Traceback" not in errors.read_text()
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1]


def test_a_full_disk_for_the_output_raises_no_error():
    with Path("/dev/full").open("w") as full:
        stream = Lasting(full)
        for _ in range(2):
            assert stream.write("step 1\n") == 7
            stream.flush()
        assert not stream.isatty()
