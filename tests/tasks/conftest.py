"""A file of questions."""

import pytest

from tests.tasks.math_files import GSM8K, write


@pytest.fixture
def gsm8k(tmp_path):
    return write(tmp_path / "gsm8k.jsonl", GSM8K)
