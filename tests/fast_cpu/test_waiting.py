"""Waiting threads of one operation sleep if other processes are busy, and spin otherwise, unless the user configures it."""

import os
import subprocess
import sys
import threading
import time

import pytest

from rlzoo.fast_cpu.waiting import SETTINGS, waiting_by_load

SHOW = """
import os, sys, rlzoo.cli.main
sys.argv = ["rlzoo", "--version"]
try:
    rlzoo.cli.main.main()
finally:
    print({name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")})
"""


@pytest.mark.parametrize("setting", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_the_command_line_sets_how_threads_wait_unless_the_user_does(setting):
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    done = subprocess.run([sys.executable, "-c", SHOW], env=environment | setting, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == str(dict.fromkeys(SETTINGS) | setting if setting else SETTINGS)


def until(condition, seconds=20):
    """Wait for a condition; returns False if it does not become true."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def holds_more():
    return any(thread.name == "waiting-more" for thread in threading.enumerate())


def test_threads_wait_asleep_while_other_processes_are_busy():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        with waiting_by_load(len(busy)):
            assert until(holds_more), "nobody saw the load"
        assert not holds_more(), "what was held is released with the block"
    finally:
        for process in busy:
            process.kill()
            process.wait()


COUNT = """
import os, resource, sys, time, torch
from rlzoo.fast_cpu.waiting import _libgomps, _MoreThreads
torch.set_num_threads(len(os.sched_getaffinity(0)))
numbers = torch.randn(200_000)

def sleeps():
    '''Times that a thread of ours went to sleep, in half a second of small operations.'''
    before, end = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.monotonic() + 0.5
    while time.monotonic() < end:
        numbers.mul(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

sleeps()
spinning = sleeps()
more = _MoreThreads(_libgomps())
time.sleep(0.2)
asleep, result = sleeps(), numbers.exp().sum().item()
more.release()
print(spinning, asleep, sleeps(), result == numbers.exp().sum().item())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a single core has no threads that wait for each other")
def test_one_more_thread_lets_the_others_sleep_and_changes_no_sum():
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | SETTINGS
    seen = []
    for _ in range(3):  # other processes put spinning threads to sleep too: one quiet half second is enough
        done = subprocess.run([sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=True)
        spinning, asleep, after, is_same = done.stdout.split()
        assert is_same == "True"
        seen.append(int(asleep) / max(int(spinning), int(after), 10))
        if seen[-1] > 10:
            break
    assert max(seen) > 10, f"one more thread multiplied the sleeps by {seen}"


def test_a_single_thread_is_not_watched():
    before = threading.active_count()
    with waiting_by_load(1):
        assert threading.active_count() == before
