"""A policy that breaks its contract is stopped before it changes the weights, with the reason; nothing is lost."""

import dataclasses
import json
import re
from typing import ClassVar

import pytest
import torch
from rlzoo_fspo import FSPO

import rlzoo
from rlzoo import ClipBand, ClipInputs, ClipPolicy, RunConfig, ops
from rlzoo.cli.main import main
from rlzoo.core.errors import PolicyError
from rlzoo.learner.judge import gradient_of, judge
from tests.learner.test_learner import make_learner
from tests.off_policy import make_model, off_policy_batch, take_updates
from tests.quick import QUICK
from tests.rules import few


class Sound(ClipPolicy):
    """No clip on the mean log-ratio; each policy below breaks one thing."""

    name, paper, scope = "spoilt", "none", "sequence"

    def __call__(self, inputs):
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band=None)


class Raises(Sound):
    def __call__(self, inputs):
        return {}["missing"]


class AnswersATensor(Sound):
    def __call__(self, inputs):
        return super().__call__(inputs).objective


class WrongShape(Sound):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return dataclasses.replace(result, objective=result.objective[:, 0])


class WrongShapeOfDecisions(Sound):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return dataclasses.replace(result, clipped=result.clipped[:1])


class HalfPrecision(Sound):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return dataclasses.replace(result, objective=result.objective.bfloat16())


class CountsClips(Sound):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return dataclasses.replace(result, clipped=result.clipped.float())


class NoGradient(Sound):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        return dataclasses.replace(result, objective=result.objective.detach())


class WritesToItsInputs(Sound):
    def __call__(self, inputs):
        inputs.advantages.clamp_(-1, 1)
        return super().__call__(inputs)


class ReadsTheEntropy(Sound):
    def __call__(self, inputs):
        return super().__call__(inputs) if inputs.old_entropy is None else None


class NotANumberForOneResponse(Sound):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        longest = ops.lengths(inputs.response_mask) == 30
        return dataclasses.replace(result, objective=torch.where(longest, torch.nan, result.objective))


class InfiniteGradient(Sound):
    def __call__(self, inputs):
        result = super().__call__(inputs)
        root = (result.objective - result.objective.detach()).abs().sqrt()  # 0 with an infinite slope
        return dataclasses.replace(result, objective=result.objective + root)


class HasABandOfNumbers(Sound):
    def __call__(self, inputs):
        return dataclasses.replace(super().__call__(inputs), band=ClipBand(low=-0.1, high=0.1))


class HasABandOfTheWrongShape(Sound):
    def __call__(self, inputs):
        edge = torch.ones(3, 1)
        return dataclasses.replace(super().__call__(inputs), band=ClipBand(low=-edge, high=edge))


class HasNoBandForLongResponses(Sound):
    def __call__(self, inputs):
        edge = torch.log(30 - ops.lengths(inputs.response_mask).float() - 1)  # NaN for 30 tokens
        return dataclasses.replace(super().__call__(inputs), band=ClipBand(low=-torch.ones(1, 1), high=edge))


class RaisesInOps(Sound):
    def __call__(self, inputs):
        return ops.sequence_sum(None, inputs.response_mask)


class RaisesInUpdated(Sound):
    def updated(self, stats):
        raise ValueError("no memory")


class BecomesAnother(Sound):
    def updated(self, stats):
        return None


FAULTS = {
    Raises: r"raised KeyError: 'missing' \(.*test_judge\.py:\d+\)",
    RaisesInOps: r"raised TypeError: .* \(.*test_judge\.py:\d+\)",
    AnswersATensor: r"returned a Tensor, expected a ClipResult",
    WrongShape: r"returned objective of shape \(18,\), expected \(18, 1\)",
    WrongShapeOfDecisions: r"returned clipped of shape \(1, 1\), expected \(18, 1\) or \(18, 30\)",
    HalfPrecision: r"returned an objective of type torch.bfloat16, expected torch.float32",
    CountsClips: r"returned clipped of type torch.float32, expected torch.bool",
    NoGradient: r"returned an objective without a gradient; it must depend on log_probs",
    ReadsTheEntropy: r"reads inputs.old_entropy, but does not name it in `needs`; declare needs = frozenset",
    WritesToItsInputs: r"modified its input advantages; work on a copy",
    NotANumberForOneResponse: r"returned an objective that is not finite for 1 of 18 responses; the first has 30 tokens",
    InfiniteGradient: r"returned an objective with a gradient that is not finite for \d+ of 18 responses",
    HasABandOfNumbers: r"returned a band whose low is a float, expected a tensor",
    HasABandOfTheWrongShape: r"returned a band whose low has the shape \(3, 1\), expected \(18, 1\)",
    HasNoBandForLongResponses: r"returned a band whose high is NaN for a response with tokens",
    RaisesInUpdated: r"raised an error in updated: ValueError: no memory",
    BecomesAnother: r"returned None from updated; expected a BecomesAnother",
}


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("scope", few(["sequence", "batch"]))
def test_every_fault_is_reported_and_the_weights_are_unchanged(kind, scope):
    policy = type(kind.__name__, (kind,), {"scope": scope, "__doc__": kind.__doc__, "__module__": __name__})()
    model = make_model()
    batch = off_policy_batch(model, Sound2())
    # rows with an advantage of 0 would be processed first, separately
    batch = dataclasses.replace(batch, advantages=torch.where(batch.advantages == 0, 1.0, batch.advantages))
    learner = make_learner(model, policy, num_minibatches=1)
    before = [parameter.clone() for parameter in learner.model.parameters()]
    pattern = FAULTS[kind].replace(r"expected \(18, 1\)", r"expected \(18, 1\)(?: or \(18, 30\))?")
    with pytest.raises(PolicyError, match=f"^rule 'spoilt' {pattern}"):
        take_updates(learner, batch, seed=0)
    if not kind.__name__.startswith(("RaisesInUpdated", "Becomes")):
        assert all(torch.equal(old, new) for old, new in zip(before, learner.model.parameters(), strict=True))


