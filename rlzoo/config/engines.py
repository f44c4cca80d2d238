"""Describes the sampling engines that ``rollout.engine`` can select."""

from __future__ import annotations

import math
import pkgutil
from typing import Any, ClassVar

from rlzoo.core.errors import UserError

ENGINES = {
    "hf": "rlzoo.rollout.hf_engine:HF",
    "generate": "rlzoo.rollout.hf_engine:Generate",
    "vllm": "rlzoo.rollout.vllm_engine:VLLM",
    "recorded": "rlzoo.journal.recorded:Recorded",
}
"""The `Engine` class of each value of ``rollout.engine``. A new engine needs one file and one line here."""


class Engine:
    """A sampling engine with a run's sampling settings. The defaults describe an engine outside the trainer's processes."""

    title: ClassVar[str]  # name in messages
    install: ClassVar[str] = ""  # command that installs `library`
    temperatures: ClassVar[tuple[float, float]] = (0.0, math.inf)  # lowest and highest allowed temperature
    largest_top_k: ClassVar[int | None] = None  # None: the engine reports the kept tokens for any top-k
    length_setting: ClassVar[str] = ""  # name of the setting that determines `max_length`
    in_flight_setting: ClassVar[str] = ""  # name of the setting that determines `in_flight`
    memory_setting: ClassVar[str] = "rollout.batch_size"  # setting to lower if sampling needs too much memory

    library = ""  # the package that the engine needs
    has_graphs = False  # whether `rollout.graphs` has an effect
    is_remote = True  # whether the engine runs outside the trainer's processes, which share it
    in_flight = False  # whether weights may change during sampling
    max_length: int | None = None  # maximum number of tokens in prompt and response; None: the model's own limit
    device_share: float | None = 0.0  # reserved share of a device's memory; None: the engine samples with the trained model
    is_resident = False  # whether the reserved memory stays reserved while the learner works
    recording: Any = None  # the `rlzoo.journal.recorded.Recording` from which batches come if they are not sampled

    def __init__(self, rollout: Any) -> None:
        self.rollout = rollout  # a `RolloutConfig`, which uses its engine to check itself

    def settled(self) -> Any:
        """Return the sampling settings, with values from any recorded batches; raise UserError if they conflict."""
        return self.rollout

    def check(self) -> None:
        """Raise UserError if the sampling settings do not fit together or exceed the engine's limits."""
        if self.rollout.vllm.in_flight and not self.in_flight:
            raise UserError("rollout.vllm.in_flight needs rollout.engine=vllm with a server (rollout.vllm.server)")
        if self.rollout.recorded is not None and self.recording is None:
            raise UserError(f"rollout.recorded={self.rollout.recorded!r} needs rollout.engine=recorded; set both")
        if self.rollout.graphs == "on" and not self.has_graphs:
            raise UserError("rollout.graphs=on: only rollout.engine=hf has this setting; set it to auto")
        top_p, top_k, largest = self.rollout.top_p, self.rollout.top_k, self.largest_top_k
        if largest is not None and ((top_k or 0) > largest or (top_p < 1 and top_k is None)):
            setting = f"top_p={top_p:g}" if top_k is None else f"top_k={top_k}"
            raise UserError(
                f"rollout.{setting}: {self.title} reports the kept tokens only if rollout.top_k is at most {largest}; "
                "set rollout.top_k, or use rollout.engine=hf"
            )

    def make(
        self,
        model: Any,
        tokenizer: Any,
        end_ids: frozenset[int],
        *,
        named: Any,
        own_weights: bool = False,
        device: Any = None,
        probe: Any = None,
    ) -> Any:
        """Return a `rlzoo.rollout.sampler.Sampler`. If it needs weights, the caller must set them before sampling.

        Args:
            model: the trained model.
            tokenizer: its tokenizer.
            end_ids: tokens that end a response.
            named: settings of the model.
            own_weights: whether an engine that samples with the trained model uses a copy of it.
            device: device of the copy. The trained model itself is not moved.
            probe: rows of the model; see `rlzoo.rollout.sampler.HFSampler`.

        Raises:
            UserError: no sampling method reproduces the model's log-probs, the engine is not installed or does not support the
                settings, or its server is unavailable or misconfigured.
        """
        size = model.config.get_text_config().vocab_size
        return self.sampler(
            model,
            tokenizer,
            path=named.path,
            own_weights=own_weights,
            device=device,
            probe=probe,
            end_ids=frozenset(token for token in end_ids if token < size),  # vLLM rejects IDs outside the vocabulary
            max_new_tokens=self.rollout.max_new_tokens,
            batch_size=self.rollout.batch_size,
            chat_template=named.chat_template,
        )

    def sampler(
        self, model: Any, tokenizer: Any, *, path: str, own_weights: bool, device: Any, probe: Any, **common: Any
    ) -> Any:
        """Return the sampler for `make`. ``path`` is ``model.path``, and ``common`` holds the other arguments of `Sampler`."""
        raise NotImplementedError


def engine_of(rollout: Any) -> Engine:
    """Import and return the engine of a `RolloutConfig`."""
    engine: type[Engine] = pkgutil.resolve_name(ENGINES[rollout.engine])
    return engine(rollout)


def known_engine(name: str) -> str:
    """Return ``name`` if there is an engine with this name; otherwise, raise ValueError."""
    if name not in ENGINES:
        raise ValueError(f"input should be {', '.join(map(repr, ENGINES))}")
    return name
