"""A run to log to MLflow."""

import pytest

from tests.journal.tracking.followed import three_steps


@pytest.fixture
def directory(tmp_path):
    return three_steps(tmp_path)
