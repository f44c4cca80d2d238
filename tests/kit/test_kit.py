"""The conformance kit against rules that are known to be correct, and against rules that are known to be broken."""

import warnings
from collections import Counter

import pytest

from rlzoo import ClipPolicy, Reduction, ops, testing
from rlzoo.testing.laws import LawWarning
from tests.kit.correct import CORRECT, Loop, Token
from tests.kit.mutants import MUTANTS

SLOW = "compiles"  # a second per rule, and what it finds is advice


def broken_laws(policy):
    """The names of the laws that a policy breaks, in their order."""
    found = []
    for law in testing.LAWS:
        if law.name != SLOW and law.name not in policy.exempt:
            try:
                law(policy)
            except Exception:  # a law may fail with whatever the policy raises
                found.append(law.name)
    return found


@pytest.fixture(scope="module")
def caught():
    """The laws that each mutant breaks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a broken rule is warned of besides
        return {mutant.name: broken_laws(mutant()) for mutant in MUTANTS}


@pytest.mark.parametrize("rule", CORRECT, ids=lambda rule: rule.name)
def test_a_correct_rule_is_not_refused(rule):
    failed = {outcome.law: outcome.detail for outcome in testing.check(rule()) if outcome.status == "fail"}
    assert failed == {}


def test_a_loop_that_leaves_the_graph_is_advised_against_and_not_refused():
    outcomes = {outcome.law: outcome for outcome in testing.check(Loop())}
    assert outcomes["compiles"].status == "warn"
    assert outcomes["compiles"].detail.startswith("has no one graph and runs uncompiled: ")
    with pytest.warns(LawWarning, match="has no one graph"):
        next(law for law in testing.LAWS if law.name == "compiles")(Loop())


def test_nine_of_ten_mutants_are_caught(caught):
    assert len(caught) == len(MUTANTS) >= 40
    escaped = [name for name, laws in caught.items() if not laws]
    assert len(escaped) <= len(caught) / 10, escaped


def test_each_law_on_behaviour_catches_a_mutant(caught):
    number = Counter(law for laws in caught.values() for law in laws)
    only_warn = {SLOW, "ratio_is_to_the_old_model"}
    assert {law.name for law in testing.LAWS} - set(number) - only_warn == set()


@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        ("changes-the-advantages", "is_pure"),
        ("changes-the-mask", "is_pure"),
        ("draws-at-random", "is_pure"),
        ("remembers-the-last-call", "is_pure"),
        ("nothing-to-learn-from", "is_pure"),
        ("answers-in-float64", "answers_in_float32"),
        ("in-float64", "computes_in_float32"),
        ("subtracts-before-the-cast", "computes_in_float32"),
        ("made-on-the-cpu", "runs_on_another_device"),
        ("answers-on-the-cpu", "runs_on_another_device"),
        ("crashes-without-rollout-log-probs", "rollout_log_probs_are_optional"),
        ("spread-of-a-single-token", "small_batches_stay_finite"),
        ("exp-before-the-clamp", "extremes_stay_finite"),
        ("mean-over-the-width", "padding_changes_nothing"),
        ("rows-are-numbered", "row_order_changes_nothing"),
        ("groups-by-their-number", "row_order_changes_nothing"),
        ("divides-a-batch-by-its-tokens", "batch_size_changes_nothing"),
        ("advantage-squared", "advantages_scale_the_gradient"),
        ("advantages-of-a-row-collapsed", "token_advantages_are_honoured"),
        ("penalty-that-is-not-declared", "penalties_are_declared"),
        ("log-ratio-reversed", "log_ratio_rises_with_log_probs"),
        ("forgets-to-clip", "clipped_means_no_gradient"),
        ("capped-and-not-reported", "clipped_means_held_back"),
        ("reported-too-late", "clipped_means_held_back"),
        ("cuts-inward", "only_cuts_outward"),
        ("band-of-ratios", "band_is_the_one_used"),
        ("one-width-is-ignored", "every_width_matters"),
        ("drifts-to-invalid", "many_updates_stay_valid"),
        ("unknown-estimator", "names_are_known"),
        ("unknown-law", "names_are_known"),
    ],
)
def test_the_law_that_explains_a_defect_is_the_first_one_broken(caught, mutant, law):
    assert caught[mutant][0] == law


def test_a_ratio_to_the_sampler_that_is_not_declared_is_pointed_out():
    class ToTheSampler(Token):
        name = "to-the-sampler"

        def __call__(self, inputs):
            log_ratio = ops.log_ratio(inputs, against="rollout")
            return ops.clipped_surrogate(log_ratio, inputs.advantages, ops.ratio_band(0.2, 0.2, None, like=log_ratio))

    law = next(law for law in testing.LAWS if law.name == "ratio_is_to_the_old_model")
    with pytest.warns(LawWarning, match="set ratio_to_sampler"):
        law(ToTheSampler())


def test_a_failing_example_is_shrunk_to_readable_numbers():
    mutant = next(each for each in MUTANTS if each.name == "cuts-inward")
    outcome = next(each for each in testing.check(mutant()) if each.status == "fail")
    assert outcome.inputs.log_probs.shape == (1, 1)
    for values in (outcome.inputs.log_probs, outcome.inputs.old_log_probs, outcome.inputs.advantages):
        assert (values * 100 - (values * 100).round()).abs().max() < 1e-3  # two digits


def test_an_error_is_told_with_its_line_and_with_the_input_that_is_missing():
    class Forgetful(Token):
        name = "forgetful"

        def __call__(self, inputs):
            return ops.clipped_surrogate(ops.log_ratio(inputs) * inputs.old_entropy, inputs.advantages, None)

    outcome = next(each for each in testing.check(Forgetful()) if each.status == "fail")
    line = Forgetful.__call__.__code__.co_firstlineno + 1
    assert outcome.detail == (
        f"TypeError: unsupported operand type(s) for *: 'Tensor' and 'NoneType' (test_kit.py line {line}); "
        "it reads old_entropy, which only a rule that names it in `needs` is given"
    )

    class Misspelt(Token):
        name = "misspelt"

        def __call__(self, inputs):
            return ops.clipped(inputs)

    outcome = next(each for each in testing.check(Misspelt()) if each.status == "fail")
    line = Misspelt.__call__.__code__.co_firstlineno + 1
    assert outcome.detail == f"AttributeError: module 'rlzoo.ops' has no attribute 'clipped' (test_kit.py line {line})"


def test_another_default_of_a_common_field_keeps_its_description():
    class Summed(Token):
        name = "summed"
        reduction: Reduction = "token_mean"

    assert Summed().reduction == "token_mean"
    assert {outcome.law: outcome.detail for outcome in testing.check(Summed()) if outcome.status == "fail"} == {}
    assert Summed.model_fields["reduction"].description == ClipPolicy.model_fields["reduction"].description
