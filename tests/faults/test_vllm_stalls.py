"""A vLLM server stalls, drips or responds with nonsense during a weight update: the run waits, or stops and can be resumed."""

import os
import time

import pytest

import rlzoo
from rlzoo.core.errors import RunError, UserError
from rlzoo.rollout import vllm_server
from tests.rollout.stand_in import running
from tests.training.short import lines, quick

STEPS = 3
EVERYTHING = int(os.environ.get("RLZOO_KILLS", "2")) > 5


def dripping(handler):
    """Send a byte every tenth of a second, without end."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(600):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def endless(handler):
    """Send as many bytes as are accepted."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 2**20)


class Answers(dict):
    """The server's responses by path; the next ``times`` requests to load weights get another one."""

    def __init__(self, answers, wrong, times):
        super().__init__(answers)
        self.wrong, self.times = wrong, times

    def get(self, path, default=None):
        if path == "/collective_rpc" and self.times:
            self.times -= 1
            return self.wrong
        return super().get(path, default)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(vllm_server, "PAUSES", (0.01, 0.02, 0.03))
    monkeypatch.setattr(vllm_server, "LARGEST_REPLY", 2**20)
    with running() as server:
        server.varies = True
        yield server


def run(server, folder):
    overrides = [
        "rollout.engine=vllm",
        f"rollout.vllm.server={server.address}",
        "rollout.vllm.timeout=0.7",
        "tracking.mlflow=false",
        "eval.num_problems=0",
        "checkpoint.every=1",
        "learner.num_minibatches=1",
        "reward.overlong_buffer=1",  # rewards differ by length, so that there is something to learn
    ]
    return quick(folder, steps=STEPS, overrides=overrides)


ODD = {
    "silence": None, "a byte now and then": dripping, "bytes without end": endless, "an error": (503, {"error": "busy"}),
    "no JSON": (200, b"<html>proxy</html>"), "a list": (200, [1]), "half a character": (200, b"\xff"),
    "a closed door": "close",
}  # fmt: skip


@pytest.mark.parametrize("wrong", ODD if EVERYTHING else ["a byte now and then", "no JSON"])
@pytest.mark.parametrize("times", [2, 10_000] if EVERYTHING else [2])
def test_weights_that_a_server_fails_to_load(server, tmp_path, wrong, times):
    plain = dict(server.by_path)

    def spoil(step, metrics):
        if step == 1:
            server.by_path = Answers(plain, ODD[wrong], times)

    if times > 2:
        with pytest.raises(
            RunError,
            match=r"rollout.vllm.server='http://127.0.0.1:\d+': the server (returned|responded|did not respond|failed)",
        ):
            rlzoo.train(run(server, tmp_path / "run"), spoil)
        assert [path.name for path in (tmp_path / "run/checkpoints").glob("*/state/state.json")] == ["state.json"]
        server.by_path = plain
        rlzoo.train(run(server, tmp_path / "run"), resume=True)
    else:
        rlzoo.train(run(server, tmp_path / "run"), spoil)
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(STEPS + 1))
    last = server.loads[-1]
    assert any(not last[name].equal(server.loads[0][name]) for name in last), "the newest weights were loaded last"


@pytest.mark.long
def test_weights_that_a_server_refuses_end_the_run_in_one_line(server, tmp_path):
    plain = dict(server.by_path)

    def spoil(step, metrics):
        if step == 1:
            server.by_path = plain | {"/collective_rpc": (404, {"detail": "Not Found"})}

    with pytest.raises((RunError, UserError), match="404"):
        rlzoo.train(run(server, tmp_path / "run"), spoil)
    server.by_path = plain
    rlzoo.train(run(server, tmp_path / "run"), resume=True)
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(STEPS + 1))
