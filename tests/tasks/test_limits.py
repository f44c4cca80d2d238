"""A grading call that needs too much memory ends, and the next one is graded."""

import resource
import subprocess
import sys

import pytest

from rlzoo.tasks import build_task
from rlzoo.tasks.grading import MEMORY, Grader
from rlzoo.tasks.math_grading import MathGrader

SMALL = 2**20


def ready():
    pass


def take(size):
    """Allocate this many bytes, and report it."""
    return float(len(bytearray(size)) == size)


def has_the_limit():
    return float(resource.getrlimit(resource.RLIMIT_DATA)[0] == MEMORY)


def mathematics():
    return MathGrader(60).worker


def puzzles():
    (worker,) = build_task({"name": "reasoning_gym:chain_sum", "seed": 0}).graders
    return worker


@pytest.mark.long
@pytest.mark.parametrize("made", [mathematics, puzzles])
def test_a_call_that_takes_too_much_memory_ends_and_the_next_is_graded(made):
    worker = made()
    grader = Grader(take, worker.start, 60, worker.memory)
    try:
        assert grader.grade([(SMALL,), (MEMORY,), (SMALL,)]) == [1.0, None, 1.0]
        assert grader.num_failures == 1
    finally:
        grader.close()


@pytest.mark.long
def test_without_the_limit_the_same_answer_gets_the_memory():
    grader = Grader(take, ready, timeout=60)
    try:
        assert grader.grade([(MEMORY,)]) == [1.0]
    finally:
        grader.close()


def test_the_training_process_has_no_memory_limit():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    grader = Grader(has_the_limit, ready, timeout=60, memory=MEMORY)
    try:
        assert grader.grade([()]) == [1.0]
    finally:
        grader.close()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_an_existing_lower_limit_is_kept():
    script = (
        "import resource; from rlzoo.support.worker_main import limit_memory;"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**28, 2**29)); limit_memory(2**30);"
        "assert resource.getrlimit(resource.RLIMIT_DATA) == (2**28, 2**28)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
