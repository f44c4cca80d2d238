"""A server on loopback that responds like vLLM's; tests/vllm has the tests with a real one."""

import contextlib
import copy
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from safetensors.torch import load_file

from rlzoo.rollout.vllm_worker import FetchWeights

INFO = {
    "model_config": {
        "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "dtype": "torch.float32", "max_model_len": 256,
        "max_logprobs": 20,
    },
    "device_config": {"device": "cpu"},
    "scheduler_config": {"enable_chunked_prefill": False},
}  # fmt: skip


@dataclass
class Worker(FetchWeights):
    server: "StandIn"

    def reload_weights(self, weights_path):
        file = Path(weights_path, "model.safetensors")
        self.server.modes = [path.stat().st_mode & 0o777 for path in (file.parent.parent, file.parent, file)]
        self.server.loads.append(load_file(file))
        self.server.has_weights = True


class StandIn(ThreadingHTTPServer):
    """Responds with a token that shows whether it has received weights since it started: 5 if so, otherwise 4.

    ``failures`` lists what happens to the next requests for completions. The requests that check the weights (``ignore_eos``)
    are answered apart, with a log-prob that depends on the weights, plus the next number in ``noise``. ``by_path`` has a status
    and a response for other paths; None means no response in time. A response of bytes is sent unchanged, and a function is
    called with the handler.
    """

    daemon_threads = True
    request_queue_size = 128  # waiting connections; beyond this number a busy machine resets them

    def __init__(self, host="127.0.0.1", port=0):
        super().__init__((host, port), Handler)
        self.failures, self.asked, self.loads = [], 0, []
        self.has_weights = False
        self.noise = []
        self.top_log_probs = None  # of each token's most probable tokens
        self.varies = False  # whether every other response is longer
        self.draws = False  # whether the token depends on the request's seed
        self.lock = threading.RLock()
        self.holds = threading.Event()  # while set, responses wait for an abort after their first token
        self.aborted = threading.Event()
        self.address = f"http://{host}:{self.server_port}"
        self.by_path = {
            "/v1/models": (200, {"data": [{"id": "embedded"}]}),
            "/server_info": (200, {"vllm_config": copy.deepcopy(INFO)}),
            "/collective_rpc": (200, {"results": [None]}),
            "/reset_prefix_cache": (200, {"success": True}),
            "/abort_requests": (200, {"status": "aborted"}),
        }

    def load_foreign(self):
        """Load another run's weights."""
        self.loads.append({name: tensor + 1 for name, tensor in self.loads[0].items()})


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        path = self.path.partition("?")[0]
        missing = (404, {"detail": "Not Found"})
        answer = self.completions(body) if path == "/v1/completions" else self.server.by_path.get(path, missing)
        if path == "/collective_rpc" and isinstance(answer, tuple) and answer[0] == 200:
            getattr(Worker(self.server), body["method"])(*body.get("args", ()), **body.get("kwargs", {}))
        if path == "/abort_requests":
            self.server.aborted.set()
        if answer is None:
            time.sleep(1.5)
        elif answer == "close":
            self.connection.close()
        elif callable(answer):
            with contextlib.suppress(OSError):  # the other side may disconnect
                answer(self)
        else:
            self.reply(*answer)

    do_POST = do_GET  # noqa: N815

    def completions(self, body):
        if body.get("ignore_eos"):
            return 200, {"choices": [self.probed()]}
        with self.server.lock:
            failure = self.server.failures.pop(0) if self.server.failures else None
            self.server.asked += 1
            if failure in ("restart", "forget"):  # it returns in its initial state
                self.server.has_weights = False
            if failure == "foreign":
                self.server.load_foreign()
        token = 5 if self.server.has_weights else 4
        token += self.server.draws * (body["seed"] % 3)
        longer = 3 * (self.server.varies and self.server.asked % 2)
        if self.server.holds.is_set() and failure is None:
            self.server.aborted.wait(10)
            return 200, {"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "abort"}]}
        log_probs = [-1.0] * (1 + longer) + [-0.5]
        choices = [{"token_ids": [token] * (1 + longer) + [1], "logprobs": {"token_logprobs": log_probs}}]
        choices[0]["logprobs"]["top_logprobs"] = self.server.top_log_probs
        failed = {"error": (500, {"error": "the engine is dead"}), "refuse": (400, {"error": "too long"})}
        failed |= {"close": "close", "restart": "close"}
        return failed.get(failure, (200, {"choices": choices}))

    def probed(self):
        with self.server.lock:
            weights = self.server.loads[-1].values() if self.server.has_weights else ()
            log_prob = -1.0 - float(sum(tensor.double().abs().mean() for tensor in weights))
            log_prob += self.server.noise.pop(0) if self.server.noise else 0.0
        return {"token_ids": [7], "logprobs": {"token_logprobs": [log_prob]}, "finish_reason": "length"}

    def reply(self, status, answer):
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextmanager
def running():
    """Run a server until the block ends."""
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
