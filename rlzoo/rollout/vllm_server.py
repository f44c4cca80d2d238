"""Samples with a vLLM server on this or another machine. New weights are passed through a folder or over HTTP."""

from __future__ import annotations

import itertools
import json
import logging
import math
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rlzoo.config.sections import VLLMConfig
from rlzoo.core.errors import RunError, UserError, shown
from rlzoo.rollout.kept import KeptSets
from rlzoo.rollout.sampler import Drawn, Draws, Ids
from rlzoo.rollout.vllm_model import cpu_head_size, head_size, vllm_weights
from rlzoo.rollout.vllm_sampler import AnyVLLMSampler, request_seed
from rlzoo.support.atomic import UnwritableError, remove_files, write_tensors, writing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("rlzoo")

T = TypeVar("T")

CONNECT_SECONDS = 10
PAUSES = (1, 2, 4, 8, 16, 32, 64)  # seconds between retries if the server does not respond or fails
SOCKET_OPTIONS = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60_000))
    if hasattr(socket, name)
]
"""Options that end a connection about 60 seconds after the other machine is lost, even while a request takes long."""
LARGEST_REPLY = 2**30  # in bytes; a token takes about 100 bytes, and each additional log-prob takes about 40 bytes
PROBES = 3  # number of answers that must all differ from the known one before the server's weights count as changed

Answer = tuple[tuple[int, float], ...]  # tokens and log-probs of the fixed request; empty if it was aborted


def _are_near(answer: Answer, known: Answer, tolerance: float) -> bool:
    """Return whether the log-probs are equal to within ``tolerance`` up to the first token that differs."""
    same = itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], zip(answer, known, strict=False))
    return max((abs(first - second) for (_, first), (_, second) in same), default=math.inf) <= tolerance


FETCH_HINT = "start it with --worker-extension-cls rlzoo.rollout.vllm_worker.FetchWeights"


class _Files(SimpleHTTPRequestHandler):
    """Serves files but no directory listings, and logs nothing."""

    def list_directory(self, path: Any) -> None:
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


class SilentServerError(UserError):
    """The server cannot be reached, times out or fails. A retry may succeed."""


