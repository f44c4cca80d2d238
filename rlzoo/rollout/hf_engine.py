"""The engines ``hf`` and ``generate``, which sample with the transformers model itself."""

from __future__ import annotations

from typing import Any, Literal

from rlzoo.config.engines import Engine


class HF(Engine):
    """Samples in the fastest way that gives the model's log-probs."""

    title = "transformers"
    has_graphs = True
    is_remote = False
    device_share = None
    way: Literal["generate"] | None = None

    def sampler(self, model: Any, tokenizer: Any, *, path: str, **settings: Any) -> Any:
        """See `Engine.sampler`."""
        from rlzoo.rollout.sampler import HFSampler

        return HFSampler(model, tokenizer, way=self.way, graphs=self.rollout.graphs, **settings)


class Generate(HF):
    """Samples with the model's ``generate`` method."""

    has_graphs = False
    way = "generate"
