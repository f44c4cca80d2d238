"""A signal that arrives while Python shuts down, or in a destructor."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os, signal, sys
sys.argv = ["rlzoo", "--version"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
atexit.register(lambda: print("went on", flush=True))
atexit.register(os.kill, os.getpid(), signal.{name})
from rlzoo.cli.main import entry
entry()
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_at_the_end_prints_no_traceback(name, code):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=name)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith("rlzoo ")
    assert "went on" not in done.stdout


def test_an_ignored_signal_stays_ignored():
    program = PROGRAM.format(name="SIGINT").replace("signal.default_int_handler", "signal.SIG_IGN")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "went on" in done.stdout


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_a_destructor_ends_the_command(name, code):
    program = (
        PROGRAM.partition("atexit.register")[0]
        + """
import time
import rlzoo.cli.main as main

class Freed:
    def __del__(self):
        signal.raise_signal(signal.{name})

main.damage = lambda: (Freed(), time.sleep(30))[2:]
main.entry()
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", program.format(name=name)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
