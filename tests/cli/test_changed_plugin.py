"""A plugin that was edited between stop and resume is reported and rejected, unless the change is allowed."""

import logging
import shutil

import pytest

from rlzoo import RunConfig, UserError, train
from tests.cli.conftest import HOOK, SOUND

SMALL = (
    "rollout.num_prompts=2", "rollout.group_size=2", "rollout.max_new_tokens=8", "learner.num_minibatches=1",
    "tracking.mlflow=false", "eval.num_problems=0", "checkpoint.every=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of one step with a plugin file: its directory and the file."""
    folder = tmp_path_factory.mktemp("changed")
    file = folder / "mine.py"
    file.write_text(SOUND + HOOK.format("Plain"))
    config = RunConfig.compose(clip="plain", plugins=[file], overrides=SMALL, steps=1, output=folder / "run")
    return train(config).path, file


@pytest.fixture
def run(stopped, tmp_path):
    """A copy of that run with its original plugin."""
    path, file = stopped
    file.write_text(SOUND + HOOK.format("Plain"))
    shutil.copytree(path, tmp_path / "run")
    return tmp_path / "run", file


def resume(path, *more):
    return ["train", "--resume", "--output", path, "--steps", "2", *more]


@pytest.mark.long
def test_an_unchanged_plugin_resumes(rlzoo, run):
    path, file = run
    code, _, err = rlzoo(*resume(path, "--plugin", file))
    assert code == 0, err
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_changed_plugin_is_refused_and_reported(rlzoo, run):
    path, file = run
    before = (path / "metrics.jsonl").read_text()
    file.write_text(file.read_text().replace("0.25", "0.125"))
    line = (
        "rlzoo: --resume: plugin mine.py has changed since the run started; undo this, pass --allow-changed to resume with the "
        "change, or start a new run with another --output\n"
    )
    for more in ([], ["--dry-run"], ["--processes", "2"]):
        code, out, err = rlzoo(*resume(path, *more))
        assert (code, out) == (2, "")
        assert err.endswith(line)
    assert (path / "metrics.jsonl").read_text() == before
    config = RunConfig.compose([path / "config.yaml"], steps=2, output=path)
    with pytest.raises(UserError, match=r"plugin mine\.py has changed since"):
        train(config, resume=True)


def test_a_changed_plugin_is_reported_and_accepted_if_allowed(rlzoo, run, caplog):
    path, file = run
    file.write_text(file.read_text() + "# longer\n")
    with caplog.at_level(logging.WARNING, logger="rlzoo"):
        code, _, err = rlzoo(*resume(path, "--allow-changed"))
    assert code == 0, err
    (message,) = [record.getMessage() for record in caplog.records if "has changed" in record.getMessage()]
    assert message.startswith("--resume: plugin mine.py has changed since the run started")
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_option_is_for_resuming(refused):
    assert refused("train", "--allow-changed") == "--allow-changed needs --resume"
