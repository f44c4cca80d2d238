"""`rlzoo calibrate` on the command line."""

import pytest
import yaml

QUICK = [word for value in ("rollout.num_prompts=8", "rollout.group_size=4") for word in ("--set", value)]


@pytest.mark.long
def test_calibrate_writes_a_config_that_trains(rlzoo, tmp_path):
    file = tmp_path / "my widths" / "rloo.yaml"
    file.parent.mkdir()
    code, out, _ = rlzoo("calibrate", "--clip", "rloo", "--steps", "4", *QUICK, "--output", file)
    assert code == 0, out
    assert f"wrote {file}; use it with: rlzoo train --config '{file}'\n" in out
    settings = yaml.safe_load(file.read_text())["clip"]
    assert settings["name"] == "rloo"
    assert file.read_text().startswith("# Clip fraction ")
    code, out, _ = rlzoo("train", "--config", file, "--dry-run")
    assert code == 0
    assert yaml.safe_load(out)["clip"]["clip_high"] == settings["clip_high"]


def test_calibrate_reports_when_the_target_clip_fraction_was_not_reached(rlzoo, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text("from rlzoo import hookimpl\n\n\n@hookimpl\ndef rlzoo_clip_policies():\n    return []\n")
    arguments = ["--clip", "rloo", "--set", "clip.clip_high=20", "--set", "clip.clip_low=0.9", "--pilots", "1", "--steps", "1"]
    code, out, _ = rlzoo("calibrate", *arguments, *QUICK, "--output", tmp_path / "rloo.yaml", "--plugin", plugin)
    assert code == 1
    assert f"rloo.yaml --plugin {plugin}\n" in out
    assert "the closest of 1 pilots had a clip fraction of 0.000, not 0.1; try more with --pilots" in out


def test_calibrate_refuses_before_any_work(refused, tmp_path):
    assert "'gpg' has no width to calibrate" in refused("calibrate", "--clip", "gpg")
    (tmp_path / "taken.yaml").write_text("")
    assert "exists; remove it, or choose another file" in refused(
        "calibrate", "--clip", "rloo", "--output", tmp_path / "taken.yaml"
    )
    assert refused("calibrate", "--clip", "rloo", "--set", "steps=3").startswith("steps=3: --steps already sets steps to 10")
    assert "there is no folder" in refused("calibrate", "--clip", "rloo", "--output", tmp_path / "none" / "a.yaml")
