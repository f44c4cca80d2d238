"""Data files: every line gives a problem, or a one-line error names the file and the line."""

import json
import os
from itertools import islice
from pathlib import Path

from hypothesis import strategies as st

from rlzoo.tasks import build_task
from rlzoo.tasks.math_rows import is_file_name, read_problems
from rlzoo.tasks.suites import find_suite
from tests.fuzz.law import SURFACES, held_to_the_law
from tests.fuzz.spoiled import ODD_TEXTS, spoiled_bytes, spoiled_trees

SURFACE = SURFACES["data lines"]
ROWS = [
    {"question": "Ann has 3 pens and buys 4. How many has she?", "answer": "3 + 4 = <<3+4=7>>7\n#### 1,007"},
    {
        "problem": "What is $\\frac{1}{2} + \\frac{1}{3}$?",
        "solution": "It is $\\boxed{\\frac{5}{6}}$.",
        "level": 2,
        "subject": "Sums",
    },
    {"id": 3, "problem": "How many apples?", "answer": 27.0, "url": "https://example.org"},
    {"prompt": [{"role": "user", "content": "What is 2 + 2?"}], "reward_model": {"ground_truth": "4", "style": "rule"}},
    {"prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "2 + 3?"}], "solution": "$5$"},
    {"messages": [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "#### 6"}]},
]


def real_rows():
    """Return some lines of each file in ``RLZOO_DATA``, or none if it is not set."""
    for file in sorted(Path(os.environ["RLZOO_DATA"]).glob("*.jsonl")) if "RLZOO_DATA" in os.environ else ():
        with file.open(encoding="utf-8") as stream:
            yield from map(json.loads, islice(stream, 5))


TREES = [*ROWS, *real_rows()]
FILES = [
    json.dumps(ROWS).encode(),
    ("\n".join(map(json.dumps, ROWS)) + "\n").encode(),
    *(json.dumps(row).encode() for row in TREES),
]


def read(file):
    for problem in read_problems(str(file), "train", None):
        assert problem.question.strip()
        assert problem.answer
        problem.question.encode()


@held_to_the_law("data lines", 0.5, content=spoiled_bytes(FILES))
def test_corrupted_data_files(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "questions.jsonl"
    file.write_bytes(content)
    SURFACE.check(lambda: read(file), str(file))


@held_to_the_law("data lines", 0.46, tree=spoiled_trees(TREES))
def test_rows_with_other_values(tmp_path_factory, tree):
    file = tmp_path_factory.getbasetemp() / "questions.jsonl"
    file.write_text(json.dumps(tree), encoding="utf-8")
    SURFACE.check(lambda: read(file), str(file))


@held_to_the_law("data lines", 0.02, trees=st.lists(spoiled_trees(ROWS), min_size=5, max_size=10))
def test_tasks_on_corrupted_files(tmp_path_factory, trees):
    file = tmp_path_factory.getbasetemp() / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, [*ROWS, *trees])), encoding="utf-8")

    def ask():
        task = build_task({"name": "math_file", "path": str(file), "seed": 0})
        for problem in [*task.train_problems(0, 20), *task.held_out_problems(20)]:
            task.prompt(problem).encode()

    SURFACE.check(ask, str(file))


@held_to_the_law("data lines", 0.02, name=st.sampled_from(ODD_TEXTS) | st.text(max_size=40))
def test_names_of_data_files_and_suites(tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp()
    SURFACE.check(lambda: find_suite(name, folder), "suite")
    if is_file_name(name):  # other names are looked up on the hub
        SURFACE.check(lambda: read_problems(name, "train", None), "is not a file", ": cannot be read")
