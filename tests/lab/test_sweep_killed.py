"""The runs of a sweep end with the sweep."""

import subprocess
import sys
import time

import psutil
import pytest

from tests.quick import QUICK


@pytest.mark.long
def test_a_run_of_a_sweep_ends_when_the_sweep_is_killed(tmp_path):
    settings = [word for setting in QUICK for word in ("--set", setting)]
    command = ["sweep", "--clip", "fspo", "--seeds", "1", "--steps", "100000", "--output", str(tmp_path / "sweep"), *settings]
    sweep = subprocess.Popen([sys.executable, "-P", "-m", "rlzoo", *command], stdout=subprocess.DEVNULL)
    runs = []
    try:
        while not list(tmp_path.glob("sweep/*/metrics.jsonl")):
            assert sweep.poll() is None
            time.sleep(0.2)
        runs = psutil.Process(sweep.pid).children()
        assert runs
        sweep.kill()
        sweep.wait()
        _, alive = psutil.wait_procs(runs, timeout=120)
        assert alive == []
    finally:
        for process in runs:
            if process.is_running():
                process.kill()
        if sweep.poll() is None:
            sweep.kill()
            sweep.wait()
