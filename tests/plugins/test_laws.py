"""Every installed policy obeys the laws; exemptions and failures are shown."""

from typing import ClassVar

import pytest

from rlzoo import RunConfig, load_zoo, testing
from rlzoo.config.composition import config_names, read_config
from tests.kit.mutants import MUTANTS
from tests.rules import few

OVERLAYS = [name for name in config_names() if "per_clip" not in read_config(name) and "model" not in read_config(name)]


@pytest.mark.parametrize("name", [*load_zoo(), *few([f"--config {name}" for name in OVERLAYS], 3)])
def test_bundled_policies_and_overlays_keep_the_laws(name):
    zoo = load_zoo()
    policy = zoo[name]() if name in zoo else RunConfig.compose([name.removeprefix("--config ")]).clip
    failed = [outcome for outcome in testing.check(policy) if outcome.status == "fail"]
    assert not failed


def mutant(name):
    return next(rule for rule in MUTANTS if rule.name == name)


def outcomes(policy):
    return {outcome.law: outcome for outcome in testing.check(policy)}


def test_a_rule_that_opts_out_of_a_law_shows_its_reason():
    class Excused(mutant("penalty-where-the-advantage-is-zero")):
        exempt: ClassVar = {"zero_advantage_zero_gradient": "adds a penalty"}

    outcome = outcomes(Excused())["zero_advantage_zero_gradient"]
    assert (outcome.status, outcome.detail) == ("opted out", "adds a penalty")


def test_a_failure_is_shown_on_the_smallest_input():
    outcome = outcomes(mutant("negated")())["ratio_one_is_reinforce"]
    assert outcome.status == "fail"
    assert outcome.inputs.log_probs.shape == (1, 1)  # the sign is wrong for any single token
    outcome = outcomes(mutant("baseline-of-the-batch")())["rows_are_independent"]
    assert outcome.inputs.log_probs.shape == (2, 1)  # one row depends on another
