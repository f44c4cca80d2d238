"""Laws of grading in a worker process."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from rlzoo.core.errors import UserError
from rlzoo.tasks.grading import Grader
from tests.poison import poison, poisoned


def ready():
    pass


def children():
    return {child.pid for child in psutil.Process().children()}


def act(what):
    """A grading function that does what the answer says, like an adversarial answer."""
    if what == "hang":
        time.sleep(60)
    if what == "slow":
        time.sleep(2)
        return 0.25
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


def test_a_hanging_call_gives_no_grade_and_the_next_is_graded(grader):
    begin = time.perf_counter()
    assert grader.grade([("0.25",), ("hang",), ("0.5",)]) == [0.25, None, 0.5]
    assert time.perf_counter() - begin < 30
    assert grader.num_failures == 1


def test_a_crashing_call_gives_no_grade_and_the_next_is_graded(grader):
    assert grader.grade([("raise",), ("exit",), ("crash",), ("0.5",)]) == [None, None, None, 0.5]
    assert grader.num_failures == 3


def test_a_worker_that_exits_with_code_0_counts_as_a_crash_at_once(grader):
    assert grader.grade([("leave",), ("0.5",)]) == [None, 0.5]
    assert grader.num_failures == 1
    assert grader.last_failure == "the worker process exited with code 0"


def test_a_worker_killed_while_idle_is_replaced(grader):
    grader.grade([("1",)])
    os.kill(grader.process.pid, signal.SIGKILL)
    psutil.Process(grader.process.pid).wait(10)
    assert grader.grade([("0.5",)]) == [0.5]


def test_nothing_starts_before_the_first_answer_and_close_ends_it(grader):
    before = children()
    assert grader.grade([]) == []
    assert children() == before
    grader.grade([("1",)])
    assert children() == {*before, grader.process.pid}
    grader.close()
    assert children() == before
    assert grader.grade([("1",)]) == [1.0]  # it can be used again


def test_threads_share_one_worker(grader):
    results, before = {}, children()
    threads = [threading.Thread(target=lambda k=k: results.update({k: grader.grade([(str(k),)] * 20)})) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [float(k)] * 20 for k in range(4)}
    assert len(children() - before) == 1


@pytest.mark.long
def test_a_script_needs_no_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from rlzoo.tasks import math_grading\nfrom rlzoo.tasks.grading import Grader\n"
        "print(Grader(math_grading.score, math_grading.start, 5).grade([('1', '1', True)]))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("[1.0]\n", 0)


def test_a_failed_start_is_reported_in_one_line():
    grader = Grader(act, fail_to_start, timeout=1)
    with pytest.raises(
        UserError, match=r"^the grading worker cannot start: KeyError: 'nothing here' \(.*test_grading.py:\d+\)$"
    ):
        grader.grade([("1",)])


FAILURES = {
    "keyboard": "KeyboardInterrupt",
    "base": "BaseException: all of it",
    "unpicklable": "UnpicklableError: holds a lock",
    "without a text": "TextlessError: an error without a text",
    "nan": "ValueError: the reward is nan, not a finite number",
    "inf": "ValueError: the reward is inf, not a finite number",
    "1e308": "ValueError: the reward is 1e+308, outside the allowed range of -1e+06 to 1e+06",
    "-1e308": "ValueError: the reward is -1e+308, outside the allowed range of -1e+06 to 1e+06",
    "huge int": "ValueError: the reward is 1000000",
    "text": "ValueError: the reward is '1.0', not a finite number",
    "lock": "ValueError: the reward is <unlocked _thread.lock object",
    "complex": "ValueError: the reward is 1j, not a finite number",
    "vector": "ValueError: the reward is [1.0, 2.0], not a finite number",
}
VALUES = {"true": 1.0, "numpy": 0.5, "tensor": 0.25, "integer": 3.0, "largest": 1e6, "prints": 0.5, "closes stdout": 0.5}


class UnpicklableError(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class TextlessError(Exception):
    def __str__(self):
        raise KeyboardInterrupt


def fail_to_start():
    raise KeyError("nothing here")


def behave(how):
    """What a user's reward may do or return."""
    import numpy as np
    import torch

    raised = {
        "keyboard": KeyboardInterrupt,
        "base": lambda: BaseException("all of it"),
        "unpicklable": UnpicklableError,
        "without a text": TextlessError,
    }
    if how in raised:
        raise raised[how]()
    if how == "prints":
        print("printed by a reward")
        os.write(1, b"written by a reward\n")
    if how == "closes stdout":
        sys.stdout.close()
        os.close(1)
    values = {"nan": math.nan, "inf": math.inf, "1e308": 1e308, "-1e308": -1e308, "huge int": 10**400, "text": "1.0"}
    values |= {"lock": threading.Lock(), "complex": 1j, "vector": [1.0, 2.0], "true": True, "integer": 3, "largest": 1e6}
    values |= {"numpy": np.float32(0.5), "tensor": torch.tensor([0.25])}
    return values.get(how, 0.5)


