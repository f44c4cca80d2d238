"""Laws of the task that reads mathematics questions from files."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlzoo.tasks import build_task
from rlzoo.tasks.math_grading import MathGrader
from rlzoo.tasks.problem import Problem
from tests.tasks.math_files import GSM8K, MATH, math_file, write

pytest.importorskip("math_verify")

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="module")
def grading(tmp_path_factory):
    with math_file(write(tmp_path_factory.mktemp("data") / "gsm8k.jsonl", GSM8K), timeout=2) as task:
        yield task


def test_an_epoch_holds_every_training_row_once_in_a_new_order(gsm8k):
    task = math_file(gsm8k)
    size = len(GSM8K) - len(task.held_out_problems(100))
    first, second = task.train_problems(0, size), task.train_problems(size, size)
    assert set(first) == set(second)
    assert len(set(first)) == size
    assert first != second
    assert task.train_problems(0, 3 * size)[size - 2 : size + 2] == task.train_problems(size - 2, 4)


def test_train_problems_depend_on_seed_and_index_only(gsm8k):
    task = math_file(gsm8k, seed=1)
    assert task.train_problems(0, 4) + task.train_problems(4, 4) == task.train_problems(0, 8)
    assert math_file(gsm8k, seed=1).train_problems(90, 9) == task.train_problems(90, 9)
    assert math_file(gsm8k, seed=2).train_problems(0, 8) != task.train_problems(0, 8)


def test_a_local_file_is_split_and_every_seed_holds_out_the_same(gsm8k):
    task = math_file(gsm8k)
    held_out = task.held_out_problems(1000)
    assert 0 < len(held_out) < len(GSM8K) / 2
    assert not {p.question for p in held_out} & {p.question for p in task.train_problems(0, 200)}
    assert math_file(gsm8k, seed=7).held_out_problems(1000) == held_out
    assert task.held_out_problems(2) == held_out[:2]


def test_questions_of_the_eval_file_are_never_trained_on(tmp_path, gsm8k):
    evaluation = write(tmp_path / "eval.jsonl", GSM8K[:10] + MATH[:5])
    task = math_file(gsm8k, eval_path=evaluation)
    held_out = {problem.question for problem in task.held_out_problems(100)}
    assert held_out == {row["question"] for row in GSM8K[:10]} | {row["problem"] for row in MATH[:5]}
    assert {problem.question for problem in task.train_problems(0, 60)} == {row["question"] for row in GSM8K[10:]}


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("18", "so \\boxed{18}", 1.0),
        ("18", "\\boxed{17}, no, \\boxed{18}", 1.0),
        ("18", "\\boxed{18}, no, \\boxed{17}", 0.0),
        ("18", "6 * 3\n#### 18", 1.0),
        ("18", "it is 18.", 1.0),
        ("18", "\\boxed{\\$18.00}", 1.0),
        ("18", "\\boxed{180}", 0.0),
        ("18", "\\boxed{-18}", 0.0),
        ("18", "\\boxed{}", 0.0),
        ("18", "", 0.0),
        ("18", "I do not know", 0.0),
        ("13", "\\boxed{12 or 13}", 0.0),
        ("13", "\\boxed{1 3}", 0.0),
        ("1200", "\\boxed{1,200}", 1.0),
        ("055", "\\boxed{55}", 1.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("\\frac{1}{2}", "\\boxed{\\dfrac{1}{2}}", 1.0),
        ("x^2+1", "\\boxed{1 + x^2}", 1.0),
        ("(1,2)", "\\boxed{(2,1)}", 0.0),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", 1.0),
    ],
)
def test_answers_are_compared_as_mathematics(grading, answer, response, reward):
    assert grading.grade([Problem("q", answer)], [response]) == [reward]


@pytest.mark.long
def test_a_tower_of_powers_does_not_hang(grading):
    begin = time.perf_counter()
    problems = [Problem("q", answer) for answer in ("2", "2", "0.5")]
    assert grading.grade(problems, ["\\boxed{9^9^9^9}", "\\boxed{9^{9^{9^9}}}", "\\boxed{1/2}"]) == [0.0, 0.0, 1.0]
    assert time.perf_counter() - begin < 30
    assert grading.graders[0].last_failure == "took longer than 2 s"


def test_grading_works_in_a_thread(grading):
    rewards = []
    thread = threading.Thread(target=lambda: rewards.extend(grading.grade([Problem("q", "1/2")], ["\\boxed{0.5}"])))
    thread.start()
    thread.join()
    assert rewards == [1.0]


def test_reference_answers_of_the_file_are_graded_right(gsm8k):
    with math_file(gsm8k) as task:
        problems = task.train_problems(0, 30)
        assert "1017" in {problem.answer for problem in problems}  # 85 * 12 - 3, written 1,017 in the file
        assert task.grade(problems, [f"\\boxed{{{problem.answer}}}" for problem in problems]) == [1.0] * 30


def test_the_default_template_asks_for_a_box(gsm8k):
    assert math_file(gsm8k).prompt(Problem("1+1?", "2")) == (
        "1+1?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


def test_the_dump_of_a_task_builds_an_equal_task(gsm8k):
    task = math_file(gsm8k, seed=3, timeout=2.5)
    task.grade([Problem("q", "1")], ["\\boxed{1}"])
    assert build_task({"name": task.name, **task.model_dump()}) == task
    assert build_task({"name": task.name, **task.model_dump(mode="json")}) == task
    assert task != math_file(gsm8k)


def test_an_answer_that_is_the_whole_solution_is_graded(grading):
    problems = [Problem("1 + 2?", "3"), Problem("Is 7 prime?", "True")]
    assert grading.grade(problems, ["\\boxed{3}", "\\boxed{True}"]) == [1.0, 1.0]
    assert grading.grade(problems, ["\\boxed{4}", "\\boxed{False}"]) == [0.0, 0.0]


@pytest.mark.long
@pytest.mark.skipif(not DATA.is_dir(), reason="the real data files are not beside this checkout")
def test_real_files_are_read_and_their_own_answers_earn_the_reward():
    rows = {"gsm8k_test": 1319, "math500": 500, "amc23": 40, "aime24": 30, "aime25": 30}
    for name, count in rows.items():
        with math_file(DATA / "gsm8k_train.jsonl", eval_path=str(DATA / f"{name}.jsonl")) as task:
            problems = task.held_out_problems(10_000)
            assert len(problems) == count
            sample = problems[:40]
            assert task.grade(sample, [f"So it is $\\boxed{{{p.answer}}}$." for p in sample]) == [1.0] * len(sample)
            assert task.grade(sample, ["\\boxed{123456789}"] * len(sample)) == [0.0] * len(sample)


@pytest.fixture
def math():
    grader = MathGrader(timeout=5)
    yield grader
    grader.close()


@pytest.mark.long
def test_an_answer_of_thousands_of_characters_is_rejected(math):
    problem = Problem("1/2 + 1/3?", "\\frac{5}{6}")
    math.grade([problem], ["\\boxed{1}"])  # the worker starts before the clock
    begin = time.perf_counter()
    assert math.grade([problem], ["\\boxed{" + "9" * 10**6 + "}"]) == [0.0]
    assert math.answer_groups(["\\boxed{" + "1+" * 10**5 + "1}", "\\boxed{7}"], [0.0, 0.0]) == [None, 1]
    assert math.worker.num_failures == 0
    assert time.perf_counter() - begin < 10


@pytest.mark.long
def test_a_worker_stays_within_its_memory_limit(math):
    problem = Problem("?", "1")
    assert math.grade([problem, problem], ["\\boxed{2^{20000000000}}", "\\boxed{2-1}"]) == [0.0, 1.0]


@pytest.mark.long
def test_the_first_answer_imports_no_module():
    script = (
        "import sys\nfrom rlzoo.tasks import math_grading\n"
        "math_grading.start()\nbefore = set(sys.modules)\nassert math_grading.score('4', '2+2', True) == 1.0\n"
        "assert not set(sys.modules) - before, set(sys.modules) - before"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.long
def test_references_and_their_text_in_the_file_earn_the_reward(tmp_path):
    cases = {  # the text in the file: right answers, and wrong ones
        "so\n#### 2,500": (["2,500", "2500", "2500.0", "2.5 \\times 10^3"], ["2, 500", "2", "500"]),
        "#### 3,400 pages": (["3,400 pages", "3400 pages"], ["3 pages", "400"]),
        "\\$1,000,000": (["\\$1,000,000", "1000000"], ["1"]),
        "#### 7, -7": (["7, -7", "-7, 7"], ["0", "7", "7 -7"]),
        "#### (4, 9)": (["(4, 9)"], ["49", "(9, 4)"]),
        "#### (2,500, 8)": (["(2,500, 8)"], ["25008"]),
        2.5e-5: (["0.000025", "2.5 \\times 10^{-5}", "\\frac{1}{40000}"], ["0.000035", "2.5e", "0"]),
        3e22: (["3" + "0" * 22, "3 \\times 10^{22}"], ["3"]),
    }
    rows = [{"question": f"question {number}", "answer": written} for number, written in enumerate(cases)]
    training = write(tmp_path / "train.jsonl", [{"question": "other", "answer": "1"}])
    with math_file(training, eval_path=write(tmp_path / "eval.jsonl", rows), timeout=60) as task:
        problems = {problem.question: problem for problem in task.held_out_problems(99)}
        for row, (right, wrong) in zip(rows, cases.values(), strict=True):
            answers = [f"\\boxed{{{answer}}}" for answer in (*right, *wrong)]
            rewards = task.grade([problems[row["question"]]] * len(answers), answers)
            assert rewards == [1.0] * len(right) + [0.0] * len(wrong), (row["answer"], rewards)
