"""From Python: a rule that is a class of the caller, and results as rows."""

import pytest
from pydantic import Field

import rlzoo
from rlzoo import ClipBand, ClipPolicy, RunConfig, UserError, ops
from tests.quick import QUICK


class Flat(ClipPolicy):
    """Clips the summed log-ratio to a constant band."""

    name, paper, scope = "flat", "none", "sequence"
    width: float = Field(0.2, gt=0, le=10, description="half-width of the band")

    def __call__(self, inputs):
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        edge = log_ratio.new_full(log_ratio.shape, self.width)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


def test_a_class_that_no_plugin_provides_trains_resumes_and_is_replayed(tmp_path):
    config = RunConfig.compose(clip=Flat(width=0.05), overrides=QUICK, steps=1, output=tmp_path / "run")
    rlzoo.train(config)
    run = rlzoo.train(config.model_copy(update={"steps": 2}), resume=True)
    assert run.to_pandas()["step"].tolist() == [row["step"] for row in run.metrics] == [0, 1, 2]
    assert "profile" not in repr(run)
    replayed = rlzoo.replay(run.path, [Flat(width=0.05), "gspo"])
    assert [row["rule"] for row in replayed.rows] == ["flat", "gspo"]
    clipped = replayed.to_pandas()["clipped"][0]
    assert clipped == pytest.approx(sum(row["clip/fraction"] for row in run.metrics[1:]) / 2, abs=0.05)
    assert "lre_max 95 % low" in replayed.rows[0]
    assert rlzoo.compare(run.path).rows[0]["rule"] == "flat"
    evaluated = rlzoo.evaluate(
        "embedded", tmp_path / "eval", k=2, suites=("arithmetic",), limit=2, overrides=["rollout.max_new_tokens=64"]
    )
    assert [row["measure"] for row in evaluated.rows][:2] == ["mean@2", "pass@1"]


def test_settings_of_a_rule_and_overrides_of_them_contradict_each_other():
    with pytest.raises(UserError, match=r"is an object, so overrides cannot change it; pass Flat\(SETTING=VALUE\)"):
        RunConfig.compose(clip=Flat(), overrides=["clip.width=0.1"])
