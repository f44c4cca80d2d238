"""The inputs and results of clip policies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tasks and the command line import this module without importing torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClipInputs:
    """Inputs to a clip policy for B responses of up to T tokens. Log-probabilities are in nats.

    The fields below ``seed`` carry no gradient and are filled only for rules that name them in `ClipPolicy.needs`. Reading
    them in any other rule raises an error. Values at masked positions are arbitrary, and a rule must ignore them.

    To add an optional input, change three files. Add a field here. In `rlzoo.learner.batch`, give `Batch` a field or property
    with the same name, which `collate` fills. `Learner.clip_inputs` looks it up by name. In `rlzoo.testing.data`, add example
    values to `optional_fields`, and add the name to the tuple of fields with its shape and type.

    Example:
        Two responses have 3 and 2 tokens, and advantages +1 and -1:

        >>> import torch
        >>> inputs = ClipInputs(
        ...     log_probs=torch.tensor([[-0.9, -0.5, -0.1], [-1.2, -0.4, 0.0]]),
        ...     old_log_probs=torch.tensor([[-1.0, -0.5, -0.2], [-1.0, -0.4, 0.0]]),
        ...     advantages=torch.tensor([[1.0], [-1.0]]),
        ...     response_mask=torch.tensor([[True, True, True], [True, True, False]]),
        ... )
        >>> tuple(inputs.log_probs.shape)
        (2, 3)
    """

    log_probs: Tensor  # (B, T) under the current model; the only tensor that carries a gradient
    old_log_probs: Tensor  # (B, T) under the model at the start of the update: the denominator of the ratio
    advantages: Tensor  # (B, 1), or (B, T) if credit differs by token; sequence rules accept only (B, 1)
    response_mask: Tensor  # (B, T) bool, True on tokens that the model chose
    rollout_log_probs: Tensor | None = None  # (B, T) as reported by the sampler
    seed: int = 0  # seed of the optimizer step, for rules that draw random numbers
    group_ids: Tensor | None = None  # (B, 1) int64; responses to the same prompt share an ID and a minibatch
    turn_ids: Tensor | None = None  # (B, T) int64: 0, 1, ... on the model's tokens, -1 elsewhere
    old_entropy: Tensor | None = None  # (B, T) in nats, under the model at the start of the update
    ref_log_probs: Tensor | None = None  # (B, T) under `model.reference`, by default the model that the run started from
    rewards: Tensor | None = None  # (B, 1) float32, before advantage estimation
    token_ids: Tensor | None = None  # (B, T) int64
    finished: Tensor | None = None  # (B, 1) bool; False if the response was cut off at a limit
    max_length: int | None = None  # the run's maximum number of model tokens in a response
    progress: float | None = None  # in [0, 1): the share of the run's updates that precede this one


_NAMES = tuple(ClipInputs.__dataclass_fields__)
METRIC = re.compile(r"[a-z][a-z0-9_]*")
"""Pattern that names in `ClipResult.metrics` must match."""
NEEDS = _NAMES[_NAMES.index("seed") + 1 :]
"""The optional inputs, below ``seed``, that a policy may list in its `needs`."""


@dataclass(frozen=True, slots=True)
class ClipBand:
    """Range of log-ratios in which the gradient flows. Each edge is broadcastable to the log-ratio.

    Example:
        The width of a band is 0.03 times the square root of the length. The responses have 100 and 400 tokens:

        >>> import torch
        >>> edge = 0.03 * torch.tensor([[100.0], [400.0]]).sqrt()
        >>> ClipBand(low=-edge, high=edge).high
        tensor([[0.3000],
                [0.6000]])
    """

    low: Tensor  # log-ratio floor, where the advantage is negative
    high: Tensor  # log-ratio ceiling, where the advantage is positive
    ceiling: Tensor | None = None  # dual clip: log-ratio ceiling where the advantage is negative


@dataclass(frozen=True, slots=True)
class ClipResult:
    """Result of a clip policy: the unreduced objective and the clip decisions.

    Decisions may be per token while the objective is per response, because a rule may clip tokens before it pools them.

    Example:
        The ratio is 1.5, the upper edge of the band is 1.2, and the advantage is 2:

        >>> import torch
        >>> from rlzoo import ops
        >>> log_ratio = torch.tensor([[1.5]]).log()
        >>> band = ops.ratio_band(0.2, 0.2, None, like=log_ratio)
        >>> result = ops.clipped_surrogate(log_ratio, torch.tensor([[2.0]]), band)
        >>> result.objective, result.log_ratio, result.clipped
        (tensor([[2.4000]]), tensor([[0.4055]]), tensor([[True]]))
    """

    objective: Tensor  # (B, T) or (B, 1), float32: unreduced, to be maximised
    log_ratio: Tensor  # (B, T) or (B, 1), detached: the quantity that the rule judged
    clipped: Tensor  # (B, T) or (B, 1), bool: where the gradient was cut (or, if a rule never cuts it, capped or reversed)
    band: ClipBand | None = None  # for rules that have a band; distinguishes cuts at the ceiling from cuts at the low edge
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # (B, T) or (B, 1); their means are logged as rule/<name>
