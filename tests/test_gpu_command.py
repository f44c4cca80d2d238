"""The command that tests rlzoo on a GPU (`examples.gpu`), run on the CPU: its rows, page, exit codes, and packed pieces."""

import argparse
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from examples.gpu import oracle, worker
from examples.gpu.__main__ import run_part, unproven
from examples.gpu.carry import Target, applies, write_pieces
from examples.gpu.carry_install import unpack
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
def test_two_rows_are_run_and_written_and_not_run_again(tmp_path):
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


def test_whatever_happens_in_a_case_is_a_row_and_only_checks_decide_the_exit_code():
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


def test_requirements_are_those_of_the_other_machine():
    target = Target({"torch": Version("2.9")}, "3.12", "2.31", "aarch64")
    assert target.platforms[0] == "manylinux_2_31_aarch64"
    assert applies(Requirement("a; python_version >= '3.12' and platform_machine == 'aarch64'"), set(), target)
    assert not applies(Requirement("a; sys_platform == 'win32'"), set(), target)
    assert not applies(Requirement("a; extra == 'trl'"), set(), target)
    assert applies(Requirement("a; extra == 'trl'"), {"trl"}, target)


def test_a_damaged_piece_is_named_and_whole_ones_are_joined(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)) * 50)
    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        archive.add(tmp_path / "file", "rlzoo/file")
    carried = tmp_path / "carried"
    carried.mkdir()
    pieces = write_pieces(tmp_path / "whole.tar", carried, size=6000)
    assert len(pieces) > 2
    (carried / "install.py").write_text((ROOT / "examples" / "gpu" / "carry_install.py").read_text())
    join = "import install, json, sys, pathlib; install.join(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]))"

    def joined(to):
        to.mkdir()
        words = [sys.executable, "-c", join, json.dumps({"pieces": pieces}), str(to)]
        environment = {**os.environ, "PYTHONPATH": str(carried)}
        return subprocess.run(words, cwd=carried, capture_output=True, text=True, check=False, env=environment)

    assert joined(tmp_path / "one").returncode == 0
    assert (tmp_path / "one" / "rlzoo" / "file").read_bytes() == (tmp_path / "file").read_bytes()
    with (carried / "piece-001").open("ab") as file:
        file.write(b"x")
    damaged = joined(tmp_path / "two")
    assert damaged.returncode == 1
    assert "piece-001: SHA-256 is" in damaged.stderr


@pytest.mark.parametrize("bad", ["link", "/absolute", "rlzoo/../../outside"])
def test_an_archive_that_would_write_elsewhere_is_not_unpacked(tmp_path, bad):
    member = tarfile.TarInfo(bad)
    if bad == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "/etc"
    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        archive.addfile(member)
    with tarfile.open(tmp_path / "whole.tar") as archive, pytest.raises(SystemExit, match="expected a file or a folder"):
        unpack(archive, tmp_path / "to")
    assert not (tmp_path / "to").exists()
