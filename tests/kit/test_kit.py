"""The conformance kit with rules that are known to be correct, and with rules that are known to be broken."""

import dataclasses
import functools
import warnings

import pytest
import torch

from rlzoo import ClipInputs, ClipPolicy, Reduction, load_zoo, ops, testing
from rlzoo.cli.check import describe
from rlzoo.testing.check import inputs_read, reached
from rlzoo.testing.reach import branches
from tests.kit.correct import CORRECT, Adaptive, Token
from tests.kit.mutants import MUTANTS
from tests.rules import few


def breaks(kind, law):
    """Return whether a rule breaks a law."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other warnings about a broken rule
        policy = kind()
        return law.name not in policy.exempt and law.failure(policy) is not None


@functools.cache
def first_broken(mutant):
    """Return the name of the first law that a mutant breaks, None if it breaks none."""
    return next((law.name for law in testing.LAWS if breaks(mutant, law)), None)


@pytest.mark.parametrize("rule", few(CORRECT, 12), ids=lambda rule: rule.name)
def test_a_correct_rule_is_not_refused(rule):
    failed = {outcome.law: outcome.detail for outcome in testing.check(rule()) if outcome.status == "fail"}
    assert failed == {}


@pytest.mark.long
def test_nineteen_of_twenty_mutants_are_caught():
    escaped = [mutant.name for mutant in MUTANTS if first_broken(mutant) is None]
    assert len(MUTANTS) >= 100
    assert len(escaped) <= len(MUTANTS) / 20, escaped


@pytest.mark.long
def test_each_law_on_behaviour_catches_a_mutant():
    first = set(map(first_broken, MUTANTS))
    others = [law for law in testing.LAWS if law.name not in first]
    assert [law.name for law in others if not any(breaks(mutant, law) for mutant in MUTANTS)] == []


EXPLAINED_BY = {
    "is_pure": [
        "changes-the-advantages",
        "changes-the-mask",
        "draws-at-random",
        "remembers-the-last-call",
        "nothing-to-learn-from",
        "first-call-alone-is-free",
        "advantages-as-a-row",
        "entropy-without-a-need",
    ],
    "answers_in_float32": [
        "answers-in-float64",
        "clipped-as-numbers",
        "metric-of-nothing",
        "metric-only-if-something-is-clipped",
        "metric-with-a-capital",
        "spread-of-a-single-token",  # its edge is NaN
    ],
    "computes_in_float32": [
        "in-float64",
        "subtracts-before-the-cast",
        "log-ratio-rounded",
        "counts-tokens-in-half-precision",
        "counts-tokens-in-a-byte",
    ],
    "runs_on_another_device": ["made-on-the-cpu", "answers-on-the-cpu", "made-on-the-cpu-after-a-look"],
    "draws_follow_the_seed": ["every-seed-draws-the-same"],
    "ratio_is_to_the_old_model": [
        "weight-to-the-sampler-upside-down",
        "cut-by-the-ratio-to-the-sampler",
        "ratio-to-the-sampler-off-ratio-one",
        "says-sampler-and-means-the-old-model",
    ],
    "masked_positions_are_ignored": ["prefix-over-the-padding", "mean-over-the-width", "a-rare-branch-reads-the-padding"],
    "rows_are_independent": ["spread-of-the-whole-batch"],
    "small_batches_stay_finite": ["length-may-be-zero"],
    "rows_weigh_the_same": ["divides-by-the-length-itself"],
    "advantages_scale_the_gradient": ["advantages-limited-far-out", "advantage-squared"],
    "log_ratio_rises_with_log_probs": ["prefix-without-the-token", "ratio-less-one-for-the-log-ratio", "log-ratio-reversed"],
    "every_need_matters": ["turns-are-not-told-apart", "later-turns-are-one"],
    "widths_scale": ["one-side-is-no-width", "scaled-past-its-bound", "targets-another"],
    "every_width_matters": ["null-is-zero", "one-width-is-ignored"],
    "every_option_keeps_the_laws": ["other-word-upside-down", "switch-fails"],
    "update_is_pure": ["keeps-its-width-elsewhere"],
    "updates_go_by_shares": ["counts-in-place-of-shares"],
    "rollout_log_probs_are_optional": ["crashes-without-rollout-log-probs"],
    "extremes_stay_finite": ["exp-before-the-clamp"],
    "row_order_changes_nothing": ["rows-are-numbered", "groups-by-their-number"],
    "batch_size_changes_nothing": ["divides-a-batch-by-its-tokens"],
    "token_advantages_are_honoured": ["advantages-of-a-row-collapsed"],
    "penalties_are_declared": ["penalty-that-is-not-declared"],
    "clipped_means_no_gradient": ["forgets-to-clip"],
    "clipped_means_held_back": ["capped-and-not-reported"],
    "gradients_follow_the_advantage": ["reported-too-late", "reversed-far-below-ratio-one", "late-tokens-are-reversed"],
    "only_cuts_outward": ["cuts-inward"],
    "band_is_the_one_used": ["band-of-ratios"],
    "updates_pull_back": ["drifts-to-invalid"],
    "updates_keep_the_band_open": ["closes-while-a-sign-is-missing"],
    "every_branch_is_reached": ["a-branch-that-cannot-be-reached", "a-ceiling-in-the-wrong-unit"],
    "names_are_known": ["unknown-estimator", "unknown-law"],
}


@pytest.mark.parametrize(
    ("law", "name"), [pair for law, names in EXPLAINED_BY.items() for pair in few([(law, name) for name in names])]
)
def test_the_law_that_explains_a_defect_fails_first(law, name):
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    assert first_broken(mutant) == law


def test_an_undeclared_ratio_to_the_sampler_is_reported():
    class ToTheSampler(Token):
        name = "to-the-sampler"

        def __call__(self, inputs):
            log_ratio = ops.log_ratio(inputs, against="rollout")
            return ops.clipped_surrogate(log_ratio, inputs.advantages, ops.ratio_band(0.2, 0.2, None, like=log_ratio))

    law = next(law for law in testing.LAWS if law.name == "ratio_is_to_the_old_model")
    with pytest.raises(AssertionError, match="set ratio_to_sampler"):
        law(ToTheSampler())


def test_feedback_in_the_wrong_direction_is_reported():
    class PushesOn(Adaptive):
        name = "pushes-on"

        def updated(self, stats):
            return self.replace(width=max(0.01, self.width * (1.1 - 0.2 * float(stats.num_clipped.sum() > 0))))

    law = next(law for law in testing.LAWS if law.name == "updates_pull_back")
    with pytest.raises(AssertionError, match="does its feedback have the wrong sign"):
        law(PushesOn())


def test_every_law_that_fails_on_an_invalid_shape_names_the_shape():
    class Matrix(Token):
        name = "matrix"

        def __call__(self, inputs):
            result = super().__call__(inputs)
            matrix = result.objective[:, :1] * inputs.advantages.squeeze(-1)
            return dataclasses.replace(
                result, objective=matrix, log_ratio=result.log_ratio[:, :1], clipped=result.clipped[:, :1]
            )

    failed = [outcome for outcome in testing.check(Matrix()) if outcome.status == "fail"]
    assert failed[0].law == "is_pure"
    assert failed[0].detail.startswith("objective has shape (")
    assert not [outcome.detail for outcome in failed if "Error" in outcome.detail]


def test_a_zero_gradient_has_its_own_message():
    class Silent(Token):
        name = "silent"

        def __call__(self, inputs):
            result = super().__call__(inputs)
            return dataclasses.replace(result, objective=torch.where(inputs.advantages > 0, result.objective, 0.0))

    law = next(law for law in testing.LAWS if law.name == "ratio_one_is_reinforce")
    with pytest.raises(AssertionError, match="a response with a nonzero advantage has a zero gradient"):
        law(Silent())


def test_a_failing_example_is_shrunk_to_readable_numbers():
    mutant = next(candidate for candidate in MUTANTS if candidate.name == "cuts-inward")
    outcome = next(candidate for candidate in testing.check(mutant()) if candidate.status == "fail")
    assert outcome.inputs.log_probs.shape == (1, 1)
    for values in (outcome.inputs.log_probs, outcome.inputs.old_log_probs, outcome.inputs.advantages):
        assert (values * 100 - (values * 100).round()).abs().max() < 1e-3  # two digits


def test_an_error_is_reported_with_its_line_and_the_missing_need():
    class Forgetful(Token):
        name = "forgetful"

        def __call__(self, inputs):
            return ops.clipped_surrogate(ops.log_ratio(inputs) * inputs.old_entropy, inputs.advantages, None)

    outcome = next(candidate for candidate in testing.check(Forgetful()) if candidate.status == "fail")
    line = Forgetful.__call__.__code__.co_firstlineno + 1
    assert outcome.detail == (
        "PolicyError: rule 'forgetful' reads inputs.old_entropy, but does not name it in `needs`; "
        f"declare needs = frozenset({{'old_entropy'}}) (test_kit.py line {line})"
    )

    class Misspelt(Token):
        name = "misspelt"

        def __call__(self, inputs):
            return ops.clipped(inputs)

    class Changed(Adaptive):
        name = "changed"

        def updated(self, stats):
            return self.replace(widht=0.1)

    outcome = next(candidate for candidate in testing.check(Changed()) if candidate.status == "fail")
    assert "widht: extra inputs are not permitted" in outcome.detail

    outcome = next(candidate for candidate in testing.check(Misspelt()) if candidate.status == "fail")
    line = Misspelt.__call__.__code__.co_firstlineno + 1
    assert outcome.detail == f"AttributeError: module 'rlzoo.core.ops' has no attribute 'clipped' (test_kit.py line {line})"


def test_every_bundled_rule_has_its_branches_reached():
    passed = {name: reached(rule()) for name, rule in load_zoo().items()}
    assert {name for name, branches in passed.items() if not branches} == {"gpg", "opd"}  # it compares nothing
    unreached = [(name, branch) for name, branches in passed.items() for branch in branches if not branch.reached]
    assert unreached == []


def test_branches_are_counted_on_response_tokens_worked_by_hand():
    # log-ratios .3, .1 and -.3 where A > 0, and -.1 where A < 0; the edges are log 1.2 = .18 and log .8 = -.22
    log_probs = torch.tensor([[-0.7, -0.9, -1.3, 5.0], [-1.1, 5.0, 5.0, 5.0]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    inputs = ClipInputs(log_probs, torch.full((2, 4), -1.0), torch.tensor([[1.0], [-1.0]]), mask)
    counted = [(branch.true, branch.false) for branch in branches(Token(), [inputs])]
    # A > 0, above the edge, and both; A < 0, below the edge, and both; either side
    assert counted == [(1, 1), (1, 3), (1, 3), (1, 1), (1, 3), (0, 4), (1, 3)]


def test_a_failing_law_shows_every_input_that_the_rule_reads():
    class Reverses(Token):
        name = "reverses"
        needs = frozenset({"turn_ids", "progress"})

        def __call__(self, inputs):
            result = super().__call__(inputs)
            turned = (inputs.turn_ids == 1) & (inputs.old_log_probs < -0.2) & (inputs.progress < 1)
            return dataclasses.replace(result, objective=torch.where(turned, -result.objective, result.objective))

    outcome = next(outcome for outcome in testing.check(Reverses()) if outcome.law == "gradients_follow_the_advantage")
    assert outcome.inputs.log_probs.shape == (1, 1)  # shrunk to the token that shows it
    assert set(inputs_read(Reverses(), outcome.inputs)) == {"old_log_probs", "turn_ids", "progress"}
    text = describe(Reverses(), outcome.inputs)
    assert "; turn_ids 1" in text
    assert "; old_log_probs -" in text
    assert text.endswith("\n  progress = 0.5")


def test_a_changed_default_of_a_common_field_keeps_its_description():
    class Summed(Token):
        name = "summed"
        reduction: Reduction = "token_mean"

    assert Summed().reduction == "token_mean"
    assert {outcome.law: outcome.detail for outcome in testing.check(Summed()) if outcome.status == "fail"} == {}
    assert Summed.model_fields["reduction"].description == ClipPolicy.model_fields["reduction"].description
