"""A long run does not leak memory, threads, files or processes."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.faults.test_kill import KILLS

RUN = """
import json, sys
from pathlib import Path
import psutil, rlzoo
from rlzoo import RunConfig
from tests.training.short import QUICK

me, seen = psutil.Process(), []

def look(step, metrics):
    if step % 50 == 0:
        seen.append([step, me.memory_info().rss, me.num_threads(), me.num_fds(), len(me.children())])

overrides = [*QUICK, "checkpoint.every=25", "eval.every=100", "rollout.max_staleness=1"]
rlzoo.train(RunConfig.compose(clip="fspo", overrides=overrides, steps=500, output=Path(sys.argv[1])), look)
after = [me.num_threads(), me.num_fds(), len(me.children())]
print(json.dumps({"seen": seen, "after": after}))
"""


@pytest.mark.timeout(1800)
@pytest.mark.skipif(KILLS <= 5, reason="in nox -s faults only: 500 steps")
def test_five_hundred_steps_take_no_more_than_a_hundred(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(tmp_path / "run")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(answer.stdout.splitlines()[-1])
    by_step = {step: values for step, *values in found["seen"]}
    print("resident bytes, threads, files, processes by step:", by_step, "after:", found["after"])
    assert by_step[500][0] < 1.02 * by_step[100][0]
    assert by_step[500][1:] == by_step[100][1:]
    assert found["after"][2] == 0, "a process is left"
    time.sleep(1)
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(process.info["cmdline"] or ())]
    assert left == []
