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

    def sampler(self, model: Any, tokenizer: Any, *, path: str, **settings: Any) -> Any:
        """See `Engine.sampler`."""
        from rlzoo.rollout.sampler import HFSampler

        return HFSampler(model, tokenizer, way=self.way, **settings)


class Generate(HF):
    """Samples with the model's ``generate`` method."""

    way = "generate"
