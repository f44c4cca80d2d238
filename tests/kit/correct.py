"""Correct rules, written as an outside author would write them; the kit must accept all of them."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from rlzoo import Advantage, ClipBand, ClipPolicy, ClipResult, Reduction, Width, ops

NEVER_CLIPS: dict[str, str] = {"clipped_means_no_gradient": "nothing is ever clipped"}


class Token(ClipPolicy):
    """PPO's clip on every token's ratio."""

    name, paper, scope = "token", "none", "token"

    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low")
    clip_high: Annotated[float, Width()] = Field(0.2, gt=0, le=100, description="the ratio stays below 1 + clip_high")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


class DualClip(Token):
    """PPO's clip with a ceiling for A < 0."""

    name = "dual-clip"
    dual_clip: float = Field(3.0, gt=1, le=100, description="largest ratio where A < 0")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.clip_low, self.clip_high, self.dual_clip, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


class Mean(ClipPolicy):
    """A band on the mean log-ratio of a response."""

    name, paper, scope = "mean", "none", "sequence"

    width: Annotated[float, Width()] = Field(0.05, gt=0, le=10, description="half-width of the band")

    def __call__(self, inputs):
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        edge = torch.full_like(log_ratio.detach(), self.width)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


class Root(ClipPolicy):
    """A band on the summed log-ratio that grows with the square root of the length."""

    name, paper, scope = "root", "none", "sequence"

    width: Annotated[float, Width()] = Field(0.03, gt=0, le=10, description="half-width of the band per sqrt(token)")

    def __call__(self, inputs):
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        edge = self.width * ops.lengths(inputs.response_mask).sqrt()
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


class PlainGradient(ClipPolicy):
    """The plain policy gradient, without a ratio."""

    name, paper, scope = "plain-gradient", "none", "token"
    exempt: ClassVar = NEVER_CLIPS

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs).detach()
        objective = inputs.advantages.detach().float() * ops.log_probs(inputs)
        return ClipResult(objective, log_ratio, torch.zeros_like(log_ratio, dtype=torch.bool))


class LogRatioTimesAdvantage(ClipPolicy):
    """The log-ratio times the advantage, without detaching the advantage."""

    name, paper, scope = "log-ratio", "none", "token"

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        objective = log_ratio * inputs.advantages
        return ClipResult(objective, log_ratio.detach(), torch.zeros_like(log_ratio, dtype=torch.bool))


class Weighted(ClipPolicy):
    """The policy gradient, weighted by the ratio up to a cap."""

    name, paper, scope = "weighted", "none", "token"
    exempt: ClassVar = {"clipped_means_no_gradient": "a capped token keeps its gradient"}

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    cap: Annotated[float, Width()] = Field(1.3, gt=0, le=100, description="largest weight")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs).detach()
        ratio = ops.limited_exp(log_ratio)
        clipped = (inputs.advantages > 0) & (ratio > self.cap)
        objective = ratio.clamp(max=self.cap) * inputs.advantages.detach().float() * ops.log_probs(inputs)
        return ClipResult(objective, log_ratio, clipped)


class Parabola(ClipPolicy):
    """A quadratic penalty that reverses the gradient where PPO would cut it."""

    name, paper, scope = "parabola", "none", "token"
    exempt: ClassVar = {"clipped_means_no_gradient": "the gradient turns round and is never cut"}

    width: Annotated[float, Width()] = Field(0.2, gt=0, le=100, description="distance of the ratio from 1 at the peak")

    def __call__(self, inputs):
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        ratio = ops.limited_exp(log_ratio)
        moved = ratio.detach() - 1
        turned = ((advantages > 0) & (moved > self.width)) | ((advantages < 0) & (moved < -self.width))
        objective = ratio * advantages - advantages.abs() / (2 * self.width) * (ratio - 1).square()
        return ClipResult(objective, log_ratio.detach(), turned)


class Shared(ClipPolicy):
    """A band whose edge is a multiple of the step's mean distance, like batch rules."""

    name, paper, scope = "shared", "none", "batch"

    reduction: Reduction = Field("token_mean", description="how the objective is reduced to a scalar")
    factor: Annotated[float, Width()] = Field(1.5, gt=0, le=100, description="the edge, in mean distances from 1")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        edge = self.factor * ops.step_mean(log_ratio.detach().abs(), inputs.response_mask)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


