"""Laws of grading in a worker process."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlzoo.tasks.grading import Grader


def ready():
    pass


def act(what):
    """A grading function that does what the answer says, as an adversarial answer can."""
    if what == "hang":
        time.sleep(60)
    if what == "raise":
        raise ArithmeticError
    if what == "exit":
        raise SystemExit(0)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":
        os._exit(0)
    return float(what)


@pytest.fixture
def grader():
    grader = Grader(act, ready, timeout=1)
    yield grader
    grader.close()


def test_a_hanging_answer_counts_zero_and_the_next_is_graded(grader):
    begin = time.perf_counter()
    assert grader.grade([("0.25",), ("hang",), ("0.5",)]) == [0.25, 0.0, 0.5]
    assert time.perf_counter() - begin < 30
    assert (grader.num_timeouts, grader.num_crashes) == (1, 0)


def test_a_crashing_answer_counts_zero_and_the_next_is_graded(grader):
    assert grader.grade([("raise",), ("exit",), ("crash",), ("0.5",)]) == [0.0, 0.0, 0.0, 0.5]
    assert (grader.num_timeouts, grader.num_crashes) == (0, 3)


def test_a_worker_that_leaves_politely_counts_as_a_timeout(grader):
    assert grader.grade([("leave",), ("0.5",)]) == [0.0, 0.5]
    assert (grader.num_timeouts, grader.num_crashes) == (1, 0)


def test_a_worker_killed_while_idle_is_replaced(grader):
    grader.grade([("1",)])
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert grader.grade([("0.5",)]) == [0.5]


def test_nothing_starts_before_the_first_answer_and_close_ends_it(grader):
    assert grader.grade([]) == []
    assert multiprocessing.active_children() == []
    grader.grade([("1",)])
    assert len(multiprocessing.active_children()) == 1
    grader.close()
    assert multiprocessing.active_children() == []
    assert grader.grade([("1",)]) == [1.0]  # it may be used again


def test_threads_share_one_worker(grader):
    results = {}
    threads = [threading.Thread(target=lambda k=k: results.update({k: grader.grade([(str(k),)] * 20)})) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [float(k)] * 20 for k in range(4)}
    assert len(multiprocessing.active_children()) == 1


def test_a_pickled_grader_starts_afresh(grader):
    grader.grade([("1",)])
    copy = pickle.loads(pickle.dumps(grader))
    assert copy.timeout == 1
    assert copy.num_timeouts == 0


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from rlzoo.tasks import math_worker\nfrom rlzoo.tasks.grading import Grader\n"
        "Grader(math_worker.score, math_worker.start, 5).grade([('1', '1', True)])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert "UserError: the grading worker does not start" in done.stderr
    assert done.stderr.rstrip().endswith("because the worker imports it")
