"""Warnings appear once, after something has been wrong for long enough, and say what to do."""

import logging
import re

import pytest
import torch
from rlzoo_fspo import FSPO
from rlzoo_gpg import GPG

from rlzoo.measure.monitor import ALARMS, Monitor
from tests.quick import quick_run

SOUND = {"clip/fraction": 0.1, "fairness/ess": 0.9, "ratio/drift_long": 0.1, "mismatch/log_ratio_abs_mean": 0.02}
WRONG = {
    "inert": ({"clip/fraction": 0.0}, 10, r"clip is inert: nothing was clipped for 10 steps; narrow clip.width_low and"),
    "saturated": ({"clip/fraction": 0.7}, 3, r"clip is saturated: 70% is clipped \(.*\); widen clip.width_low"),
    "ess": ({"fairness/ess": 0.1}, 3, r"effective sample size collapsed: 10% .* lower learner.lr"),
    "mismatch": ({"mismatch/log_ratio_abs_mean": 0.3}, 1, r"drifted apart: .* 0.30 nats per token .* rollout.max_staleness"),
    "drift": ({"ratio/drift_long": -0.8}, 5, r"drift is no longer negligible: .* -0.80 standard deviations"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_an_alarm_needs_patience_and_is_raised_once(name):
    bad, patience, message = WRONG[name]
    monitor = Monitor(FSPO())
    for _ in range(patience - 1):
        assert monitor.after_step(1, [], SOUND | bad) == []
    assert monitor.after_step(1, [], SOUND) == []  # one good step resets the count
    shown = [monitor.after_step(1, [], SOUND | bad) for _ in range(3 * patience)]
    assert [len(texts) for texts in shown] == [int(step == patience) for step in range(1, 3 * patience + 1)]
    assert re.search(message, shown[patience - 1][0]), shown
    assert monitor.raised == [name]


def test_every_alarm_has_a_test_case():
    assert {alarm.name for alarm in ALARMS} == set(WRONG)


def test_steps_without_the_metric_change_nothing():
    monitor = Monitor(FSPO())
    for _ in range(2):
        monitor.after_step(1, [], {"clip/fraction": 0.9})
    assert monitor.after_step(1, [], {}) == []  # every group had equal rewards
    assert len(monitor.after_step(1, [], {"clip/fraction": 0.9})) == 1


def test_a_rule_that_never_cuts_is_not_called_inert():
    monitor = Monitor(GPG())
    assert not any(monitor.after_step(1, [], {"clip/fraction": 0.0}) for _ in range(30))


@pytest.mark.long
def test_alarms_are_logged_during_the_run_and_kept_in_the_summary(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="rlzoo")
    trained = quick_run(
        tmp_path / "run", "fspo", "clip.width_low=1e-6", "clip.width_high=1e-6", "clip.width_ceiling=1e-6", steps=3
    )
    assert [record.getMessage() for record in caplog.records if "saturated" in record.getMessage()]
    assert '"saturated"' in (trained.path / "summary.json").read_text()


def test_the_monitor_forgets_old_steps(recorded, monkeypatch):
    from rlzoo.lab.replay import replay
    from rlzoo.measure import monitor as module

    monkeypatch.setattr(module, "WINDOW", 2)
    table = replay(recorded, FSPO()).table
    watch = Monitor(FSPO())
    assert watch.profile() is None
    for step in range(1, 6):
        watch.after_step(step, [table], SOUND)
    judged = int((table.signal > 0).sum())
    assert sum(watch.profile().both.count) == 2 * judged
    assert torch.isfinite(torch.tensor(watch.profile().both.fraction)).all()
