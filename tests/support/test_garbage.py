"""The garbage collector runs rarely while libraries load, and as usual while a run trains."""

import gc
import subprocess
import sys

import pytest

from rlzoo.support.garbage import collect_seldom, quick_garbage_collection


@pytest.fixture(autouse=True)
def thresholds():
    former = gc.get_threshold()
    yield
    gc.set_threshold(*former)


def printed(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def test_within_it_looks_as_often_as_ever_but_not_at_what_was_there_before():
    collect_seldom()
    seldom, frozen = gc.get_threshold(), gc.get_freeze_count()
    assert seldom[0] > 10_000
    with quick_garbage_collection():
        assert str(gc.get_threshold()) == printed("import gc; print(gc.get_threshold())")  # Python's initial value
        assert gc.get_freeze_count() > frozen
    assert gc.get_threshold() == seldom
    assert gc.get_freeze_count() == frozen


def test_what_was_set_before_is_set_again_when_it_fails():
    gc.set_threshold(1234, 5, 6)
    with pytest.raises(KeyError), quick_garbage_collection():
        raise KeyError
    assert gc.get_threshold() == (1234, 5, 6)


def test_the_command_line_loads_with_few_looks():
    help_alone = "import gc, sys; sys.argv = ['rlzoo', '--help']; from rlzoo.cli.main import main"
    assert printed(f"{help_alone}\ntry: main()\nfinally: print(gc.get_threshold())").startswith("(50000,")
