"""Laws of every advantage estimator and every mismatch correction."""

from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from rlzoo import Advantage, UserError
from rlzoo.advantages import ESTIMATORS, BatchNorm, PassAtK, Raw
from rlzoo.config.sections import MismatchConfig
from rlzoo.corrections import CORRECTIONS

SIZE = 32  # responses per prompt: enough for pass@32
GROUPS = torch.arange(3).repeat_interleave(SIZE)


def rewards_of(kind, seed=0):
    rng = torch.Generator().manual_seed(seed)
    if kind == "binary":
        return torch.randint(0, 2, (3 * SIZE,), generator=rng).float()
    return torch.randn(3 * SIZE, generator=rng)


def test_every_name_has_an_estimator_and_the_other_way():
    assert list(ESTIMATORS) == list(get_args(Advantage))


@pytest.fixture(params=ESTIMATORS.values(), ids=list(ESTIMATORS))
def estimator(request):
    return request.param


@pytest.mark.parametrize("kind", ["binary", "real"])
def test_advantages_are_finite_float32_columns(estimator, kind):
    got = estimator(rewards_of(kind), GROUPS)
    assert (got.shape, got.dtype) == ((3 * SIZE, 1), torch.float32)
    assert got.isfinite().all()


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -1e6, 1e30])
def test_equal_rewards_have_no_advantage(estimator, value):
    if not isinstance(estimator, Raw):
        assert (estimator(torch.full((3 * SIZE,), value), GROUPS) == 0).all()


def test_advantages_follow_their_rows(estimator):
    rewards, order = rewards_of("real"), torch.randperm(3 * SIZE, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(estimator(rewards[order], GROUPS[order]), estimator(rewards, GROUPS)[order])


def test_a_prompt_knows_nothing_of_another(estimator):
    rewards = rewards_of("real")
    changed = torch.where(GROUPS == 0, rewards, 7 * rewards + 3)
    same = torch.equal(estimator(rewards, GROUPS)[:SIZE], estimator(changed, GROUPS)[:SIZE])
    assert same is not isinstance(estimator, BatchNorm)


def test_of_two_responses_to_one_prompt_the_better_has_the_larger_advantage(estimator):
    rewards, got = rewards_of("real").abs(), estimator(rewards_of("real").abs(), GROUPS)[:, 0]
    for group in range(3):
        rows = (group == GROUPS).nonzero()[:, 0]
        ordered = got[rows][rewards[rows].argsort()]
        assert (ordered.diff() >= 0).all()
        assert isinstance(estimator, PassAtK) or (ordered.diff() > 0).all()


def test_too_small_a_group_is_zero_or_refused(estimator):
    one, alone = torch.ones(1), torch.zeros(1, dtype=torch.long)
    if estimator.min_group_size == 1 or estimator.takes_one:
        assert estimator(one, alone).isfinite().all()
    else:
        with pytest.raises(UserError, match=f"at least {estimator.min_group_size} responses per prompt, not 1"):
            estimator(one, alone)


def test_estimators_are_frozen_and_bounded():
    with pytest.raises(ValidationError):
        PassAtK(k=1)
    with pytest.raises(ValidationError):
        PassAtK(k=2).k = 3
    assert PassAtK(k=4) == ESTIMATORS["pass@4"]
    assert PassAtK(k=4).name == "pass@4"


def cases():
    for name, kind in CORRECTIONS.items():
        for pool in ("token", "sum", "mean") if "pool" in kind.model_fields else ("token",):
            yield pytest.param(MismatchConfig(correction=name, pool=pool).build(), id=f"{name}-{pool}")


@pytest.mark.parametrize("correction", list(cases()))
def test_a_correction_weighs_agreement_by_one_and_ignores_the_padding(correction):
    mask = torch.arange(6) < torch.tensor([[6], [3], [1]])
    mask[0, 2] = False  # a hole
    weights = correction(torch.where(mask, 0.0, 50.0), mask)
    assert weights.dtype == torch.float32
    assert weights.shape == (mask.shape if correction.is_per_token else (3, 1))
    assert (weights == 1).all()


@pytest.mark.parametrize("correction", list(cases()))
def test_a_correction_stays_finite_and_never_turns_the_gradient(correction):
    mask = torch.ones(4, 2000, dtype=torch.bool)
    weights = correction(torch.tensor([[50.0], [-50.0], [0.01], [-0.01]]).expand(4, 2000), mask)
    assert weights.isfinite().all()
    assert (weights >= 0).all()


def test_no_correction_is_none():
    assert MismatchConfig().build() is None
