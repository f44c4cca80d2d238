"""Laws of an ``async def`` reward: order, concurrency, time limits, retries, and what remains afterwards."""

import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError

import psutil
import pytest

import rlzoo
from rlzoo.tasks import async_grading, build_task
from rlzoo.tasks.async_grading import AsyncGrader, is_coroutine_function, is_transient
from rlzoo.tasks.problem import Problem
from tests.tasks.slow_rewards import act, load
from tests.training.short import lines, quick


@pytest.fixture
def make():
    made = []

    def make(timeout=60.0, concurrency=8):
        made.append(AsyncGrader(load, timeout, concurrency))
        made[-1].grade([("is 0",)])  # starts the process
        return made[-1]

    yield make
    for grader in made:
        grader.close()


def calls(*what):
    return [(each,) for each in what]


def test_rewards_are_in_the_order_of_the_calls(make):
    seconds = [0.3, 0.0, 0.2, 0.1]
    started = make().grade(calls(*(f"sleep {each}" for each in seconds)))
    assert started == seconds


def test_the_concurrency_limit_is_reached_and_not_exceeded(make):
    grader = make(concurrency=8)
    begin = time.perf_counter()
    most = grader.grade(calls(*["count"] * 24))
    seconds = time.perf_counter() - begin
    assert max(most) == 8
    assert 0.3 <= seconds < 2.4, "three rounds of 0.1 s, not one and not 24"


def test_blocking_calls_run_concurrently_in_threads(make):
    begin = time.perf_counter()
    assert make(concurrency=16).grade(calls(*["brief 0.5"] * 16)) == [0.5] * 16
    assert time.perf_counter() - begin < 8 * 0.5


@pytest.mark.parametrize("kind", ["hang", "thread"])
def test_a_call_that_takes_too_long_has_no_grade_and_leaves_nothing(make, kind):
    grader = make(timeout=0.5)
    pid = grader.process.pid
    begin = time.perf_counter()
    assert grader.grade(calls("is 1", kind, "is 2")) == [1.0, None, 2.0]
    assert time.perf_counter() - begin < 5
    assert (grader.num_failures, grader.last_failure) == (1, "took longer than 0.5 s")
    assert not psutil.pid_exists(pid), "its tasks and threads end with the process"
    assert grader.grade(calls("is 3")) == [3.0]


@pytest.mark.parametrize("kind", ["block", "stubborn"])
def test_a_call_that_cannot_be_cancelled_is_killed_with_the_process(make, kind, monkeypatch):
    monkeypatch.setattr(async_grading, "SPARE", 0.5)
    grader = make(timeout=0.5)
    assert grader.grade(calls("is 1", kind)) == [1.0, None]
    assert grader.num_failures == 1
    assert grader.grade(calls("is 3")) == [3.0]


def test_a_crash_fails_the_unfinished_calls(make):
    grader = make()
    assert grader.grade(calls("is 1", "hang", "crash")) == [1.0, None, None]
    assert grader.num_failures == 2
    assert grader.last_failure == "the worker process was killed (SIGKILL)"


@pytest.mark.parametrize(
    ("what", "failure"),
    [
        ("exit", "SystemExit: 0"),
        ("cancel", "CancelledError"),
        ("text", "ValueError: the reward is 'much', not a finite number"),
        ("refused", "PermissionError: no"),
    ],
)
def test_other_failures_give_no_grade_at_once_with_their_reason(make, what, failure):
    grader = make()
    assert grader.grade(calls(what, "is 1")) == [None, 1.0]
    reason, _, place = grader.last_failure.partition(" (")
    assert (grader.num_failures, reason) == (1, failure)
    assert re.fullmatch(r".*slow_rewards\.py:\d+\)", place) or what == "text"  # only the function's own errors have one


def test_requests_to_a_busy_or_unreachable_server_are_retried(make):
    grader = make()
    assert grader.grade(calls("busy 2", "down 1")) == [3.0, 2.0]
    assert grader.num_failures == 0


def test_a_server_that_stays_busy_fails_at_the_timeout(make):
    grader = make(timeout=0.8)
    assert grader.grade(calls("busy 99")) == [None]
    said = "took longer than 0.8 s; the last attempt failed with HTTPError: HTTP Error 503: busy ("
    assert grader.last_failure.startswith(said)


class StatusError(Exception):
    """An error as httpx raises it."""

    def __init__(self, status):
        self.response = type("Response", (), {"status_code": status})


def nested():
    """An error as HTTP libraries raise it, caused by a socket error."""
    try:
        try:
            raise ConnectionRefusedError
        except OSError as error:
            raise URLError(error) from error
    except URLError as error:
        return error


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (StatusError(429), True),
        (StatusError(500), True),
        (StatusError(400), False),
        (nested(), True),
        (TimeoutError(), True),
        (FileNotFoundError(), False),
        (ValueError(), False),
    ],
)
def test_only_transient_errors_are_retried(error, again):
    assert is_transient(error) is again


