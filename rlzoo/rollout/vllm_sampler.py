"""Samples with vLLM inside this process."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlzoo.config.sections import VLLMConfig
from rlzoo.core.errors import RunError, UserError
from rlzoo.models.pretrained import quiet
from rlzoo.rollout.draws import Truncation
from rlzoo.rollout.kept import KeptSets
from rlzoo.rollout.sampler import Drawn, Draws, Ids, Sampler
from rlzoo.rollout.vllm_model import cpu_head_size, head_size, padded_config, vllm_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from vllm import LLM

MAX_ROWS = 1024  # maximum number of rows in one pass; vLLM's own limit is between 1024 and 2048 tokens

ROOM_FOR_TIES = 16  # minimum number of log-probs beyond top_k, in case other tokens share the k-th largest logit
DROPPED = -9000.0  # log-probs of dropped tokens are below this: -inf in process, -9999 from a server

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, because weights are passed as tensors
    "VLLM_NO_USAGE_STATS": "1",  # send no usage statistics
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is a share of all memory
}
"""Environment variables for vLLM. Values that the user has set take precedence."""


class AnyVLLMSampler(Sampler):
    """Base class for sampling with vLLM, in this process or on a server.

    The weights are undefined until `update_weights` is called.
    """

    needs_weights = True
    max_model_len: int  # maximum number of tokens in a prompt and its response

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: VLLMConfig,
        *,
        top_k: int | None = None,
        **common: Any,
    ) -> None:
        """See `Sampler`. ``top_k`` is the largest top-k that is used for sampling."""
        super().__init__(model, tokenizer, **common)
        self.settings = settings
        self.has_weights = False
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        # request more than top_k, because no kept token can be missing if some log-probs belong to dropped tokens
        self.num_log_probs = 0 if top_k is None else min(2 * top_k + ROOM_FOR_TIES, self.vocabulary)

    @property
    def context(self) -> int:
        """See `Sampler.context`. vLLM's limit may be lower than the model's context length."""
        return min(super().context, self.max_model_len)

    def _requests(self, rows: Sequence[Ids], draws: Draws) -> list[dict[str, Any]]:
        """Return each response's sampling parameters: its distribution, log-probs and end tokens."""
        assert self.has_weights, "update_weights must be called before sampling"
        self._check_length(max(map(len, rows), default=0), draws.limit)
        truncation = draws.truncation or Truncation()
        assert draws.truncation is None or truncation.top_k is not None, "RolloutConfig requires top_k"
        return [
            {
                "temperature": draws.temperature,
                "top_p": truncation.top_p,
                "top_k": truncation.top_k or 0,
                "max_tokens": draws.limit,
                "stop_token_ids": sorted(self.end_ids),
                "seed": request_seed(draws.seed, row, draws.turn),
                "logprobs": self.num_log_probs if draws.truncation else 0,  # 0: only the drawn token's log-prob
            }
            for row in draws.rows
        ]

    def _kept(self, reported: Iterable[Mapping[int, float]]) -> KeptSets:
        """Return the tokens that truncation kept for each drawn token, given the log-probs of the most probable tokens.

        Raises:
            RunError: vLLM kept more tokens than it returned, because many logits tie with the k-th largest.
        """
        ids: list[int] = []
        sizes: list[int] = []
        for log_probs in reported:
            kept = sorted(token for token, log_prob in log_probs.items() if log_prob > DROPPED)
            if len(kept) == self.vocabulary:
                kept = []
            elif len(kept) == len(log_probs):
                raise RunError(
                    f"rollout.top_k: so many tokens have the same logit that vLLM kept more than {len(kept) - 1}; "
                    "set rollout.vllm.dtype=float32, or rollout.engine=hf"
                )
            ids += kept
            sizes.append(len(kept))
        return KeptSets.of(ids, sizes)

    def _check_length(self, prompt: int = 0, response: int | None = None) -> None:
        """Raise a UserError if vLLM would silently truncate a prompt and response of these lengths."""
        response, limit = response or self.max_new_tokens, self.max_model_len
        if prompt + response > limit or (prompt == 0 and response >= limit):
            beside = f"a prompt of {prompt} tokens" if prompt else "a prompt"
            raise UserError(
                f"rollout.max_new_tokens={response}: with {beside}, this exceeds vLLM's limit of {limit} tokens; "
                "lower it, or raise rollout.vllm.max_model_len (for a server: --max-model-len)"
            )


