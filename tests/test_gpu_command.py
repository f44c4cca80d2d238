"""The command that tests rlzoo on a GPU (`examples.gpu`), run on the CPU: its rows, page and exit codes."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.gpu import oracle, worker
from examples.gpu.__main__ import run_part, unproven
from examples.gpu.data import make_data
from examples.gpu.page import PAGE, page, published
from examples.gpu.rows import AbsentError, Case, Outcome, Setting, read
from rlzoo import ClipInputs, load_zoo

ROOT = Path(__file__).resolve().parents[1]
SETTING = Setting("cpu", True, Path("models"))


def command(folder, *options):
    words = [sys.executable, "-m", "examples.gpu", "--device", "cpu", "--quick", "--output", str(folder), *options]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.long
def test_two_rows_are_run_once_and_written(tmp_path):
    done = command(tmp_path, "--only", "gradient-fspo-float32,log-probs-vllm-float32")
    assert done.returncode == 0, done.stdout + done.stderr
    report = read(tmp_path / "gpu.json")
    gradient, sampling = report["rows"]
    assert (gradient.part, gradient.name, gradient.status) == ("correctness", "gradient-fspo-float32", "passed")
    assert gradient.values["error"] < 1e-5
    assert gradient.mark == sampling.mark == "CPU, small"
    assert (sampling.name, sampling.status, sampling.found) == ("log-probs-vllm-float32", "absent", "vLLM is not installed")
    text = (tmp_path / "gpu.md").read_text()
    assert f"| `gradient-fspo-float32` | {gradient.about} | {gradient.found} | 1e-04 | passed |" in text
    assert "| `log-probs-vllm-float32` |" in text
    options = argparse.Namespace(only=["gradient-fspo-float32"], minutes=1, output=tmp_path, mark="CPU, small")
    run_part("correctness", options, report)  # without the options of a worker, which is not started
    assert report["rows"] == [gradient, sampling]


def outcome(run, allowed="1e-4"):
    return worker.run_case("correctness", Case("name", "about", allowed, run), SETTING)


def raises(error):
    def run(setting):
        raise error

    return run


@pytest.mark.long
def test_every_case_gives_a_row_and_only_checks_determine_the_exit_code():
    failed = outcome(lambda setting: Outcome("error 2", passed=False))
    broken = outcome(raises(ZeroDivisionError("by zero")))
    missing = outcome(raises(AbsentError("no library")))
    slow = outcome(raises(RuntimeError("out of memory")), allowed="")
    assert [row.status for row in (failed, broken, missing, slow)] == ["failed", "failed", "absent", "failed"]
    assert broken.found == "ZeroDivisionError: by zero"
    assert unproven({"rows": [failed, broken, missing, slow]}) == [failed, broken]


def test_the_page_is_written_from_its_data_with_every_row():
    reports = published()
    assert page(*reports) == PAGE.read_text(encoding="utf-8")
    small = next(report for report in reports if report["mark"] == "CPU, small")
    listed = [case.name for part in worker.PARTS for case in worker.cases(part)]
    assert [row.name for row in small["rows"]] == listed
    assert not unproven(small)
    if not any("gpus" in report["machine"] for report in reports):
        assert "**Not yet run on a GPU.**" in page(*reports)[:200]


@pytest.mark.parametrize("name", oracle.RULES)
def test_the_oracle_clips_what_the_rule_clips(name):
    data = make_data(name, quick=True)
    inputs = ClipInputs(
        data.log_ratios.float(), torch.zeros(data.log_ratios.shape), data.batch.advantages, data.batch.response_mask
    )
    clipped = load_zoo()[name]()(inputs).clipped
    for row, mask in enumerate(data.batch.response_mask):
        slopes = oracle.RULES[name].derivative(data.log_ratios[row, mask].tolist(), float(data.batch.advantages[row]))
        wanted = clipped[row, mask] if clipped.shape[1] > 1 else clipped[row].expand(int(mask.sum()))
        assert [slope == 0 for slope in slopes] == wanted.tolist()
    assert 0 < float(clipped.float().mean()) < 1
