"""A real vLLM server on another machine without a shared file system; also when it is killed and restarted."""

import os
import signal
import subprocess
import sys
import time

import pytest

from examples.write_served import write_served
from tests.nodes.machines import ADDRESSES, Machines, ip, wait, why_not
from tests.nodes.test_nodes import until_step
from tests.training.short import lines
from tests.vllm.conftest import OPTIONS, SERVER
from tests.vllm.test_train import QUICK

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PORT = 8000
ADDRESS = f"http://{ADDRESSES[1]}:{PORT}"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": ADDRESSES[1],
    "HF_HUB_OFFLINE": "1",
}


def serve(machines):
    words = ["--model", "served", "--served-model-name", "embedded", "--host", ADDRESSES[1], "--port", str(PORT), *OPTIONS]
    extension = ["--worker-extension-cls", "rlzoo.rollout.vllm_worker.FetchWeights"]
    process = machines.start(1, *SERVER, *words, *extension, environment=ENVIRONMENT)
    ask = [sys.executable, "-c", f"import urllib.request as u; u.urlopen('{ADDRESS}/health', timeout=5)"]
    while subprocess.run(["ip", "netns", "exec", machines.names[0], *ask], capture_output=True, check=False).returncode:
        assert process.poll() is None, machines.log(1)[-3000:]
        time.sleep(2)


def train(machines, *words):
    sets = [*QUICK, "checkpoint.every=1", f"rollout.vllm.server={ADDRESS}"]
    first = () if words else ["--clip", "grpo", *(word for setting in sets for word in ("--set", setting))]
    return machines.start(0, sys.executable, "-m", "rlzoo", "train", *first, "--steps", "4", "--output", "run", *words)


def test_weights_reach_a_server_on_another_machine_and_a_restarted_one(tmp_path):
    machines = Machines(tmp_path)
    try:
        write_served("embedded", machines.folders[1] / "served")
        serve(machines)
        process = train(machines)
        until_step(machines, 2, limit=600)
        for id_ in ip("netns", "pids", machines.names[1]).split():
            os.kill(int(id_), signal.SIGKILL)
        assert wait([process], limit=900)[0] == [1], machines.log(0)[-3000:]
        assert f"rollout.vllm.server='{ADDRESS}': the server" in machines.log(0).splitlines()[-1]
        serve(machines)
        assert wait([train(machines, "--resume")], limit=900)[0] == [0], machines.log(0)[-3000:]
    finally:
        machines.close()
    rows = lines(machines.folders[0] / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["learner/grad_norm"] > 0 for row in rows[1:])
    for row in rows[1:]:  # the server has each step's weights: its log-probs are the trainer's
        assert row["mismatch/log_ratio_abs_max"] < 1e-4
