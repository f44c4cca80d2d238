"""Every installed policy obeys the laws, and the laws catch policies that break them."""

from typing import Annotated, ClassVar

import pytest
import torch
from pydantic import Field

from rlzoo import ClipBand, ClipPolicy, RunConfig, Width, load_zoo, ops, testing
from rlzoo.config.composition import config_names, read_config
from rlzoo.testing import laws, parametrize_with_checks

OVERLAYS = [name for name in config_names() if "per_clip" not in read_config(name) and "model" not in read_config(name)]

test_bundled_policies_keep_the_laws = parametrize_with_checks([policy() for policy in load_zoo().values()])
test_overlays_keep_the_laws = parametrize_with_checks([RunConfig.compose([name]).clip for name in OVERLAYS])


class Bandless(ClipPolicy):
    """A correct sequence rule with a band of +-0.1 on the mean; each broken policy below breaks one thing."""

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


class ReadsThePadding(Bandless):
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


class NarrowsWhenScaled(Bandless):
    width: Annotated[float, Width()] = Field(0.1, gt=0, le=10, description="one over the half-width of the band")

    def __call__(self, inputs):
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        edge = torch.tensor(0.01 / self.width)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(-edge, edge))


class Forgetful(Bandless):
    seen: ClassVar[list[int]] = []

    def updated(self, stats):
        self.seen.append(1)
        return self.replace(advantage="raw" if len(self.seen) % 2 else "group_mean")


BROKEN = [
    (Unbounded, laws.settings_are_complete),
    (SignFlipped, laws.ratio_one_is_reinforce),
    (MultipliesByMask, laws.masked_positions_are_ignored),
    (BatchMean, laws.rows_are_independent),
    (Penalised, laws.zero_advantage_zero_gradient),
    (ExpFirst, laws.extremes_stay_finite),
    (Half, laws.answers_in_float32),
    (ReadsThePadding, laws.masked_positions_are_ignored),
    (ForgetsToClip, laws.clipped_means_no_gradient),
    (NarrowsWhenScaled, laws.widths_scale),
    (Forgetful, laws.update_is_pure),
]


def test_a_sound_policy_passes_every_law():
    assert {outcome.status for outcome in testing.check(Bandless())} == {"pass"}


@pytest.mark.parametrize(("policy", "law"), BROKEN, ids=[f"{policy.__name__}-{law.name}" for policy, law in BROKEN])
def test_each_law_catches_the_policy_that_breaks_it(policy, law):
    with pytest.raises(Exception):  # noqa: B017, PT011 - a law may fail with whatever the policy raises
        law(policy())


def test_opting_out_of_a_law_shows_its_reason():
    class Excused(Penalised):
        exempt: ClassVar = {"zero_advantage_zero_gradient": "adds a penalty"}

    outcome = next(o for o in testing.check(Excused()) if o.law == "zero_advantage_zero_gradient")
    assert (outcome.status, outcome.detail) == ("opted out", "adds a penalty")


def test_a_failure_is_shown_on_the_smallest_input():
    outcomes = {outcome.law: outcome for outcome in testing.check(SignFlipped())}
    assert outcomes["ratio_one_is_reinforce"].status == "fail"
    assert outcomes["ratio_one_is_reinforce"].inputs.log_probs.shape == (1, 1)  # the sign is wrong on any single token
    outcomes = {outcome.law: outcome for outcome in testing.check(BatchMean())}
    assert outcomes["rows_are_independent"].inputs.log_probs.shape == (2, 1)  # it takes two rows for one to depend on another