class GroupBand(ClipPolicy):
    """A band on the difference between the mean log-ratios of a response and its group."""

    name, paper, scope = "group-band", "none", "batch"
    needs = frozenset({"group_ids"})

    width: Annotated[float, Width()] = Field(0.05, gt=0, le=10, description="half-width of the band")

    def __call__(self, inputs):
        mean = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        spread = ops.group_mean(mean.detach().square(), inputs.group_ids).sqrt()
        edge = self.width + spread
        return ops.clipped_surrogate(mean, inputs.advantages, ClipBand(low=-edge, high=edge))


class Adaptive(Mean):
    """A band that follows a clip fraction."""

    name = "adaptive"
    target: float = Field(0.2, gt=0, lt=1, description="share of the responses to clip")
    rate: float = Field(0.5, ge=0, le=10, description="step of the logarithm of the width")

    def updated(self, stats):
        count = float(stats.num_responses.sum())
        if count == 0:
            return self
        error = float(stats.num_clipped.sum()) / count - self.target
        width = self.width * float(torch.tensor(self.rate * error).exp())
        return self.replace(width=min(max(width, 1e-4), 10.0))


class Kind(Token):
    """A setting that is a word and contains "int"."""

    name = "kind"
    measure: Literal["interval", "point"] = Field("interval", description="what the band is about")


class Optional(ClipPolicy):
    """A width that may be null and is null."""

    name, paper, scope = "optional", "none", "sequence"

    width: Annotated[float | None, Width()] = Field(None, gt=0, le=10, description="half-width of the band; null for none")

    def __call__(self, inputs):
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        if self.width is None:
            return ops.clipped_surrogate(log_ratio, inputs.advantages, band=None)
        edge = torch.full_like(log_ratio.detach(), self.width)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


class OneSide(Token):
    """Two widths, one of which is null: no ceiling for A < 0."""

    name = "one-side"
    dual: Annotated[float | None, Width()] = Field(None, gt=1, le=100, description="largest ratio where A < 0; null for none")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.clip_low, self.clip_high, self.dual, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


class Soft(ClipPolicy):
    """A weight that fades with the ratio and is never zero."""

    name, paper, scope = "soft", "none", "token"
    exempt: ClassVar = {"clipped_means_no_gradient": "the weight fades and is never cut"}

    advantage: Advantage = Field("group_mean", description="how a group's rewards become advantages")
    softness: float = Field(2.0, gt=0, le=100, description="how soon the weight fades")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        weight = (-self.softness * log_ratio.detach().abs().clamp(max=ops.LOG_RATIO_LIMIT)).exp()
        objective = weight * inputs.advantages.detach().float() * ops.log_probs(inputs)
        return ClipResult(objective, log_ratio.detach(), torch.zeros_like(log_ratio, dtype=torch.bool))


class Textbook(Token):
    """PPO as in textbooks, without `ops`."""

    name = "textbook"

    def __call__(self, inputs):
        moved = torch.where(inputs.response_mask, inputs.log_probs.float() - inputs.old_log_probs.detach().float(), 0.0)
        ratio, advantages = moved.clamp(-20, 20).exp(), inputs.advantages.detach().float()
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        objective = torch.minimum(ratio * advantages, bounded * advantages)
        above = (advantages > 0) & (ratio > 1 + self.clip_high)
        below = (advantages < 0) & (ratio < 1 - self.clip_low)
        return ClipResult(objective, moved.detach(), above | below)


class Penalised(Token):
    """PPO's clip with a penalty on the divergence from the old policy."""

    name = "penalised"
    learns_without_advantages = True
    exempt: ClassVar = {
        "zero_advantage_zero_gradient": "the penalty acts whatever the advantage",
        "clipped_means_no_gradient": "the penalty acts beyond the band, too",
    }

    def __call__(self, inputs):
        result, log_ratio = super().__call__(inputs), ops.log_ratio(inputs)
        penalty = ops.limited_exp(-log_ratio) - 1 + log_ratio
        return ClipResult(result.objective - 0.1 * penalty, result.log_ratio, result.clipped, result.band)


