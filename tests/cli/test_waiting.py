"""OpenMP's threads sleep soon after their work, unless the user decides otherwise."""

import os
import subprocess
import sys

import pytest

from rlzoo.waiting import SPINS

SHOW = """
import os, sys, rlzoo.cli
sys.argv = ["rlzoo", "--version"]
try:
    rlzoo.cli.main()
finally:
    print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("setting", "expected"), [({}, str(SPINS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_the_command_line_lets_threads_wait_briefly_unless_the_user_decides(setting, expected):
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", SHOW], env=environment | setting, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == expected
