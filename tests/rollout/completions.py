"""A third sampling engine: a server with OpenAI's completions interface, which reports log-probs and loads weights by path."""

import json
import tempfile
import urllib.request
from pathlib import Path

from safetensors.torch import save_file

from rlzoo.config.engines import Engine
from rlzoo.rollout.sampler import Drawn, Sampler


class Completions(Engine):
    title = "the completions server"
    temperatures = (0.0, 2.0)
    largest_top_k = 0  # it reports no kept tokens
    address = ""

    def sampler(self, model, tokenizer, *, path, own_weights, device, probe, **common):
        return CompletionsSampler(model, tokenizer, self.address, **common)


class CompletionsSampler(Sampler):
    needs_weights = True

    def __init__(self, model, tokenizer, address, **common):
        super().__init__(model, tokenizer, **common)
        self.address = address
        self.folder = tempfile.TemporaryDirectory()

    def draw(self, rows, draws):
        return [self._draw_one(ids, [draws.seed, row, draws.turn], draws) for ids, row in zip(rows, draws.rows, strict=True)]

    def _draw_one(self, ids, seeds, draws):
        body = {"prompt": ids, "max_tokens": draws.limit, "temperature": draws.temperature, "logprobs": 0}
        (choice,) = self._ask("/v1/completions", seed=sum(seeds), stop_token_ids=sorted(self.end_ids), **body)["choices"]
        reported = choice["logprobs"]
        return Drawn(self.tokenizer.convert_tokens_to_ids(reported["tokens"]), reported["token_logprobs"])

    def update_weights(self, weights, version=0):
        file = Path(self.folder.name, "model.safetensors")
        save_file({name: tensor.detach().clone() for name, tensor in weights}, file)
        self._ask("/update_weights_from_disk", model_path=str(file))

    def close(self):
        self.folder.cleanup()

    def _ask(self, path, **body):
        request = urllib.request.Request(self.address + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