def undetached(inputs, before):
    """Return the masked difference of log-probabilities, without detaching; the engine's other inputs have no gradient."""
    mask = inputs.response_mask
    return torch.where(mask, inputs.log_probs.float(), 0.0) - torch.where(mask, before.float(), 0.0)


class Undetached(Token):
    """PPO's clip on a difference that is not detached, times advantages that are not detached."""

    name = "undetached"

    def __call__(self, inputs):
        log_ratio = undetached(inputs, inputs.old_log_probs)
        ratio = log_ratio.clamp(-20, 20).exp()
        objective = torch.minimum(
            ratio * inputs.advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * inputs.advantages
        )
        above = (inputs.advantages > 0) & (ratio > 1 + self.clip_high)
        below = (inputs.advantages < 0) & (ratio < 1 - self.clip_low)
        return ClipResult(objective, log_ratio.detach(), above | below)


class ToTheSampler(Token):
    """PPO's clip on the ratio to the sampler, or to the old model for tokens without sampler log-probs."""

    name = "to-the-sampler"
    ratio_to_sampler = True

    def __call__(self, inputs):
        before = inputs.old_log_probs if inputs.rollout_log_probs is None else inputs.rollout_log_probs
        log_ratio = undetached(inputs, before)
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


class Corrected(Token):
    """PPO's clip, with each token weighted by the capped ratio of the old model to the sampler."""

    name = "corrected"
    ratio_to_sampler = True
    cap: float = Field(2.0, gt=0, le=1e6, description="largest weight")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        weight = (log_ratio.detach() - ops.log_ratio(inputs, against="rollout").detach()).neg()
        weight = ops.limited_exp(weight).clamp(max=self.cap)
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, weight * inputs.advantages, band)


class Gate(ClipPolicy):
    """A weight that halves at a width and never cuts."""

    name, paper, scope = "gate", "none", "token"
    exempt: ClassVar = {"clipped_means_no_gradient": "the weight fades and is never cut"}

    width: Annotated[float, Width()] = Field(0.3, gt=0, le=100, description="log-ratio at which the weight is one half")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        weight = 1 / (1 + (log_ratio.detach() / self.width).square())
        objective = weight * ops.limited_exp(log_ratio) * inputs.advantages.float()
        return ClipResult(objective, log_ratio.detach(), torch.zeros_like(inputs.response_mask))


class Turns(Token):
    """PPO's clip on the mean log-ratio of a turn; each token has its own gradient."""

    name = "turns"
    needs = frozenset({"turn_ids"})

    def __call__(self, inputs):
        token = ops.log_ratio(inputs)
        log_ratio = ops.turn_mean(token.detach(), inputs.turn_ids) + token - token.detach()
        return ops.clipped_surrogate(
            log_ratio, inputs.advantages, ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        )


class Prefix(ClipPolicy):
    """The ratio up to each token, in a band that grows with the square root of its position."""

    name, paper, scope = "prefix", "none", "token"

    width: Annotated[float, Width()] = Field(0.1, gt=0, le=10, description="half-width per root of the place")

    def __call__(self, inputs):
        token = ops.log_ratio(inputs)
        log_ratio = ops.prefix_sum(token.detach(), inputs.response_mask) + token - token.detach()
        edge = self.width * ops.positions(inputs.response_mask).sqrt()
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


class Pooled(ClipPolicy):
    """The log-ratio of a response, pooled as a setting selects, with a ceiling that may be null."""

    name, paper, scope = "pooled", "none", "sequence"

    pool: Literal["mean", "sum"] = Field("mean", description="how the tokens' log-ratios become one")
    width: Annotated[float, Width()] = Field(0.05, gt=0, le=10, description="half-width of the band")
    ceiling: Annotated[float | None, Width()] = Field(
        None, gt=0, le=100, description="log-ratio cut where A < 0; null for none"
    )

    def __call__(self, inputs):
        pooled = {"mean": ops.sequence_mean, "sum": ops.sequence_sum}[self.pool]
        log_ratio = pooled(ops.log_ratio(inputs), inputs.response_mask)
        edge = torch.full_like(log_ratio.detach(), self.width)
        ceiling = None if self.ceiling is None else torch.full_like(edge, self.ceiling)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge, ceiling=ceiling))


