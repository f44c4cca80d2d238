"""Makes installed rules and estimators available in verl: ``loss_mode=rlzoo:my-rule``, ``adv_estimator=rlzoo:group_norm``.

verl imports this module through the entry-point group ``verl.plugins`` or the variable ``VERL_USE_EXTERNAL_MODULES``. Names of
the form ``rlzoo:...`` are resolved when verl looks them up and may include settings, as in ``rlzoo:my-rule/width_low:0.02``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

from rlzoo.core import ops
from rlzoo.core.advantages import AdvantageEstimator, AdvantageInputs
from rlzoo.core.errors import UserError
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.reductions import Reduction, StepCounts, is_per_response, reduce_objective
from rlzoo.core.types import ClipInputs
from rlzoo.integrations import rules
from rlzoo.integrations.rules import PREFIX, clipped_by_length, one_per_response
from rlzoo.journal.rollout_file import turns
from rlzoo.learner.judge import judge

REDUCTIONS: dict[str, Reduction] = {
    "token-mean": "token_mean",
    "token-sum": "token_mean",  # the result is a sum, because the token count is set to 1
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "constant_length",
}
"""Maps verl's ``loss_agg_mode`` to rlzoo's reduction."""
TO_ESTIMATOR = frozenset({"turn_ids", "token_rewards"})  # fields of `AdvantageInputs` that verl can fill, besides rewards
INSTEAD = {"reduction": "actor.loss_agg_mode", "advantage": "algorithm.adv_estimator"}


class Registry(dict[str, Any]):
    """A verl registry that creates entries named ``rlzoo:...`` on lookup."""

    def __init__(self, entries: dict[str, Any], make: Callable[[str], Any]) -> None:
        super().__init__(entries)
        self.make = make

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith(PREFIX))

    def __missing__(self, name: str) -> Any:
        """Create an entry and store it; raise UserError if its name or a setting is invalid."""
        if not name.startswith(PREFIX):
            raise KeyError(name)
        self[name] = self.make(name)
        return self[name]


def policy_loss(policy: ClipPolicy) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """Create a verl policy loss from a rule.

    verl determines the advantages, the reduction (``loss_agg_mode``) and the weights of its rollout correction. The rule's
    fields replace ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high`` and ``clip_ratio_c``.

    Args:
        policy: a rule whose `needs` include at most ``turn_ids``. A gap in the response mask starts a new turn.

    Returns:
        A function with the signature that verl's registry expects, which returns the micro-batch's loss and metrics.

    Raises:
        UserError: the rule is adaptive, or it or its estimator needs something that verl does not provide.
    """
    rules.check_supported(policy, "verl", ("turn_ids",))
    rules.check_estimator(policy, "verl", TO_ESTIMATOR)

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
            advantages = one_per_response(advantages, mask, f"advantages for {policy.name}")
        counts, dp_size, horizon = _denominators(policy, mask, loss_agg_mode, config)
        rule_inputs = ClipInputs(
            log_prob,
            old_log_prob,
            advantages,
            mask,
            seed=int(torch.randint(2**31, ())),  # verl does not pass the step
            turn_ids=turns(mask) if "turn_ids" in policy.needs else None,
        )
        result = judge(policy, rule_inputs)
        objective, is_column = result.objective, is_per_response(result.objective, mask)
        if is_column and loss_agg_mode.startswith("token"):
            raise UserError(f"{policy.name} has a per-response objective: set actor.loss_agg_mode=seq-mean-token-mean")
        if rollout_is_weights is not None:
            weights = rollout_is_weights.detach()
            objective = objective * (one_per_response(weights, mask, f"weights for {policy.name}") if is_column else weights)
        share = reduce_objective(objective, mask, REDUCTIONS[loss_agg_mode], counts, horizon)
        responses, clipped = clipped_by_length(result, advantages, mask)
        metrics = {
            "actor/pg_clipfrac": ops.step_mean(result.clipped.float().expand(mask.shape), mask).item(),
            "actor/ppo_kl": ops.step_mean(old_log_prob - log_prob.detach(), mask).item(),
        }
        for index, (number, cut) in enumerate(zip(responses.tolist(), clipped.tolist(), strict=True)):
            # verl averages over micro-batches; the quotient of two such means is exact, even if a micro-batch has an empty bin
            metrics |= {f"actor/length_bin_{index}_responses": number, f"actor/length_bin_{index}_clipped": cut}
        return -share * dp_size, metrics  # verl averages gradients across data-parallel ranks, but the counts cover all ranks

    return loss


def _denominators(policy: ClipPolicy, mask: Tensor, mode: str, config: Any) -> tuple[StepCounts, int, int | None]:
    """Return the counts of the whole step, the number of data-parallel ranks, and the constant of ``seq-mean-token-sum-norm``.

    Raises:
        UserError: verl does not provide these values, or passes only part of a step to a rule that needs the whole step.
    """
    info = {} if config is None else dict(config.global_batch_info)
    dp_size, num_tokens = info.get("dp_size") or 1, int(info.get("batch_num_tokens") or mask.sum())
    num_responses = int(info.get("global_batch_size") or mask.any(-1).sum())
    if dp_size > 1 and not (info.get("batch_num_tokens") and info.get("global_batch_size")):
        raise UserError("batch_num_tokens and global_batch_size are needed when dp_size > 1")
    if policy.scope == "batch" and num_tokens != int(mask.sum()):
        raise UserError(f"{policy.name} needs a whole step: use one micro-batch per mini-batch, on one device")
    horizon = info.get("loss_scale_factor")
    if mode == "seq-mean-token-sum-norm" and horizon is None:
        raise UserError(
            f"loss_agg_mode={mode} divides by the width of the micro-batch, which varies: "
            "set actor.loss_scale_factor to the maximum response length"
        )
    return StepCounts(num_responses, 1 if mode == "token-sum" else num_tokens), dp_size, horizon


def advantage_estimator(estimator: AdvantageEstimator) -> Callable[..., tuple[Tensor, Tensor]]:
    """Create a verl advantage estimator from an rlzoo estimator.

    verl assigns an outcome reward to one token of a response, and the estimator uses this reward as the reward of the
    response. Rewards on several tokens, for example from ``use_kl_in_reward``, are passed to estimators that accept them.
    For other estimators, they are summed.

    Args:
        estimator: an estimator whose `needs` include at most ``turn_ids`` and ``token_rewards``.

    Returns:
        A function with the signature that verl's registry expects, which returns advantages and returns, both ``(B, T)``.

    Raises:
        UserError: the estimator needs something that verl does not pass to an estimator.
    """
    if missing := sorted(estimator.needs - TO_ESTIMATOR):
        raise UserError(f"advantage {estimator.name!r} needs {', '.join(missing)}, which verl does not pass to an estimator")

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        mask = response_mask.bool()
        if index is None and estimator.compares:
            raise UserError(f"advantage {estimator.name!r} compares the responses to one prompt, but the batch has no uid")
        names = [str(name) for name in (range(len(mask)) if index is None else index)]
        group_ids = torch.as_tensor(np.unique(names, return_inverse=True)[1]).long()[:, None].to(mask.device)
        rewards, paid = token_level_rewards.sum(1, keepdim=True), None
        is_outcome = bool(((token_level_rewards != 0).sum(1) <= 1).all())
        if estimator.takes_token_rewards and ("token_rewards" in estimator.needs or not is_outcome):
            rewards, paid = torch.zeros_like(rewards), _on_chosen_tokens(token_level_rewards, mask)
        values = estimator(AdvantageInputs(rewards, group_ids, mask, turns(mask), paid))
        advantages = torch.where(mask, values, 0.0)
        return advantages, advantages

    return estimate


def _on_chosen_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """Move each reward to the last generated token at or before its position, or, failing that, to the first."""
    # an environment may place rewards on tokens that the model did not generate
    places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    last = torch.where(mask, places, -1).cummax(1).values
    first = mask.int().argmax(1, keepdim=True)
    return torch.zeros_like(rewards).scatter_add(1, torch.where(last < 0, first, last), rewards)


def _make_estimator(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    bare, settings = rules.parse(name)
    return advantage_estimator(rules.installed().advantages.build(name, {"name": bare, **settings}))


core_algos.POLICY_LOSS_REGISTRY = Registry(core_algos.POLICY_LOSS_REGISTRY, lambda name: policy_loss(rules.rule(name, INSTEAD)))
core_algos.ADV_ESTIMATOR_REGISTRY = Registry(core_algos.ADV_ESTIMATOR_REGISTRY, _make_estimator)
