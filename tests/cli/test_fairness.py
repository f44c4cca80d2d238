"""`rlzoo fairness` and `rlzoo rescore` on the command line."""

import dataclasses
import json
import shutil

import pytest

from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.lab.recorded import RecordedRun


def test_fairness_prints_drift_and_clipping_of_the_run_rule(rlzoo, trained):
    code, out, _ = rlzoo("fairness", trained.path)
    assert code == 0
    assert "trained with fspo" in out.splitlines()[0]
    assert "summed log-ratio S, with spread sd, by length L" in out
    assert "clip fraction by length in tokens" in out
    assert max(map(len, out.splitlines()[1:])) <= 80
    code, out, _ = rlzoo("fairness", trained.path / "rollouts", "--clip", "gspo,grpo", "--json")
    answer = json.loads(out)
    assert [rule["rule"] for rule in answer["rules"]] == ["gspo", "grpo"]
    recorded = RecordedRun.read(trained.path)
    assert answer["num_responses"] == recorded.num_responses
    assert 0 < answer["drift"]["moved"] < 1
    assert sum(answer["drift"]["count"]) < recorded.num_responses


def test_fairness_of_one_step_is_that_of_its_file(rlzoo, trained):
    file = trained.path / "rollouts" / "000002.safetensors"
    code, out, _ = rlzoo("fairness", file, "--json")
    assert code == 0
    assert json.loads(out)["num_responses"] == RecordedRun.read(file).num_responses


@pytest.mark.parametrize(
    "command", [["fairness"], ["replay", "--clip", "fspo"], ["rescore", "--output", "new", "--model", "embedded"]]
)
def test_a_file_that_is_not_a_recording_is_refused_by_name(rlzoo, tmp_path, command):
    name, *options = command
    for path, reason in ((tmp_path / "nothing", "does not exist"), (tmp_path, "neither a run directory nor a folder")):
        code, _, error = rlzoo(name, path, *options)
        assert code == 2
        assert reason in error
        assert str(path) in error
    other = tmp_path / "weights.safetensors"
    other.write_bytes(b"\x00" * 100)
    assert rlzoo(name, other, *options)[0] == 2


def test_a_run_is_rescored_and_judged(rlzoo, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained.path, run)
    code, out, _ = rlzoo("rescore", run, "--model", "embedded", "--output", tmp_path / "again")
    assert code == 0
    assert "rescored 4 steps" in out
    code, out, error = rlzoo("rescore", run, "--model", "embedded", "--output", tmp_path / "again")
    assert code == 2
    assert "exists and is not an empty folder" in error
    code, out, _ = rlzoo("replay", tmp_path / "again", "--clip", "fspo,gspo")
    assert code == 0
    assert not (tmp_path / "again" / "replay.html").exists()


def test_individual_settings_of_the_run_rule_can_be_overridden(rlzoo, trained):
    """The run was trained with both widths at .015; settings that are not given keep their recorded values."""
    for path in (trained.path, trained.path / "rollouts"):
        _, out, _ = rlzoo("replay", path, "--clip", "fspo", "--set", "clip.width_low=0.05", "--json")
        settings = json.loads(out)["rules"][0]["settings"]
        assert (settings["width_low"], settings["width_high"]) == (0.05, 0.015)


def test_a_replay_with_no_steps_left_is_refused_in_one_line(rlzoo, trained):
    code, _, error = rlzoo("replay", trained.path / "rollouts", "--clip", "fspo", "--skip-steps", "99")
    assert code == 2
    assert "after step 99" in error


FLAT = """
import torch
from pydantic import Field
from rlzoo import ClipBand, ClipPolicy, hookimpl, ops


class Flat(ClipPolicy):
    "Clips the summed log-ratio of a response to a band of constant width."

    name, paper, scope = "flat", "none", "sequence"
    width: float = Field(0.2, gt=0, le=10, description="half-width of the band on the summed log-ratio")

    def __call__(self, inputs):
        log_ratio = ops.sequence_sum(ops.log_ratio(inputs), inputs.response_mask)
        edge = torch.full_like(log_ratio.detach(), self.width)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, ClipBand(low=-edge, high=edge))


@hookimpl
def rlzoo_clip_policies():
    return [Flat]
"""


def test_a_rollout_file_restores_the_settings_of_a_plugin_rule(rlzoo, trained, tmp_path):
    (tmp_path / "flat.py").write_text(FLAT)
    step = RolloutFile.load(trained.path / "rollouts" / "000002.safetensors")
    dataclasses.replace(step, rule={"name": "flat", "width": 0.05}).save(tmp_path / "000002.safetensors")
    _, out, _ = rlzoo("fairness", tmp_path / "000002.safetensors")
    assert "unknown rule 'flat'; see `rlzoo clips list`; to use a plugin that you trust, add --plugin FILE; or name" in out
    for name, options in (("fairness", []), ("replay", ["--clip", "flat"])):
        _, out, _ = rlzoo(name, tmp_path / "000002.safetensors", *options, "--plugin", tmp_path / "flat.py", "--json")
        assert json.loads(out)["rules"][0]["settings"]["width"] == 0.05
