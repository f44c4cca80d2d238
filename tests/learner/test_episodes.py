"""Learning from actually played episodes: the gradient equals the oracle's, and environment tokens have no gradient."""

import dataclasses

import pytest
import torch
from rlzoo_fspo import FSPO
from rlzoo_grpo import GRPO
from rlzoo_gspo import GSPO
from rlzoo_rloo import RLOO

from rlzoo import ClipInputs
from rlzoo.learner.batch import ScoredBatch, collate
from rlzoo.measure.response_table import ResponseTable
from rlzoo.measure.turns import TurnProfile
from rlzoo.rollout.episodes import Player
from rlzoo.rollout.sampler import HFSampler
from rlzoo.rollout.types import RolloutGroup
from rlzoo.tasks.environments import Host
from rlzoo.tasks.problem import Problem
from rlzoo.training.metrics import episode_metrics, update_metrics
from tests.learner.test_learner import make_learner, oracle_step, relative_error, step_gradient
from tests.off_policy import clip_fraction, make_model
from tests.rollout.test_episodes import ENDS, WIDE
from tests.rollout.test_sampler import tokenizer
from tests.rules import few
from tests.tasks.environments.games import Counting, Words

RULES = [GRPO(), GSPO(), RLOO(), FSPO()]
SPREAD = {"grpo": 0.3, "gspo": 0.005, "rloo": 0.1, "fspo": 0.03}  # nats per token


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def groups(model):
    """Three problems, six episodes each."""
    return played(model, Words, [Problem(f"episode {index}", "") for index in range(3)])


def played(model, game, problems):
    asked = [problem for problem in problems for _ in range(6)]
    sampler = HFSampler(model.eval(), tokenizer("<pad>"), end_ids=ENDS, max_new_tokens=60)
    player = Player(sampler, Host(game, workers=0, timeout=5.0), WIDE)
    rollouts = player.play(asked, [problems.index(problem) for problem in asked], seed=2)
    return [RolloutGroup(problem, tuple(rollouts[6 * n : 6 * n + 6])) for n, problem in enumerate(problems)]


def off_policy(model, policy, groups):
    """Return the batch scored for a rule, with old log-probs far enough from the model's that part of the batch is clipped."""
    scored = make_learner(model, policy).score(collate(groups))
    current = make_learner(model, policy).log_probs(scored)
    noise = torch.randn(current.shape, generator=torch.Generator().manual_seed(0))
    old = torch.where(scored.response_mask, current - SPREAD[policy.name] * noise, 0.0)
    return ScoredBatch.of(scored, old_log_probs=old), current


@pytest.mark.parametrize(
    "settings", few([{"packing": True}, {}, {"max_tokens_per_micro_batch": 40}, {"padding_side": "left"}]), ids=str
)
@pytest.mark.parametrize("policy", RULES, ids=lambda policy: policy.name)
def test_the_gradient_of_played_episodes_equals_the_float64_oracle(model, groups, policy, settings):
    batch, current = off_policy(model, policy, groups)
    holes = batch.response_mask.sum() < sum(len(rollout.response_ids) for group in groups for rollout in group.rollouts)
    assert holes, "the environment wrote some of the tokens"
    assert 0.05 < clip_fraction(policy, ClipInputs(current, batch.old_log_probs, batch.advantages, batch.response_mask)) < 0.9
    value, expected = oracle_step(model, policy, batch)
    gradient, objective = step_gradient(model, policy, batch, **settings)
    assert objective == pytest.approx(value, rel=1e-5, abs=1e-6)  # a sum of terms of both signs
    assert relative_error(gradient.double(), expected) < 1e-5


@pytest.mark.parametrize("policy", RULES, ids=lambda policy: policy.name)
def test_one_environment_token_in_the_mask_is_detected(model, groups, policy):
    batch, _ = off_policy(model, policy, groups)
    _, expected = oracle_step(model, policy, batch)
    row = next(row for row in range(len(batch)) if batch.turn_ids[row].max() > 0 and batch.advantages[row, 0] != 0)
    mask = batch.response_mask.clone()
    place = int((~mask[row]).nonzero()[0, 0])
    mask[row, place] = True
    gradient, _ = step_gradient(model, policy, dataclasses.replace(batch, response_mask=mask))
    assert relative_error(gradient.double(), expected) > 1e-3


def test_an_episode_that_did_not_start_does_not_affect_training(model):
    groups = played(model, Counting, [Problem("good", ""), Problem("no start", ""), Problem("raise", "")])
    policy = GRPO(advantage="raw")
    batch, _ = off_policy(model, policy, groups)
    assert batch.lengths[6:12].tolist() == [0] * 6
    gradient, _ = step_gradient(model, policy, batch)
    assert gradient.isfinite().all()
    assert gradient.any()
    learner = make_learner(model, policy)
    _, updates = learner.update(learner.score(collate(groups)))
    metrics = update_metrics(updates, with_kl=False) | episode_metrics(groups)
    assert all(value == value for value in metrics.values()), "no metric is NaN"
    assert metrics["env/failed"] >= 6 / 18


