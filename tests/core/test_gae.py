"""Generalised advantage estimation and its value targets against a float64 oracle, and numbers worked by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from rlzoo_advantages import GAE

from rlzoo import AdvantageInputs, UserError, load_zoo
from rlzoo.testing import ADVANTAGE_LAWS
from tests import gae_oracle


def episodes(seed, number=12, size=40):
    """Return ragged responses with holes and one to five turns; a third is cut off, and one response has no tokens."""
    rng = np.random.default_rng(seed)
    mask, turns = np.zeros((number, size), bool), np.full((number, size), -1)
    for row in range(1, number):
        place = 0
        for turn in range(row % 5 + 1):
            end = min(size, place + int(rng.integers(1, 8)))
            mask[row, place:end], turns[row, place:end] = True, turn
            place = end + int(rng.integers(1, 4))
    uniform = torch.from_numpy(rng.normal(size=(3, number, size)))
    return AdvantageInputs(
        torch.from_numpy(rng.normal(size=(number, 1))),
        torch.arange(number)[:, None],
        torch.from_numpy(mask),
        torch.from_numpy(turns),
        values=uniform[0],
        token_rewards=uniform[1] if seed % 2 else None,
        last_values=uniform[2, :, :1],
        finished=torch.arange(number)[:, None] % 3 > 0,
    )


SETTINGS = {
    "plain": {},
    "discounted": {"gamma": 0.9, "lam": 0.7},
    "one step": {"lam": 0.0},
    "rewards alone": {"lam": 1.0},
    "growing": {"lam_alpha": 0.3},
    "two lambdas": {"lam": 0.5, "lam_returns": 1.0},
    "bootstrapped": {"bootstrap_truncated": True, "gamma": 0.9},
}


@pytest.mark.parametrize("time_step", ["token", "turn"])
@pytest.mark.parametrize("name", SETTINGS)
def test_advantages_and_targets_equal_the_oracle(name, time_step):
    for seed, whiten in itertools.product(range(4), (False, True)):
        inputs, settings = episodes(seed), {**SETTINGS[name], "time_step": time_step, "whiten": whiten}
        estimator, mask = GAE(**settings), inputs.response_mask
        arrays = [inputs.rewards[:, 0], inputs.values, inputs.last_values[:, 0], inputs.finished[:, 0], mask, inputs.turn_ids]
        paid = None if inputs.token_rewards is None else inputs.token_rewards.numpy()
        expected = gae_oracle.gae(*(array.numpy() for array in arrays), paid, **settings)
        noise = torch.where(mask, inputs.values, torch.nan)  # what masked positions hold is not read
        answers = estimator(dataclasses.replace(inputs, values=noise)), estimator.value_targets(inputs)
        for got, wanted in zip(answers, expected, strict=True):
            torch.testing.assert_close(got, torch.from_numpy(wanted).float(), rtol=1e-6, atol=1e-6)


def by_hand(**settings):
    # two turns of two tokens with one token of the environment between them; the reward is 1
    mask = torch.tensor([[True, True, False, True, True]])
    inputs = AdvantageInputs(
        torch.ones(1, 1),
        torch.zeros(1, 1, dtype=torch.long),
        mask,
        torch.tensor([[0, 0, -1, 1, 1]]),
        values=torch.tensor([[0.5, 0.25, 9.0, 0.75, 0.5]]),
        last_values=torch.full((1, 1), 0.9),
        finished=torch.zeros(1, 1, dtype=torch.bool),
    )
    estimator = GAE(whiten=False, **settings)
    return estimator(inputs)[mask].tolist(), estimator.value_targets(inputs)[mask].tolist()


def test_values_worked_by_hand():
    # deltas: .25 - .5, .75 - .25, .5 - .75, 1 - .5 = -.25, .5, -.25, .5; with lambda .5, from the end: .5, 0, .5, 0
    assert by_hand(lam=0.5) == ([0.0, 0.5, 0.0, 0.5], [0.5, 0.75, 0.75, 1.0])
    assert by_hand(lam=0.5, lam_returns=1.0)[1] == [1.0, 1.0, 1.0, 1.0]
    # alpha L = .5 * 4 gives lambda .5; alpha L = .2 * 4 is below 1 and gives 0
    assert by_hand(lam_alpha=0.5) == by_hand(lam=0.5)
    assert by_hand(lam_alpha=0.2) == by_hand(lam=0.0)
    # the value .9 replaces the reward of 1
    assert by_hand(lam=0.0, bootstrap_truncated=True)[0] == pytest.approx([-0.25, 0.5, -0.25, 0.4])
    # turns: V = .5 and .75, deltas .25 and .25
    assert by_hand(lam=1.0, time_step="turn") == ([0.5, 0.5, 0.25, 0.25], [1.0, 1.0, 1.0, 1.0])


def test_whitening_uses_the_tokens_of_the_batch_alone():
    inputs = episodes(1)
    whitened = GAE()(inputs)[inputs.response_mask].double()
    assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(whitened.std()) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(GAE().value_targets(inputs), GAE(whiten=False).value_targets(inputs), rtol=0, atol=0)
    alone = inputs.select(torch.tensor([1])).mapped(lambda values: values[:, :1])
    assert GAE()(alone).tolist() == [[0.0]]  # one token has no standard deviation


@pytest.mark.parametrize("settings", [{"whiten": False}, {"whiten": False, "time_step": "turn"}])
def test_without_whitening_prompts_are_independent(settings):
    (law,) = (law for law in ADVANTAGE_LAWS if law.name == "prompts_are_independent")
    law(GAE(**settings))


def test_an_estimator_with_values_says_what_the_critic_learns():
    silent = type("Silent", (GAE,), {"name": "silent", "targets": load_zoo().advantages["raw"].targets, "__doc__": "."})
    assert "does not implement `targets`" in load_zoo().advantages.problem(silent)
    with pytest.raises(UserError, match="advantage 'gae' needs finished, which this run does not have"):
        GAE()(dataclasses.replace(episodes(0), finished=None))
