"""`rlzoo fairness` and `rlzoo rescore` as a user meets them."""

import json
import shutil

import pytest

from rlzoo.lab.recorded import RecordedRun


def test_fairness_prints_drift_and_what_the_own_rule_clipped(rlzoo, trained):
    code, out, _ = rlzoo("fairness", trained.path)
    assert code == 0
    assert "trained with fspo" in out.splitlines()[0]
    assert "log-ratio S of a response by length in tokens" in out
    assert "clip fraction by length in tokens" in out
    assert max(map(len, out.splitlines()[1:])) <= 80
    code, out, _ = rlzoo("fairness", trained.path / "rollouts", "--clip", "gspo,grpo", "--json")
    answer = json.loads(out)
    assert [rule["policy"] for rule in answer["rules"]] == ["gspo", "grpo"]
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
def test_what_is_no_recording_is_refused_by_its_name(rlzoo, tmp_path, command):
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
