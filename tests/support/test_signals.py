import os
import signal
import threading

import pytest

from rlzoo.cli.main import Terminated, _terminate
from rlzoo.support.signals import held_signals


@pytest.fixture(autouse=True)
def _handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _interrupted(reached, *numbers):
    with held_signals():
        for number in numbers:
            os.kill(os.getpid(), number)
            reached.append(number)
        reached.append("end of the block")
    reached.append("behind the block")


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_waits_for_the_end_of_the_block(number, error):
    reached = []
    with pytest.raises(error):
        _interrupted(reached, number)
    assert reached == [number, "end of the block"]
    assert signal.getsignal(signal.SIGTERM) is _terminate
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_goes_through_at_once():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        _interrupted(reached, signal.SIGINT, signal.SIGINT)
    assert reached == [signal.SIGINT]


def test_blocks_within_blocks_wait_for_the_outermost():
    reached = []

    def outer():
        with held_signals():
            _interrupted(reached, signal.SIGTERM)

    with pytest.raises(Terminated):
        outer()
    assert reached == [signal.SIGTERM, "end of the block", "behind the block"]


def test_no_signal_changes_nothing_and_other_threads_may_use_it():
    with held_signals():
        pass
    assert signal.getsignal(signal.SIGTERM) is _terminate

    def work():
        with held_signals():
            done.append(True)

    done = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
