"""The engines that sample with the transformers model itself: ``hf`` and ``generate``."""

from __future__ import annotations

from typing import Any, Literal

from rlzoo.config.engines import Engine


class HF(Engine):
    """Samples in the fastest way that gives the model's log-probs."""

    title = "transformers"
    is_remote = False
    device_share = None
    way: Literal["generate"] | None = None

    def make(self, model: Any, tokenizer: Any, *, path: str, own_weights: bool, device: Any, probe: Any, **common: Any) -> Any:
        """See `Engine.make`."""
        from rlzoo.rollout.sampler import HFSampler

        copied = {"own_weights": own_weights, "device": device}
        return HFSampler(model, tokenizer, way=self.way, probe=probe, **copied, **common)


class Generate(HF):
    """Samples with the model's ``generate`` method."""

    way = "generate"