class Drawn(Token):
    """PPO's clip, except for a tenth of the cut tokens, drawn by the seed."""

    name, scope = "drawn", "batch"
    exempt: ClassVar = {
        "row_order_changes_nothing": "the draw goes by the place in the batch",
        "only_cuts_outward": "the tokens that are left alone are drawn again in every call",
    }

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        cut = ops.clipped_surrogate(log_ratio, inputs.advantages, band)
        free = ops.clipped_surrogate(log_ratio, inputs.advantages, band=None)
        generator = torch.Generator().manual_seed(inputs.seed)
        places = (cut.clipped & inputs.response_mask).nonzero()
        chosen = places[(torch.rand(len(places), generator=generator) < 0.1).to(places.device)]
        spared = torch.zeros_like(cut.clipped).index_put(tuple(chosen.T), torch.tensor(True, device=places.device))
        return ClipResult(torch.where(spared, free.objective, cut.objective), log_ratio.detach(), cut.clipped & ~spared)


class EntropyGate(Token):
    """PPO's clip in a band that is twice as wide where the model was undecided."""

    name = "entropy-gate"
    needs = frozenset({"old_entropy"})
    threshold: float = Field(0.7, ge=0, le=20, description="entropy above which the band is wider, in nats")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        factor = torch.where(inputs.old_entropy > self.threshold, 2.0, 1.0)
        return ops.clipped_surrogate(
            log_ratio, inputs.advantages, ClipBand(low=-self.clip_low * factor, high=self.clip_high * factor)
        )


class RewardGate(Token):
    """PPO's clip, with a ceiling that is lower for responses with a small reward."""

    name = "reward-gate"
    needs = frozenset({"rewards"})
    least: float = Field(0.5, ge=-1e6, le=1e6, description="reward below which the ceiling is halved")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        high = torch.where(inputs.rewards < self.least, self.clip_high / 2, self.clip_high)
        low = torch.full_like(high, -self.clip_low)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=low, high=high))


class TurnCut(ClipPolicy):
    """Cuts the response if any of its turns moved too far in the direction of the advantage."""

    name, paper, scope = "turn-cut", "none", "sequence"
    needs = frozenset({"turn_ids"})
    exempt: ClassVar = {"only_cuts_outward": "a single turn may move outward while the response moves inward"}

    width: Annotated[float, Width()] = Field(0.3, gt=0, le=100, description="largest mean log-ratio of a turn")

    def __call__(self, inputs):
        token = ops.log_ratio(inputs)
        log_ratio, side = ops.sequence_mean(token, inputs.response_mask), inputs.advantages.detach().sign()
        far = ops.turn_mean(token.detach(), inputs.turn_ids) * side > self.width
        clipped = (far & inputs.response_mask).any(-1, keepdim=True)
        objective = torch.where(clipped, log_ratio.detach(), log_ratio).clamp(-20, 20).exp() * inputs.advantages.float()
        return ClipResult(objective, log_ratio.detach(), clipped)


class AnyTurn(Token):
    """Drops every token of a response if any of its turns moved too far, whatever the direction."""

    name = "any-turn"
    needs = frozenset({"turn_ids"})
    exempt: ClassVar = {"only_cuts_outward": "the cut does not depend on the direction"}

    def __call__(self, inputs):
        token = ops.log_ratio(inputs)
        moved = ops.turn_mean(token.detach(), inputs.turn_ids)
        far = ((moved > self.clip_high) | (moved < -self.clip_low)).any(-1, keepdim=True).expand_as(token)
        objective = torch.where(far, 0.0, ops.limited_exp(token) * inputs.advantages.float())
        return ClipResult(objective, token.detach(), far & (inputs.advantages != 0))


class Annealed(ClipPolicy):
    """A band that narrows while the run progresses."""

    name, paper, scope = "annealed", "none", "token"
    needs = frozenset({"progress"})

    width: Annotated[float, Width()] = Field(0.3, gt=0, le=10, description="half-width of the band at the start")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        edge = torch.full_like(log_ratio.detach(), self.width * (1 - 0.5 * inputs.progress))
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


