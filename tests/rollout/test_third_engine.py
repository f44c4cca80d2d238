"""A new sampling engine is one file and one line: a run samples through it, and nothing else knows that it exists."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file

from rlzoo import RunConfig
from rlzoo.config.engines import ENGINES, engine_of
from rlzoo.core.errors import UserError
from rlzoo.models.pretrained import eos_token_ids, load_pretrained
from tests.off_policy import plain_log_probs
from tests.quick import quick_run
from tests.rollout.completions import Completions
from tests.training.short import lines


class Server(ThreadingHTTPServer):
    """Serves the embedded model, computed without rlzoo's sampler; its own weights are random until it gets others."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.tokenizer = load_pretrained("embedded")
        for parameter in self.model.parameters():
            parameter.data.normal_()
        self.num_loads = 0

    def load(self, body):
        self.model.load_state_dict(load_file(body["model_path"]), strict=False)  # without the tied head
        self.num_loads += 1
        return {"success": True}

    @torch.no_grad()
    def complete(self, body):
        ids, chosen, log_probs = torch.tensor([body["prompt"]]), [], []
        generator = torch.Generator().manual_seed(body["seed"])
        while len(chosen) < body["max_tokens"] and not {*chosen} & {*body["stop_token_ids"]}:
            row = (self.model(input_ids=ids).logits[0, -1] / body["temperature"]).log_softmax(-1)
            token = torch.multinomial(row.exp(), 1, generator=generator)
            ids = torch.cat([ids, token[None]], dim=1)
            chosen.append(int(token))
            log_probs.append(float(row[token]))
        tokens = self.tokenizer.convert_ids_to_tokens(chosen)
        return {"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": log_probs}}]}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answers = {"/v1/completions": self.server.complete, "/update_weights_from_disk": self.server.load}
        answer = json.dumps(answers[self.path](body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@contextmanager
def running():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(monkeypatch):
    with running() as server:
        monkeypatch.setattr(Completions, "address", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setitem(ENGINES, "completions", "tests.rollout.completions:Completions")
        yield server


def test_a_third_engine_samples_from_the_model(server):
    model, tokenizer = load_pretrained("embedded")
    config = RunConfig.compose(clip="grpo", overrides=["rollout.engine=completions", "rollout.max_new_tokens=12"])
    sampler = engine_of(config.rollout).make(model, tokenizer, eos_token_ids(model, tokenizer), named=config.model)
    sampler.update_weights(model.state_dict().items())
    rollouts = sampler.sample(["3+5=", "12+34="], 4, seed=1)
    sampler.close()
    assert len({rollout.response_ids for rollout in rollouts}) > 2
    for rollout in rollouts:
        sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        expected = plain_log_probs(model, sequence, len(rollout.response_ids)).detach()
        torch.testing.assert_close(torch.tensor(rollout.rollout_log_probs), expected, atol=1e-4, rtol=0)


def test_a_run_trains_with_a_third_engine_that_follows_its_weights(server, tmp_path):
    overrides = ["rollout.engine=completions", "rollout.num_prompts=4", "learner.num_minibatches=2", "learner.lr=1e-3"]
    result = quick_run(tmp_path, "grpo", *overrides, steps=2)
    steps = [row for row in lines(result.path / "metrics.jsonl") if row["step"]]
    assert len(steps) == server.num_loads == 2
    assert all(row["mismatch/log_ratio_abs_max"] < 1e-4 for row in steps), "sampled with the weights of the step"


def test_a_third_engine_states_its_limits(server):
    with pytest.raises(UserError, match=r"rollout.temperature=3.0: the completions server accepts 0 to 2"):
        RunConfig.compose(clip="grpo", overrides=["rollout.engine=completions", "rollout.temperature=3"])
    with pytest.raises(UserError, match=r"rollout.engine='another': input should be 'hf', .*'vllm', .*'completions'"):
        RunConfig.compose(clip="grpo", overrides=["rollout.engine=another"])
