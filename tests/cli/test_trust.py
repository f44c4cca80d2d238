"""A run directory that somebody sent is data for every command except those that SECURITY.md lists."""

import json
import shutil

import pytest
import yaml

import rlzoo as rl
from tests.cli.conftest import HOOK, SOUND

SPY = """
from pathlib import Path
Path({marker!r}).touch()
"""


@pytest.fixture
def sent(trained, tmp_path):
    """Copy a run and change its configuration; returns the copy."""

    def write(name="sent", **changes):
        run = shutil.copytree(trained.path, tmp_path / "mail" / name)
        settings = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump(settings | changes))
        return run

    return write


@pytest.fixture
def spy(tmp_path):
    """A plugin that also has a reward and a task, and leaves a marker when it is imported; returns its file and the marker."""
    marker = tmp_path / "imported"
    file = tmp_path / "spying.py"
    file.write_text(SPY.format(marker=str(marker)) + SOUND + HOOK.format("Plain"))
    return file, marker


@pytest.mark.long
def test_commands_that_only_read_a_run_load_no_code_that_it_names(rlzoo, sent, spy, tmp_path):
    file, marker = spy
    (tmp_path / "here" / "spying.py").write_text(file.read_text())  # where a reward and a task are imported from
    plain, outside = {"name": "plain", "width": 0.25}, {"name": "math_file", "path": "/etc/passwd"}
    for name, changes in {
        "plugin": {"plugins": [str(file)], "clip": plain},
        "relative": {"plugins": ["../spying.py", "../mail/relative/plugins/spying.py"], "clip": plain},
        "unused": {"plugins": [str(file)]},
        "reward": {"task": {"name": "arithmetic", "reward": "spying:reward"}},
        "task": {"task": {"name": "spying:Task"}},
        "data": {"task": outside},
        "correction": {"plugins": [str(file)], "correction": {"name": "spying"}},
    }.items():
        run = sent(name, **changes)
        (run / "plugins").mkdir()
        shutil.copy(file, run / "plugins" / "spying.py")
        for command in (["compare", run], ["fairness", run]):
            code, out, err = rlzoo(*command)
            assert code in (0, 2), (name, command)
            assert "passwd" not in out + err, (name, command)
            assert not marker.exists(), (name, command)
            if name != "correction":
                assert code == 0, (name, command, err)
        rlzoo("rescore", run, "--model", "embedded", "--output", tmp_path / "new" / name)
        if name == "plugin":
            suite = ("--suite", "arithmetic", "--k", "1", "--limit", "1", "--max-new-tokens", "8", "--no-mlflow")
            assert rlzoo("eval", run, *suite)[0] == 0
        assert not marker.exists(), name


def test_missing_columns_are_explained_and_filled_once_the_plugin_is_given(rlzoo, sent, spy):
    file, marker = spy
    run = sent(plugins=[str(file)], clip={"name": "plain", "width": 0.25})
    why = "unknown rule 'plain'; see `rlzoo clips list`; to use a plugin that you trust, add --plugin FILE"
    code, out, _ = rlzoo("compare", run)
    assert code == 0
    assert f"plain: no length error for seed 0: {why}\n" in out
    assert "add --plugin FILE" in (run / "compare.html").read_text()
    (contender,) = json.loads(rlzoo("compare", run, "--json")[1])["contenders"]
    assert contender["profile"] is None
    assert f"{why}; or name rules with --clip" in rlzoo("fairness", run)[1]
    assert json.loads(rlzoo("fairness", run, "--json")[1])["note"] == why
    assert not marker.exists()
    (contender,) = json.loads(rlzoo("compare", run, "--json", "--plugin", file)[1])["contenders"]
    assert contender["profile"]["clip_fraction"] < 0.01  # a band of 0.25 nats per token is wider than most log-ratios here
    (rule,) = json.loads(rlzoo("fairness", run, "--json", "--plugin", file)[1])["rules"]
    assert rule["settings"]["width"] == 0.25


def test_an_unusable_plugin_is_an_error_in_a_comparison(refused, sent, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    assert "ZeroDivisionError" in refused("compare", sent(), "--plugin", tmp_path / "broken.py")


def test_an_unknown_correction_is_reported(rlzoo, sent):
    run = sent(correction={"name": "mine"})
    reason = "was trained with another correction: unknown correction 'mine'"
    code, out, _ = rlzoo("compare", run)
    assert code == 0
    assert reason in out
    code, _, err = rlzoo("fairness", run, "--clip", "gspo")
    assert code == 2
    assert reason in err


def test_fairness_does_not_need_the_reward_of_a_run(rlzoo, sent):
    run = sent(task={"name": "arithmetic", "reward": "gone:reward"})
    assert rlzoo("fairness", run)[0] == 0


def test_a_link_in_a_run_directory_creates_no_file_elsewhere(refused, sent, tmp_path):
    for command, page in ((["compare"], "compare.html"), (["replay", "--clip", "fspo"], "replay.html")):
        run = sent(command[0])
        (run / page).symlink_to(tmp_path / "profile")
        assert "exists and is not an rlzoo report" in refused(command[0], run, *command[1:])
        assert not (tmp_path / "profile").exists()


def test_the_python_api_reads_a_run_as_data_unless_code_is_allowed(sent, spy):
    from rlzoo.lab.recorded import RecordedRun

    file, marker = spy
    run = sent(plugins=[str(file)], clip={"name": "plain", "width": 0.25})
    assert RecordedRun.read(run).rule is None
    assert not marker.exists()
    with pytest.raises(rl.UserError, match="unknown rule 'plain'"):
        _ = RecordedRun.read(run).own_rule
    assert RecordedRun.read(run, own_code=True).own_rule.width == 0.25
    assert marker.exists()
