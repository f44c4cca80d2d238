"""Metrics of steps and of whole runs, keyed by their MLflow names."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

import torch

from rlzoo.config.sections import RewardConfig
from rlzoo.core.fairness import NUM_BINS, bin_edges, bin_index
from rlzoo.core.policy import ClipPolicy
from rlzoo.core.reductions import kl_estimate
from rlzoo.learner.batch import AdvantageBatch, Batch, ScoredBatch
from rlzoo.learner.critic import CriticUpdate
from rlzoo.learner.learner import Update
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.response_table import ResponseTable
from rlzoo.measure.turns import TurnProfile
from rlzoo.rollout.rollouts import Sampled
from rlzoo.rollout.types import RolloutGroup
from rlzoo.training.mismatch import mismatch_metrics
from rlzoo.training.run import Run


class Stopwatch:
    """Times the parts of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._started = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Record the time since the previous lap in seconds."""
        now = time.perf_counter()
        self.laps[f"time/{name}"], self._last = now - self._last, now

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return the time of each lap in seconds and the number of tokens per second over all laps."""
        tokens = int(batch.lengths.sum())
        return {**self.laps, "throughput/tokens_per_second": tokens / (self._last - self._started)}


def step_metrics(run: Run, sampled: Sampled, batch: AdvantageBatch, updates: Sequence[Update]) -> dict[str, float]:
    """Compute the metrics of one step. `AfterStep` adds the evaluation metrics.

    Args:
        run: the run.
        sampled: the responses of the step.
        batch: the same responses, as scored by the learner.
        updates: the optimizer steps of the step.
    """
    config, policy = run.config, run.learner.policy
    metrics = rollout_metrics(sampled.groups) | episode_metrics(sampled.groups) | reward_metrics(batch, config.reward)
    metrics |= update_metrics(updates, with_kl=config.learner.kl_coef > 0)
    metrics |= policy_settings(policy, config.clip)
    metrics |= critic_metrics(batch, run.learner.critic.updates) if run.learner.critic is not None else {}
    if isinstance(batch, ScoredBatch) and "rollout_log_probs" not in sampled.unknown:
        metrics |= mismatch_metrics(batch)
    if "finished" in sampled.unknown:
        del metrics["response/truncated"]
    metrics["reward/failed"] = sampled.failed
    if config.rollout.dynamic_sampling:
        metrics |= {"rollout/rounds": float(sampled.num_rounds), "rollout/dropped_groups": float(sampled.num_dropped)}
    if (band := config.rollout.band) is not None:
        metrics["rollout/measured"] = float(len(run.rollouts.measured))
        metrics["rollout/in_band"] = fmean([band[0] <= mean <= band[1] for mean, _ in run.rollouts.measured.values()] or [0.0])
    if config.rollout.max_staleness:
        versions = [rollout.versions or (rollout.policy_version,) for group in sampled.groups for rollout in group.rollouts]
        metrics["rollout/staleness"] = sampled.learner_version - sum(map(fmean, versions)) / len(versions)
        metrics["rollout/staleness_max"] = float(sampled.learner_version - min(map(min, versions)))
    return metrics


def clip_metrics(table: ResponseTable, with_kl: bool) -> dict[str, float]:
    """Compute clip, fairness and ratio metrics over the updates of one step."""
    num_tokens = float(table.length.sum())
    mean = float(table.token_log_ratio_sum.sum()) / num_tokens
    metrics = {
        "ratio/mu_token": mean,
        "ratio/sigma_token": max(0.0, float(table.token_log_ratio_squared.sum()) / num_tokens - mean**2) ** 0.5,
        "ratio/log_ratio_min": float(table.token_log_ratio_min.min()),
        "ratio/log_ratio_max": float(table.token_log_ratio_max.max()),
        "learner/entropy": float(table.entropy_sum.sum()) / num_tokens,
    }
    if with_kl:
        metrics["learner/kl_ref"] = float(table.kl_sum.sum()) / num_tokens
    profile = LengthProfile.of(table)
    if profile is None:
        return metrics
    rows = table.judged()
    turns = TurnProfile.of(table)
    metrics |= turns.metrics() if turns else {}
    fractions = {
        "clip/fraction_low": float(rows.clipped_low.mean()),
        "clip/fraction_high": float(rows.clipped_high.mean()),
        "clip/fraction_dual": float(rows.clipped_dual.mean()),
        "clip/fraction_limited": float(rows.limited.mean()),
    }
    return metrics | profile.metrics() | fractions | band_metrics(rows, profile)