class Gate:
    """Counts the open requests to a server and blocks new ones while its weights change."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._condition = threading.Condition()
        self._is_open = True
        self._num_inside = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Wait until the gate is open and then run the block. `closed` waits for the block to end."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_open)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_inside -= 1
                self._condition.notify_all()

    @contextmanager
    def closed(self, abort: Callable[[], None]) -> Iterator[None]:
        """Block new requests, call ``abort`` until all open requests have ended, and then run the block."""
        with self._changing:
            try:
                with self._condition:
                    self._is_open = False
                    while not self._condition.wait_for(lambda: self._num_inside == 0, 0.05):
                        abort()
                yield
            finally:
                with self._condition:
                    self._is_open = True
                    self._condition.notify_all()


class ServerSampler(AnyVLLMSampler):
    """Samples with the server at ``settings.server``, which serves the model under the name ``served``.

    vLLM reports no version of its weights. Therefore, the sampler sends a fixed request after loading weights, before and
    after every batch, and before loading weights in flight. As long as the answer stays the same, nobody else has changed them.

    With ``settings.in_flight``, the server's weights change while it samples. Responses in progress are aborted and then
    continued from their existing tokens with the new weights, so the version of the weights is known for every token.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: VLLMConfig, *, served: str, **common: Any
    ) -> None:
        import urllib3
        from accelerate import PartialState

        super().__init__(model, tokenizer, settings, **common)
        assert settings.server is not None, "settings.server must be set"
        self.served = served
        self.in_flight = settings.in_flight
        self.version = 0  # version of the server's weights, in optimizer steps
        self.gate = Gate()
        # disable keep-alive, because the server would close the connection while the learner works
        self.http = urllib3.connection_from_url(
            settings.server,
            headers={"Connection": "close"},
            maxsize=self.batch_size * (64 if settings.in_flight else 1),  # with in_flight, several batches are drawn at once
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=settings.timeout),
            retries=False,
            socket_options=SOCKET_OPTIONS,
        )
        self.processes = PartialState()
        self.known: Answer = ()  # the server's answer with the weights that were sent last
        self.own_folder = not settings.sync_folder
        host = urlsplit(settings.server).hostname or ""
        self.is_fetching = self.own_folder and not (host in ("localhost", "::1") or host.startswith("127."))
        self._check_server()
        # a server that runs as another user could not open a folder created by tempfile
        usual = Path(tempfile.gettempdir(), f"rlzoo-weights-{uuid.uuid4().hex}")
        self.folder = Path(settings.sync_folder or usual).resolve()

    def draw(self, rows: Sequence[Ids], draws: Draws) -> list[Drawn]:
        """Request all responses, ``batch_size`` at a time. See `Sampler.draw`."""
        requests, truncates = self._requests(rows, draws), draws.truncation is not None

        def draw_all() -> list[Drawn]:
            self._check_weights()
            with ThreadPoolExecutor(self.batch_size) as pool:
                pairs = zip(rows, requests, strict=True)
                answers = [pool.submit(self._draw_one, ids, request, truncates) for ids, request in pairs]
                try:
                    drawn = [answer.result() for answer in answers]
                finally:
                    pool.shutdown(wait=False, cancel_futures=True)  # after a failure, drop the remaining requests
            self._check_weights()
            return drawn

        return self._patiently(draw_all)

    def _draw_one(self, ids: Ids, request: dict[str, Any], truncates: bool) -> Drawn:
        """Draw one response and continue it if it is aborted for a weight update."""
        tokens: list[int] = []
        log_probs: list[float] = []
        versions: list[int] = []
        kept: list[KeptSets] = []
        limit, seed, is_done = request["max_tokens"], request["seed"], False
        while not is_done:
            left = {"prompt": [*ids, *tokens], "max_tokens": limit - len(tokens), "seed": seed}
            body = {"model": self.served, "return_token_ids": True, **request, **left}
            if truncates:
                body["return_tokens_as_token_ids"] = True
            with self.gate.passing():
                version = self.version
                (choice,) = self._ask("POST", "/v1/completions", json=body)["choices"]
            if choice["token_ids"]:  # empty if the request was aborted before the first token
                tokens += choice["token_ids"]
                log_probs += choice["logprobs"]["token_logprobs"]
                if truncates:
                    reported = choice["logprobs"]["top_logprobs"]  # keys such as "token_id:17"
                    kept.append(self._kept({int(key[9:]): value for key, value in column.items()} for column in reported))
            versions += [version] * (len(tokens) - len(versions))
            seed = request_seed(seed, 0, 1)  # draw the remaining tokens with different random numbers
            is_done = choice.get("finish_reason") != "abort" or len(tokens) >= limit
        return Drawn(tokens, log_probs, KeptSets.join(kept) if truncates else None, versions if self.in_flight else ())

    def _abort(self) -> None:
        """Abort all requests. The server returns the tokens that it has drawn so far."""
        with suppress(SilentServerError):  # if the server does not respond, the requests fail as well
            self._ask("POST", "/abort_requests", json={}, hint="; rollout.vllm.in_flight needs vLLM 0.32 or newer")

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Write the weights to the folder, make the server load them, and reset its prefix cache.

        All processes must call this method, because each may hold a shard of the weights. Only the main process contacts the
        server. The other processes wait until it is done.
        """
        from accelerate.utils import broadcast_object_list

        if self.processes.is_main_process:
            self._write_and_load(vllm_weights(weights, self.model.config, self.head_size), version)
        else:
            for _ in weights:
                pass
        (self.known,) = broadcast_object_list([self.known])
        self.has_weights = True

    def close(self) -> None:
        """Remove the folder if this sampler created it. The server keeps running."""
        self.http.close()
        if self.own_folder:
            with suppress(OSError):  # the folder may contain other files
                self.folder.rmdir()

    def _write_and_load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights}
        # use a new name every time, because another machine may still see the old file under a reused name
        folder = self.folder / f"weights-{uuid.uuid4().hex}"
        # without in_flight, nothing is being sampled now
        with self.gate.closed(self._abort) if self.in_flight else nullcontext():
            if self.in_flight and self.known:  # open batches have checked older weights; their next check is of the new ones
                self._patiently(partial(self._check_weights, is_closed=True))
            self.known, self.version = (), version
            try:
                with writing(folder):
                    folder.mkdir(parents=True)
                    write_tensors(folder / "model.safetensors", tensors, uuid.uuid4().hex, {"format": "pt"})
                load = partial(self._load, folder)
                if self.has_weights:
                    self._patiently(load)
                else:
                    load()  # a failure of the first load is probably a configuration error, so do not retry
            except UnwritableError as error:
                raise UserError(f"rollout.vllm.sync_folder={str(self.folder)!r}: {error}") from error
            finally:
                with suppress(OSError):
                    remove_files(folder, "model.safetensors".__eq__)

    def _load(self, folder: Path) -> None:
        """Make the server load the weights in ``folder``."""
        timeout = self.settings.timeout
        with self._served(folder / "model.safetensors") if self.is_fetching else nullcontext() as url:
            body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": timeout}
            hint = f"it must have access to the folder {self.folder} under this path"
            if url:
                body |= {"method": "fetch_weights", "kwargs": {"url": url, "timeout": timeout}}
                hint = f"{FETCH_HINT}, and let it reach {url}"
            self._ask("POST", "/collective_rpc", json=body, hint=f"; {hint}")
        if not (reply := self._ask("POST", "/reset_prefix_cache")).get("success"):
            advice = "make sure that no other client samples from it" if reply else "use vLLM 0.32 or newer"
            raise self._error(f"did not reset its prefix cache; {advice}")
        self._answer()  # a server's first answer may come from kernels that are not used again
        self.known = self._answer()

    @contextmanager
    def _served(self, file: Path) -> Iterator[str]:
        """Serve the folder of the weights over HTTP until the block ends, and yield the file's address for the server.

        The name of the file's folder is random, and folders are not listed, so only the server knows the address.
        """
        address = urlsplit(self.settings.server or "")
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            with socket.create_connection((address.hostname, port), CONNECT_SECONDS) as probe:
                own, family = probe.getsockname()[0], probe.family  # the address under which the server sees this machine
        except OSError as error:
            raise self._error(f"cannot be reached: {error}", SilentServerError) from error

        class Server(ThreadingHTTPServer):
            address_family = family

        with Server((own, 0), partial(_Files, directory=str(self.folder))) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                host = f"[{own}]" if ":" in own else own
                yield f"http://{host}:{server.server_port}/{file.relative_to(self.folder).as_posix()}"
            finally:
                server.shutdown()

    def _answer(self) -> Answer:
        """Send the fixed request. It is too short for the prefix cache, and no model can be certain of its continuation."""
        prompt = [self.vocabulary * place // 5 for place in range(1, 5)]
        request = {"max_tokens": 8, "temperature": 2.0, "seed": 0, "logprobs": 0, "stop_token_ids": [], "ignore_eos": True}
        body = {"model": self.served, "prompt": prompt, "return_token_ids": True, **request}
        (choice,) = self._ask("POST", "/v1/completions", json=body)["choices"]
        tokens = choice["token_ids"] if choice.get("finish_reason") != "abort" else []
        return tuple(zip(tokens, choice["logprobs"]["token_logprobs"][: len(tokens)], strict=True))

    def _check_weights(self, *, is_closed: bool = False) -> None:
        """Raise a RunError if the server no longer has the weights that were sent. ``is_closed`` is the gate's state.

        The same weights give exactly the same answer unless other requests share the batch and change the rounding.
        """
        answers: list[Answer] = []
        is_near = False
        while len(answers) < PROBES:
            with nullcontext() if is_closed else self.gate.passing():
                known, answer = self.known, self._answer()
            if answer == known:
                return
            is_near = is_near or _are_near(answer, known, self.tolerance)
            answers += [answer] if answer else []
        is_busy = self.processes.num_processes > 1 or (self.in_flight and not is_closed) or len(set(answers)) > 1
        if is_near and is_busy:
            return
        problem = "no longer has the weights that this run sent: it restarted, or another run uses it"
        raise RunError(str(self._error(f"{problem}; give every run its own server")))

    def _patiently(self, work: Callable[[], T]) -> T:
        """Call ``work``, and repeat it after pauses while the server does not respond. If it never does, raise a RunError."""
        for pause in PAUSES:
            try:
                return work()
            except SilentServerError as error:
                logger.warning("%s; retrying in %d s", error, pause)
                time.sleep(pause)
        try:
            return work()
        except SilentServerError as error:
            raise RunError(str(error)) from error

    def _check_server(self) -> None:
        """Check that the server's settings match those of the run, and read the server's length limit and device."""
        names = {model["id"] for model in self._ask("GET", "/v1/models")["data"]}
        if self.served not in names:
            problem = f"serves {', '.join(sorted(names))}, not model.path={self.served!r}"
            raise self._error(f"{problem}; start it with that model, or with --served-model-name {self.served}")
        hint = "; start it with VLLM_SERVER_DEV_MODE=1"
        config = self._ask("GET", "/server_info", fields={"config_format": "json"}, hint=hint)["vllm_config"]
        model = config["model_config"]
        wanted = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
        if self.settings.dtype is not None:
            wanted["dtype"] = f"torch.{self.settings.dtype}"
        for name, value in wanted.items():
            if model[name] != value:
                option = f"--{name.replace('_', '-')} {value.removeprefix('torch.')}"
                raise self._error(f"runs with {name} {model[name]}; start it with {option}")
        if self.num_log_probs and -1 != int(model["max_logprobs"]) < self.num_log_probs:
            needed = f"rollout.top_k needs {self.num_log_probs}"
            raise self._error(
                f"returns at most {model['max_logprobs']} log-probs per token, but {needed}; "
                f"start it with --max-logprobs {self.num_log_probs}"
            )
        self.max_model_len = int(model["max_model_len"])
        wanted_len = self.settings.max_model_len or 0
        if self.max_model_len < wanted_len:
            raise self._error(f"accepts {self.max_model_len} tokens, fewer than rollout.vllm.max_model_len={wanted_len}")
        self._check_length()
        self.tolerance = max(1e-4, 12 * torch.finfo(getattr(torch, model["dtype"].removeprefix("torch."), torch.bfloat16)).eps)
        on_cpu = config["device_config"]["device"] == "cpu"
        if on_cpu and config["scheduler_config"]["enable_chunked_prefill"]:
            raise self._error("uses chunked prefill, which fails on the CPU; start it with --no-enable-chunked-prefill")
        self.head_size = (cpu_head_size if on_cpu else head_size)(self.model.config)
        if self.in_flight:
            self._abort()

    def _ask(self, method: str, path: str, hint: str = "", **request: Any) -> dict[str, Any]:
        """Send a request and return the JSON object in the reply (empty if there is no body). Failures raise a UserError."""
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        url_path = urlsplit(self.settings.server or "").path.rstrip("/")
        late = f"did not respond to {path} within {self.settings.timeout:g} s (rollout.vllm.timeout)"
        advice = "start it as described in docs/how-to/vllm.md"
        data, end = bytearray(), time.monotonic() + self.settings.timeout
        try:
            with self.http.request(method, url_path + path, preload_content=False, decode_content=False, **request) as answer:
                while block := answer.read1(2**16):  # the read timeout restarts with every byte
                    data += block
                    if time.monotonic() > end:
                        raise self._error(late, SilentServerError)
                    if len(data) > LARGEST_REPLY:
                        raise self._error(f"responded to {path} with more than {LARGEST_REPLY:,} bytes", SilentServerError)
        except ReadTimeoutError as error:
            raise self._error(late, SilentServerError) from error
        except HTTPError as error:
            raise self._error(f"failed to respond to {path}: {error}; {advice}", SilentServerError) from error
        if not 200 <= answer.status < 300:
            text = " ".join(data.decode(errors="replace").split())[:400]
            kind = UserError if answer.status < 500 else SilentServerError
            raise self._error(f"returned status {answer.status} for {path}: {text}{hint}", kind)
        with suppress(ValueError, RecursionError):
            parsed = json.loads(data or b"{}")
            if isinstance(parsed, dict):
                return parsed
        raise self._error(f"returned {shown(bytes(data[:80]))} for {path}; expected a JSON object", SilentServerError)

    def _error(self, problem: str, kind: type[UserError] = UserError) -> UserError:
        return kind(f"rollout.vllm.server={self.settings.server!r}: the server {problem}")
