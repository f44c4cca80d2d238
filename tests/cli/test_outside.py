"""A run reports whose code it loads."""

import pytest

from tests.cli.conftest import SOUND

RUN = ["train", "--set", "tracking.mlflow=false", "--set", "eval.num_problems=0", "--steps", "1"]


@pytest.fixture
def announced(rlzoo, caplog):
    """Return what a run with these options reports about plugins."""

    def run(*options):
        with caplog.at_level("INFO", logger="rlzoo"):
            code, _, err = rlzoo(*RUN, *options)
        assert code == 0, err
        return [record.getMessage() for record in caplog.records if "plugin" in record.getMessage()]

    return run


@pytest.mark.long
def test_a_run_lists_the_external_plugins_that_it_loads(announced, plugin):
    file = plugin(SOUND, returned="Plain")
    assert announced("--clip", "plain", "--plugin", file) == [f"plugin loaded: {file} (plain)"]


@pytest.mark.long
def test_a_run_without_external_plugins_lists_none(announced):
    assert announced("--clip", "fspo") == []