def episode_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Compute the episode metrics of a rollout batch. The result is empty if every response is a single turn."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not any(rollout.turns or rollout.failure for rollout in rollouts):
        return {}
    turns = torch.tensor([len(rollout.turns) for rollout in rollouts], dtype=torch.float64)
    tokens = sum(len(rollout.response_ids) for rollout in rollouts)
    metrics = {
        "env/turns_mean": float(turns.mean()),
        "env/turns_p95": float(turns.quantile(0.95)),
        "env/failed": sum(bool(rollout.failure) for rollout in rollouts) / len(rollouts),
        "env/token_share": 1 - sum(rollout.length for rollout in rollouts) / max(tokens, 1),
    }
    graded = [rollout for rollout in rollouts if rollout.reward is not None]
    for k in range(NUM_BINS):
        turns_k = [rollout.turns[k] for rollout in rollouts if len(rollout.turns) > k]
        if turns_k:
            metrics[f"response/length_turn_{k + 1}"] = sum(turn.end - turn.start for turn in turns_k) / len(turns_k)
        rewards_k = [rollout.turns[k].reward for rollout in graded if len(rollout.turns) > k]
        paid = [reward for reward in rewards_k if reward is not None]
        if paid:
            metrics[f"reward/turn_{k + 1}"] = sum(paid) / len(paid)
    edges = bin_edges(turns)
    index = bin_index(turns, edges)
    for k in range(NUM_BINS):
        metrics[f"env/num_turns_bin_{k}_edge"] = float(edges[k + 1])
        inside = [rollout for rollout, place in zip(rollouts, index.tolist(), strict=True) if place == k]
        rewards = [rollout.reward for rollout in inside if rollout.reward is not None]
        for name, values in (("reward/", rewards), ("response/length_", [rollout.length for rollout in inside])):
            if values:
                metrics[f"{name}num_turns_bin_{k}"] = fmean(values)
    for name in sorted({name for rollout in rollouts for name in rollout.numbers}):
        numbers = [rollout.numbers[name] for rollout in rollouts if name in rollout.numbers]
        metrics[f"env/{name}"] = sum(numbers) / len(numbers)
    return metrics


def band_metrics(rows: ResponseTable, profile: LengthProfile) -> dict[str, float]:
    """Compute the mean edges of the band in each length bin. A rule may have no band or only one edge."""
    index = bin_index(rows.length, torch.tensor(profile.edges))
    return {
        f"clip/band_{side}_length_bin_{k}": float(edge[index == k].mean())
        for side, edge in (("low", rows.band_low), ("high", rows.band_high))
        for k in range(NUM_BINS)
        if bool((index == k).any()) and bool(edge.isfinite().all())
    }


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Compute reward and response metrics of a rollout batch."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = torch.tensor([rollout.reward for rollout in rollouts if rollout.reward is not None], dtype=torch.float64)
    lengths = torch.tensor([rollout.length for rollout in rollouts], dtype=torch.float64)
    same = [not group.is_mixed for group in groups]
    graded = {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std(correction=0))} if len(rewards) else {}
    names = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    for name in names:
        parts = [rollout.reward_parts[name] for rollout in rollouts if rollout.reward is not None]
        graded[f"reward/parts/{name}"] = fmean(parts)
    return graded | {
        "reward/zero_std_groups": sum(same) / len(same),
        "response/length_mean": float(lengths.mean()),
        "response/length_p05": float(lengths.quantile(0.05)),
        "response/length_p95": float(lengths.quantile(0.95)),
        "response/truncated": sum(not rollout.finished for rollout in rollouts) / len(rollouts),
    }


def reward_metrics(batch: AdvantageBatch, settings: RewardConfig) -> dict[str, float]:
    """Compute one step's metrics for shaped rewards and for the KL to the reference model, where the run uses them."""
    metrics: dict[str, float] = {}
    if settings.overlong_buffer > 0:
        metrics |= {"reward/shaped_mean": float(batch.rewards.double().nanmean())} if batch.graded.any() else {}
    if isinstance(batch, ScoredBatch) and batch.ref_log_probs is not None:
        kl = kl_estimate(batch.old_log_probs, batch.ref_log_probs, "k1")
        metrics["reward/kl"] = float(kl[batch.response_mask].double().mean())
    return metrics


