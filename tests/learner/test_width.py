"""A rule receives every response in inputs of one width, regardless of the micro-batch."""

import dataclasses
from typing import ClassVar

import pytest
import torch

import rlzoo
from rlzoo import ClipPolicy, ClipResult, ops
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import clip_fraction, replay
from tests.learner.test_learner import make_learner, relative_error
from tests.off_policy import make_model, off_policy_batch
from tests.rules import few
from tests.training.short import quick


class Wide(ClipPolicy):
    """Clips as GRPO does, in a band that shrinks with the width of its inputs, which a rule should not do, but may."""

    name, paper, scope = "wide", "none", "token"
    seen: ClassVar[set[int]] = set()

    def __call__(self, inputs) -> ClipResult:
        width = inputs.response_mask.shape[-1]
        self.seen.add(width)
        log_ratio = ops.log_ratio(inputs)
        band = ops.ratio_band(3 / width, 3 / width, None, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


class WideStep(Wide):
    """The same, applied to the whole step."""

    name, scope = "wide-step", "batch"


@pytest.fixture(scope="module")
def model():
    return make_model()


def one_step(model, policy, **settings):
    batch = off_policy_batch(model, policy)
    rows = torch.arange(len(batch))[batch.lengths < 20]  # none of them is as long as the longest row of the batch
    learner = make_learner(model, policy, **settings)
    measures = learner.accumulate(batch, rows)
    gradient = torch.cat([parameter.grad.flatten() for parameter in learner.model.parameters()])
    return gradient, float(measures.table.judged().clipped.mean())


CUTS = {
    "small micro-batches": {"max_tokens_per_micro_batch": 40},
    "large micro-batches": {"max_tokens_per_micro_batch": 4096},
    "packed": {"max_tokens_per_micro_batch": 256, "packing": True},
    "padded on the left": {"max_tokens_per_micro_batch": 256, "padding_side": "left"},
}


@pytest.mark.parametrize("policy", few([WideStep(), Wide()]), ids=lambda policy: policy.name)
@pytest.mark.parametrize("cut", CUTS)
def test_a_rule_that_reads_the_width_has_one_gradient_for_any_micro_batches(model, policy, cut):
    Wide.seen.clear()
    expected, expected_fraction = one_step(model, Wide(), max_tokens_per_micro_batch=256)
    gradient, fraction = one_step(model, policy, **CUTS[cut])
    assert Wide.seen == {30}
    assert 0.05 < fraction < 0.95
    assert fraction == pytest.approx(expected_fraction, abs=1e-6)
    assert relative_error(gradient, expected) < 1e-5


PLUGIN = """
from rlzoo import ClipPolicy, hookimpl, ops


class Wide(ClipPolicy):
    "Clips as GRPO does, in a band that shrinks with the width of its inputs."

    name, paper, scope = "wide", "none", "token"

    def __call__(self, inputs):
        log_ratio = ops.log_ratio(inputs)
        edge = 0.05 / inputs.response_mask.shape[-1]
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ops.ratio_band(edge, edge, None, like=log_ratio))


@hookimpl
def rlzoo_clip_policies():
    return [Wide]
"""


@pytest.mark.long
def test_replay_uses_the_width_of_the_run(tmp_path):
    (tmp_path / "wide.py").write_text(PLUGIN)
    overrides = ["tracking.mlflow=false", "eval.num_problems=0", "learner.max_tokens_per_micro_batch=100"]
    config = quick(tmp_path / "run", clip="wide", steps=5, overrides=overrides, plugins=[tmp_path / "wide.py"])
    trained = rlzoo.train(config)
    run = RecordedRun.read(trained.path)
    widths = {update.inputs.log_probs.shape[1] for update in run.updates}
    assert len(widths) > 1, "the steps are to differ in width"
    for step in range(1, 6):
        one = dataclasses.replace(run, updates=tuple(update for update in run.updates if update.step == step))
        fraction = replay(one, config.clip).profile.clip_fraction
        assert fraction == pytest.approx(trained.metrics[step]["clip/fraction"], rel=1e-4)
    whole = replay(run, config.clip).profile.clip_fraction
    assert 0 < whole < 1
    assert clip_fraction(run, config.clip) == pytest.approx(whole, rel=1e-6)
