"""`rlzoo train` as a whole: on a terminal, quiet, as JSON, in two processes, and its start-up time."""

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from itertools import pairwise

import pytest

from rlzoo.cli.progress import SHOWN
from rlzoo.journal.run_directory import read_metrics
from tests.cli.terminal import Pseudo

SETTINGS = ["rollout.num_prompts=8", "rollout.group_size=4", "task.num_operands_max=4", "rollout.max_new_tokens=20"]
QUICK = [word for setting in (*SETTINGS, "eval.num_problems=20") for word in ("--set", setting)]
ALONE = ("--set", "tracking.mlflow=false")


@pytest.fixture
def on_a_terminal(tmp_path, zygote):
    """Run a command on a terminal; returns its exit code and the terminal."""

    def run(columns, rows, *arguments, interrupted_at=None, **variables):
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", **variables}
        with Pseudo(columns, rows) as terminal:
            fcntl.ioctl(terminal.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            files = [os.ttyname(terminal.theirs)] * 3
            process = zygote.start(*arguments, folder=tmp_path, files=files, environment=environment)
            while process.poll() is None:
                if interrupted_at and re.search(interrupted_at, terminal.screen.text):
                    process.send_signal(signal.SIGINT)
                    interrupted_at = None
                time.sleep(0.05)
        return process.returncode, terminal.screen

    return run


def test_a_run_on_a_terminal(on_a_terminal, tmp_path):
    # all but the first of eight updates are clipped, which is reported after three steps
    narrow = ["--set", "clip.clip_low=1e-5", "--set", "clip.clip_high=1e-5", "--set", "learner.num_epochs=2"]
    arguments = ["train", "--clip", "rloo", "--steps", "5", "--output", "out", *narrow, *QUICK]
    code, screen = on_a_terminal(80, 24, *arguments)
    assert code == 0, screen.text
    lines = screen.text.split("\n")
    assert max(map(len, lines)) <= 80
    assert screen.is_cursor_shown
    # the title and the warning remain above the view, in this order
    places = ("rloo on arithmetic", "clip is saturated", "5 of 5 steps in")
    order = [next(at for at, line in enumerate(lines) if text in line) for text in places]
    assert order == sorted(order)
    assert not any(re.search(r"\d/5 .* left", line) for line in lines)  # no bar is left
    last = read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]
    measured = [shown for shown in SHOWN if shown.metric in last]
    view = lines[order[-1] + 1 : order[-1] + 1 + len(measured)]
    assert [line.split("  ")[0].strip() for line in view] == [shown.label for shown in measured]
    assert [line.split()[-1] for line in view] == [shown.number(last[shown.metric]) for shown in measured]
    assert "run directory out" in lines
    # output in between has at most one bar, which only advances
    steps = [re.findall(r"(\d)/5 \d:\d\d:\d\d left", frame) for frame in screen.frames]
    assert max(map(len, steps)) == 1
    assert all(int(now[0]) >= int(before[0]) for before, now in pairwise([step for step in steps if step]))
    # the terminal's own colours: bold, dim and one of the first eight
    assert {code for style in screen.styles for code in style.split(";")} <= {"", "0", "1", "2", "22", "32"}


@pytest.mark.long
def test_ctrl_c_on_a_small_terminal_without_colours(on_a_terminal):
    arguments = ["train", "--steps", "500", "--output", "out", *QUICK]
    code, screen = on_a_terminal(60, 8, *arguments, interrupted_at=r"[1-9]\d*/500", NO_COLOR="1")
    assert code == 130, screen.text
    lines = screen.text.split("\n")
    assert "stopping after this step; interrupt again to stop at once" in lines
    assert re.search(
        r"stopped after step \d+ of 500; resume with: rlzoo train --resume --output out", screen.text.replace("\n", "")
    )
    assert "Traceback" not in screen.text
    assert any(re.fullmatch(r"\d+ of 500 steps in \d:\d\d:\d\d", line) for line in lines)
    assert not any(re.search(r"\d/500 .* left", line) for line in lines)
    assert [line for line in lines if line][-1] == "resume with: rlzoo train --resume --output out"
    assert not any(code[:1] in "349" and len(code) > 1 for style in screen.styles for code in style.split(";"))


