"""Estimators and corrections by name, called with plain tensors."""

import torch

from rlzoo import AdvantageInputs, CorrectionInputs, load_zoo


def estimator(settings):
    """Return a function of rewards and groups, ``(B,)`` each, and optionally of token rewards and a mask."""
    built = load_zoo().advantages.build("clip.advantage", settings)

    def estimate(rewards, groups, token_rewards=None, mask=None, **more):
        mask = torch.ones(len(rewards), 1, dtype=torch.bool) if mask is None else mask
        return built(AdvantageInputs(rewards[:, None], groups[:, None], mask, token_rewards=token_rewards, **more))

    return estimate


def correction(name, **settings):
    """Return the correction with this name."""
    return load_zoo().corrections.build("correction", {"name": name, **settings})


def weigh(correction, log_ratio, mask, advantages=None):
    """Return the weights for given log-ratios of trainer and sampler, ``(B, T)``."""
    advantages = torch.ones(len(mask), 1) if advantages is None else advantages
    return correction(CorrectionInputs(log_ratio, torch.zeros_like(log_ratio), mask, advantages))