@pytest.mark.long
def test_whatever_a_reward_raises_or_returns_is_a_number_or_a_failure_with_its_reason():
    grader = Grader(behave, ready, timeout=60)
    try:
        for how, reason in FAILURES.items():
            failed = grader.num_failures
            assert grader.grade([(how,)]) == [None]
            assert grader.num_failures == failed + 1, how
            assert grader.last_failure.startswith(reason), how
        worker = grader.process.pid
        assert grader.grade([(how,) for how in VALUES]) == list(VALUES.values())
        assert grader.process.pid == worker  # none of these has ended the worker
    finally:
        grader.close()


@pytest.mark.long
def test_what_a_reward_prints_does_not_enter_stdout(tmp_path):
    script = "from tests.tasks.test_grading import *; grader = Grader(behave, ready, 60); print(grader.grade([('prints',)]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[0.5]\n"
    assert "written by a reward" in done.stderr


@pytest.fixture
def clock(monkeypatch):
    """A clock that can be set forward or back: a function that does so after some seconds."""
    real, shift, timers = time.time, [0.0], []
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])

    def jump(seconds, after):
        timers.append(threading.Timer(after, lambda: shift.__setitem__(0, seconds)))
        timers[-1].start()

    yield jump
    for timer in timers:
        timer.cancel()


def test_a_clock_set_forward_during_a_call_does_not_time_it_out(clock):
    grader = Grader(act, ready, timeout=60)
    try:
        assert grader.grade([("1",)]) == [1.0]  # the worker has started
        clock(3600, after=0.5)
        assert grader.grade([("slow",), ("0.5",)]) == [0.25, 0.5]
        assert grader.num_failures == 0
    finally:
        grader.close()


def test_a_clock_set_back_during_a_call_does_not_extend_its_limit(grader, clock):
    assert grader.grade([("1",)]) == [1.0]
    clock(-3600, after=0.3)
    begin = time.monotonic()
    assert grader.grade([("0.25",), ("hang",), ("0.5",)]) == [0.25, None, 0.5]
    assert time.monotonic() - begin < 30
    assert grader.num_failures == 1


def spin(how):
    """Compute without end, in Python or in C code that blocks the process's other threads."""
    while how == "in Python":
        pass
    return float(str(9 ** (9**9))) if how == "in C" else 1.0


@pytest.mark.parametrize("how", ["in Python", "in C"])
def test_a_worker_in_an_endless_call_ends_with_its_parent(how):
    script = "from tests.tasks.test_grading import *; grader = Grader(spin, ready, 600); grader.grade([('first',)]);"
    script += f"print(grader.process.pid, flush=True); grader.grade([({how!r},)])"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(parent.stdout.readline()))
    try:
        while worker.cpu_times().user < 0.3:  # it is computing
            time.sleep(0.05)
        parent.kill()
        parent.communicate()
        worker.wait(10)
    finally:
        if worker.is_running():
            worker.kill()
    assert not worker.is_running()


@pytest.mark.long
def test_modules_of_the_working_directory_do_not_replace_those_of_python_in_a_worker(tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    poison(here)
    (here / "own_reward.py").write_text("def short(problem, response):\n    return -len(response)\n")
    script = """
    from rlzoo.tasks import math_grading
    from rlzoo.tasks.grading import Grader
    from rlzoo.tasks.user_code import reward_worker
    from rlzoo.tasks.problem import Problem

    if __name__ == "__main__":
        print(reward_worker("own_reward:short", 60).grade([(Problem("1+1=", "2"), "two")]))
        print(Grader(math_grading.score, math_grading.start, 60).grade([("1/2", "0.5", True)]))
    """
    (elsewhere / "command.py").write_text(textwrap.dedent(script))
    # like the installed command: a script in another folder, without -P, which a worker would inherit
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, elsewhere / "command.py"]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert poisoned(here) == []
    assert (done.stdout, done.stderr) == ("[-3.0]\n[1.0]\n", "")
