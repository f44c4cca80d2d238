"""Samples with a vLLM server, on this machine or on another; new weights go through a folder that both see."""

from __future__ import annotations

import json
import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from torch import Tensor

from rlzoo.config.sections import VLLMConfig
from rlzoo.errors import RunError, UserError, shown
from rlzoo.rollout.sampler import make_rollout
from rlzoo.rollout.vllm_model import cpu_head_size, head_size, vllm_weights
from rlzoo.rollout.vllm_sampler import check_length, prompt_rows, request_seed, request_settings
from rlzoo.support.atomic import UNFINISHED_TENSORS, remove_files
from rlzoo.support.replies import bounded_pool
from rlzoo.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("rlzoo")

T = TypeVar("T")

CONNECT_SECONDS = 10
PAUSES = (1, 2, 4, 8, 16, 32, 64)
"""Seconds between tries with a server that does not answer, or only with errors of its own."""
REPLY_BYTES, BYTES_PER_TOKEN = 2**22, 2**10
"""Largest reply: that for a token of a response, with its log-prob, has about 100 bytes."""
START_IT = "start it as docs/how-to/vllm.md says"


class SilentServerError(UserError):
    """The server cannot be reached, takes too long, or fails by itself: it may be back soon."""


class ServerSampler:
    """Samples with the server at ``settings.server``; its weights are undefined until `update_weights`.

    Example:
        ``ServerSampler(model, tokenizer, end_ids=frozenset({2}), max_new_tokens=64, served="Qwen/Qwen3-0.6B",
        settings=VLLMConfig(server="http://127.0.0.1:8000"))``
    """

    needs_weights = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: frozenset[int],
        max_new_tokens: int,
        served: str,
        settings: VLLMConfig,
        batch_size: int = 256,
        chat_template: bool = False,
    ) -> None:
        import urllib3

        assert settings.server is not None, "the server's address"
        self.settings = settings
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.max_new_tokens = max_new_tokens
        self.served = served
        self.batch_size = batch_size
        self.chat_template = chat_template
        self.model_config = model.config
        self.has_weights = False
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=settings.timeout)
        # no proxy: only this address is spoken to; and no connection is kept: the server ends one while the learner works
        self.http = bounded_pool(
            REPLY_BYTES + BYTES_PER_TOKEN * max_new_tokens,
            settings.timeout,
            headers={"Connection": "close"},
            maxsize=batch_size,
            timeout=timeout,
            retries=False,
        )
        self.own_folder = settings.sync_folder is None
        if self.own_folder and not _is_loopback(settings.server):
            raise self._error("is on another machine; set rollout.vllm.sync_folder to a folder that both see")
        self.max_model_len, self.head_size = self._check_server()
        self.folder = self._make_folder()
        self.weights: Path | None = None  # what the server has loaded

    def sample(
        self,
        prompts: Sequence[str],
        samples: int,
        *,
        seed: int,
        temperature: float = 1.0,
        policy_version: int = 0,
        first_row: int = 0,
    ) -> list[Rollout]:
        """Draw ``samples`` responses to each prompt, see `Sampler.sample`; ``batch_size`` requests are under way at once."""
        assert self.has_weights, "update_weights comes before the first sample"
        rows = prompt_rows(self.tokenizer, prompts, samples, self.chat_template)
        check_length(max(map(len, rows), default=0), self.max_new_tokens, self.max_model_len)

        def draw(row: int) -> Rollout:
            seeded = request_settings(temperature, self.max_new_tokens, self.end_ids, request_seed(seed, first_row + row))
            body = {"model": self.served, "prompt": list(rows[row]), "return_token_ids": True, **seeded}
            (choice,) = self._ask("POST", "/v1/completions", json=body)["choices"]
            log_probs = choice["logprobs"]["token_logprobs"]
            return make_rollout(self.tokenizer, self.end_ids, rows[row], choice["token_ids"], log_probs, policy_version)

        def draw_all() -> list[Rollout]:
            with ThreadPoolExecutor(self.batch_size) as pool:
                answers = [pool.submit(draw, row) for row in range(len(rows))]
                try:
                    return [answer.result() for answer in answers]
                finally:
                    pool.shutdown(wait=False, cancel_futures=True)  # after a failure the rest is not asked for

        # after a failure all anew: a server that was just started again may have answered some without our weights
        return self._patiently(draw_all)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write the weights into the folder and have the server read them and forget what it computed with the old ones.

        With several processes each calls this, since each may hold a part of the weights; the first one speaks to the
        server, and the others wait for it.
        """
        from accelerate import PartialState

        processes = PartialState()
        if processes.is_main_process:
            self._write_and_load(vllm_weights(weights, self.model_config, self.head_size))
        else:
            for _ in weights:
                pass
        processes.wait_for_everyone()
        self.has_weights = True

    def close(self) -> None:
        """Leave the server as it is; remove the folder if it is this sampler's own."""
        self.http.clear()
        self._forget_weights()
        if self.own_folder:
            with suppress(OSError):  # somebody else's file is in it
                self.folder.rmdir()

    def _write_and_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from safetensors.torch import save_file

        # a new name every time: a shared folder's other side may still see an old file under an old name
        whole = self.folder / f"weights-{uuid.uuid4().hex}"
        part = whole.with_name(f".{whole.name}.part")
        try:
            part.mkdir()
            tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights}
            save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
            part.rename(whole)
        except OSError as error:
            raise UserError(f"rollout.vllm.sync_folder={str(self.folder)!r}: cannot be written: {error.strerror}") from error
        finally:
            self._remove(part)
        self._forget_weights()
        self.weights = whole  # kept, for a server that is started again
        try:
            if self.has_weights:
                self._patiently(self._load)
            else:
                self._load()  # a mistake at the start does not fix itself
        except Exception:
            self._forget_weights()
            raise

    def _load(self) -> None:
        """Have the server take our weights."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self.weights)}, "timeout": self.settings.timeout}
        self._ask("POST", "/collective_rpc", json=body, hint=f"; it has to see the folder {self.folder} under this name")
        if not self._ask("POST", "/reset_prefix_cache").get("success"):
            raise self._error("has not reset its prefix cache: does somebody else sample from it?")

    def _forget_weights(self) -> None:
        if self.weights is not None:
            self._remove(self.weights)

    @staticmethod
    def _remove(folder: Path) -> None:
        with suppress(OSError):
            remove_files(folder, lambda name: name == "model.safetensors" or UNFINISHED_TENSORS.fullmatch(name))

    def _patiently(self, work: Callable[[], T]) -> T:
        """Do it, and if the server does not answer, again after pauses.

        A server that was restarted has the weights that it was first started with. It gets ours before it samples again.

        Raises:
            RunError: it has not answered for longer than all the pauses, or several processes sample from it.
        """
        from accelerate import PartialState

        for tries, pause in enumerate((0, *PAUSES)):
            try:
                if tries:
                    time.sleep(pause)
                    self._load()
                return work()
            except SilentServerError as error:
                reason = error
                if PartialState().num_processes > 1:  # only one of them could give it the weights
                    break
                if tries < len(PAUSES):
                    logger.warning("%s; trying again in %d s", error, PAUSES[tries])
        raise RunError(str(reason)) from reason

    def _check_server(self) -> tuple[int, int]:
        """Refuse a server that would sample something else; returns its length limit and the width of its heads."""
        names = {model["id"] for model in self._ask("GET", "/v1/models")["data"]}
        if self.served not in names:
            given = f"serves {', '.join(sorted(names))}, not model.path={self.served!r}"
            raise self._error(f"{given}; start it with that model, or with --served-model-name {self.served}")
        hint = "; start it with VLLM_SERVER_DEV_MODE=1"
        found = self._ask("GET", "/server_info", fields={"config_format": "json"}, hint=hint)["vllm_config"]
        model = found["model_config"]
        wanted = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
        if self.settings.dtype is not None:
            wanted["dtype"] = f"torch.{self.settings.dtype}"
        for name, value in wanted.items():
            if model[name] != value:
                option = f"--{name.replace('_', '-')} {value.removeprefix('torch.')}"
                raise self._error(f"runs with {name} {model[name]}; start it with {option}")
        limit = int(model["max_model_len"])
        if limit < (self.settings.max_model_len or 0):
            raise self._error(f"takes {limit} tokens, less than rollout.vllm.max_model_len={self.settings.max_model_len}")
        check_length(0, self.max_new_tokens, limit)
        on_cpu = found["device_config"]["device"] == "cpu"
        if on_cpu and found["scheduler_config"]["enable_chunked_prefill"]:
            raise self._error("cuts prompts into pieces, which fails on the CPU; start it with --no-enable-chunked-prefill")
        return limit, cpu_head_size(self.model_config) if on_cpu else head_size(self.model_config)

    def _make_folder(self) -> Path:
        if self.settings.sync_folder is None:
            return Path(tempfile.mkdtemp(prefix="rlzoo-weights-"))
        folder = Path(self.settings.sync_folder).expanduser().resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"rollout.vllm.sync_folder={str(folder)!r}: cannot be made: {error.strerror}") from error
        return folder

    def _ask(self, method: str, path: str, hint: str = "", **request: Any) -> dict[str, Any]:
        """One request; whatever goes wrong becomes one line."""
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        try:
            answer = self.http.request(method, f"{self.settings.server}".rstrip("/") + path, **request)
        except ReadTimeoutError as error:
            raise self._late(path) from error
        except HTTPError as error:
            raise SilentServerError(str(self._error(f"cannot be asked for {path}: {error}; {START_IT}"))) from error
        if 200 <= answer.status < 300:
            return self._parsed(answer.data, path)
        problem = " ".join(answer.data.decode(errors="replace").split())[:400]
        refused = self._error(f"answers {path} with {answer.status}: {problem}{hint}")
        raise refused if answer.status < 500 else SilentServerError(str(refused))

    def _parsed(self, data: bytes, path: str) -> dict[str, Any]:
        """The body of an answer as JSON; nothing is an empty object."""
        try:
            parsed = json.loads(data) if data else {}
        except (ValueError, RecursionError) as error:
            raise SilentServerError(str(self._error(f"answers {path} with what is not JSON: {shown(data[:80])}"))) from error
        if not isinstance(parsed, dict):
            raise SilentServerError(str(self._error(f"answers {path} with {shown(parsed)}, not with a JSON object")))
        return parsed

    def _late(self, path: str) -> SilentServerError:
        return SilentServerError(
            str(self._error(f"no answer to {path} within {self.settings.timeout:g} s (rollout.vllm.timeout)"))
        )

    def _error(self, problem: str) -> UserError:
        return UserError(f"rollout.vllm.server={self.settings.server!r}: {problem}")


def _is_loopback(server: str) -> bool:
    host = urlsplit(server).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