def test_batches_share_one_event_loop_so_that_connections_can_be_kept(make):
    grader = make()
    assert grader.grade(calls("loop")) == grader.grade(calls("loop"))


def test_it_works_inside_a_running_event_loop_and_in_a_thread(make):
    grader, graded = make(), []

    async def inside():
        return grader.grade(calls("is 1"))

    assert asyncio.run(inside()) == [1.0]
    thread = threading.Thread(target=lambda: graded.extend(grader.grade(calls("is 2"))))
    thread.start()
    thread.join()
    assert graded == [2.0]
    assert grader.grade([]) == []


class Judge:
    async def __call__(self, problem, response):
        return 1.0


def test_async_def_is_recognised_in_functions_and_objects():
    assert [is_coroutine_function(each) for each in (act, Judge(), partial(act, ""), load)] == [True, True, True, False]


def test_ctrl_c_ends_the_calls_and_their_process():
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job starts with it ignored
        "from rlzoo.tasks.async_grading import AsyncGrader\n"
        "from tests.tasks.slow_rewards import load\n"
        "grader = AsyncGrader(load, 600, 8)\n"
        "grader.grade([('is 0',)])\n"
        "print(grader.process.pid, flush=True)\n"
        "grader.grade([('hang',), ('thread',)])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    assert not psutil.pid_exists(worker)


@pytest.fixture
def judge_module(tmp_path, monkeypatch):
    """Put the example's file into the current directory."""
    source = Path(rlzoo.__file__).parents[1] / "examples" / "judge_reward.py"
    (tmp_path / "judge_reward.py").write_text(source.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("judge_reward", None)


class Server(ThreadingHTTPServer):
    """A judge that is slow, and does what the answer says."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.at_once, self.most, self.lock = [], 0, 0, threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, server = body["messages"][0]["content"], self.server
        answer = prompt.split("\n")[6]  # between the marks
        with server.lock:
            server.asked.append(answer)
            server.at_once += 1
            server.most = max(server.most, server.at_once)
            is_first = server.asked.count(answer) == 1
        time.sleep(0.3)
        with server.lock:
            server.at_once -= 1
        text = {"garbage": "it is rather good", "echo": "GRADE: 10\nGRADE: 10"}.get(answer, f"GRADE: {len(answer) % 11}")
        status = {"busy": 429, "broken": 500}.get(answer, 200) if is_first else 200
        status = 401 if answer == "secret" else status
        reply = b"<html>" if answer == "html" else json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    yield server
    server.shutdown()
    server.server_close()


def test_the_example_judge_works_with_a_real_server(judge_module, server):
    answers = ["right", "busy", "broken", "garbage", "echo", "html", "secret", "right", *(f"a{number}" for number in range(24))]
    with build_task({"name": "arithmetic", "reward": "judge_reward:judge", "timeout": 60, "reward_concurrency": 16}) as task:
        problems = [Problem("1+1", "2")] * len(answers)
        begin = time.perf_counter()
        rewards = task.grade(problems, answers)
        seconds = time.perf_counter() - begin
        (grader,) = task.graders
        assert rewards[:8] == [0.5, 0.4, 0.6, None, None, None, None, 0.5]
        assert rewards[8:] == [len(answer) / 10 for answer in answers[8:]]
        assert grader.num_failures == 4
        counts = Counter(server.asked)
        assert [counts[answer] for answer in ("busy", "broken", "garbage", "secret")] == [2, 2, 1, 1]
        assert server.most == 16
        assert seconds < 0.3 * len(answers) * 0.8
        before = len(server.asked)
        assert task.grade(problems[:1], answers[:1]) == [0.5]
        assert len(server.asked) == before, "the grade is known"


def test_a_run_samples_ahead_and_counts_failures_of_the_judge(tmp_path, monkeypatch):
    code = (
        "import asyncio, itertools\n"
        "numbers = itertools.count()\n"
        "async def judge(problem, response):\n"
        "    await asyncio.sleep(0.05)\n"
        "    if next(numbers) % 8 == 0: raise ValueError('no grade')\n"
        "    return len(response)\n"
    )
    (tmp_path / "own_judge.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    settings = ["task.reward=own_judge:judge", "rollout.max_staleness=1", "eval.num_problems=0", "tracking.mlflow=false"]
    result = rlzoo.train(quick(tmp_path / "out", overrides=settings, steps=2))
    assert [row["reward/failed"] for row in result.metrics[1:]] == [0.125, 0.125]
    rows = list(itertools.chain(*(lines(tmp_path / "out" / "rollouts" / f"{step:06d}.jsonl") for step in (1, 2))))
    assert all(row["reward"] in (None, len(row["response"])) for row in rows)
    assert sum(row["reward"] is None for row in rows) == len(rows) / 8
