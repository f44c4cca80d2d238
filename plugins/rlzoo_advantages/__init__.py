"""The advantage estimators that ship with rlzoo."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlzoo import AdvantageEstimator, AdvantageInputs, hookimpl, ops

STD_FLOOR = 1e-6
ROUNDING = 1e-12  # bound on the relative rounding error in float64


class GroupNorm(AdvantageEstimator):
    """Normalises the rewards within each group.

    Formula:
        A = (R - mean) / (std + 1e-6) within the group, where std divides by n - 1

    Reference:
        DeepSeekMath, arXiv 2402.03300.
    """

    name, paper, takes_one = "group_norm", "arXiv 2402.03300", True

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        return _normalised(inputs.rewards, inputs.group_ids)


class GroupMean(AdvantageEstimator):
    """Centres the rewards within each group.

    Formula:
        A = R - mean of the group

    Reference:
        Dr. GRPO, arXiv 2503.20783.
    """

    name, paper, takes_one = "group_mean", "arXiv 2503.20783", True

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        return ops.group_centred(inputs.rewards, inputs.group_ids)


class LeaveOneOut(AdvantageEstimator):
    """Compares each response with the other responses in its group.

    Formula:
        A = R - mean of the other rewards in the group

    Reference:
        RLOO, arXiv 2402.14740.
    """

    name, paper = "leave_one_out", "arXiv 2402.14740"

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        count = ops.group_sum(torch.ones_like(inputs.rewards), inputs.group_ids)
        return ops.group_centred(inputs.rewards, inputs.group_ids) * count / (count - 1)


class GDPO(AdvantageEstimator):
    """Normalises the named rewards within each group, computes their weighted sums, and divides the sums by their std.

    Formula:
        A = S / (std of S over the batch + 1e-6),    S = sum over the named rewards of weight * (r - mean) / (std + 1e-6)

    Where:
        The means and standard deviations of r are taken within the group, and every std divides by n - 1. The mean of S over
        the batch is 0, because it is 0 over each group.

    Reference:
        GDPO, arXiv 2601.05242. The standard deviation of S is taken over responses, as in TRL (verl takes it over tokens).
    """

    name, paper, takes_one = "gdpo", "arXiv 2601.05242", True
    needs: ClassVar = frozenset({"reward_parts"})
    exempt: ClassVar = {"prompts_are_independent": "the last standard deviation is taken over the whole batch"}

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        assert inputs.reward_parts is not None, "guaranteed by needs"
        weights, parts = inputs.reward_weights, inputs.reward_parts.items()
        terms = torch.stack([weights.get(name, 1.0) * _normalised(values, inputs.group_ids) for name, values in parts])
        total = terms.sum(0)
        # terms that cancel would leave a rounding error, which is not 0 and would count as a signal
        total = torch.where(total.abs() > ROUNDING * terms.abs().sum(0), total, 0.0)
        std = (total.square().sum() / max(len(total) - 1, 1)).sqrt()
        return total / (std + STD_FLOOR)


class MaxRL(AdvantageEstimator):
    """Maximises log(success rate) instead of the success rate.

    Formula:
        A = (R - mean) / mean within the group, or 0 if the mean is not positive

    Reference:
        MaxRL, arXiv 2602.02710.
    """

    name, paper, takes_one = "max_rl", "arXiv 2602.02710", True

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        mean = ops.group_mean(inputs.rewards, inputs.group_ids)
        return torch.where(mean > 0, ops.group_centred(inputs.rewards, inputs.group_ids) / mean, 0.0)


class PassAtK(AdvantageEstimator):
    """Measures how much a response improves the best of k responses drawn from its group. Rewards need not be 0 or 1.

    Formula:
        A = (mean of M over the k-subsets that contain the response - E) / sd, or 0 if all subsets have the same M

    Where:
        M is the largest reward in a k-subset of the group. E and sd are the mean and standard deviation of M over all such
        subsets.

    Reference:
        Pass@k training, arXiv 2508.10751.
    """

    name, paper = "pass_at_k", "arXiv 2508.10751"
    aliases: ClassVar = {f"pass@{k}": {"k": k} for k in (2, 4, 8, 16, 32)}

    k: int = Field(2, ge=2, le=4096, description="number of responses in each subset")

    @property
    def min_group_size(self) -> int:
        """See `AdvantageEstimator.min_group_size`."""
        return self.k

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        rewards, group_ids = inputs.rewards[:, 0], inputs.group_ids[:, 0]
        advantages = torch.zeros_like(rewards)
        for index in torch.unique(group_ids):
            rows = (group_ids == index).nonzero()[:, 0]
            values = rewards[rows]
            best = _share_of_maxima(len(values), self.k).to(values)  # in ascending order of reward
            ascending = values.sort().values
            mean = (best * ascending).sum()
            spread = (best * (ascending - mean).square()).sum().sqrt()
            if bool((ascending[best > 0] == ascending[-1]).all()):
                continue
            others = torch.stack([torch.cat([values[:i], values[i + 1 :]]) for i in range(len(values))]).sort(dim=-1).values
            share = _share_of_maxima(len(values) - 1, self.k - 1).to(values)
            with_it = (torch.maximum(others, values[:, None]) * share).sum(dim=-1)
            advantages[rows] = (with_it - mean) / spread
        return advantages[:, None]


class BatchNorm(AdvantageEstimator):
    """Normalises the rewards over the whole batch, or the returns of all its tokens if there are per-token rewards.

    Formula:
        A = (R - mean) / (std + 1e-6) over the batch, where std divides by n - 1

    Reference:
        REINFORCE++, arXiv 2501.03262.
    """

    name, paper = "batch_norm", "arXiv 2501.03262"
    compares, takes_token_rewards = False, True
    exempt: ClassVar = {"prompts_are_independent": "the mean and the standard deviation are taken over the whole batch"}

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        if inputs.token_rewards is None:
            return _normalised(inputs.rewards, torch.zeros_like(inputs.group_ids))
        returns = inputs.returns()
        values = returns[inputs.response_mask]
        if bool((values == values[:1]).all()):  # rounding the mean must not make equal returns look unequal
            return torch.zeros_like(returns)
        return (returns - values.mean()) / (values.std() + STD_FLOOR)


class Raw(AdvantageEstimator):
    """Uses the reward unchanged, or the return of each token if there are per-token rewards.

    Formula:
        A = R
    """

    name, paper = "raw", "none"
    compares, takes_token_rewards = False, True
    exempt: ClassVar = {"equal_rewards_have_no_advantage": "the reward is not compared with other rewards"}

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        return inputs.rewards if inputs.token_rewards is None else inputs.returns()


class Process(AdvantageEstimator):
    """Credits each token with the rewards of the reasoning steps that end at or after it, normalised within the group.

    Formula:
        A_t = sum over the steps of the response that end at or after token t of (r - mean) / (std + 1e-6)

    Where:
        r is the reward of a step. Every non-zero per-token reward ends a step, and so does the last token, which also
        receives the reward of the whole response. The mean and the standard deviation (with n - 1) are taken over the step
        rewards of all responses in the group. If all step rewards in a group are equal, A_t = 0.

    Reference:
        GRPO with process supervision, DeepSeekMath, arXiv 2402.03300, section 4.1.3. The paper does not say which standard
        deviation it uses. Dividing by n - 1 and adding the response's reward to the last step are rlzoo's choices.
    """

    name, paper = "process", "arXiv 2402.03300"
    needs: ClassVar = frozenset({"token_rewards"})
    per_token, takes_token_rewards, takes_one = True, True, True

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        assert inputs.token_rewards is not None, "guaranteed by needs"
        mask = inputs.response_mask
        paid = torch.where(mask, inputs.token_rewards, 0.0)
        last = ops.positions(mask) == ops.lengths(mask)
        paid = torch.where(last & mask, paid + inputs.rewards, paid)
        is_step = (paid != 0) | (last & mask)
        group = inputs.group_ids.expand_as(paid)[is_step][:, None]
        normalised = torch.zeros_like(paid)
        normalised[is_step] = _normalised(paid[is_step][:, None], group)[:, 0]
        return normalised.flip(-1).cumsum(-1).flip(-1)


class GiGPO(AdvantageEstimator):
    """Compares whole responses with each other, and turns with other turns that began in the same environment state.

    Formula:
        A_t = (R - mean of the group) + weight * (G - mean over the group's turns that began in the same state)

    Where:
        R is the total reward of the response. G = sum over this and later turns of discount^(number of turns later) * r,
        where r is the reward of a turn: the sum of its per-token rewards, plus the reward of the response in the last turn.
        If no other turn began in the same state, the second term is 0.

    Reference:
        GiGPO, arXiv 2505.10978, with a discount of 0.95, a weight of 1 and no division by the standard deviation, as in the
        authors' code. As in the paper, the mean of R counts each response once, not once per turn as in the code.
    """

    name, paper = "gigpo", "arXiv 2505.10978"
    needs: ClassVar = frozenset({"turn_ids", "state_ids"})
    per_token, takes_token_rewards, takes_one = True, True, True

    discount: float = Field(0.95, gt=0, le=1, description="discount applied to the next turn's reward")
    weight: float = Field(1.0, ge=0, le=1e6, description="weight of the comparison between turns")

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        assert inputs.turn_ids is not None, "guaranteed by needs"
        assert inputs.state_ids is not None, "guaranteed by needs"
        rewards, mask, turns = inputs.rewards, inputs.response_mask, inputs.turn_ids
        paid = torch.zeros(mask.shape, dtype=rewards.dtype) if inputs.token_rewards is None else inputs.token_rewards
        number = int(turns.max()) + 1
        index = torch.where(mask, turns, number)  # environment tokens go to an extra turn that is dropped
        per_turn = torch.zeros(len(mask), number + 1, dtype=rewards.dtype).scatter_add(1, index, torch.where(mask, paid, 0.0))
        last = torch.where(mask, turns, -1).amax(-1, keepdim=True)
        per_turn = per_turn[:, :number].scatter_add(1, last.clamp(min=0), rewards)
        for turn in range(number - 2, -1, -1):
            per_turn[:, turn] += self.discount * per_turn[:, turn + 1]
        states = torch.zeros(len(mask), number + 1, dtype=torch.long).scatter(1, index, inputs.state_ids)[:, :number]
        exists = torch.arange(number) <= last
        # turns in the same group that began in the same state share an ID
        pairs = torch.stack([inputs.group_ids.expand_as(states)[exists], states[exists]], dim=1)
        together = torch.unique(pairs, dim=0, return_inverse=True)[1][:, None]
        compared = torch.zeros_like(per_turn)
        compared[exists] = ops.group_centred(per_turn[exists][:, None], together)[:, 0]
        episode = rewards + torch.where(mask, paid, 0.0).sum(-1, keepdim=True)
        return ops.group_centred(episode, inputs.group_ids) + self.weight * compared.gather(1, turns.clamp(min=0))


class ReverseKL(AdvantageEstimator):
    """Compares each token's log-prob under a teacher with its log-prob under the model. Rewards are ignored.

    Formula:
        A_t = log pi_T - log pi_old, clamped to [-20, 20]

    Where:
        pi_T is the teacher, `model.reference`, and pi_old is the model before the first update. Later tokens do not affect A_t.

    Reference:
        On-Policy Distillation, Thinking Machines Lab, 2025 (thinkingmachines.ai/blog/on-policy-distillation), without a clamp.
    """

    name, paper = "reverse_kl", "none"
    needs: ClassVar = frozenset({"ref_log_probs", "old_log_probs"})
    per_token, compares = True, False
    exempt: ClassVar = {"equal_rewards_have_no_advantage": "advantages come from the teacher, not from rewards"}

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        assert inputs.ref_log_probs is not None, "guaranteed by needs"
        assert inputs.old_log_probs is not None, "guaranteed by needs"
        return (inputs.ref_log_probs - inputs.old_log_probs).clamp(-ops.LOG_RATIO_LIMIT, ops.LOG_RATIO_LIMIT)


class GAE(AdvantageEstimator):
    """Compares the rewards that follow each step with the critic's prediction (generalised advantage estimation).

    Formula:
        A_t = sum_k (gamma lam)^k delta_(t+k),    delta_t = r_t + gamma V_(t+1) - V_t
        value target of t = V_t + A_t, with lam_returns instead of lam

    Where:
        t counts only the tokens that the model chose, so the last token of a turn is followed by the first token of the next
        turn. V_t is the critic's value before token t. r_t is the reward of token t, and the last token also receives the
        reward of the response. After the last token, V = 0. With `lam_alpha`, lam is max(0, 1 - 1 / (lam_alpha L)), where L
        is the number of steps in the response. With `time_step` turn, a step is a turn. V_t is then the value before its
        first token, r_t is the sum of its rewards, and its tokens share A_t and the target. Finally, whitening replaces A by
        (A - mean) / (std + 1e-6) over the batch's tokens, where std divides by n - 1.

    Reference:
        arXiv 1506.02438. lam_returns is from VC-PPO, arXiv 2503.01491. lam_alpha is from VAPO, arXiv 2504.05118. As in verl
        and TRL's PPO, advantages are whitened over the batch. CleanRL whitens them over a minibatch.
    """

    name, paper = "gae", "arXiv 1506.02438"
    needs: ClassVar = frozenset({"values", "last_values", "finished", "turn_ids"})
    compares, per_token, takes_token_rewards = False, True, True
    exempt: ClassVar = {
        "equal_rewards_have_no_advantage": "a reward is compared with the critic's values, not with other rewards",
        "prompts_are_independent": "whitening takes the mean and the standard deviation over the whole batch",
    }

    gamma: float = Field(1.0, ge=0, le=1, description="discount of the next step")
    lam: float = Field(0.95, ge=0, le=1, description="weight of later steps: 0 trusts the critic, 1 the rewards")
    lam_alpha: float | None = Field(
        None, gt=0, le=1e6, description="lam is max(0, 1 - 1 / (lam_alpha L)) for a response of L steps; null: lam is fixed"
    )
    lam_returns: float | None = Field(None, ge=0, le=1, description="lam of the value targets; null: as for the advantages")
    time_step: Literal["token", "turn"] = Field("token", description="whether a step is a token or a turn of the model")
    bootstrap_truncated: bool = Field(
        False,
        description="let the critic's last value replace the reward of a response that was cut off at a limit; only for "
        "environments in which running out of time says nothing about success",
    )
    whiten: bool = Field(True, description="normalise the advantages over the tokens of the batch")

    def estimate(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.estimate`."""
        advantages, mask = self._estimate(inputs, None), inputs.response_mask
        if not self.whiten:
            return advantages
        chosen = advantages[mask]
        if bool((chosen == chosen[:1]).all()):  # this includes a single token, which has no standard deviation
            return torch.zeros_like(advantages)
        return (advantages - chosen.mean()) / (chosen.std() + STD_FLOOR)

    def targets(self, inputs: AdvantageInputs) -> Tensor:
        """See `AdvantageEstimator.targets`."""
        assert inputs.values is not None, "guaranteed by needs"
        values = inputs.values
        if self.time_step == "turn":
            values = _by_turn(inputs)[1].gather(1, _turns(inputs))
        return values + self._estimate(inputs, self.lam_returns)

    def _estimate(self, inputs: AdvantageInputs, lam: float | None) -> Tensor:
        """Return ``(B, T)`` advantages before whitening. If ``lam`` is None, they use the settings `lam` and `lam_alpha`."""
        paid, values, exists = _by_turn(inputs) if self.time_step == "turn" else _by_token(inputs)
        assert inputs.last_values is not None, "guaranteed by needs"
        assert inputs.finished is not None, "guaranteed by needs"
        length = exists.sum(-1, keepdim=True)
        bootstraps = ~inputs.finished & self.bootstrap_truncated
        is_last = exists & (ops.positions(exists) == length)
        paid = paid + torch.where(is_last & ~bootstraps, inputs.rewards, 0.0)
        if lam is None and self.lam_alpha is not None:
            decay = self.gamma * (1 - 1 / (self.lam_alpha * length[:, 0].double())).clamp(min=0)
        else:
            decay = torch.full_like(paid[:, 0], self.gamma * (self.lam if lam is None else lam))
        following = torch.where(bootstraps, inputs.last_values, 0.0)[:, 0]
        later, advantages = torch.zeros_like(following), torch.zeros_like(paid)
        for t in range(paid.shape[1] - 1, -1, -1):
            here = exists[:, t]
            now = paid[:, t] + self.gamma * following - values[:, t] + decay * later
            later, following = torch.where(here, now, later), torch.where(here, values[:, t], following)
            advantages[:, t] = later
        return advantages.gather(1, _turns(inputs)) if self.time_step == "turn" else advantages


@hookimpl
def rlzoo_advantages() -> list[type[AdvantageEstimator]]:
    """Return the advantage estimators that this plugin provides."""
    compared = [GroupNorm, GroupMean, LeaveOneOut, GDPO, MaxRL, PassAtK, Process, GiGPO]
    return [*compared, BatchNorm, Raw, ReverseKL, GAE]


def _by_token(inputs: AdvantageInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens' rewards, their values, and whether the model chose them, ``(B, T)`` each."""
    assert inputs.values is not None, "guaranteed by needs"
    mask, paid = inputs.response_mask, inputs.token_rewards
    return torch.zeros_like(inputs.values) if paid is None else torch.where(mask, paid, 0.0), inputs.values, mask


def _by_turn(inputs: AdvantageInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the turns' rewards, the values before their first tokens, and whether they have tokens, ``(B, K)`` each."""
    paid, values, mask = _by_token(inputs)
    turns, (rows, length) = _turns(inputs), mask.shape
    number = int(turns.max()) + 1
    place = torch.where(mask, torch.arange(length), length)
    first = torch.full((rows, number), length).scatter_reduce(1, turns, place, "amin")
    exists = first < length
    before = torch.where(exists, values.gather(1, first.clamp(max=length - 1)), 0.0)
    return torch.zeros(rows, number, dtype=paid.dtype).scatter_add(1, turns, paid), before, exists


def _turns(inputs: AdvantageInputs) -> Tensor:
    """Return the turn of each token, ``(B, T)``, or 0 for an environment's tokens."""
    assert inputs.turn_ids is not None, "guaranteed by needs"
    return torch.where(inputs.response_mask, inputs.turn_ids, 0)


def _normalised(values: Tensor, group_ids: Tensor) -> Tensor:
    """Compute ``(values - mean) / (std + 1e-6)`` within each group, ``(N, 1)``, where the std divides by n - 1."""
    centred = ops.group_centred(values, group_ids)
    count = ops.group_sum(torch.ones_like(values), group_ids)
    std = (ops.group_sum(centred.square(), group_ids) / (count - 1).clamp(min=1)).sqrt()
    return centred / (std + STD_FLOOR)


def _share_of_maxima(n: int, k: int) -> Tensor:
    """Return, for each j, the share of k-subsets whose maximum is the j-th smallest of n, ``C(j - 1, k - 1) / C(n, k)``."""
    return torch.tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)], dtype=torch.float64)
