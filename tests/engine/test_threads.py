"""Work that is too small to share is computed by one thread, and torch's setting is as it was afterwards."""

import os
import subprocess
import sys

import pytest
import torch

import rlzoo
from rlzoo.engine.pretrained import load_pretrained
from rlzoo.engine.rollout import HFSampler
from rlzoo.engine.threads import Threads
from rlzoo.waiting import SPINS
from tests.engine.short import quick


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """As torch has them where nobody has set a number."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    former = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(former)


class Model(torch.nn.Module):
    """What the choice reads of a model."""

    def __init__(self, width):
        super().__init__()
        from transformers import Qwen3Config

        self.config, self.device = Qwen3Config(hidden_size=width), torch.device("cpu")


EMBEDDED, FIVE_MILLION, SMOLLM2 = 64, 256, 576


@pytest.mark.parametrize(
    ("width", "rows", "tokens", "sampling", "learning"),
    [(EMBEDDED, 256, 3072, 1, 1), (FIVE_MILLION, 80, 2560, 1, 2), (SMOLLM2, 32, 512, 2, 2), (2048, 1, 64, 2, 2)],
)
def test_the_number_of_threads_follows_the_size_of_the_work(width, rows, tokens, sampling, learning):
    threads = Threads(Model(width))
    with threads.sampling(rows):
        assert torch.get_num_threads() == sampling
    with threads.learning(tokens):
        assert torch.get_num_threads() == learning
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("setting", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_that_the_user_has_set_is_kept(setting, monkeypatch):
    monkeypatch.setenv(setting, "2")
    with Threads(Model(EMBEDDED)).learning(10):
        assert torch.get_num_threads() == 2


def test_a_run_computes_by_one_thread_and_leaves_the_setting_as_it_was(tmp_path, monkeypatch):
    seen = set()
    forward = torch.nn.Linear.forward

    def looks(self, states):
        seen.add(torch.get_num_threads())
        return forward(self, states)

    monkeypatch.setattr(torch.nn.Linear, "forward", looks)
    # before the first step the sampler tries out how it can decode
    rlzoo.train(quick(tmp_path / "run", steps=1, overrides=["tracking.mlflow=false"]), lambda step, _: step or seen.clear())
    assert seen == {1}
    assert torch.get_num_threads() == 2


def test_an_error_leaves_the_setting_as_it_was():
    model, tokenizer = load_pretrained("embedded", "float32")
    sampler = HFSampler(model, tokenizer, end_ids=frozenset({1}), max_new_tokens=4)
    with pytest.raises(TypeError):
        sampler.sample(["3+5="], 2, seed=None)
    assert torch.get_num_threads() == 2


SHOW = """
import os, sys, rlzoo.cli
sys.argv = ["rlzoo", "--version"]
try:
    rlzoo.cli.main()
finally:
    print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("setting", "expected"), [({}, str(SPINS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_the_command_line_lets_threads_wait_briefly_unless_the_user_decides(setting, expected):
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", SHOW], env=environment | setting, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == expected
