"""Which names of the zoo are the same rule, as docs/reference/comparison.md counts them."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

from rlzoo import load_zoo
from rlzoo.core.reductions import StepCounts, reduce_objective
from rlzoo.testing.data import clip_stats, evaluate, fresh, off_policy_inputs, ragged_inputs

ROOT = Path(__file__).resolve().parents[2]
SPREADS = [0.0005, 0.003, 0.03, 0.3, 1.0]
SAME = {  # names that do not count: their settings and reduction, and the older rule with the same gradient
    "gspo-token": ({}, "sequence_mean", "gspo", {}, "sequence_mean"),
    "opd": ({}, "token_mean", "cispo", {"clip_high": 1e6}, "token_mean"),
}


def gradient(policy, reduction, spread):
    """Return the loss's gradient on 48 responses with one advantage each, several turns and this spread of log-ratios."""
    inputs = fresh(ragged_inputs(policy, spread, seed=round(1e4 * spread), num_responses=48))
    log_probs = inputs.log_probs.clamp_(max=-0.01).requires_grad_()
    objective = policy(inputs).objective
    max_length = inputs.response_mask.shape[1]
    loss = reduce_objective(objective, inputs.response_mask, reduction, StepCounts.of(inputs.response_mask), max_length)
    return torch.autograd.grad(loss, log_probs)[0].double()


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", SAME)
def test_a_name_that_is_not_counted_has_the_gradient_of_an_older_rule(name, spread):
    settings, reduction, older, older_settings, older_reduction = SAME[name]
    got = gradient(load_zoo()[name](**settings), reduction, spread)
    expected = gradient(load_zoo()[older](**older_settings), older_reduction, spread)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
    assert expected.isfinite().all()
    assert expected.any()


def test_no_two_counted_names_have_the_same_gradient():
    rules = {name: policy() for name, policy in load_zoo().items() if name not in SAME}
    inputs = off_policy_inputs(rules["fspo-adaptive"])  # it equals FSPO until its first update
    rules["fspo-adaptive"] = rules["fspo-adaptive"].updated(clip_stats(inputs, evaluate(rules["fspo-adaptive"], inputs)[0]))
    gradients = {name: [gradient(rule, rule.reduction, spread).flatten() for spread in SPREADS] for name, rule in rules.items()}
    for first, second in itertools.combinations(gradients, 2):
        pairs = zip(gradients[first], gradients[second], strict=True)
        assert min(cosine_similarity(one, other, dim=0).item() for one, other in pairs) < 1 - 1e-6, (first, second)


@pytest.mark.parametrize("page", ["README.md", "docs/reference/comparison.md"])
def test_the_pages_state_the_number_of_rules_and_names(page):
    numbers = re.findall(r"(\d+)(?:\s+distinct\s+rules)?\s+under\s+(\d+)\s+names", (ROOT / page).read_text())
    assert numbers
    assert set(numbers) == {(str(len(load_zoo()) - len(SAME)), str(len(load_zoo())))}
