"""Every advantage estimator and every correction obeys its laws, with all settings that change its form."""

import dataclasses

import pytest
import torch
from pydantic import ValidationError
from rlzoo_advantages import GroupNorm, PassAtK, Process
from rlzoo_corrections import LengthFair

from rlzoo import AdvantageInputs, UserError, load_zoo, ops
from rlzoo.testing import ADVANTAGE_LAWS, CORRECTION_LAWS, check
from tests.estimates import estimator, weigh

ZOO = load_zoo()
ESTIMATORS = [
    *(kind() for kind in ZOO.advantages.values()),
    *(ZOO.advantages.build("advantage", alias) for alias in ZOO.advantages.aliases),
]
CORRECTIONS = [
    kind(**({"pool": pool} if pool else {}))
    for kind in ZOO.corrections.values()
    for pool in (("token", "sum", "mean") if "pool" in kind.model_fields else (None,))
]


@pytest.mark.parametrize("law", ADVANTAGE_LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("component", ESTIMATORS, ids=repr)
def test_an_estimator_keeps_the_law(component, law):
    if law.name in component.exempt:
        with pytest.raises(AssertionError):
            law(component)
    else:
        law(component)


@pytest.mark.parametrize("law", CORRECTION_LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("component", CORRECTIONS, ids=repr)
def test_a_correction_keeps_the_law(component, law):
    assert not component.exempt
    law(component)


def estimators_with_a_mistake():
    def mistake(law, estimate):
        wrong = type("Wrong", (GroupNorm,), {"estimate": estimate, "__module__": __name__})
        return pytest.param(wrong(), law, id=law)

    def by_row(self, inputs):
        return plain(self, inputs) * torch.arange(len(inputs.rewards))[:, None]

    plain = GroupNorm.estimate
    yield mistake("advantages_have_the_form", lambda self, inputs: plain(self, inputs)[:, 0])
    yield mistake("inputs_are_not_changed", lambda self, inputs: inputs.group_ids.add_(1) * 0 + plain(self, inputs))
    yield mistake("equal_rewards_have_no_advantage", lambda self, inputs: inputs.rewards)
    yield mistake(
        "advantages_follow_their_rows", lambda self, inputs: plain(self, inputs) * torch.arange(len(inputs.rewards))[:, None]
    )
    yield mistake("prompts_are_independent", lambda self, inputs: inputs.rewards - inputs.rewards.mean())
    yield mistake("the_better_response_has_the_larger_advantage", lambda self, inputs: -plain(self, inputs))
    yield mistake("masked_positions_are_ignored", lambda self, inputs: plain(self, inputs) / inputs.response_mask.shape[1])


def corrections_with_a_mistake():
    def mistake(law, weigh):
        return pytest.param(type("Wrong", (LengthFair,), {"weigh": weigh, "__module__": __name__})(), law, id=law)

    yield mistake("weights_have_the_form", lambda self, inputs: inputs.log_ratio)
    yield mistake("agreement_weighs_one", lambda self, inputs: 0.5 * LengthFair.weigh(self, inputs))
    yield mistake(
        "masked_positions_are_ignored",
        lambda self, inputs: (inputs.old_log_probs - inputs.rollout_log_probs).sum(-1, keepdim=True).exp(),
    )
    yield mistake(
        "weights_follow_their_rows",
        lambda self, inputs: (ops.lengths(inputs.response_mask) * 0 + inputs.log_ratio.mean()).exp(),
    )
    yield mistake("weights_have_the_form", lambda self, inputs: ops.sequence_sum(inputs.log_ratio, inputs.response_mask).exp())
    yield mistake("it_corrects_something", lambda self, inputs: torch.ones_like(inputs.log_ratio[:, :1]))


@pytest.mark.parametrize(("component", "law"), [*estimators_with_a_mistake(), *corrections_with_a_mistake()])
def test_a_mistake_in_an_estimator_or_a_correction_breaks_its_law(component, law):
    assert law in {outcome.law for outcome in check(component) if outcome.status == "fail"}


def test_estimators_are_frozen_and_bounded():
    with pytest.raises(ValidationError):
        PassAtK(k=1)
    with pytest.raises(ValidationError):
        PassAtK(k=2).k = 3
    assert ZOO.advantages.build("clip.advantage", "pass@4") == PassAtK(k=4)
    assert ZOO.advantages.build("clip.advantage", {"name": "pass_at_k", "k": 4}) == PassAtK(k=4)


@pytest.mark.parametrize("component", ESTIMATORS, ids=repr)
def test_a_group_that_is_too_small_gives_zero_or_is_refused(component):
    mask = torch.ones(1, 2, dtype=torch.bool)
    ones, zeros = torch.ones(1, 1), torch.zeros(1, 2, dtype=torch.long)
    paid = torch.ones(1, 2) if component.takes_token_rewards else None
    inputs = AdvantageInputs(ones, zeros[:, :1], mask, zeros, paid, zeros, reward_parts={"all": ones})
    inputs = dataclasses.replace(inputs, old_log_probs=-mask.float(), ref_log_probs=-2 * mask.float())
    inputs = dataclasses.replace(inputs, values=mask.float() / 2, last_values=ones, finished=ones.bool())
    if component.min_group_size == 1 or component.takes_one:
        assert component(inputs).isfinite().all()
    else:
        with pytest.raises(UserError, match=f"at least {component.min_group_size} responses per prompt, not 1"):
            component(inputs)


def test_process_rewards_worked_by_hand():
    # one group; steps end at tokens 2 and 4 of the first response, at 1 of the second; the reward is on the last token
    paid = torch.tensor([[0.0, 1.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    rewards, groups = torch.tensor([2.0, 0.0]), torch.zeros(2, dtype=torch.long)
    # steps 1, 2, 3, 0: mean 1.5, deviations -.5, .5, 1.5, -1.5, std sqrt(5 / 3) = 1.29099
    unit = 1 / 1.2909944
    expected = [[0.0, 0.0, 0.5, 0.5], [0.0, -1.5, 0.0, 0.0]]
    got = estimator("process")(rewards, groups, paid, mask)
    torch.testing.assert_close(got, torch.tensor(expected) * unit, rtol=1e-4, atol=1e-5)
    assert Process().paper == "arXiv 2402.03300"


def test_turns_from_one_state_are_compared_worked_by_hand():
    # two episodes of one prompt with two turns of one token; both begin in state 5, the second turns in states 6 and 7
    mask = torch.ones(2, 2, dtype=torch.bool)
    turns, states = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[5, 6], [5, 7]])
    rewards, groups = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long)
    paid = torch.tensor([[0.0, 0.0], [0.5, 0.0]])
    got = estimator({"name": "gigpo", "discount": 0.5, "weight": 2.0})(
        rewards, groups, paid, mask, turn_ids=turns, state_ids=states
    )
    # episodes 1 and .5: +-.25; the first turns return 0 + .5 * 1 and .5, which are equal; the second turns are alone
    torch.testing.assert_close(got, torch.tensor([[0.25, 0.25], [-0.25, -0.25]]))
    paid = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    got = estimator({"name": "gigpo", "discount": 0.5, "weight": 2.0})(
        rewards, groups, paid, mask, turn_ids=turns, state_ids=states
    )
    # episodes 1 and 1: 0; first turns .5 and 1: -.25 and +.25, times 2
    torch.testing.assert_close(got, torch.tensor([[-0.5, 0.0], [0.5, 0.0]]))


def test_the_mean_of_episodes_counts_an_episode_of_several_turns_once():
    # three turns with R = 1 and one with R = 0: the mean over episodes is .5; over turns, it would be .75
    mask, turns = torch.tensor([[True, True, True], [True, False, False]]), torch.tensor([[0, 1, 2], [0, 0, 0]])
    rewards, groups, states = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long), torch.tensor([[1, 2, 3], [4, 0, 0]])
    got = estimator("gigpo")(rewards, groups, torch.zeros(2, 3), mask, turn_ids=turns, state_ids=states)
    torch.testing.assert_close(got[mask], torch.tensor([0.5, 0.5, 0.5, -0.5]))


def test_trust_region_and_gate_worked_by_hand():
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    log_ratio = torch.tensor([[0.5, 0.0], [0.03, -0.03], [0.1, 9.0]])
    trm = ZOO.corrections.build("correction", {"name": "trm", "max_divergence": 0.1, "mean_divergence": None})
    # .5^2 / 2 = .125 is above .1; .03^2 / 2 and .1^2 / 2 are below, and the masked 9 is not read
    assert weigh(trm, log_ratio, mask).tolist() == [[0.0], [1.0], [1.0]]
    mean = ZOO.corrections.build("correction", {"name": "trm", "max_divergence": None, "mean_divergence": 0.001})
    # means of e^l - 1 - l: (.14872 + 0) / 2, about .00045, and .00517
    assert weigh(mean, log_ratio, mask).tolist() == [[0.0], [1.0], [0.0]]
    gate = ZOO.corrections.build("correction", "tv_gate")
    # mean |rho - 1|: .324 is above .2; token 1 pushes further if A > 0, token 2 has log rho = 0 and pushes nowhere
    up = weigh(gate, log_ratio, mask, torch.ones(3, 1))
    torch.testing.assert_close(up[0], torch.tensor([0.0, 1.0]))
    down = weigh(gate, log_ratio, mask, -torch.ones(3, 1))
    torch.testing.assert_close(down[0], torch.tensor([0.5, 0.0]).exp())
