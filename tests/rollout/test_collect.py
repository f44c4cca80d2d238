"""Dynamic sampling: groups with equal rewards are replaced, and the batch keeps its size."""

import pytest
import torch

from rlzoo.rollout.rollouts import collect, sampled_mean
from rlzoo.rollout.types import Rollout, RolloutGroup
from rlzoo.tasks.problem import Problem


def group(name, *rewards):
    return RolloutGroup(Problem(name, ""), tuple(Rollout((1,), (2,), (0.0,), "", True, 0, reward) for reward in rewards))


def rounds(*texts):
    """Return a sampler of the given rounds: capitals are groups whose rewards differ, small letters have equal rewards."""

    def sample(turn):
        return [group(name, 1.0, 0.0 if name.isupper() else 1.0) for name in texts[turn]]

    return sample


@pytest.mark.parametrize(
    ("texts", "extra", "kept", "num_rounds", "num_dropped"),
    [
        (["aBc"], 0, "aBc", 1, 0),  # off: the first round unchanged
        (["ABC", "DEF"], 2, "ABC", 1, 0),
        (["aBc", "DeF", "GHI"], 2, "BDF", 2, 3),
        (["aBC", "DEF"], 2, "BCD", 2, 1),  # E and F are surplus
        (["aBc", "deF", "ghi"], 2, "BFa", 3, 6),  # seven equal groups, one of which fills the batch
        (["abc", "def"], 1, "abc", 2, 3),
    ],
)
def test_groups_of_equal_rewards_are_replaced_within_the_bound(texts, extra, kept, num_rounds, num_dropped):
    batch = collect(rounds(*texts), 3, extra)
    assert "".join(group.problem.question for group in batch.groups) == kept
    assert (batch.num_rounds, batch.num_dropped) == (num_rounds, num_dropped)


def test_the_sampling_error_excludes_the_variance_between_problems():
    # two problems with the rewards 1, 0 and 1, 1: variances 1/2 and 0, of their means 1/4 and 0, of the mean of both 1/16
    assert sampled_mean(torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double()) == {"eval/accuracy": 0.75, "eval/accuracy_se": 0.25}
    # one response each: the variance of all rewards, 1/4, over four
    assert sampled_mean(torch.tensor([[1.0], [0.0], [1.0], [0.0]]).double())["eval/accuracy_se"] == pytest.approx(0.25)
    # a problem with one response: of its own variance nothing is known, so it is that of all three responses, 1/6
    ragged = sampled_mean([torch.tensor([1.0, 0.0]), torch.tensor([0.5])])
    assert ragged == pytest.approx({"eval/accuracy": 0.5, "eval/accuracy_se": ((0.5 / 2 + 0.5 / 3) / 4) ** 0.5})


def test_the_sampling_error_matches_repeated_evaluations():
    rng = torch.Generator().manual_seed(0)
    chance = torch.rand(50, 1, generator=rng).double()
    drawn = (torch.rand(2000, 50, 4, generator=rng) < chance).double()
    errors = torch.tensor([sampled_mean(rewards)["eval/accuracy_se"] for rewards in drawn[:200]])
    assert float(errors.mean()) == pytest.approx(float(drawn.mean((1, 2)).std()), rel=0.05)
