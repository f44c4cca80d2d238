"""Checks that attacks on the sandbox fail, and that the next program still runs."""

import os
import sys
import time

import pytest
import rlzoo_sandbox as sandbox
from rlzoo_sandbox import python

from rlzoo.core.errors import UserError
from rlzoo.support.workers import Worker
from rlzoo.tasks import build_task
from rlzoo.tasks.task import Problem

PYTHON = "rlzoo_sandbox:python"
SETTINGS = {"name": "tools", "problems": {"name": "arithmetic"}, "tools": [PYTHON]}


def test_the_output_of_a_program_is_returned():
    assert python("print(sum(i * i for i in range(10)))") == "285"
    assert (
        python("import math, json, fractions\nprint(json.dumps([math.comb(5, 2), 'ä']), fractions.Fraction(3, 6))")
        == '[10, "\\u00e4"] 1/2'
    )
    assert python("pass") == ""


def test_a_failing_program_returns_its_output_and_traceback():
    text = python("print('first')\n1/0")
    assert text.startswith("first\nTraceback (most recent call last):")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert python("1 +").endswith("SyntaxError: invalid syntax")


def test_the_same_program_always_gives_the_same_output():
    numbers = "random.random(), os.urandom(4), time.time(), uuid.uuid4(), hash('a'), id(object())"
    program = f"import random, os, time, uuid\nprint({numbers})"
    assert len({python(program) for _ in range(2)}) == 1


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/hostname", "/proc/self/environ", "/root/.bashrc", "/", ".", "/dev/null"])
def test_no_file_of_the_host_is_visible(path):
    for attack in ("open({0!r}).read()", "import os; os.stat({0!r})", "import os; os.listdir({0!r})"):
        last = python(attack.format(path)).splitlines()[-1]
        assert "Error: [Errno" in last, last


def test_no_file_can_be_written(tmp_path):
    target = tmp_path / "new"
    for path in (target, "new", "/tmp/new"):
        assert "FileNotFoundError" in python(f"open({str(path)!r}, 'w').write('x')")
    for descriptor in range(3, 12):  # files that the host process has open
        assert "OSError" in python(f"import os; os.write({descriptor}, b'x')")
    assert [*tmp_path.iterdir()] == []


def test_the_environment_and_the_arguments_of_the_host_are_hidden(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    assert python("import os, sys\nprint(dict(os.environ), sys.argv, sys.platform)") == "{} ['-c'] wasi"


def test_there_is_no_network():
    assert "OSError" in python("import socket; socket.socket().connect(('127.0.0.1', 80))")
    assert "OSError" in python("import socket; socket.socket(fileno=3).recv(10)")
    assert "Error" in python("import urllib.request; urllib.request.urlopen('http://127.0.0.1/')").splitlines()[-1]


@pytest.mark.parametrize(
    "attack",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.posix_spawn('/bin/true', [], {})",
        "import threading\nwhile True: threading.Thread(target=print).start()",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
    ],
)
def test_no_process_and_no_thread_can_be_started(attack):
    assert "Error" in python(attack).splitlines()[-1]


@pytest.mark.parametrize(
    "attack",
    [
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import ctypes; ctypes.string_at(0)",
        "import _ctypes",
    ],
)
def test_a_program_cannot_access_its_interpreter_host(attack):
    assert "Error" in python(attack).splitlines()[-1]


def test_a_gigabyte_allocation_is_refused_and_the_program_may_continue():
    program = "try:\n    x = bytearray(2**30)\nexcept MemoryError:\n    print('no')\nprint(len(bytearray(100 * 2**20)))"
    assert python(program) == f"no\n{100 * 2**20}"
    assert python("x = []\nwhile True: x.append('a' * 10**6)").endswith("MemoryError")


def test_an_endless_loop_is_stopped_and_its_output_kept():
    text = python("print('begun')\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass")
    assert text == "begun\n(the program was stopped: it took more than 10,000,000,000 steps)"


