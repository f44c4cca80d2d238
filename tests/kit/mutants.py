"""Broken rules: each is a correct rule with one defect that an author may overlook."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from rlzoo import ClipBand, ClipPolicy, ClipResult, Width, ops
from tests.kit import correct
from tests.kit.correct import Adaptive, GroupBand, Kind, Mean, Parabola, PlainGradient, Pooled, Prefix, Shared, Token, Weighted

MUTANTS: list[type[ClipPolicy]] = []


def mutant(base: type[ClipPolicy], **members: object) -> Callable[[Callable], type[ClipPolicy]]:
    """Register a copy of a correct rule with another ``__call__``."""

    def make(call: Callable) -> type[ClipPolicy]:
        name = call.__name__.replace("_", "-")
        rule = type(call.__name__, (base,), {"__call__": call, "name": name, "__module__": __name__, **members})
        MUTANTS.append(rule)
        return rule

    return make


def register(kind: type[ClipPolicy]) -> type[ClipPolicy]:
    """Register a class with a defect outside ``__call__``."""
    MUTANTS.append(kind)
    return kind


def surrogate(log_ratio, inputs, width, advantages=None):
    """A clipped surrogate with a symmetric band."""
    edge = torch.full_like(log_ratio.detach(), width)
    band = ClipBand(low=-edge, high=edge)
    return ops.clipped_surrogate(log_ratio, inputs.advantages if advantages is None else advantages, band)


def ppo(self, log_ratio, inputs, advantages=None):
    """Return the clipped surrogate of `Token`, with another log-ratio or other advantages."""
    band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
    return ops.clipped_surrogate(log_ratio, inputs.advantages if advantages is None else advantages, band)


# padding, rows and shapes


@mutant(Mean)
def mean_over_the_width(self, inputs):
    log_ratio = ops.log_ratio(inputs).mean(dim=-1, keepdim=True)
    return surrogate(log_ratio, inputs, self.width / 2)


@mutant(correct.Root)
def band_by_the_width(self, inputs):
    log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
    return surrogate(log_ratio, inputs, self.width * inputs.log_probs.shape[-1] ** 0.5)


@mutant(Token)
def objective_by_the_width(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective / inputs.log_probs.shape[-1])


@mutant(Token)
def position_by_column(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    root = torch.arange(1, log_ratio.shape[-1] + 1, device=log_ratio.device).float().sqrt()
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-self.clip_low * root, high=self.clip_high * root))


@mutant(Mean)
def mask_by_multiplication(self, inputs):
    mask = inputs.response_mask
    total = ((inputs.log_probs - inputs.old_log_probs) * mask).sum(-1, keepdim=True)
    log_ratio = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return surrogate(log_ratio.float(), inputs, self.width)


@mutant(Mean)
def no_mask_at_all(self, inputs):
    log_ratio = (inputs.log_probs - inputs.old_log_probs.detach()).float().mean(-1, keepdim=True)
    return surrogate(log_ratio, inputs, self.width)


@mutant(Mean)
def first_token_alone(self, inputs):
    log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
    first = ops.log_ratio(inputs)[:, :1]
    return surrogate(log_ratio + 0.5 * (first - first.detach()), inputs, self.width)


@mutant(Token)
def baseline_of_the_batch(self, inputs):
    return ppo(self, ops.log_ratio(inputs), inputs, inputs.advantages - inputs.advantages.mean())


@mutant(Mean)
def divides_by_the_rows(self, inputs):
    result = Mean.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective / len(inputs.log_probs))


@mutant(Shared)
def divides_a_batch_by_its_tokens(self, inputs):
    result = Shared.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective / inputs.response_mask.sum())


@mutant(Shared)
def edge_by_a_sum_over_the_batch(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    edge = self.factor * log_ratio.detach().abs().sum() / 500
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Shared)
def step_mean_over_padding(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    edge = 2 * self.factor * log_ratio.detach().abs().mean()
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Shared)
def edge_of_the_first_row(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    edge = self.factor * ops.step_mean(log_ratio[:1].detach().abs(), inputs.response_mask[:1])
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Shared)
def rows_are_numbered(self, inputs):
    result = Shared.__call__(self, inputs)
    weight = 1 + torch.arange(len(inputs.log_probs), device=inputs.log_probs.device)[:, None] / 100
    return dataclasses.replace(result, objective=result.objective * weight)


@mutant(GroupBand)
def groups_are_runs_of_four_rows(self, inputs):
    mean = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
    group = torch.arange(len(mean), device=mean.device)[:, None] // 4
    edge = self.width + ops.group_mean(mean.detach().square(), group).sqrt()
    return ops.clipped_surrogate(mean, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Token)
def pooled_objective_of_a_token_rule(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, objective=ops.sequence_mean(result.objective, inputs.response_mask))


@mutant(Token)
def reduced_to_a_scalar(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective.mean())


# advantages


@mutant(Token)
def advantages_of_a_row_collapsed(self, inputs):
    return ppo(self, ops.log_ratio(inputs), inputs, inputs.advantages[:, :1])


@mutant(Token)
def advantages_of_a_row_averaged(self, inputs):
    averaged = ops.per_response(inputs.advantages.expand_as(inputs.response_mask), inputs.response_mask)
    return ppo(self, ops.log_ratio(inputs), inputs, averaged)


@mutant(Token)
def band_by_the_sign_of_the_row(self, inputs):
    log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
    row = ops.per_response(advantages, inputs.response_mask)
    band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
    clamped, clipped = ops.clamp_by_advantage(log_ratio, row, band)
    return ClipResult(clamped.exp() * advantages, log_ratio.detach(), clipped & (advantages != 0))


@mutant(Token)
def advantage_squared(self, inputs):
    return ppo(self, ops.log_ratio(inputs), inputs, inputs.advantages * inputs.advantages.abs())


@mutant(Token)
def sign_of_the_advantage_alone(self, inputs):
    return ppo(self, ops.log_ratio(inputs), inputs, inputs.advantages.sign())


@mutant(Token)
def sign_of_the_advantage_dropped(self, inputs):
    return ppo(self, ops.log_ratio(inputs), inputs, inputs.advantages.abs())


@mutant(Token)
def negative_advantages_halved(self, inputs):
    halved = torch.where(inputs.advantages < 0, inputs.advantages / 2, inputs.advantages)
    return ppo(self, ops.log_ratio(inputs), inputs, halved)


@mutant(Token)
def advantages_limited(self, inputs):
    return ppo(self, ops.log_ratio(inputs), inputs, inputs.advantages.clamp(-1, 1))


@mutant(Shared)
def advantages_whitened_again(self, inputs):
    advantages = inputs.advantages / inputs.advantages.std()
    log_ratio = ops.log_ratio(inputs)
    edge = self.factor * ops.step_mean(log_ratio.detach().abs(), inputs.response_mask)
    return ops.clipped_surrogate(log_ratio, advantages, ClipBand(low=-edge, high=edge))


@mutant(Token)
def negated(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, objective=-result.objective)


@mutant(Token)
def penalty_where_the_advantage_is_zero(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective - 0.1 * ops.log_ratio(inputs).square())


# the cut


@mutant(Token)
def cuts_on_both_sides_whatever_the_sign(self, inputs):
    log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
    clipped = (log_ratio.abs() > self.clip_high) & (advantages != 0)
    return ClipResult(log_ratio.clamp(-self.clip_low, self.clip_high).exp() * advantages, log_ratio.detach(), clipped)


@mutant(Token)
def cuts_inward(self, inputs):
    log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
    cut = ((advantages > 0) & (log_ratio < -self.clip_low)) | ((advantages < 0) & (log_ratio > self.clip_high))
    return ClipResult(torch.where(cut, 0.0, log_ratio.clamp(-20, 20).exp() * advantages), log_ratio.detach(), cut)


@mutant(Token)
def maximum_for_minimum(self, inputs):
    moved = ops.log_ratio(inputs)
    ratio, advantages = moved.clamp(-20, 20).exp(), inputs.advantages.detach().float()
    objective = torch.maximum(ratio * advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
    clipped = ((advantages > 0) & (ratio > 1 + self.clip_high)) | ((advantages < 0) & (ratio < 1 - self.clip_low))
    return ClipResult(objective, moved.detach(), clipped)


@mutant(Token)
def maximum_for_minimum_and_reported(self, inputs):
    moved = ops.log_ratio(inputs)
    ratio, advantages = moved.clamp(-20, 20).exp(), inputs.advantages.detach().float()
    objective = torch.maximum(ratio * advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
    clipped = ((advantages > 0) & (ratio < 1 - self.clip_low)) | ((advantages < 0) & (ratio > 1 + self.clip_high))
    return ClipResult(objective, moved.detach(), clipped)


@mutant(Token)
def negative_side_cut_above(self, inputs):
    log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
    cut = (advantages > 0) & (log_ratio > self.clip_high)
    cut = cut | (advantages < 0) & ((log_ratio > 0) | (log_ratio < -self.clip_low))
    return ClipResult(torch.where(cut, 0.0, log_ratio.clamp(-20, 20).exp() * advantages), log_ratio.detach(), cut)


@mutant(Mean)
def edge_with_the_wrong_sign(self, inputs):
    log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
    edge = torch.full_like(log_ratio.detach(), self.width)
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=edge, high=edge))


@mutant(Token)
def lets_go_again_far_out(self, inputs):
    log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
    cut = (advantages > 0) & (log_ratio > self.clip_high) & (log_ratio < 3 * self.clip_high)
    cut = cut | (advantages < 0) & (log_ratio < -self.clip_low)
    return ClipResult(torch.where(cut, 0.0, log_ratio.clamp(-20, 20).exp() * advantages), log_ratio.detach(), cut)


@mutant(Token)
def forgets_to_clip(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, objective=ops.limited_exp(ops.log_ratio(inputs)) * inputs.advantages.float())


@mutant(Token)
def never_clips_though_it_has_widths(self, inputs):
    return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)


@mutant(Token)
def forgets_to_report(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, clipped=torch.zeros_like(result.clipped))


@mutant(Token)
def one_width_is_ignored(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    band = ops.ratio_band(self.clip_low, self.clip_low, None, like=log_ratio)
    return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


@mutant(Token)
def floor_holds_nothing(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    edge = torch.tensor(self.clip_high, device=log_ratio.device)
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Token)
def everything_is_clipped_at_ratio_one(self, inputs):
    log_ratio = ops.log_ratio(inputs) + 0.3
    return ppo(self, log_ratio, inputs)


@mutant(correct.DualClip)
def dual_clip_not_reported(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    band = ops.ratio_band(self.clip_low, self.clip_high, 1.2, like=log_ratio)
    result = ops.clipped_surrogate(log_ratio, inputs.advantages, band)
    return dataclasses.replace(result, clipped=result.clipped & ~((inputs.advantages < 0) & (log_ratio > 0)))


# what it reports


@mutant(Token)
def log_ratio_reversed(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, log_ratio=-result.log_ratio, band=None)


@mutant(Token)
def log_ratio_constant(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, log_ratio=torch.zeros_like(result.log_ratio), band=None)


@mutant(Token)
def ratio_for_the_log_ratio(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, log_ratio=result.log_ratio.exp(), band=None)


@mutant(Mean)
def log_ratio_of_another_pooling(self, inputs):
    result = Mean.__call__(self, inputs)
    total = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask).detach()
    return dataclasses.replace(result, log_ratio=total)


@mutant(Token)
def log_ratio_with_a_gradient(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, log_ratio=ops.log_ratio(inputs))


@mutant(Token)
def band_of_ratios(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, band=ClipBand(low=result.band.low.exp(), high=result.band.high.exp()))


@mutant(Token)
def band_twice_as_wide_as_the_one_used(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, band=ClipBand(low=2 * result.band.low, high=2 * result.band.high))


@mutant(Token)
def clipped_as_numbers(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, clipped=result.clipped.float())


@mutant(Weighted)
def capped_and_not_reported(self, inputs):
    result = Weighted.__call__(self, inputs)
    return dataclasses.replace(result, clipped=torch.zeros_like(result.clipped))


@mutant(Weighted)
def reported_from_ratio_one_on(self, inputs):
    result = Weighted.__call__(self, inputs)
    return dataclasses.replace(result, clipped=(inputs.advantages > 0) & (result.log_ratio > 0))


@mutant(Weighted)
def reported_on_the_other_side(self, inputs):
    result = Weighted.__call__(self, inputs)
    return dataclasses.replace(result, clipped=(inputs.advantages < 0) & (result.log_ratio < -0.2))


@mutant(Parabola)
def turned_and_not_reported(self, inputs):
    result = Parabola.__call__(self, inputs)
    return dataclasses.replace(result, clipped=torch.zeros_like(result.clipped))


@mutant(Parabola)
def reported_too_late(self, inputs):
    result = Parabola.__call__(self, inputs)
    return dataclasses.replace(result, clipped=result.clipped & (result.log_ratio.abs() > 0.4))


@mutant(PlainGradient)
def reported_though_nothing_happens(self, inputs):
    result = PlainGradient.__call__(self, inputs)
    return dataclasses.replace(result, clipped=(inputs.advantages > 0) & (result.log_ratio > 0.1))


# inputs, state and randomness


@mutant(Token)
def crashes_without_rollout_log_probs(self, inputs):
    drift = ops.sequence_mean(inputs.old_log_probs.float() - inputs.rollout_log_probs.float(), inputs.response_mask)
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective * drift.detach().float().clamp(-1, 1).exp())


@mutant(Token)
def changes_the_advantages(self, inputs):
    inputs.advantages.mul_(0.5)
    return Token.__call__(self, inputs)


@mutant(Token)
def changes_the_old_log_probs(self, inputs):
    inputs.old_log_probs.masked_fill_(~inputs.response_mask, 0.0)
    return Token.__call__(self, inputs)


@mutant(Token)
def changes_the_mask(self, inputs):
    inputs.response_mask[:, -1] = False
    return Token.__call__(self, inputs)


@mutant(Token)
def draws_at_random(self, inputs):
    result = Token.__call__(self, inputs)
    kept = torch.rand_like(result.objective) < 0.9
    return dataclasses.replace(
        result, objective=torch.where(kept, result.objective, 0.0), clipped=result.clipped | ~kept & (inputs.advantages != 0)
    )


@mutant(Token)
def seeds_everybody(self, inputs):
    torch.manual_seed(inputs.seed)
    return Token.__call__(self, inputs)


@mutant(Token)
def gradient_alone_is_random(self, inputs):
    result = Token.__call__(self, inputs)
    log_probs = ops.log_probs(inputs)
    noise = (log_probs - log_probs.detach()) * torch.rand(()) * 0.1
    return dataclasses.replace(result, objective=result.objective + torch.where(result.clipped, 0.0, noise * inputs.advantages))


SEEN: dict[str, float] = {}


@mutant(Token)
def remembers_the_last_call(self, inputs):
    seen = SEEN
    width = seen.get("width", self.clip_high)
    seen["width"] = self.clip_high * float(inputs.log_probs.mean().abs())
    return surrogate(ops.log_ratio(inputs), inputs, width)


@mutant(Token)
def nothing_to_learn_from(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective.detach())


# numbers and devices


@mutant(Token)
def exp_before_the_clamp(self, inputs):
    moved = ops.log_ratio(inputs)
    ratio, advantages = moved.exp(), inputs.advantages.detach().float()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
    clipped = ((advantages > 0) & (ratio > 1 + self.clip_high)) | ((advantages < 0) & (ratio < 1 - self.clip_low))
    return ClipResult(objective, moved.detach(), clipped)


@mutant(Weighted)
def weight_before_the_cap(self, inputs):
    log_ratio = ops.log_ratio(inputs).detach()
    ratio = log_ratio.exp()
    objective = ratio.clamp(max=self.cap) * inputs.advantages.detach().float() * ops.log_probs(inputs)
    weight = ratio / ratio  # the ratio has overflowed
    return ClipResult(objective * weight, log_ratio, (inputs.advantages > 0) & (ratio > self.cap))


@mutant(Token)
def in_float64(self, inputs):
    log_ratio = ops.log_ratio(inputs).double()
    result = ppo(self, log_ratio, inputs)
    return dataclasses.replace(result, objective=result.objective.float(), log_ratio=result.log_ratio.float())


@mutant(Token)
def answers_in_float64(self, inputs):
    return ppo(self, ops.log_ratio(inputs).double(), inputs, inputs.advantages.double())


@mutant(Token)
def in_bfloat16(self, inputs):
    result = ppo(self, ops.log_ratio(inputs).bfloat16(), inputs)
    return dataclasses.replace(result, objective=result.objective.float(), log_ratio=result.log_ratio.float())


@mutant(Token)
def subtracts_before_the_cast(self, inputs):
    moved = torch.where(inputs.response_mask, inputs.log_probs - inputs.old_log_probs.detach(), 0.0)
    return ppo(self, moved.float(), inputs)


@mutant(Token)
def log_ratio_in_float64(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, log_ratio=result.log_ratio.double())


@mutant(Mean)
def made_on_the_cpu(self, inputs):
    log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
    edge = torch.full((len(log_ratio), 1), self.width)
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Token)
def answers_on_the_cpu(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, clipped=result.clipped.cpu())


@mutant(Mean)
def spread_of_a_single_token(self, inputs):
    token, mask = ops.log_ratio(inputs), inputs.response_mask
    mean = ops.sequence_mean(token, mask)
    spread = ops.sequence_sum((token - mean).detach().square(), mask) / (mask.sum(-1, keepdim=True) - 1)
    edge = self.width + 0 * spread
    return ops.clipped_surrogate(mean, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Shared)
def variance_of_equal_rows(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    mean = ops.sequence_mean(log_ratio, inputs.response_mask).detach()
    weight = mean.std() / mean.std()
    edge = self.factor * ops.step_mean(log_ratio.detach().abs(), inputs.response_mask)
    return ops.clipped_surrogate(log_ratio * weight, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Mean)
def divides_by_the_drift(self, inputs):
    result = Mean.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective * (result.log_ratio / result.log_ratio))


# settings and updates


@register
class UnknownEstimator(Token):
    """Names an estimator that does not exist."""

    name = "unknown-estimator"
    advantage: Literal["grpo_norm"] = Field("grpo_norm", description="how a group's rewards become advantages")


@register
class UnknownReduction(Token):
    """Names a reduction that does not exist."""

    name = "unknown-reduction"
    reduction: str = Field("mean", description="how the objective is reduced to a scalar")


@register
class NoBound(Token):
    """A number without a bound."""

    name = "no-bound"
    strength: float = Field(1.0, description="a number")


@register
class NoDescription(Token):
    """A setting without a description."""

    name = "no-description"
    strength: float = Field(1.0, gt=0)


@register
class NarrowsWhenScaled(Token):
    """Multiplies a field that is the reciprocal of a width."""

    name = "narrows-when-scaled"
    sharpness: Annotated[float, Width()] = Field(5.0, gt=0, le=1e6, description="one over the half-width of the band")

    def __call__(self, inputs):
        return surrogate(ops.log_ratio(inputs), inputs, 1 / self.sharpness)


@register
class UnknownLaw(Token):
    """Opts out of a law that does not exist."""

    name = "unknown-law"
    exempt: ClassVar = {"clips_are_zero": "a law of another name"}


@register
class DriftsToInvalid(Adaptive):
    """Updates its width without validation; it falls below zero after a few dozen updates."""

    name = "drifts-to-invalid"

    def updated(self, stats):
        count = max(1.0, float(stats.num_responses.sum()))
        error = float(stats.num_clipped.sum()) / count - self.target
        return self.model_copy(update={"width": self.width - 0.002 * error})


@register
class GrowsWithoutEnd(Adaptive):
    """Its width exceeds the bound of its field after a few dozen updates."""

    name = "grows-without-end"

    def updated(self, stats):
        count = max(1.0, float(stats.num_responses.sum()))
        return self.replace(width=self.width * (1.2 - 0.4 * float(stats.num_clipped.sum()) / count))


@register
class ClosesWhileASignIsMissing(Adaptive):
    """Counts a sign without responses as one without clips, which narrows the band."""

    name = "closes-while-a-sign-is-missing"

    def updated(self, stats):
        share = (stats.num_clipped.sum(0) / stats.num_responses.sum(0).clamp(min=1)).min()
        return self.replace(width=min(max(self.width * float((share - 0.1).exp()), 1e-6), 10.0))


@register
class DividesByNoResponses(Adaptive):
    """Fails if an update had no response with a nonzero advantage."""

    name = "divides-by-no-responses"

    def updated(self, stats):
        error = float(stats.num_clipped.sum() / stats.num_responses.sum()) - self.target
        return self.replace(width=min(max(self.width + 1e-3 * error, 1e-4), 1.0))


@register
class UpdatesInPlace(Adaptive):
    """Changes itself instead of returning another policy."""

    name = "updates-in-place"

    def updated(self, stats):
        object.__setattr__(self, "width", self.width * 0.99)
        return self


@register
class UpdatesAtRandom(Adaptive):
    """Draws its next width at random."""

    name = "updates-at-random"

    def updated(self, stats):
        return self.replace(width=0.04 + 0.02 * float(torch.rand(())))


@register
class BandsReadTheWord(Kind):
    """A word in its settings reverses the cut."""

    name = "bands-read-the-word"

    def __call__(self, inputs):
        sign = -1 if self.measure == "interval" else 1
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        clamped, clipped = ops.clamp_by_advantage(log_ratio, sign * inputs.advantages, band)
        return ClipResult(clamped.exp() * inputs.advantages.float(), log_ratio.detach(), clipped)


@mutant(GroupBand)
def groups_by_their_number(self, inputs):
    mean = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
    edge = self.width * (1 + inputs.group_ids.float() / 100)
    return ops.clipped_surrogate(mean, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Token, exempt={"zero_advantage_zero_gradient": "adds a penalty"})
def penalty_that_is_not_declared(self, inputs):
    result = Token.__call__(self, inputs)
    penalty = torch.where(result.clipped, 0.0, 0.1 * ops.log_ratio(inputs).square())
    return dataclasses.replace(result, objective=result.objective - penalty)


# defects that only show with other inputs, options or calls


FIRST: list[bool] = []


@mutant(Token)
def first_call_alone_is_free(self, inputs):
    result = Token.__call__(self, inputs)
    if FIRST:
        return result
    FIRST.append(True)
    return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)


@mutant(correct.Drawn)
def every_seed_draws_the_same(self, inputs):
    return correct.Drawn.__call__(self, dataclasses.replace(inputs, seed=7))


@mutant(Token)
def advantages_as_a_row(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective.mean(-1) * torch.ones_like(inputs.advantages))


@mutant(Token)
def metric_of_nothing(self, inputs):
    result = Token.__call__(self, inputs)
    share = result.clipped.float().sum(-1, keepdim=True)
    return dataclasses.replace(result, metrics={"share": share / share})


@mutant(Mean)
def log_ratio_rounded(self, inputs):
    result = Mean.__call__(self, inputs)
    moved = torch.where(inputs.response_mask, inputs.log_probs.detach() - inputs.old_log_probs, 0.0)
    return dataclasses.replace(result, log_ratio=ops.sequence_mean(moved.float(), inputs.response_mask), band=None)


@mutant(Mean)
def made_on_the_cpu_after_a_look(self, inputs):
    log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
    far = float(log_ratio.detach().abs().max()) > 10
    edge = torch.full((len(log_ratio), 1), self.width * (2 if far else 1))
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(correct.Corrected)
def weight_to_the_sampler_upside_down(self, inputs):
    old, rollout = inputs.old_log_probs.float(), inputs.rollout_log_probs
    if rollout is None:
        return correct.Corrected.__call__(self, inputs)
    return correct.Corrected.__call__(self, dataclasses.replace(inputs, rollout_log_probs=2 * old - rollout.float()))


@mutant(Prefix)
def prefix_over_the_padding(self, inputs):
    moved = torch.nan_to_num(inputs.log_probs.float() - inputs.old_log_probs.float(), 0.0, 0.0, 0.0).detach()
    token = ops.log_ratio(inputs)
    log_ratio = moved.cumsum(-1) + token - token.detach()
    edge = self.width * ops.positions(inputs.response_mask).sqrt()
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(GroupBand)
def spread_of_the_whole_batch(self, inputs):
    return GroupBand.__call__(self, dataclasses.replace(inputs, group_ids=torch.zeros_like(inputs.group_ids)))


@mutant(Mean)
def length_may_be_zero(self, inputs):
    log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask) / inputs.response_mask.sum(-1, keepdim=True)
    return surrogate(log_ratio, inputs, self.width)


@mutant(Token)
def divides_by_the_length_itself(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective / ops.lengths(inputs.response_mask))


@mutant(Token)
def advantages_limited_far_out(self, inputs):
    return ppo(self, ops.log_ratio(inputs), inputs, inputs.advantages.clamp(-20, 20))


@mutant(Prefix)
def prefix_without_the_token(self, inputs):
    token = ops.log_ratio(inputs)
    log_ratio = ops.prefix_sum(token.detach(), inputs.response_mask) - 2 * token.detach() + token
    edge = self.width * ops.positions(inputs.response_mask).sqrt()
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Token)
def ratio_less_one_for_the_log_ratio(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, log_ratio=result.log_ratio.expm1(), band=None)


@mutant(correct.Turns)
def turns_are_not_told_apart(self, inputs):
    return correct.Turns.__call__(self, dataclasses.replace(inputs, turn_ids=torch.where(inputs.response_mask, 0, -1)))


@mutant(correct.Turns)
def later_turns_are_one(self, inputs):
    return correct.Turns.__call__(self, dataclasses.replace(inputs, turn_ids=inputs.turn_ids.clamp(max=1)))


@register
class OneSideIsNoWidth(Token):
    """Its ceiling is not marked as a width, so `scaled` does not change it."""

    name = "one-side-is-no-width"
    clip_high: float = Field(0.2, gt=0, le=100, description="the ratio stays below 1 + clip_high")


@register
class ScaledPastItsBound(Token):
    """Scales without validation: a floor below a ratio of 0."""

    name = "scaled-past-its-bound"

    def scaled(self, factor):
        return self.model_copy(update={"clip_low": self.clip_low * factor, "clip_high": self.clip_high * factor})

    def __call__(self, inputs):
        kept = self.replace(clip_low=min(self.clip_low, 0.99), clip_high=min(self.clip_high, 100.0))
        return Token.__call__(kept, inputs)


@register
class NullIsZero(Mean):
    """A width of null is read as 0."""

    name = "null-is-zero"
    width: Annotated[float | None, Width()] = Field(0.05, gt=0, le=10, description="half-width of the band; null for none")

    def __call__(self, inputs):
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        return surrogate(log_ratio, inputs, self.width or 0.0)


@register
class OtherWordUpsideDown(Pooled):
    """Only the non-default word inverts the ratio."""

    name = "other-word-upside-down"

    def __call__(self, inputs):
        if self.pool == "mean":
            return Pooled.__call__(self, inputs)
        return Pooled.__call__(self, dataclasses.replace(inputs, advantages=-inputs.advantages))


@register
class SwitchFails(Mean):
    """Fails if a switch is on."""

    name = "switch-fails"
    strict: bool = Field(False, description="whether to judge strictly")

    def __call__(self, inputs):
        return self.strictly(inputs) if self.strict else Mean.__call__(self, inputs)


WIDTHS = {"factor": 1.0}


@register
class KeepsItsWidthElsewhere(Adaptive):
    """Keeps the width of the next update in its module."""

    name = "keeps-its-width-elsewhere"

    def __call__(self, inputs):
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        return surrogate(log_ratio, inputs, WIDTHS["factor"] * self.width)

    def updated(self, stats):
        count = max(1.0, float(stats.num_responses.sum()))
        WIDTHS["factor"] *= 1 + 0.1 * (float(stats.num_clipped.sum()) / count - self.target)
        return self


@register
class CountsInPlaceOfShares(Adaptive):
    """Compares the number of clipped responses with a share."""

    name = "counts-in-place-of-shares"

    def updated(self, stats):
        error = float(stats.num_clipped.sum()) - self.target
        return self.replace(width=min(max(self.width * (1 + 0.01 * error), 1e-3), 1.0))


# defects that need wider inputs: other scales, lengths, groups, turns, rewards, entropies, or a sampler that differs


@mutant(Token)
def metric_only_if_something_is_clipped(self, inputs):
    result = Token.__call__(self, inputs)
    metrics = {"cut": result.clipped.float()} if bool(result.clipped.any()) else {}
    return dataclasses.replace(result, metrics=metrics)


@mutant(Token)
def metric_only_if_an_advantage_is_negative(self, inputs):
    result = Token.__call__(self, inputs)
    below = (inputs.advantages < 0).float()
    return dataclasses.replace(result, metrics={"below": below} if below.any() else {})


@mutant(Token)
def metric_with_a_capital(self, inputs):
    result = Token.__call__(self, inputs)
    return dataclasses.replace(result, metrics={"Share cut": result.clipped.float()})


@mutant(Token)
def entropy_without_a_need(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    if inputs.old_entropy is None:
        return ppo(self, log_ratio, inputs)
    return surrogate(log_ratio, inputs, 0.1 + inputs.old_entropy)


@mutant(Token)
def progress_without_a_need(self, inputs):
    scale = 1 - (getattr(inputs, "progress", None) or 0.0) / 2
    band = ops.ratio_band(self.clip_low * scale, self.clip_high * scale, None, like=inputs.log_probs)
    return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band)


@mutant(correct.Turns)
def finished_without_a_need(self, inputs):
    result = correct.Turns.__call__(self, dataclasses.replace(inputs, advantages=inputs.advantages))
    return result if inputs.finished is None else dataclasses.replace(result, objective=result.objective * inputs.finished)


@mutant(Token)
def cut_by_the_ratio_to_the_sampler(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
    clamped, clipped = ops.clamp_by_advantage(ops.log_ratio(inputs, against="rollout"), inputs.advantages, band)
    objective = torch.where(clipped, clamped.detach(), log_ratio).clamp(-20, 20).exp() * inputs.advantages.float()
    return ClipResult(objective, log_ratio.detach(), clipped)


@mutant(Token)
def drops_what_the_sampler_disagrees_with(self, inputs):
    result = Token.__call__(self, inputs)
    gap = (ops.log_ratio(inputs, against="rollout") - ops.log_ratio(inputs)).detach().abs()
    dropped = (gap > 0.7) & (inputs.advantages != 0)
    objective = torch.where(dropped, 0.0, result.objective)
    return dataclasses.replace(result, objective=objective, clipped=result.clipped | dropped)


@mutant(Token)
def ratio_to_the_sampler_off_ratio_one(self, inputs):
    log_ratio, other = ops.log_ratio(inputs), ops.log_ratio(inputs, against="rollout")
    near = log_ratio.detach().abs() < 0.01
    band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
    judged = ops.clipped_surrogate(torch.where(near, log_ratio, other), inputs.advantages, band)
    return dataclasses.replace(judged, log_ratio=log_ratio.detach(), band=None)


@mutant(Token, ratio_to_sampler=True)
def says_sampler_and_means_the_old_model(self, inputs):
    return Token.__call__(self, inputs)


@mutant(correct.Root)
def counts_tokens_in_half_precision(self, inputs):
    log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
    root = inputs.response_mask.half().sum(-1, keepdim=True).clamp(min=1).float().sqrt()
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-self.width * root, high=self.width * root))


@mutant(Prefix)
def positions_in_bfloat16(self, inputs):
    token = ops.log_ratio(inputs)
    log_ratio = ops.prefix_sum(token.detach(), inputs.response_mask) + token - token.detach()
    edge = self.width * ops.positions(inputs.response_mask).bfloat16().sqrt().float()
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Mean)
def counts_tokens_in_a_byte(self, inputs):
    count = inputs.response_mask.sum(-1, keepdim=True, dtype=torch.uint8).clamp(min=1)
    log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask) / count
    return surrogate(log_ratio, inputs, self.width)


@mutant(Token)
def reversed_far_below_ratio_one(self, inputs):
    result, log_ratio = Token.__call__(self, inputs), ops.log_ratio(inputs)
    turned = (inputs.advantages > 0) & (log_ratio < -0.7)
    return dataclasses.replace(result, objective=torch.where(turned, -result.objective, result.objective))


@mutant(Mean)
def reversed_above_ratio_one(self, inputs):
    result = Mean.__call__(self, inputs)
    turned = (inputs.advantages < 0) & (result.log_ratio > 0.02)
    return dataclasses.replace(result, objective=torch.where(turned, -result.objective, result.objective))


@mutant(correct.Gate)
def reversed_by_a_weight_below_zero(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    weight = 1 - (log_ratio.detach() / self.width).square()
    objective = weight * ops.limited_exp(log_ratio) * inputs.advantages.float()
    return ClipResult(objective, log_ratio.detach(), torch.zeros_like(inputs.response_mask))


@mutant(Token)
def rare_tokens_are_reversed(self, inputs):
    result = Token.__call__(self, inputs)
    rare = inputs.old_log_probs.detach() < -6
    return dataclasses.replace(result, objective=torch.where(rare, -result.objective, result.objective))


@mutant(Token, scope="batch")
def a_rare_branch_reads_the_padding(self, inputs):
    result = Token.__call__(self, inputs)
    wide = ops.log_probs(inputs).detach() * inputs.advantages.detach() < -6
    column = torch.arange(inputs.log_probs.shape[-1], device=wide.device)
    return dataclasses.replace(result, objective=torch.where(wide, result.objective * (1 + column / 99), result.objective))


@mutant(correct.EntropyGate)
def no_number_at_high_entropy(self, inputs):
    result = correct.EntropyGate.__call__(self, inputs)
    undecided = inputs.old_entropy > 3
    broken = result.objective * (inputs.old_entropy - inputs.old_entropy).log().clamp(min=-1e3)
    return dataclasses.replace(result, objective=torch.where(undecided, broken * torch.inf, result.objective))


@mutant(Mean)
def long_responses_are_reversed(self, inputs):
    result = Mean.__call__(self, inputs)
    turned = ops.lengths(inputs.response_mask) > 1000
    return dataclasses.replace(result, objective=torch.where(turned, -result.objective, result.objective))


@mutant(Token)
def a_branch_that_cannot_be_reached(self, inputs):
    result, log_ratio = Token.__call__(self, inputs), ops.log_ratio(inputs).detach()
    doubtful = (log_ratio > self.clip_high) & (log_ratio < -self.clip_low)
    return dataclasses.replace(result, objective=torch.where(doubtful, 0.0, result.objective))


@mutant(correct.DualClip)
def a_ceiling_in_the_wrong_unit(self, inputs):
    result, log_ratio = Token.__call__(self, inputs), ops.log_ratio(inputs)
    over = (inputs.advantages < 0) & (torch.sigmoid(log_ratio.detach()) > self.dual_clip)
    objective = torch.where(over, 0.0, result.objective)
    return dataclasses.replace(result, objective=objective, clipped=result.clipped | over)


@mutant(correct.RewardGate)
def logarithm_of_a_reward(self, inputs):
    result = correct.RewardGate.__call__(self, inputs)
    return dataclasses.replace(result, objective=result.objective * (1 + (1 + inputs.rewards).log().abs()))


@mutant(correct.TurnCut)
def turns_beyond_the_fifth_are_dropped(self, inputs):
    turns = torch.where(inputs.turn_ids > 4, -1, inputs.turn_ids)
    return correct.TurnCut.__call__(self, dataclasses.replace(inputs, turn_ids=turns))


@mutant(GroupBand)
def spread_of_a_group_of_one(self, inputs):
    mean = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
    size = ops.group_sum(torch.ones_like(mean), inputs.group_ids)
    spread = (ops.group_sum(mean.detach().square(), inputs.group_ids) / (size - 1)).sqrt()
    edge = self.width + spread
    return ops.clipped_surrogate(mean, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(GroupBand)
def groups_of_equal_size(self, inputs):
    mean = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
    number = len(torch.unique(inputs.group_ids))
    spread = mean.detach().square().reshape(number, -1).mean(-1, keepdim=True).sqrt()
    edge = self.width + spread.repeat_interleave(len(mean) // number, 0)
    return ops.clipped_surrogate(mean, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(correct.Annealed)
def divides_by_the_progress(self, inputs):
    return surrogate(ops.log_ratio(inputs), inputs, self.width / inputs.progress)


@mutant(Shared)
def largest_of_the_positive_rows(self, inputs):
    log_ratio = ops.log_ratio(inputs)
    rows = (inputs.advantages > 0).any(-1)
    edge = self.factor * ops.sequence_mean(log_ratio.detach().abs(), inputs.response_mask)[rows].max()
    return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@mutant(Token)
def logarithm_of_the_other_tokens(self, inputs):
    before = ops.log_probs(inputs) - ops.log_ratio(inputs)
    result, others = Token.__call__(self, inputs), torch.log1p(-before.detach().exp())
    return dataclasses.replace(result, objective=result.objective * (others / others))


@mutant(Token)
def another_rule_without_a_gradient(self, inputs):
    result = Token.__call__(self, inputs)
    return result if inputs.log_probs.requires_grad else dataclasses.replace(result, objective=result.objective * 2)


@mutant(correct.EntropyGate)
def entropy_of_the_whole_row(self, inputs):
    mean = inputs.old_entropy.mean(-1, keepdim=True).expand_as(inputs.old_entropy)
    return correct.EntropyGate.__call__(self, dataclasses.replace(inputs, old_entropy=mean))


@mutant(Token)
def late_tokens_are_reversed(self, inputs):
    result = Token.__call__(self, inputs)
    late = ops.positions(inputs.response_mask) > 3000
    return dataclasses.replace(result, objective=torch.where(late, -result.objective, result.objective))


@register
class TargetsAnother(Adaptive):
    """Returns another kind of rule when asked for a clip fraction."""

    name = "targets-another"

    def targeting(self, clip_fraction):
        return Mean(width=0.05)
