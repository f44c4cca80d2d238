"""An OpenEnv server on the loopback address, and sessions with it."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from rlzoo_openenv import OpenEnv

from rlzoo.core.errors import UserError
from rlzoo.tasks.problem import Problem
from tests.tasks.environments.page import check_training, train, write_file
from tests.training.short import lines

EPISODE = Problem("episode 0:0", "")


@contextmanager
def serving(folder, log):
    """The page's server on a free port."""
    name = write_file("OpenEnv", folder).stem
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", f"{name}:app", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)
    try:
        until = time.monotonic() + 200
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, folder / "log") as url:
        yield url


def played(environment, seed, moves):
    seen = [environment.reset(EPISODE, seed)]
    for move in moves:
        seen.append(environment.step(move))
        if seen[-1][2]:
            break
    return seen


def test_one_seed_gives_one_episode(server):
    moves = ["5", "a", "2", "8"]
    assert played(OpenEnv(server), 3, moves) == played(OpenEnv(server), 3, moves)


def test_the_hints_of_the_server_lead_to_its_number(server):
    seen = played(OpenEnv(server), 3, ["5", "2", "4"])  # random.Random(3).randint(1, 9) is 4
    assert seen == [
        "Guess my number between 1 and 9. Answer with one digit.",
        ("lower", 0.1, False, {}),
        ("higher", 0.1, False, {}),
        ("Right.", 1.0, True, {}),
    ]


def test_concurrent_sessions_are_independent(server):
    one, other = OpenEnv(server), OpenEnv(server)
    one.reset(EPISODE, 3)
    other.reset(EPISODE, 3)
    assert [one.step("5")[0], one.step("4")[0], other.step("3")[0]] == ["lower", "Right.", "higher"]
    other.close()


def test_settings_that_do_not_match_the_server_are_refused(server):
    with pytest.raises(UserError, match="no field 'word' \\(fields: message\\)"):
        OpenEnv(server, action="word")
    with pytest.raises(UserError, match=r"no such field \(fields: text\)"):
        OpenEnv(server, observation="board").reset(EPISODE, 0)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:8000"):
        OpenEnv("127.0.0.1:8000")
    with pytest.raises(UserError, match="no OpenEnv server responds; start one or correct the address"):
        OpenEnv("http://127.0.0.1:9")


@pytest.mark.environments
def test_the_example_on_the_page_trains(server, tmp_path, model):
    path, rows = train("OpenEnv", tmp_path, model, changed=[("http://127.0.0.1:8000", server)])
    check_training(path, rows)
    for step in (1, 2):
        turns = [turn for each in lines(path / "rollouts" / f"{step:06}.jsonl") for turn in each["turns"]]
        paid = {(turn["observation"], turn["reward"]) for turn in turns}
        assert paid == {("Between 1 and 9!", 0.0), ("lower", 0.1), ("higher", 0.1), ("Right.", 1.0)}
