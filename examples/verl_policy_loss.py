"""Any installed clip policy as a policy loss of verl: ``register("fspo")``, then ``policy_loss.loss_mode=rlzoo-fspo``.

verl's workers import what VERL_USE_EXTERNAL_MODULES names; a module with these two lines is enough::

    from verl_policy_loss import register
    register("fspo", width_low=0.02)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import PolicyLossFn, register_policy_loss

from rlzoo import ClipInputs, ClipPolicy, Reduction, load_zoo, ops
from rlzoo.reductions import StepCounts, reduce_objective

REDUCTIONS: dict[str, Reduction] = {
    "token-mean": "token_mean",
    "token-sum": "token_mean",  # with 1 for the number of tokens
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "constant_length",
}
"""verl's ``loss_agg_mode`` and what it is called here."""


def register(name: str, **settings: Any) -> str:
    """Add the policy ``name`` with these settings to verl's registry; returns its name there, ``rlzoo-<name>``."""
    register_policy_loss(f"rlzoo-{name}")(policy_loss(load_zoo()[name](**settings)))
    return f"rlzoo-{name}"


def policy_loss(policy: ClipPolicy) -> PolicyLossFn:
    """The policy as a function with the signature of verl's registry.

    verl's: the advantages, ``loss_agg_mode`` (which replaces ``policy.reduction``) and the weights of its rollout correction.
    Ours: the objective; the fields of the policy replace clip_ratio, clip_ratio_low, clip_ratio_high and clip_ratio_c. Rules
    that look at the sampler's log-probs get ``old_log_prob``: verl hands over no others.

    Not supported, and refused: rules that adapt to the run; rules with `needs`; rules of scope "batch" on less than a whole
    step; for rules with one objective per response, advantages or weights that differ between its tokens, and the token modes
    of ``loss_agg_mode``.
    """
    if type(policy).updated is not ClipPolicy.updated:
        raise ValueError(f"{policy.name} adapts to the run, which only rlzoo's own learner does")
    if policy.needs:
        raise ValueError(f"{policy.name} needs {', '.join(sorted(policy.needs))}, which only rlzoo's own learner gives")

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = response_mask.bool()
        if policy.scope == "sequence":
            advantages = per_response(advantages, mask, f"advantages for {policy.name}")
        info = {} if config is None else dict(config.global_batch_info)
        dp_size, num_tokens = info.get("dp_size") or 1, int(info.get("batch_num_tokens") or mask.sum())
        num_responses = int(info.get("global_batch_size") or mask.any(-1).sum())
        if dp_size > 1 and not (info.get("batch_num_tokens") and info.get("global_batch_size")):
            raise ValueError("batch_num_tokens and global_batch_size are needed when dp_size > 1")
        if policy.scope == "batch" and num_tokens != int(mask.sum()):
            raise ValueError(f"{policy.name} judges a whole step: make a mini-batch one micro-batch on one device")
        seed = int(torch.randint(2**31, ()))  # verl does not tell the step
        result = policy(ClipInputs(log_prob, old_log_prob, advantages, mask, seed=seed))
        objective, is_column = result.objective, result.objective.shape != mask.shape
        if is_column and loss_agg_mode.startswith("token"):
            raise ValueError(f"{policy.name} has one objective per response: set actor.loss_agg_mode=seq-mean-token-mean")
        if rollout_is_weights is not None:
            weights = rollout_is_weights.detach()
            objective = objective * (per_response(weights, mask, f"weights for {policy.name}") if is_column else weights)
        counts = StepCounts(num_responses, 1 if loss_agg_mode == "token-sum" else num_tokens)
        horizon = info.get("loss_scale_factor") or mask.shape[1]
        share = reduce_objective(objective, mask, REDUCTIONS[loss_agg_mode], counts, horizon)
        metrics = {
            "actor/pg_clipfrac": ops.step_mean(result.clipped.float().expand(mask.shape), mask).item(),
            "actor/ppo_kl": ops.step_mean(old_log_prob - log_prob.detach(), mask).item(),
        }
        return -share * dp_size, metrics  # verl averages gradients over data-parallel ranks, and the counts are of all

    return loss


def per_response(values: Tensor, mask: Tensor, what: str) -> Tensor:
    """The ``(B, 1)`` column of a ``(B, T)`` tensor that holds one value in every response; verl repeats it over the tokens."""
    column = values.gather(1, mask.int().argmax(1, keepdim=True))
    if not torch.equal(torch.where(mask, values, column), column.expand_as(values)):
        raise ValueError(f"{what} differ between the tokens of a response: its objective is per response")
    return column