class Sound2(ClipPolicy):
    """Clips nothing; only used to create data."""

    name, paper, scope = "data", "none", "token"
    exempt: ClassVar = {"clipped_means_no_gradient": "never clips"}

    def __call__(self, inputs):
        return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)


class HidesWhatIsBroken(Sound):
    def __call__(self, inputs):
        known = torch.where(inputs.log_probs.isnan(), inputs.old_log_probs, inputs.log_probs)
        return super().__call__(dataclasses.replace(inputs, log_probs=known))


def test_a_rule_that_hides_a_broken_model_does_not_make_the_step_finite():
    old = torch.full((2, 3), -1.0)
    log_probs = old.clone()
    log_probs[0, 1] = torch.nan
    log_probs.requires_grad_()
    inputs = ClipInputs(log_probs, old, torch.tensor([[1.0], [-1.0]]), torch.ones(2, 3, dtype=torch.bool))
    policy = HidesWhatIsBroken()
    result = judge(policy, inputs)
    assert result.objective.isfinite().all()
    assert gradient_of(policy, result.objective.sum(), inputs, result).isnan().all()


LATE = """
import dataclasses
import torch
from rlzoo import ClipPolicy, hookimpl, ops

class Late(ClipPolicy):
    "Sound at ratio 1, and NaN for one response as soon as the policy has moved."
    name, paper, scope = "late", "none", "sequence"
    def __call__(self, inputs):
        log_ratio = ops.sequence_mean(ops.log_ratio(inputs), inputs.response_mask)
        result = ops.clipped_surrogate(log_ratio, inputs.advantages, band=None)
        spoilt = torch.zeros_like(result.clipped)
        spoilt[0] = bool((log_ratio.abs() > 1e-3).any())
        return dataclasses.replace(result, objective=torch.where(spoilt, torch.nan, result.objective))

@hookimpl
def rlzoo_clip_policies():
    return [Late]
"""


def test_a_run_that_is_stopped_keeps_its_checkpoint_journal_and_rollouts(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late.py").write_text(LATE)
    quick = ["rollout.num_prompts=8", "rollout.group_size=4", "task.num_operands_max=4", "rollout.max_new_tokens=20"]
    sets = [
        word for key in [*quick, "eval.num_problems=8", "learner.lr=3e-3", "tracking.mlflow=false"] for word in ("--set", key)
    ]
    command = ["rlzoo", "train", "--plugin", "late.py", "--clip", "late", "--steps", "3", "--output", "out", *sets]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    error = capfd.readouterr().err
    said = r"^rlzoo: step 1 \(everything so far is in out\): rule 'late' returned an objective that is not finite"
    assert re.search(said, error, re.M)
    assert "Traceback" not in error
    out = tmp_path / "out"
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [0]
    assert len((out / "rollouts" / "000001.jsonl").read_text().splitlines()) == 32
    assert (out / "plugins" / "late.py").read_text() == LATE


def test_the_state_of_an_adaptive_policy_is_in_checkpoint_and_metrics(tmp_path):
    quick = ["rollout.num_prompts=8", "rollout.group_size=4", "task.num_operands_max=4", "rollout.max_new_tokens=20"]
    overrides = [*quick, "eval.num_problems=0", "learner.lr=1e-3", "tracking.mlflow=false"]
    config = RunConfig.compose(clip="fspo-adaptive", overrides=overrides, steps=2, output=tmp_path / "out")
    result = rlzoo.train(config)
    saved = json.loads((result.path / "checkpoints" / "step-000002" / "clip.json").read_text())
    policy = type(config.clip).model_validate({key: value for key, value in saved.items() if key != "name"})
    assert policy != config.clip
    assert len(policy.lengths) == len(policy.offsets_low) > 0
    last = result.metrics[-1]
    assert last["clip/band_low_length_bin_0"] < 0 < last["clip/band_high_length_bin_0"]
    assert "clip/band_low_length_bin_0" not in result.metrics[0]


class Shrinking(FSPO):
    """A band that narrows by a tenth with every update."""

    def updated(self, stats):
        return self.replace(width_low=0.9 * self.width_low)


def test_numbers_that_an_adaptive_policy_changes_are_metrics(tmp_path):
    config = RunConfig.compose(clip="fspo", overrides=[*QUICK], steps=2, output=tmp_path / "out")
    metrics = rlzoo.train(config.model_copy(update={"clip": Shrinking(width_low=0.1)})).metrics
    # four updates per step
    assert [step["clip/setting_width_low"] for step in metrics[1:]] == pytest.approx([0.1 * 0.9**4, 0.1 * 0.9**8])
    assert "clip/setting_width_high" not in metrics[-1]
