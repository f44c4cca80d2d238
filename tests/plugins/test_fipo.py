"""FIPO compared with loops in float64: GRPO's clip with advantages weighted by the discounted future log-ratio."""

import math

import numpy as np
import pytest
import torch
from rlzoo_fipo import discounted_future

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing import evaluate
from tests.plugins.closed_form import ClosedForm, closed_form_test

OTHER = {"dual_clip": 1.3, "weight_low": 0.3, "weight_high": 0.5, "half_life": 4.0, "safety": 1.2, "clip_high": 0.1}


def fipo(
    log_probs,
    old_log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=10.0,
    weight_low=0.0,
    weight_high=0.2,
    half_life=32.0,
    safety=10.0,
):
    objective, derivative = np.zeros(mask.shape), np.zeros(mask.shape)
    clipped = np.zeros(mask.shape, dtype=bool)
    cap = math.inf if dual_clip is None else dual_clip
    for b in range(len(mask)):
        tokens = np.flatnonzero(mask[b])
        credit = [advantages[b, 0] if advantages.shape[1] == 1 else advantages[b, t] for t in tokens]
        log_ratio = [log_probs[b, t] - old_log_probs[b, t] for t in tokens]
        for place, t in enumerate(tokens):
            future = 0.0
            for later in range(place, len(tokens)):
                if not (credit[later] < 0 and math.exp(log_ratio[later]) > cap):
                    future += 2 ** (-(later - place) / half_life) * log_ratio[later]
            weight = min(max(math.exp(future), 1 - weight_low), 1 + weight_high)
            advantage, ratio = credit[place], math.exp(log_ratio[place])
            if advantage < 0 and ratio > safety:
                weight = 1.0
            bounded = min(ratio, 1 + clip_high) if advantage > 0 else max(ratio, 1 - clip_low)
            if advantage < 0:
                bounded = min(bounded, cap)
            clipped[b, t] = advantage != 0 and bounded != ratio
            objective[b, t] = bounded * weight * advantage
            derivative[b, t] = 0.0 if clipped[b, t] else objective[b, t]
    return ClosedForm(objective, derivative, clipped)


test_equals_the_closed_form = closed_form_test("fipo", fipo, [{}, OTHER, {"dual_clip": None}])


def test_hand_worked_response():
    # Half-life 1, log-ratios ln 1.1, 0, and after a tool's answer ln 1.21 = 2 ln 1.1: F = 1.5 ln 1.1, ln 1.1, 2 ln 1.1.
    # Weights 1.1^1.5 = 1.1536897, 1.1, 1.2 (1.21 is above the bound). A = 2: 2 x 1.1 x 1.1536897 = 2.5381174, 2 x 1.1 = 2.2,
    # 2 x 1.21 x 1.2 = 2.904.
    ratios = torch.tensor([[1.1, 1.0, 7.0, 1.21]])
    mask = torch.tensor([[True, True, False, True]])
    old = torch.full_like(ratios, -2.0)
    inputs = ClipInputs(old + ratios.log(), old, torch.tensor([[2.0]]), mask)
    result, gradient = evaluate(load_zoo()["fipo"](half_life=1.0), inputs)
    assert result.objective[mask].tolist() == pytest.approx([2.5381174, 2.2, 2.904], rel=1e-5)
    assert gradient[mask].tolist() == pytest.approx([2.5381174, 2.2, 2.904], rel=1e-5)
    assert result.metrics["future_weight"][mask].tolist() == pytest.approx([1.1536897, 1.1, 1.2], rel=1e-5)


def test_a_negative_token_above_the_dual_clip_is_capped_and_excluded_from_the_future():
    # ratios 1.1 and 20, A = -1, half-life 1: the second is left out of F, so f = 1.1 for the first; the second is 10 x 1
    old = torch.full((1, 2), -5.0)
    now = old + torch.tensor([[1.1, 20.0]]).log()
    inputs = ClipInputs(now, old, torch.tensor([[-1.0]]), torch.ones(1, 2, dtype=torch.bool))
    result, gradient = evaluate(load_zoo()["fipo"](half_life=1.0), inputs)
    assert result.objective[0].tolist() == pytest.approx([-1.21, -10.0], rel=1e-5)
    assert gradient[0].tolist() == pytest.approx([-1.21, 0.0], rel=1e-5)


@pytest.mark.parametrize("half_life", [0.5, 32.0, 5000.0])
@pytest.mark.parametrize("length", [1, 2, 7, 600])
def test_the_discounted_future_equals_the_loop(length, half_life):
    rng = torch.Generator().manual_seed(length)
    values, mask = torch.randn(2, length, generator=rng), torch.rand(2, length, generator=rng) < 0.7
    got = discounted_future(values.double(), mask, half_life)
    for b in range(2):
        total = 0.0
        for t in range(length - 1, -1, -1):
            if mask[b, t]:
                total = float(values[b, t]) + 2 ** (-1 / half_life) * total
                assert got[b, t].item() == pytest.approx(total, rel=1e-9)
            else:
                assert got[b, t] == 0