def test_turns_are_measured(model, groups):
    policy = GRPO()
    learner = make_learner(model, policy, lr=0.05, num_epochs=4)
    _, updates = learner.update(learner.score(collate(groups)))
    metrics = update_metrics(updates, with_kl=False) | episode_metrics(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    second = [rollout.turns[1] for rollout in rollouts if len(rollout.turns) > 1]
    assert metrics["env/turns_mean"] == pytest.approx(sum(len(rollout.turns) for rollout in rollouts) / 18)
    assert metrics["reward/turn_2"] == pytest.approx(sum(turn.reward for turn in second) / len(second))
    assert metrics["response/length_turn_2"] == pytest.approx(sum(turn.end - turn.start for turn in second) / len(second))
    chosen = sum(rollout.length for rollout in rollouts)
    assert metrics["env/token_share"] == pytest.approx(1 - chosen / sum(len(rollout.response_ids) for rollout in rollouts))
    assert {
        "clip/fraction_turn_1",
        "clip/fraction_num_turns_bin_0",
        "clip/num_turns_bin_5_edge",
        "fairness/lre_turn_max",
        "fairness/lre_num_turns_max",
    } <= metrics.keys()
    table = updates[0].minibatch.table
    rows = updates[0].minibatch.rows
    assert table.turn_tokens.sum(1).tolist() == table.length.tolist()
    assert sorted(table.turns.tolist()) == sorted(len(rollouts[row].turns) for row in rows.tolist())


def test_clip_fractions_by_number_of_turns_cover_the_episodes_of_each_bin(model, groups):
    learner = make_learner(model, GRPO(clip_low=1e-4, clip_high=1e-4), lr=0.05, num_epochs=4)
    _, updates = learner.update(learner.score(collate(groups)))
    rows = updates[-1].minibatch.table.judged()
    metrics = TurnProfile.of(rows).metrics()
    edges = [0, *(metrics[f"clip/num_turns_bin_{k}_edge"] for k in range(6))]
    assert edges[6] == rows.turns.max()
    found = 0
    for k in range(6):
        inside = (rows.turns > edges[k]) & (rows.turns <= edges[k + 1])
        assert bool(inside.any()) == (f"clip/fraction_num_turns_bin_{k}" in metrics)
        if inside.any():
            assert metrics[f"clip/fraction_num_turns_bin_{k}"] == pytest.approx(float(rows.clipped[inside].mean()), rel=1e-5)
            found += int(inside.sum())
    assert found == len(rows.turns)


def test_rewards_and_lengths_by_number_of_turns_cover_the_episodes_of_each_bin(groups):
    metrics = episode_metrics(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    edges = [0, *(metrics[f"env/num_turns_bin_{k}_edge"] for k in range(6))]
    found = 0
    for k in range(6):
        inside = [rollout for rollout in rollouts if edges[k] < len(rollout.turns) <= edges[k + 1]]
        assert bool(inside) == (f"reward/num_turns_bin_{k}" in metrics)
        if inside:
            found += len(inside)
            assert metrics[f"reward/num_turns_bin_{k}"] == pytest.approx(sum(each.reward for each in inside) / len(inside))
            length = sum(each.length for each in inside) / len(inside)
            assert metrics[f"response/length_num_turns_bin_{k}"] == pytest.approx(length)
    assert found == len(rollouts)


def test_the_error_by_turn_on_hand_worked_numbers():
    # Two episodes of two turns of 4 tokens, half of the second turn clipped in one: turn 1 keeps all, turn 2 keeps 6 of 8.
    # Mean acceptance 14/16 = 7/8, weights 8/7 and 6/7: both are off by 1/7.
    tokens, clipped = torch.zeros(2, 6), torch.zeros(2, 6)
    tokens[:, :2], clipped[0, 1] = 4.0, 2.0
    columns = {field.name: torch.ones(2) for field in dataclasses.fields(ResponseTable)}
    columns |= {
        "turns": torch.full((2,), 2.0),
        "turn_tokens": tokens,
        "turn_clipped": clipped,
        "clipped": torch.tensor([0.25, 0]),
    }
    metrics = TurnProfile.of(ResponseTable(**columns | {"group": torch.arange(2)})).metrics()
    assert metrics["clip/fraction_turn_1"] == 0
    assert metrics["clip/fraction_turn_2"] == pytest.approx(0.25)
    assert "clip/fraction_turn_3" not in metrics
    assert metrics["fairness/lre_turn_max"] == pytest.approx(1 / 7)
    assert metrics["fairness/lre_turn_mean"] == pytest.approx(1 / 7)
    assert metrics["fairness/lre_turn_max_ci_low"] <= 1 / 7 <= metrics["fairness/lre_turn_max_ci_high"]