def test_an_error_prints_one_line_only(on_a_terminal, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("in the way")
    code, screen = on_a_terminal(60, 20, "train", "--output", "out", *QUICK)
    assert code == 2
    assert screen.text.replace("\n", "") == (
        "rlzoo: output directory 'out' is not empty; choose another --output, or remove this one"
    )
    assert all(len(line) <= 60 for line in screen.text.split("\n"))


def test_quiet_prints_only_the_result(rlzoo):
    code, out, err = rlzoo("train", "--quiet", "--steps", "1", "--output", "out", *QUICK, *ALONE)
    assert code == 0, err
    accuracy, directory = out.splitlines()
    assert re.fullmatch(r"held-out accuracy 0\.\d{3} -> 0\.\d{3}", accuracy)
    assert directory == "run directory out"


@pytest.mark.long
def test_a_custom_reward_is_not_called_accuracy_and_comparable_runs_are_listed(rlzoo, tmp_path):
    folder = tmp_path / "here"
    (folder / "reward_by_length.py").write_text("def short(problem, response):\n    return -0.01 * len(response)\n")
    more = [*QUICK, *ALONE, "--steps", "1", "--set", "task.reward=reward_by_length:short"]
    code, out, err = rlzoo("train", "--output", "runs/one", *more)
    assert code == 0, err
    assert re.search(r"^step 0/1  held-out reward -0\.\d{3}$", out, re.M)
    assert re.search(r"^held-out reward -0\.\d{3} -> -0\.\d{3}$", out, re.M)
    assert "accuracy" not in out
    assert "rlzoo compare" not in out  # there is nothing to compare with
    (folder / "my rule.py").write_text("import rlzoo\n\n@rlzoo.hookimpl\ndef rlzoo_clip_policies():\n    return []\n")
    out = rlzoo("train", "--output", "runs/other", "--clip", "gspo", "--plugin", "my rule.py", *more)[1]
    assert out.splitlines()[-1] == "compare the finished runs in runs: rlzoo compare runs --plugin 'my rule.py'"
    out = rlzoo("compare", "runs", "--csv", "table.csv")[1]
    assert "score: held-out reward at the end" in out
    assert "accuracy" not in out + (folder / "table.csv").read_text() + (folder / "runs" / "compare.html").read_text()
    one, _ = json.loads(rlzoo("runs", "list", "--json")[1])
    assert (one["accuracy"], one["held-out reward"] < 0) == (None, True)


@pytest.mark.long
def test_json_output_holds_only_the_rows_and_the_result(rlzoo, tmp_path):
    code, out, err = rlzoo("train", "--json", "--steps", "2", "--output", "out", *QUICK)
    assert code == 0, err
    *rows, last = map(json.loads, out.splitlines())
    assert rows == read_metrics(tmp_path / "here" / "out" / "metrics.jsonl")
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    result = last["result"]
    assert (result["run"], result["accuracy_first"], result["accuracy_last"]) == ("out", accuracies[0], accuracies[-1])
    assert len(result["mlflow_run"]) == 32


def test_quiet_json_output_holds_only_the_result(rlzoo):
    code, out, err = rlzoo("train", "--json", "--quiet", "--steps", "1", "--output", "out", *QUICK, *ALONE)
    assert code == 0, err
    assert json.loads(out)["result"]["run"] == "out"


@pytest.mark.long
def test_with_two_processes_only_rank_0_prints_in_the_requested_format(tmp_path, zygote):
    inert = [f"--set={key}" for key in ("learner.num_minibatches=1", "learner.num_epochs=1", "tracking.mlflow=false")]
    words = ["train", "--json", "--processes", "2", "--steps", "1", *QUICK, *inert, "--output", "out"]
    unread = tmp_path / "accelerate" / "default_config.yaml"  # a configuration of Accelerate that rlzoo does not read
    unread.parent.mkdir()
    unread.write_text("compute_environment: AMAZON_SAGEMAKER\nfuture_option: [")
    done = zygote.run(*words, folder=tmp_path, environment=os.environ | {"HF_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("clip is inert: one update per rollout") == 1
    *rows, last = map(json.loads, done.stdout.splitlines())
    assert rows == read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert last["result"]["run"] == "out"


def test_a_launcher_passes_its_output_options_to_its_processes(rlzoo, monkeypatch):
    asked = []
    launcher = "torch.distributed.launcher.api.elastic_launch"
    monkeypatch.setattr(launcher, lambda how, program: lambda *words: asked.append(words))
    for options in (["--quiet", "--json"], []):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", os.environ.copy())
            assert rlzoo("train", "--processes", "2", "--output", "out", *options)[0] == 0
        flags = [word for word in asked[-1] if word in ("--quiet", "--json")]
        assert flags == [word for word in options if word in ("--quiet", "--json")]


SLOW = ("torch", "transformers", "mlflow", "rich.progress", "rlzoo.config.run_config")
IMPORTED = f"""
import atexit, sys
atexit.register(lambda: print([name for name in {SLOW} if name in sys.modules], file=sys.stderr))
from rlzoo.cli.main import main; main()
"""


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["trian"], ["train", "--stepz", "3"]])
def test_help_and_typing_errors_import_no_heavy_library(arguments):
    done = subprocess.run([sys.executable, "-c", IMPORTED, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if "--help" in arguments else 2)
    assert done.stderr.splitlines()[-1] == "[]"
