"""Calibration ends with a width that was measured to clip the target share, and reports if it cannot find one."""

import pytest

from rlzoo import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.lab.calibrate import calibrate, overlay
from tests.quick import QUICK


def pilots(clip, *overrides, target=0.1, max_pilots=5, steps=3):
    config = RunConfig.compose(clip=clip, overrides=[*QUICK, *overrides], steps=steps)
    seen = []
    return config, seen, calibrate(config, target, max_pilots=max_pilots, on_pilot=seen.append)


@pytest.mark.long
def test_a_pilot_with_the_calibrated_width_clips_the_target_fraction(tmp_path):
    # the paper's widths clip more than twice the target here
    config, seen, best = pilots("gspo", "clip.clip_low=3e-4", "clip.clip_high=4e-4")
    assert seen[0].clip_fraction > 0.2
    assert best.is_met
    assert 0.09 <= best.clip_fraction <= 0.11
    written = overlay(best, config)
    assert "target 10.0%" in written
    file = tmp_path / "gspo.yaml"
    file.write_text(written)
    again = RunConfig.compose([file])
    assert again.clip.name == "gspo"
    assert again.clip.clip_low == pytest.approx(best.policy.clip_low, rel=1e-5)


def test_a_pilot_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pilots("fspo", target=0.08, max_pilots=1, steps=1)
    assert not list(tmp_path.iterdir())


def test_a_rule_without_a_width_is_refused_before_any_pilot():
    with pytest.raises(UserError, match="'gpg' has no width to calibrate"):
        pilots("gpg")


def test_a_rule_that_adapts_to_a_target_needs_one_pilot():
    config, seen, best = pilots("fspo-adaptive", target=0.2, max_pilots=4, steps=1)
    assert [pilot.policy.target_clip_fraction for pilot in seen] == [0.2]
    assert overlay(best, config).endswith("clip:\n  name: fspo-adaptive\n  target_clip_fraction: 0.2\n")
