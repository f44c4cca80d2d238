"""One process at a time writes to a run directory."""

import pytest

import rlzoo
from rlzoo import UserError
from rlzoo.support.lock import Lock
from tests.training.test_resume import config


@pytest.mark.long
def test_a_run_directory_in_use_is_refused(tmp_path):
    whole = rlzoo.train(config("fspo", tmp_path / "run"))
    lock = Lock(whole.path)
    with pytest.raises(UserError, match=r"directory .* is in use by process \d+; stop it, or wait until it ends"):
        rlzoo.train(config("fspo", tmp_path / "run"), resume=True)
    lock.release()
    assert rlzoo.train(config("fspo", tmp_path / "run"), resume=True).metrics