class Tanh(ClipPolicy):
    """A hyperbolic tangent of the log-ratio, which saturates in float32."""

    name, paper, scope = "tanh", "none", "token"
    exempt: ClassVar = {"clipped_means_no_gradient": "the gradient fades and is never cut"}

    width: Annotated[float, Width()] = Field(0.1, gt=0, le=100, description="log-ratio at which the gradient has faded")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        objective = inputs.advantages.detach().float() * self.width * torch.tanh(log_ratio / self.width)
        return ClipResult(objective, log_ratio.detach(), torch.zeros_like(log_ratio, dtype=torch.bool))


class TanhWithoutAnExemption(Tanh):
    """The same as `Tanh`, with a fixed width and without opting out."""

    name = "tanh-without-an-exemption"
    exempt: ClassVar = {}
    width: float = Field(0.5, gt=0, le=100, description="log-ratio at which the gradient has faded")


class Hinge(ClipPolicy):
    """A hinge on the log-ratio: linear up to a margin, and flat beyond it."""

    name, paper, scope = "hinge", "none", "token"

    margin: Annotated[float, Width()] = Field(0.2, gt=0, le=100, description="log-ratio at which the hinge bends")

    def __call__(self, inputs):
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        room = self.margin * advantages.abs() - advantages * log_ratio
        clipped = (room < 0) & (advantages != 0)
        return ClipResult(-torch.relu(room), log_ratio.detach(), clipped)


class HardAndSoft(ClipPolicy):
    """A hard edge where A > 0, and a weight that fades where A < 0."""

    name, paper, scope = "hard-and-soft", "none", "token"
    exempt: ClassVar = {"clipped_means_no_gradient": "the weight fades where A < 0"}

    width: Annotated[float, Width()] = Field(0.2, gt=0, le=100, description="edge where A > 0, and scale of the decay")

    def __call__(self, inputs):
        log_ratio, advantages = ops.log_ratio(inputs), inputs.advantages.detach().float()
        cut = (advantages > 0) & (log_ratio.detach() > self.width)
        fading = (-(log_ratio.detach() / self.width).square()).exp()
        weight = torch.where(cut, 0.0, torch.where(advantages < 0, fading, 1.0))
        return ClipResult(weight * advantages * ops.log_probs(inputs), log_ratio.detach(), cut)


class Ranked(ClipPolicy):
    """Cuts the tenth of a response's tokens that moved furthest in the direction of the advantage."""

    name, paper, scope = "ranked", "none", "token"

    share: float = Field(0.9, gt=0, lt=1, description="share of the tokens that is kept")

    def __call__(self, inputs):
        log_ratio, mask = ops.log_ratio(inputs), inputs.response_mask
        outward = log_ratio.detach() * inputs.advantages.detach().sign()
        order = torch.where(mask, outward, torch.inf).sort(dim=-1).values
        rank = torch.searchsorted(order, outward) / ops.lengths(mask)
        cut = (rank >= self.share) & (outward > 0) & mask
        objective = torch.where(cut, log_ratio.detach(), log_ratio).clamp(-20, 20).exp() * inputs.advantages.float()
        return ClipResult(objective, log_ratio.detach(), cut)


class Quantile(ClipPolicy):
    """A band whose edge is a quantile of the step's log-ratios."""

    name, paper, scope = "quantile", "none", "batch"

    share: float = Field(0.8, gt=0, lt=1, description="quantile of the absolute log-ratios")

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        edge = log_ratio.detach().abs().masked_fill(~inputs.response_mask, torch.nan).flatten().nanquantile(self.share)
        edge = torch.where(edge.isnan(), 0.0, edge)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


class ByAdvantage(Mean):
    """A band that is wider for larger advantages."""

    name = "by-advantage"
    exempt: ClassVar = {"advantages_scale_the_gradient": "the band grows with the advantage"}

    def __call__(self, inputs):
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        edge = self.width * (1 + inputs.advantages.detach().float().abs()).sqrt()
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


class LongAndShort(ClipPolicy):
    """A band with one width for short responses and another one for long responses."""

    name, paper, scope = "long-and-short", "none", "sequence"

    short: Annotated[float, Width()] = Field(0.05, gt=0, le=10, description="half-width up to the limit")
    long: Annotated[float, Width()] = Field(0.02, gt=0, le=10, description="half-width beyond the limit")
    limit: int = Field(16, ge=1, le=1_000_000, description="number of tokens of the longest short response")

    def __call__(self, inputs):
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        edge = torch.where(ops.lengths(inputs.response_mask) > self.limit, self.long, self.short)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