def update_metrics(updates: Sequence[Update], *, with_kl: bool) -> dict[str, float]:
    """Compute learner and clip metrics over the updates of one step. A step without updates counts as skipped."""
    if not updates:
        return {"learner/skipped": 1.0}
    minibatches, count = [update.minibatch for update in updates], len(updates)
    table = ResponseTable.concat([minibatch.table for minibatch in minibatches])
    objective = sum(minibatch.objective for minibatch in minibatches) / count
    names = minibatches[0].rule_metrics
    rule_metrics = {f"rule/{name}": sum(minibatch.rule_metrics[name] for minibatch in minibatches) / count for name in names}
    learner_metrics = {
        "learner/objective": objective,
        "learner/loss": -objective,
        "learner/grad_norm": sum(update.grad_norm for update in updates) / count,
        "learner/grad_clipped": sum(update.grad_clipped for update in updates) / count,
        "learner/lr": updates[-1].lr,
        "learner/nonfinite": sum(update.nonfinite for update in updates) / count,
        "learner/skipped": sum(update.skipped for update in updates) / count,
    }
    return clip_metrics(table, with_kl) | learner_metrics | rule_metrics


def critic_metrics(batch: AdvantageBatch, updates: Sequence[CriticUpdate]) -> dict[str, float]:
    """Compute the critic's metrics over its updates in one step and measure how well its values predict the value targets.

    The explained variance, 1 - var(target - value) / var(target), is computed over all tokens, over the first tokens of the
    responses, over the last tokens, and over the tokens of each length bin. It is omitted where all targets are equal.
    """
    metrics = {
        f"critic/{name}": fmean(getattr(update, name) for update in updates)
        for name in (("loss", "grad_norm", "nonfinite") if updates else ())
    }
    mask = batch.response_mask & batch.graded[:, None]
    if batch.values is None or batch.value_targets is None or not mask.any():
        return metrics
    place, size = mask.cumsum(-1), mask.sum(-1, keepdim=True)
    index = bin_index(batch.lengths, bin_edges(batch.lengths))[:, None]
    tokens = {"": mask, "_first": mask & (place == 1), "_last": mask & (place == size)}
    tokens |= {f"_length_bin_{k}": mask & (index == k) for k in range(NUM_BINS)}
    for name, chosen in tokens.items():
        targets, values = batch.value_targets[chosen].double(), batch.values[chosen].double()
        if len(targets) and (spread := float(targets.var(correction=0))) > 0:
            metrics[f"critic/explained_variance{name}"] = 1 - float((targets - values).var(correction=0)) / spread
    return metrics


def policy_settings(policy: ClipPolicy, configured: ClipPolicy) -> dict[str, float]:
    """Return the settings that an adaptive rule has changed so far, with their current values."""
    before = configured.model_dump()
    return {
        f"clip/setting_{name}": float(value)
        for name, value in policy.model_dump().items()
        if value != before[name] and isinstance(value, int | float)
    }


def run_metrics(
    accuracies: Sequence[float], recent: Collection[Mapping[str, float]], profile: LengthProfile | None
) -> dict[str, float]:
    """Compute the metrics of a whole run, rounded to four significant digits.

    Runs are compared by these metrics, because the metrics of individual steps are too noisy.

    Args:
        accuracies: the results of all evaluations.
        recent: the metrics of the final steps, over which rewards and lengths are averaged.
        profile: the pooled length profile over the final steps.
    """
    metrics = {"accuracy": accuracies[-1], "gain": accuracies[-1] - accuracies[0]} if accuracies else {}
    for name, source in {"reward": "reward/mean", "response_length": "response/length_mean"}.items():
        values = [row[source] for row in recent if source in row]
        if values:
            metrics[name] = sum(values) / len(values)
    if profile is not None:
        pooled = profile.metrics()
        names = ("clip/fraction", "fairness/ess", *(name for name in pooled if name.startswith("fairness/lre_")))
        metrics |= {name.replace("clip/", "clip_").removeprefix("fairness/"): pooled[name] for name in names}
        by_length = {f"clip_by_length_{k}": f"clip/fraction_length_bin_{k}" for k in range(NUM_BINS)}
        metrics |= {name: pooled[source] for name, source in by_length.items() if source in pooled}
    return {name: float(f"{value:.4g}") for name, value in metrics.items()}
