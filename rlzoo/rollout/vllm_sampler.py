"""Samples with vLLM, inside this process."""

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
from rlzoo.errors import UserError
from rlzoo.models.pretrained import quiet
from rlzoo.rollout.sampler import Conversation, Drawn, Draws, Ids, Sampler
from rlzoo.rollout.vllm_model import cpu_head_size, head_size, padded_config, vllm_weights
from rlzoo.support.extras import INSTALL_VLLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from vllm import LLM

MAX_ROWS = 1024  # rows in one pass of vLLM, at most: its own limit lies between 1,024 and 2,048 tokens a pass

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over as tensors
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent anywhere
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; without it vLLM takes a share of all memory
}
"""Environment variables that are set for vLLM, unless the user has set them."""


class AnyVLLMSampler(Sampler):
    """What vLLM is asked for, in this process or at a server. The weights are undefined until `update_weights`."""

    needs_weights = True
    max_model_len: int  # tokens of a prompt and its response, at most

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: VLLMConfig, **common: Any) -> None:
        super().__init__(model, tokenizer, **common)
        self.settings = settings
        self.has_weights = False

    @property
    def context(self) -> int:
        """See `Sampler.context`; vLLM may be given less room than the model has."""
        return min(super().context, self.max_model_len)

    def _requests(self, rows: Sequence[Ids], draws: Draws) -> list[dict[str, Any]]:
        """How each response is sampled: from the whole distribution, with the log-prob of each token, up to an end token."""
        assert self.has_weights, "update_weights comes before the first sample"
        temperature = draws.temperature
        self._check_length(max(map(len, rows), default=0), draws.limit)
        if not 0.01 <= temperature <= 2.0:  # vLLM refuses some of them, and raises others to its least without a word
            raise UserError(f"temperature={temperature}: vLLM takes 0.01 to 2; set rollout.engine=hf for others")
        return [
            {
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "max_tokens": draws.limit,
                "stop_token_ids": sorted(self.end_ids),
                "seed": request_seed(draws.seed, row, draws.turn),
                "logprobs": 0,  # of the token drawn, and of no others
            }
            for row in draws.rows
        ]

    def _check_length(self, prompt: int = 0, response: int | None = None) -> None:
        """Refuse what vLLM would cut off without a word."""
        response, limit = response or self.max_new_tokens, self.max_model_len
        if prompt + response > limit or (prompt == 0 and response >= limit):
            raise UserError(
                f"rollout.max_new_tokens={response}: with a prompt of {prompt or 'some'} tokens more than vLLM's {limit}; "
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
        config = model.config if self.head_size == head_size(model.config) else padded_config(model.config, self.head_size)
        # one of several processes that train: each has an engine of its own, within the group that is there already
        together = {"distributed_executor_backend": "external_launcher"} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
        set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces it by a warning
        try:
            with tempfile.TemporaryDirectory(prefix="rlzoo-vllm-") as folder, quiet():
                config.save_pretrained(folder)
                self.llm: LLM = engine(
                    folder,
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    trust_remote_code=False,  # whatever the trained model's own setting
                    generation_config="vllm",  # no defaults of the model's: every request says all
                    logprobs_mode="processed_logprobs",  # of what is sampled from, so after the temperature
                    dtype=self.settings.dtype or str(model.dtype).removeprefix("torch."),
                    max_model_len=self.settings.max_model_len,
                    max_num_seqs=num_rows,
                    gpu_memory_utilization=self.settings.gpu_memory_utilization,
                    enable_chunked_prefill=not on_cpu,  # there it ends in an error with the seeds of single responses
                    enable_sleep_mode=self.sleeps,
                    enforce_eager=self.settings.enforce_eager or on_cpu,
                    **together,
                )
        except (ValueError, RuntimeError) as error:
            raise UserError(f"rollout.engine='vllm': vLLM does not start: {' '.join(str(error).split())[:400]}") from error
        finally:
            torch.set_num_threads = set_num_threads
        self.max_model_len = int(self.llm.llm_engine.model_config.max_model_len)
        self._check_length()

    def draw(self, rows: Sequence[Ids], draws: Draws) -> list[Drawn]:
        """See `Sampler.draw`."""
        drawn = self.draw_awake(rows, draws)
        self.rest()
        return drawn

    def conversation(self) -> Conversation:
        """See `Sampler.conversation`; vLLM stays awake between the turns."""
        return AwakeConversation(self)

    def draw_awake(self, rows: Sequence[Ids], draws: Draws) -> list[Drawn]:
        """Draw, and keep what was computed until `rest`."""
        from vllm import SamplingParams

        requests = [SamplingParams(**request, detokenize=False) for request in self._requests(rows, draws)]
        self._wake()
        with random_state_kept(), torch.autocast(self.device_type, enabled=False):  # the learner's is not its own
            outputs = self.llm.generate([{"prompt_token_ids": list(ids)} for ids in rows], requests, use_tqdm=False)
        drawn: list[Drawn] = []
        for output in (output.outputs[0] for output in outputs):
            tokens = list(output.token_ids)
            drawn.append((tokens, [places[token].logprob for token, places in zip(tokens, output.logprobs, strict=True)]))
        return drawn

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights, and forget what was computed with the old ones."""
        self._wake()
        iterator = vllm_weights(weights, self.model.config, self.head_size)
        with torch.no_grad():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM has not reset its prefix cache: responses are being sampled")
        self.has_weights = True

    def close(self) -> None:
        """End the engine and give its memory back."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()

    def _wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def rest(self) -> None:
        """Give the GPU's memory back, with the prefix cache, until the next draw."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=1)  # the weights wait in the CPU's memory
            self.asleep = True


class AwakeConversation(Conversation):
    """Keeps vLLM awake from turn to turn: it forgets its prefix cache when it sleeps."""

    def __init__(self, sampler: VLLMSampler) -> None:
        super().__init__(sampler)
        self.sampler: VLLMSampler = sampler

    def draw(self, contexts: Mapping[int, Ids], draws: Draws) -> list[Drawn]:
        """See `Conversation.draw`."""
        return self.sampler.draw_awake(list(contexts.values()), draws)

    def close(self) -> None:
        """Let vLLM sleep."""
        self.sampler.rest()


def _import_vllm() -> tuple[Any, type[LLM]]:
    """The platform that vLLM found and its engine, after the environment is set: vLLM reads that when it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise UserError(
            f"rollout.engine='vllm': vLLM is not installed: {INSTALL_VLLM}; or name a rollout.vllm.server"
        ) from error
    except (ImportError, RuntimeError, OSError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"rollout.engine='vllm': vLLM cannot be imported: {problem}; {INSTALL_VLLM}") from error
    return current_platform, LLM


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Afterwards the global random states of Python, NumPy and torch are as before: vLLM seeds and draws from them."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def request_seed(seed: int, row: int, turn: int = 0) -> int:
    """The seed of one turn of a response: 63 bits that depend on the batch's seed, the row's number and the turn alone."""
    turns = [turn] if turn else []
    return int(np.random.SeedSequence([seed, row, *turns]).generate_state(1, np.uint64)[0]) >> 1
