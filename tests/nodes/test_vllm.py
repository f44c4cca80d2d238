"""A vLLM server on another machine, without a shared file system: its weights travel over HTTP.

A small server replaces vLLM's; tests/vllm/test_remote.py has the real one.
"""

import os
import signal
import time

import pytest

from tests.nodes.machines import ADDRESSES, Machines, ip, wait, why_not
from tests.nodes.test_nodes import cable_is_cut_for_5_s, until_step
from tests.training.short import QUICK, lines, without_times

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PORT = 8000
SERVER = f"""
from tests.rollout.stand_in import StandIn
server = StandIn("0.0.0.0", {PORT})
server.draws = True
server.serve_forever()
"""
GRADE = """
import time

def grade(problem, response):
    time.sleep(0.05)
    return float(response.startswith("5"))
"""
SETTINGS = [*QUICK, "tracking.mlflow=false", "checkpoint.every=1", "eval.num_problems=0", "rollout.engine=vllm"]
STEPS = 4


@pytest.fixture
def machines(tmp_path):
    made = Machines(tmp_path)
    (made.folders[0] / "grade.py").write_text(GRADE)
    yield made
    made.close()


def serve(machines, number=1):
    process = machines.start(number, "python", "-c", SERVER)
    time.sleep(8)
    return process


def train(machines, *words, server=ADDRESSES[1]):
    sets = [*SETTINGS, "task.reward=grade:grade", f"rollout.vllm.server=http://{server}:{PORT}"]
    first = () if words else ["--clip", "grpo", *(word for setting in sets for word in ("--set", setting))]
    return machines.start(0, "python", "-m", "rlzoo", "train", *first, "--steps", str(STEPS), "--output", "run", *words)


def metrics(machines):
    return without_times(lines(machines.folders[0] / "run" / "metrics.jsonl"))


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """The metrics of the run with the server on the trainer's machine, which reads the weights from a folder."""
    machines = Machines(tmp_path_factory.mktemp("beside"))
    (machines.folders[0] / "grade.py").write_text(GRADE)
    serve(machines, 0)
    assert wait([train(machines, server="127.0.0.1")])[0] == [0], machines.log(0)[-3000:]
    machines.close()
    rows = metrics(machines)
    assert rows[-1]["learner/grad_norm"] > 0
    return rows


@pytest.mark.parametrize("fault", [lambda machines: None, cable_is_cut_for_5_s], ids=["no fault", "a cut of 5 s"])
def test_a_run_equals_one_with_a_server_on_its_own_machine(machines, beside, fault):
    serve(machines)
    process = train(machines)
    until_step(machines, 1)
    fault(machines)
    assert wait([process])[0] == [0], machines.log(0)[-3000:]
    assert metrics(machines) == beside
    sizes = machines.num_bytes()
    print(f"{sizes:,} bytes on the cable")
    assert sizes > STEPS * 400_000  # the weights of each step


def signal_the_server(machines, what):
    for id_ in ip("netns", "pids", machines.names[1]).split():
        os.kill(int(id_), what)


def server_is_restarted(machines, server):
    signal_the_server(machines, signal.SIGKILL)
    server.wait()
    serve(machines)


def cable_is_cut_during_a_request(machines, _):
    signal_the_server(machines, signal.SIGSTOP)
    time.sleep(5)  # the trainer now waits for an answer
    machines.connect(is_up=False)
    signal_the_server(machines, signal.SIGCONT)


ENDED = {
    "the server restarted": (server_is_restarted, "no longer has the weights that this run sent: it restarted", 60, {0, 1}),
    "the cable was cut": (cable_is_cut_during_a_request, f"http://{ADDRESSES[1]}:{PORT}", 300, {1}),
}


@pytest.mark.parametrize("fault", ENDED)
def test_a_run_whose_server_is_lost_can_be_resumed_and_loses_nothing(machines, beside, fault):
    lose, message, limit, allowed = ENDED[fault]
    server = serve(machines)
    process = train(machines)
    until_step(machines, 1)
    log = machines.logs[0]
    lose(machines, server)
    codes, seconds = wait([process], limit=limit)
    print(f"{fault}: ended with exit code {codes[0]} after {seconds:.0f} s")
    assert codes[0] in allowed
    machines.connect()
    if codes != [0]:  # a server that restarts between two steps receives the next step's weights, and the run continues
        last = log.read_text().splitlines()[-1]
        assert last.startswith("rlzoo: ")
        assert message in last
        assert wait([train(machines, "--resume")])[0] == [0], machines.log(0)[-3000:]
    assert metrics(machines) == beside
