"""Evaluation directories: rlzoo resumes from the recorded answers, or one line says why not."""

import json
import shutil

from hypothesis import strategies as st

from rlzoo.lab.evaluation import EvaluationConfig, SuiteResult
from rlzoo.lab.evaluation_directory import Answered, EvaluationDirectory
from rlzoo.lab.runs import read_mapping
from rlzoo.measure.at_k import Completion
from rlzoo.tasks.problem import Problem
from tests.fuzz.law import SURFACES, held_to_the_law
from tests.fuzz.spoiled import spoiled_bytes, spoiled_trees

SURFACE = SURFACES["evaluation directories"]
PROBLEMS = [Problem("1 + 1?", "2"), Problem("2 + 2?", "4")]
ANSWERED = [
    Answered(PROBLEMS[0].question, PROBLEMS[0].answer, (Completion("2", 1.0, 0, 2, True), Completion("3", 0.0, 1, 2, True))),
    Answered(
        PROBLEMS[1].question, PROBLEMS[1].answer, (Completion("\u2028é", 0.0, None, 5, False), Completion("4", 1.0, 1, 1, True))
    ),
]
LINES = [item.to_line(index).encode() for index, item in enumerate(ANSWERED)]
SETTINGS = EvaluationConfig.compose("embedded", ["rollout.group_size=2"], suites=("mine",)).settings()


def go_on(folder):
    """Resume from an existing directory as ``rlzoo eval`` does."""
    directory = EvaluationDirectory(folder)
    directory.check(SETTINGS)
    answered = directory.read("mine", PROBLEMS)
    if answered:
        SuiteResult.of("mine", answered)
    read_mapping(folder / "results.json")


def begin(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "evals"
    shutil.rmtree(folder, ignore_errors=True)
    EvaluationDirectory(folder).create(SETTINGS).release()
    (folder / "completions" / "mine.jsonl").write_bytes(b"".join(LINES))
    return folder


@held_to_the_law("evaluation directories", 0.4, content=spoiled_bytes([b"".join(LINES)]))
def test_corrupted_completions(tmp_path_factory, content):
    folder = begin(tmp_path_factory)
    (folder / "completions" / "mine.jsonl").write_bytes(content)
    SURFACE.check(lambda: go_on(folder), str(folder))


@held_to_the_law("evaluation directories", 0.4, tree=spoiled_trees([json.loads(line) for line in LINES[:1]]))
def test_completions_with_other_values(tmp_path_factory, tree):
    folder = begin(tmp_path_factory)
    (folder / "completions" / "mine.jsonl").write_bytes(json.dumps(tree).encode() + b"\n" + LINES[1])
    SURFACE.check(lambda: go_on(folder), str(folder))


@held_to_the_law("evaluation directories", 0.2, data=st.data(), name=st.sampled_from(["settings.yaml", "results.json"]))
def test_corrupted_settings_and_results(tmp_path_factory, data, name):
    folder = begin(tmp_path_factory)
    (folder / "results.json").write_text('{"suites": {}}')
    file = folder / name
    file.write_bytes(data.draw(spoiled_bytes([file.read_bytes()])))
    SURFACE.check(lambda: go_on(folder), str(folder))
