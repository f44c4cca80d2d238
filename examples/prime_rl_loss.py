"""Makes every installed rule available as a custom loss in prime-rl: ``import_path = "prime_rl_loss.loss"``."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlzoo.core import ops
from rlzoo.core.errors import UserError
from rlzoo.core.fairness import bin_index
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.reductions import is_per_response
from rlzoo.core.types import ClipInputs
from rlzoo.integrations.rules import LENGTH_EDGES, PREFIX, check_supported, one_per_response
from rlzoo.integrations.rules import rule as make_rule
from rlzoo.journal.rollout_file import turns
from rlzoo.learner.judge import judge

INSTEAD = {
    "reduction": "no reduction, because prime-rl divides by the number of tokens in the step",
    "advantage": "the algorithm of prime-rl's orchestrator",
}


class LossInputs(Protocol):
    """The input to a prime-rl loss: one sample of T tokens, including its prompt."""

    trainer_logprobs: Tensor  # (T,) under the trained model, with a gradient
    inference_logprobs: Tensor  # (T,) from the sampler
    ref_logprobs: Tensor | None  # (T,) under the reference model
    advantages: Tensor  # (T,)
    loss_mask: Tensor  # (T,) bool
    loss_weights: Tensor | None  # (T,); None for 1 everywhere


class LossOutputs(NamedTuple):
    """The output that prime-rl expects from a loss."""

    loss: Tensor  # scalar sum; prime-rl divides it by the number of tokens in the step
    metrics: dict[str, Tensor]  # scalars, each averaged over the samples that report it


def loss(inputs: LossInputs, rule: str, **settings: Any) -> LossOutputs:
    """Compute a rule's loss for one sample.

    The ratio is relative to the sampler's log-probs, because prime-rl provides no others. prime-rl divides the sum of all
    losses by the number of tokens in the step, regardless of the rule's ``reduction``. The effective reduction is therefore
    ``token_mean`` for rules with a per-token objective. For rules with a per-response objective, it is ``sequence_mean`` times
    the number of responses divided by the number of tokens.

    Args:
        inputs: prime-rl's ``LossInputs``. A gap in the mask starts a new turn.
        rule: name of the rule, optionally with settings, such as ``"my-rule/width_low:0.02"``.
        **settings: settings of the rule.

    Raises:
        UserError: the rule is unknown, its settings are invalid, or it needs something that prime-rl does not pass to a loss.
    """
    policy = _made(rule, tuple(sorted(settings.items())))
    mask = inputs.loss_mask.bool()[None]
    advantages = inputs.advantages[None]
    if policy.scope == "sequence":
        advantages = one_per_response(advantages, mask, f"advantages for {policy.name}")
    if "ref_log_probs" in policy.needs and inputs.ref_logprobs is None:
        raise UserError(f"{policy.name} needs ref_log_probs, which prime-rl provides only with its algorithms for distillation")
    rule_inputs = ClipInputs(
        inputs.trainer_logprobs[None],
        inputs.inference_logprobs[None],
        advantages,
        mask,
        rollout_log_probs=inputs.inference_logprobs[None],
        turn_ids=turns(mask) if "turn_ids" in policy.needs else None,
        ref_log_probs=None if inputs.ref_logprobs is None else inputs.ref_logprobs[None],
    )
    result = judge(policy, rule_inputs)
    objective, is_column = result.objective, is_per_response(result.objective, mask)
    if inputs.loss_weights is not None:
        weights = inputs.loss_weights.detach()[None]
        objective = objective * (one_per_response(weights, mask, f"weights for {policy.name}") if is_column else weights)
    total = (objective * mask.any()).sum() if is_column else ops.sequence_sum(objective, mask).sum()
    return LossOutputs(-total, _metrics(result.clipped, mask, advantages))


@functools.cache
def _made(name: str, settings: tuple[tuple[str, Any], ...]) -> ClipPolicy:
    """Return the rule with these settings. Results are cached."""
    policy = make_rule(name, INSTEAD, **dict(settings))
    check_supported(policy, "prime-rl", ("turn_ids", "ref_log_probs"))
    if policy.scope == "batch":
        raise UserError(f"{PREFIX}{policy.name} needs a whole step, but prime-rl passes one sample at a time to a loss")
    return policy


@torch.no_grad()
def _metrics(clipped: Tensor, mask: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Return the sample's clip fraction, overall and in its length bin, or {} for a sample whose advantages are all 0."""
    if not bool((torch.where(mask, advantages, 0.0) != 0).any()):
        return {}
    fraction = ops.per_response(clipped.float(), mask)[0, 0]
    index = int(bin_index(mask.sum(1).cpu(), torch.tensor(LENGTH_EDGES)))
    return {"clip/fraction": fraction, f"clip/fraction_length_bin_{index}": fraction}
