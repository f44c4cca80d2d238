"""The shared code of the integrations: names with settings, errors, turns from a mask, clip counts by length."""

import pytest
import torch

from rlzoo import ClipResult
from rlzoo.core.errors import UserError
from rlzoo.integrations.rules import check_supported, clipped_by_length, one_per_response, parse, rule
from rlzoo.journal.rollout_file import turns


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fspo", ("fspo", {})), ("rlzoo:fspo", ("fspo", {})),
     ("rlzoo:fspo/width_low:0.02/width_high:1e-1", ("fspo", {"width_low": 0.02, "width_high": 0.1})),
     ("grpo/dual_clip:null", ("grpo", {"dual_clip": None})), ("pass@4", ("pass@4", {}))],
)  # fmt: skip
def test_a_name_with_settings_is_split(name, expected):
    assert parse(name) == expected


@pytest.mark.parametrize(
    "name", ["fspo/", "fspo/width_low", "fspo/width_low:", "fspo/:1", "fspo/drift:1/drift:2", "fspo/drift:[1"]
)
def test_an_invalid_setting_is_rejected(name):
    with pytest.raises(UserError, match=r"expected /key:value settings|cannot be read"):
        parse(name)


def test_settings_in_the_name_and_as_keywords_are_equivalent():
    expected = rule("fspo", width_low=0.02, width_high=0.1)
    assert rule("rlzoo:fspo/width_low:0.02/width_high:1e-1") == expected
    assert rule("fspo/width_low:0.3", width_low=0.02, width_high=0.1) == expected


def test_a_field_that_the_trainer_determines_is_rejected():
    with pytest.raises(UserError, match=r"grpo/reduction:token_mean would be ignored; set loss_agg_mode"):
        rule("grpo/reduction:token_mean", {"reduction": "loss_agg_mode"})
    assert rule("grpo/reduction:token_mean").reduction == "token_mean"


def test_rules_that_need_what_a_trainer_does_not_provide_are_rejected():
    check_supported(rule("fspo-turn"), "T", ["turn_ids"])
    with pytest.raises(UserError, match="fspo-turn needs turn_ids, which T does not pass to a loss"):
        check_supported(rule("fspo-turn"), "T")
    with pytest.raises(UserError, match="fspo-adaptive adapts its band after every update, but T keeps no state for it"):
        check_supported(rule("fspo-adaptive"), "T")


def test_a_gap_in_the_mask_begins_a_turn():
    mask = torch.tensor([[0, 1, 1, 0, 0, 1], [1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    assert turns(mask).tolist() == [[-1, 0, 0, -1, -1, 1], [0, -1, 1, -1, 2, 2], [-1] * 6]


def test_values_that_are_equal_in_a_response_become_a_column():
    mask = torch.tensor([[False, True, True], [True, False, False], [False, False, False]])
    values = torch.tensor([[9.0, 2.0, 2.0], [3.0, 8.0, 7.0], [1.0, 5.0, 6.0]])
    column = one_per_response(values, mask, "values")
    assert column[:2].tolist() == [[2.0], [3.0]]
    with pytest.raises(UserError, match="values differ between the tokens of a response"):
        one_per_response(values, torch.ones_like(mask), "values")


def result(clipped):
    zero = torch.zeros(clipped.shape)
    return ClipResult(zero, zero, clipped)


def test_clip_counts_by_length_leave_out_responses_without_an_advantage():
    # 64 and 65 tokens: the first and the second bin; 300: the third; 2 tokens have no advantage
    mask = torch.arange(300) < torch.tensor([64, 65, 300, 2])[:, None]
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [0.0]])
    number, clipped = clipped_by_length(result(torch.tensor([[True], [False], [True], [True]])), advantages, mask)
    assert (number.tolist(), clipped.tolist()) == ([1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0])
    # a token rule's response counts with its share of clipped tokens; masked ones do not count
    cut = torch.zeros(mask.shape, dtype=torch.bool)
    cut[0, :16] = cut[1, 65:] = True
    number, clipped = clipped_by_length(result(cut), advantages, mask)
    assert clipped.tolist() == [0.25, 0, 0, 0, 0, 0]