class VLLMSampler(AnyVLLMSampler):
    """Samples with a vLLM engine in this process."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: VLLMConfig, **common: Any) -> None:
        super().__init__(model, tokenizer, settings, **common)
        self.asleep = False
        with random_state_kept():
            self._start(model, min(self.batch_size, MAX_ROWS))

    def _start(self, model: PreTrainedModel, num_rows: int) -> None:
        platform, engine = _import_vllm()
        on_cpu = bool(platform.is_cpu())
        self.device_type = str(platform.device_type)
        self.sleeps = self.settings.sleep and bool(platform.is_sleep_mode_available())
        self.head_size = cpu_head_size(model.config) if on_cpu else head_size(model.config)
        config = padded_config(model.config, self.head_size)
        # if there are several training processes, each has its own engine in the existing process group
        together = {"distributed_executor_backend": "external_launcher"} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
        set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces this function with one that only warns
        try:
            with tempfile.TemporaryDirectory(prefix="rlzoo-vllm-") as folder, quiet():
                config.save_pretrained(folder)
                self.llm: LLM = engine(
                    folder,
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    trust_remote_code=False,  # even if the trained model was loaded with remote code
                    generation_config="vllm",  # ignore the model's defaults, such as a repetition penalty
                    logprobs_mode="processed_logprobs",  # under the sampling distribution, after temperature, top-k and top-p
                    max_logprobs=max(self.num_log_probs, 1),
                    dtype=self.settings.dtype or str(model.dtype).removeprefix("torch."),
                    max_model_len=self.settings.max_model_len,
                    max_num_seqs=num_rows,
                    gpu_memory_utilization=self.settings.gpu_memory_utilization,
                    enable_chunked_prefill=not on_cpu,  # chunked prefill fails on the CPU if requests have seeds
                    enable_sleep_mode=self.sleeps,
                    enforce_eager=self.settings.enforce_eager or on_cpu,
                    **together,
                )
        except (ValueError, RuntimeError) as error:
            raise UserError(f"rollout.engine='vllm': vLLM failed to start: {' '.join(str(error).split())[:400]}") from error
        finally:
            torch.set_num_threads = set_num_threads
        self.max_model_len = int(self.llm.llm_engine.model_config.max_model_len)
        self._check_length()

    def draw(self, rows: Sequence[Ids], draws: Draws) -> list[Drawn]:
        """See `Sampler.draw`. vLLM stays awake, with its prefix cache, until `rest` is called."""
        from vllm import SamplingParams

        requests = [SamplingParams(**request, detokenize=False) for request in self._requests(rows, draws)]
        self._wake()
        with random_state_kept(), torch.autocast(self.device_type, enabled=False):  # the learner's autocast must not apply
            outputs = self.llm.generate([{"prompt_token_ids": list(ids)} for ids in rows], requests, use_tqdm=False)
        drawn: list[Drawn] = []
        for output in (output.outputs[0] for output in outputs):
            tokens = list(output.token_ids)
            log_probs = [column[token].logprob for token, column in zip(tokens, output.logprobs, strict=True)]
            kept = None
            if draws.truncation is not None:
                kept = self._kept({token: reported.logprob for token, reported in column.items()} for column in output.logprobs)
            drawn.append(Drawn(tokens, log_probs, kept))
        return drawn

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace the weights and reset the prefix cache."""
        self._wake()
        iterator = vllm_weights(weights, self.model.config, self.head_size)
        with torch.no_grad():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, because it is still sampling")
        self.has_weights = True

    def close(self) -> None:
        """Shut down the engine and release its memory."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()

    def _wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def rest(self) -> None:
        """See `Sampler.rest`. Releases the GPU memory, including the prefix cache, until the next draw."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=1)  # level 1 keeps the weights in CPU memory
            self.asleep = True


def _import_vllm() -> tuple[Any, type[LLM]]:
    """Import vLLM after setting its environment variables. Return its platform and its engine class."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except (ImportError, RuntimeError, OSError) as error:
        problem = f"vLLM cannot be imported: {' '.join(str(error).split())}"
        raise UserError(f"rollout.engine='vllm': {problem}; see docs/how-to/vllm.md, or set rollout.vllm.server") from error
    if not current_platform.device_type:
        raise UserError("rollout.engine='vllm': this build of vLLM supports no device on this machine; see docs/how-to/vllm.md")
    return current_platform, LLM


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global random states of Python, NumPy and torch after the block, because vLLM seeds and uses them."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def request_seed(seed: int, row: int, turn: int = 0) -> int:
    """Derive the 63-bit seed for a turn of a response from the batch's seed, the row number and the turn."""
    return int(np.random.SeedSequence([seed, row, turn]).generate_state(1, np.uint64)[0]) >> 1