class Masked(Token):
    """PPO's clip without the tokens whose probability differs too much between the trainer and the sampler."""

    name = "masked"
    ratio_to_sampler = True
    factor: float = Field(2.0, gt=1, le=1e6, description="largest ratio between the two probabilities")

    def __call__(self, inputs):
        result = super().__call__(inputs)
        gap = (ops.log_ratio(inputs, against="rollout") - ops.log_ratio(inputs)).detach()
        dropped = (gap.exp() > self.factor) | (gap.exp() < 1 / self.factor)
        objective = torch.where(dropped, 0.0, result.objective)
        return ClipResult(objective, result.log_ratio, result.clipped | dropped & (inputs.advantages != 0))


class Unfinished(Token):
    """PPO's clip with half the width for responses that were cut off at a limit."""

    name = "unfinished"
    needs = frozenset({"finished", "max_length"})

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        share = ops.positions(inputs.response_mask) / inputs.max_length
        factor = torch.where(inputs.finished, 1.0, 0.5) * (1 - 0.2 * share)
        return ops.clipped_surrogate(
            log_ratio, inputs.advantages, ClipBand(low=-self.clip_low * factor, high=self.clip_high * factor)
        )


class Anchored(Token):
    """PPO's clip with a wider band where the old model is close to the reference."""

    name = "anchored"
    needs = frozenset({"ref_log_probs"})

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        drift = (ops.log_probs(inputs) - log_ratio).detach() - torch.where(inputs.response_mask, inputs.ref_log_probs, 0.0)
        factor = torch.where(drift.abs() < 0.1, 2.0, 1.0)
        return ops.clipped_surrogate(
            log_ratio, inputs.advantages, ClipBand(low=-self.clip_low * factor, high=self.clip_high * factor)
        )


class Odds(ClipPolicy):
    """Twice the logarithm of one plus the ratio, which never cuts; reports the largest ratio."""

    name, paper, scope = "odds", "none", "token"
    exempt: ClassVar = {"clipped_means_no_gradient": "nothing is ever cut"}

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        objective = 2 * inputs.advantages.detach().float() * torch.nn.functional.softplus(log_ratio)
        largest = torch.where(inputs.response_mask, log_ratio.detach(), -torch.inf).amax(-1, keepdim=True)
        largest = ops.limited_exp(largest)
        return ClipResult(
            objective, log_ratio.detach(), torch.zeros_like(inputs.response_mask), metrics={"largest_ratio": largest}
        )


class Binary(Token):
    """Cuts tokens by the divergence between the probabilities of the token and of all others."""

    name = "binary"
    width: Annotated[float, Width()] = Field(0.02, gt=0, le=100, description="largest divergence in nats")
    clip_low: float = Field(0.2, gt=0, lt=1, description="not used")
    clip_high: float = Field(0.2, gt=0, le=100, description="not used")

    def __call__(self, inputs):
        log_ratio, now = ops.log_ratio(inputs), ops.log_probs(inputs).detach()
        before = now - log_ratio.detach()
        others = (1 - before.exp()) * (torch.log(1 - before.exp() + 1e-6) - torch.log(1 - now.exp() + 1e-6))
        divergence = others - before.exp() * log_ratio.detach()
        cut = (inputs.advantages * log_ratio.detach() > 0) & (divergence > self.width)
        objective = torch.where(cut, 0.0, ops.limited_exp(log_ratio) * inputs.advantages.float())
        return ClipResult(objective, log_ratio.detach(), cut)


CORRECT = (
    Token, DualClip, Mean, Root, PlainGradient, LogRatioTimesAdvantage, Weighted, Parabola, Shared, GroupBand, Adaptive,
    Kind, Optional, OneSide, Soft, Textbook, Penalised, Undetached, ToTheSampler, Corrected, Gate, Turns, Prefix, Pooled,
    Drawn, EntropyGate, RewardGate, TurnCut, AnyTurn, Annealed, Tanh, TanhWithoutAnExemption, Hinge, HardAndSoft, Ranked,
    Quantile, ByAdvantage, LongAndShort, Masked, Unfinished, Anchored, Odds, Binary,
)  # fmt: skip
