"""Every installed policy keeps the ten laws; and the laws catch the policies that break them."""

from typing import ClassVar

import pytest
import torch
from pydantic import Field

from rlzoo import ClipBand, ClipPolicy, load_zoo, ops, testing
from rlzoo.testing import parametrize_with_checks

test_bundled_policies_keep_the_laws = parametrize_with_checks([policy() for policy in load_zoo().values()])


class Bandless(ClipPolicy):
    """A sound sequence rule with a band of +-0.1 on the mean; each broken policy below spoils one thing."""

    name = "bandless"
    paper = "none"
    scope = "sequence"
    exempt: ClassVar = {}

    def __call__(self, inputs):
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        edge = torch.tensor(0.1)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(-edge, edge))


class Unbounded(Bandless):
    width: float = Field(1.0, description="no bound")


class SignFlipped(Bandless):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return type(result)(-result.objective, result.log_ratio, result.clipped)


class MultipliesByMask(Bandless):
    def __call__(self, inputs):
        log_ratio = ((inputs.log_probs - inputs.old_log_probs) * inputs.response_mask).sum(-1, keepdim=True)
        edge = torch.tensor(0.1)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(-edge, edge))


class BatchMean(Bandless):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return type(result)(result.objective - result.objective.mean(), result.log_ratio, result.clipped)


class Penalised(Bandless):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        penalty = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask).square()
        return type(result)(result.objective - penalty, result.log_ratio, result.clipped)


class ExpFirst(Bandless):
    def __call__(self, inputs):
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        ratio, advantages = log_ratio.exp(), inputs.advantages
        objective = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
        clipped = ((advantages > 0) & (ratio > 1.1)) | ((advantages < 0) & (ratio < 0.9))
        return ops.ClipResult(objective, log_ratio.detach(), clipped)


class Half(Bandless):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return type(result)(result.objective.bfloat16(), result.log_ratio, result.clipped)


class GradientThroughOld(Bandless):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return type(result)(result.objective + inputs.old_log_probs.sum(-1, keepdim=True), result.log_ratio, result.clipped)


class ForgetsToClip(Bandless):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        free = ops.clipped_surrogate(
            ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask), inputs.advantages, band=None
        )
        return type(result)(free.objective, result.log_ratio, result.clipped)


class DataDependent(Bandless):
    def __call__(self, inputs):
        if float(inputs.log_probs.sum()) > 0:
            return super().__call__(inputs)
        return super().__call__(inputs)


BROKEN = [
    (Unbounded, testing.settings_are_complete),
    (SignFlipped, testing.ratio_one_is_reinforce),
    (MultipliesByMask, testing.masked_positions_are_ignored),
    (BatchMean, testing.rows_are_independent),
    (Penalised, testing.zero_advantage_zero_gradient),
    (ExpFirst, testing.extremes_stay_finite),
    (Half, testing.answers_in_float32),
    (GradientThroughOld, testing.is_pure),
    (ForgetsToClip, testing.clipped_means_no_gradient),
    (DataDependent, testing.compiles),
]


def test_a_sound_policy_passes_every_law():
    assert [outcome.status for outcome in testing.check(Bandless())] == ["pass"] * 10


@pytest.mark.parametrize(("policy", "law"), BROKEN, ids=lambda case: getattr(case, "__name__", None))
def test_each_law_catches_the_policy_that_breaks_it(policy, law):
    with pytest.raises(Exception):  # noqa: B017, PT011 - a law may fail with whatever the policy raises
        law(policy())


def test_opting_out_of_a_law_shows_its_reason():
    class Excused(Penalised):
        exempt: ClassVar = {"zero_advantage_zero_gradient": "adds a penalty"}

    outcome = next(o for o in testing.check(Excused()) if o.law == "zero_advantage_zero_gradient")
    assert (outcome.status, outcome.detail) == ("opted out", "adds a penalty")