@pytest.fixture
def few_steps(monkeypatch):
    """Allow only a tenth of the work, for programs that would use up any allowance."""
    monkeypatch.setattr(sandbox, "WORK", sandbox.WORK // 10)


@pytest.mark.parametrize("slow", ["9 ** 9 ** 9", "sum(range(10**12))", "import re; re.match('(a+)+b', 'a' * 64)"])
def test_one_long_python_instruction_is_stopped(slow, few_steps):
    text = python(slow)
    assert text == "(the program was stopped: it took more than 1,000,000,000 steps)"


def test_an_endless_loop_of_calls_is_stopped():
    assert python("import time\nwhile True: time.time()") == "(the program was stopped: it made more than 20,000 calls)"
    assert python("import os\nwhile True: os.urandom(10**6)") == "(the program was stopped: it made more than 20,000 calls)"


def test_a_program_cannot_sleep():
    assert python("import time; time.sleep(3600)").endswith("OSError: [Errno 58] Not supported")


def test_long_output_is_returned_with_its_beginning_and_end():
    text = python("print('a' * 1000)\nprint('b' * 998 + '.')")
    assert text == "a" * 400 + "\n(1,201 bytes are left out)\n" + "b" * 398 + "."


@pytest.mark.parametrize(
    "flood", ["print('x' * 10**6)", "while True: print('xxx')", "import os\nwhile True: os.write(2, b'x' * 999)"]
)
def test_a_megabyte_of_output_is_truncated(flood):
    text = python(flood)
    assert text.endswith("\n(the program was stopped: it printed more than 20,000 bytes)")
    assert len(text) < 1000


@pytest.mark.parametrize(
    "depth", ["def f(): f()\nf()", "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "eval('(' * 10_000)"]
)
def test_endless_recursion_is_contained(depth, few_steps):
    text = python(depth)
    assert "Error" in text or "was stopped" in text
    assert python("print(1)") == "1"


def test_a_program_that_crashes_its_interpreter_does_not_affect_others():
    assert "was stopped" in python("import signal; signal.raise_signal(11)")
    assert python("import os; os._exit(7)") == python("import sys; sys.exit(7)") == ""
    assert python("print(1)") == "1"


def test_a_program_that_no_argument_can_hold_is_refused():
    for program in ("print(1)\0", "#" * 20_001):
        with pytest.raises(ValueError, match="must contain no null characters and at most 20,000 bytes"):
            python(program)


def test_the_sandbox_runs_in_a_worker_with_other_episodes():
    with build_task({**SETTINGS, "workers": 1}) as task:
        numbers, _ = task.host.begin([Problem("1+1", "2")] * 2, [0, 0])
        call = '<tool_call>{"name": "python", "arguments": {"code": "print(2**64)"}}</tool_call>'
        seen = task.host.step(dict.fromkeys(numbers, call))
        assert [each.messages[0]["content"] for each in seen] == [str(2**64)] * 2


def run_and_say_who(code):
    return python(code) + f" {os.getpid()}"


def test_the_sandbox_process_survives_every_program():
    worker = Worker(run_and_say_who, sandbox.prepare, 4 * 2**30)
    attacks = [
        "x = [0] * 10**9",
        "import os; os.abort()",
        "print('x' * 10**7)",
        "import signal; signal.raise_signal(9)",
        "print(1)",
    ]
    answers = [worker.call((attack,), 30.0)[0][0] for attack in attacks]
    worker.close()
    assert len({answer.rsplit(" ", 1)[1] for answer in answers}) == 1


@pytest.fixture
def anew():
    """Reload the interpreter before and after the test."""
    sandbox.prepare.cache_clear()
    yield
    sandbox.prepare.cache_clear()


def test_an_interpreter_that_was_changed_is_not_compiled(monkeypatch, anew):
    monkeypatch.setattr(sandbox, "SHA256", "0" * 64)
    with pytest.raises(UserError, match="has the SHA-256 e5dc5a39"):
        sandbox.prepare()


def test_a_short_program_takes_a_fraction_of_a_second():
    sandbox.prepare()
    began = time.process_time()
    for _ in range(5):
        assert python("print(1)") == "1"
    assert (time.process_time() - began) / 5 < 1.0


def test_no_code_of_the_package_with_the_interpreter_is_imported():
    sandbox.prepare()
    assert sandbox.PACKAGE not in sys.modules
