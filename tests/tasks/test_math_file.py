"""Laws of the task that reads mathematics questions from files."""

import json
import threading
import time
from pathlib import Path

import pytest

from rlzoo.errors import UserError
from rlzoo.tasks import build_task, math_worker
from rlzoo.tasks.math_grading import MathGrader, math_worker_process
from rlzoo.tasks.math_rows import read_problems
from rlzoo.types import Problem

pytest.importorskip("math_verify")

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"

GSM8K = [
    {
        "question": f"Ann has {n} boxes of 12 eggs and breaks 3 eggs. How many eggs are whole?",
        "answer": f"She starts with {n}*12=<<{n}*12={n * 12}>>{n * 12} eggs.\n{n * 12 - 3} are whole.\n#### {n * 12 - 3:,}",
    }
    for n in range(80, 120)  # 1,000 and more: some answers have a comma
]
MATH = [
    {
        "problem": f"What is $\\frac{{{n}}}{{7}}$ of $2$?",
        "solution": f"We multiply: \\boxed{{\\frac{{{2 * n}}}{{7}}}}.",
        "level": 1,
    }
    for n in range(1, 60)
    if n % 7
]


ALLOWED = (
    "allowed: a question in question, problem, prompt or messages, and its answer in answer, ground_truth, final_answer, "
    "expected_answer, reward_model.ground_truth, solution or the assistant's message"
)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def math_file(path, **settings):
    return build_task({"name": "math_file", "path": str(path), **settings})


def error_of(path, **settings):
    with pytest.raises(UserError) as caught:
        math_file(path, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def gsm8k(tmp_path):
    return write(tmp_path / "gsm8k.jsonl", GSM8K)


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
    ("row", "answer"),
    [
        ({"question": "q", "answer": "so\n#### 1,234"}, "1234"),
        ({"problem": "q", "answer": "18"}, "18"),
        ({"problem": "q", "solution": "it is $\\boxed{\\frac{1}{2}}$."}, "\\frac{1}{2}"),
        ({"problem": "q", "solution": "it is $\\boxed{3}$.", "answer": "4"}, "4"),
        ({"problem": "q", "answer": "we find \\boxed{x^2}"}, "x^2"),
        ({"problem": "q", "answer": 27.0}, "27"),
        ({"problem": "q", "answer": 2.5}, "2.5"),
        ({"problem": "p", "question": "q", "answer": 7}, "7"),
        ({"problem": "q", "answer": "(1,000, 2)"}, "(1,000, 2)"),
    ],
)
def test_answers_are_read_from_every_layout(tmp_path, row, answer):
    others = [{"question": "other", "answer": "1"}]
    task = math_file(write(tmp_path / "train.jsonl", others), eval_path=write(tmp_path / "eval.jsonl", [row]))
    assert task.held_out_problems(1) == [Problem("q", answer)]


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


def test_a_tower_of_powers_does_not_hang(grading):
    begin, timeouts = time.perf_counter(), grading.graders[0].num_timeouts
    problems = [Problem("q", answer) for answer in ("2", "2", "0.5")]
    assert grading.grade(problems, ["\\boxed{9^9^9^9}", "\\boxed{9^{9^{9^9}}}", "\\boxed{1/2}"]) == [0.0, 0.0, 1.0]
    assert time.perf_counter() - begin < 30
    assert grading.graders[0].num_timeouts > timeouts
    assert grading.graders[0].num_crashes == 0


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


def asked(text, system=None):
    """A prompt as a list of messages."""
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]


LAYOUTS = {
    "question and answer": {"question": "1 + 2?", "answer": "3"},
    "prompt and answer": {"prompt": "1 + 2?", "answer": 3},
    "question beside a prompt made of it": {"question": "1 + 2?", "prompt": "Q: 1 + 2?\nA:", "answer": "3"},
    "problem and solution": {"problem": "1 + 2?", "solution": "Together they are \\boxed{3}."},
    "problem and expected_answer": {"problem": "1 + 2?", "generated_solution": "...", "expected_answer": "3"},
    "question and final_answer": {"question": "1 + 2?", "final_answer": "3", "difficulty": 1.5},
    "TRL's prompt of messages and ground_truth": {"prompt": asked("1 + 2?"), "ground_truth": "3"},
    "TRL's DeepMath": {"prompt": asked("1 + 2?"), "solution": "$3$"},
    "a solution of one word": {"prompt": asked("1 + 2?"), "solution": "3"},
    "messages with the answer": {
        "messages": [*asked("1 + 2?", system="Be brief."), {"role": "assistant", "content": "1 + 2 = 3\n#### 3"}]
    },
    "messages with a box": {"messages": [*asked("1 + 2?"), {"role": "assistant", "content": "It is \\boxed{3}"}]},
    "messages and answer": {"messages": asked("1 + 2?"), "answer": "3"},
    "verl": {
        "data_source": "openai/gsm8k",
        "prompt": asked("1 + 2?", system="Think first."),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 0, "split": "train"},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_usual_layouts_are_read_whatever_holds_them(tmp_path, layout):
    table = pytest.importorskip("pyarrow").Table.from_pylist([LAYOUTS[layout]])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "rows.parquet")
    write(tmp_path / "rows.jsonl", [LAYOUTS[layout]])
    (tmp_path / "rows.json").write_text(json.dumps([LAYOUTS[layout]], indent=2), encoding="utf-8")
    for name in ("rows.jsonl", "rows.json", "rows.parquet"):
        assert read_problems(str(tmp_path / name), "train", None) == [Problem("1 + 2?", "3")], name


def test_a_layout_is_read_from_a_data_set_too(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{"prompt": asked(f"1 + {n}?"), "solution": f"${n + 1}$"} for n in range(3)]
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", rows)
    assert read_problems(str(tmp_path / "set"), "train", None) == [Problem(f"1 + {n}?", str(n + 1)) for n in range(3)]
    write(tmp_path / "set" / "train.jsonl", [{"text": "1 + 2 = 3", "label": 1}])
    with pytest.raises(UserError) as caught:
        read_problems(str(tmp_path / "set"), "train", None)
    assert "no column with the question (columns found: text, label; allowed: " in str(caught.value)


def test_an_answer_that_is_the_whole_solution_is_graded(grading):
    problems = [Problem("1 + 2?", "3"), Problem("Is 7 prime?", "True")]
    assert grading.grade(problems, ["\\boxed{3}", "\\boxed{True}"]) == [1.0, 1.0]
    assert grading.grade(problems, ["\\boxed{4}", "\\boxed{False}"]) == [0.0, 0.0]


def test_a_parquet_file_that_is_none_or_lacks_a_column_is_told_of(tmp_path):
    pytest.importorskip("pyarrow")
    file = tmp_path / "rows.parquet"
    assert error_of(file).startswith(f"{file}: file not found")
    file.write_bytes(b"PAR1 is not all there is to it")
    assert error_of(file).startswith(f"{file}: cannot be read: ")
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([{"text": "q", "answer": "1"}]), file)
    assert error_of(file) == f"{file}: no column with the question (columns found: text, answer; {ALLOWED})"


def test_each_mistake_in_a_file_is_told_with_its_place(tmp_path, gsm8k):
    file = tmp_path / "bad.jsonl"
    good = json.dumps(GSM8K[0]) + "\n\n"  # the blank line counts: the next row is on line 3

    def message(line):
        file.write_text(good + line + "\n")
        return error_of(file).removeprefix(f"{file} line 3: ")

    assert message('{"question": ') == "not JSON: Expecting value at column 14"
    assert message("[1, 2]") == "a list, not an object with columns"
    assert message('{"text": "q", "answer": "1"}') == f"no column with the question (columns found: text, answer; {ALLOWED})"
    assert message('{"question": "q", "level": 3}') == f"no column with the answer (columns found: question, level; {ALLOWED})"
    assert message("{}") == f"no column with the question (columns found: none; {ALLOWED})"
    assert message('{"problem": "q", "solution": "it is 3"}') == (
        "no column 'answer', and no \\boxed{} or #### in solution to take it from"
    )
    assert message('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "it is 3"}]}') == (
        "no column 'answer', and no \\boxed{} or #### in the assistant's message to take it from"
    )
    twice = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]
    assert message(json.dumps({"prompt": twice, "answer": "1"})) == "2 messages of a user, not one: a task asks one question"
    assert message('{"prompt": [], "answer": "1"}') == "0 messages of a user, not one: a task asks one question"
    assert message('{"prompt": [{"role": "user"}], "answer": "1"}').startswith("no column with the question")
    assert message('{"question": 3, "answer": "1"}') == "the question is 3, not a text"
    assert message('{"question": " ", "answer": "1"}') == "the question is ' ', not a text"
    assert message('{"question": "q", "answer": ["1"]}') == "the answer is ['1'], not a text or a number"
    assert message('{"question": "q", "answer": true}') == "the answer is True, not a text or a number"
    assert message('{"question": "q", "answer": "hm\\n####"}') == "the answer is empty"


def test_each_unusable_file_is_told_in_one_line(tmp_path, gsm8k, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of("none.jsonl") == f"none.jsonl: file not found (from {tmp_path})"
    assert error_of(gsm8k, eval_path="none.jsonl") == f"none.jsonl: file not found (from {tmp_path})"
    for path in ("./gsm8k", "../data/gsm8k", "/data/gsm8k.txt", "a/b/c", "my questions"):  # no data set is named like these
        assert error_of(path) == f"{path}: file not found (from {tmp_path})"
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert error_of("empty.jsonl") == "empty.jsonl: no rows"
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    assert error_of("binary.jsonl").startswith("binary.jsonl: cannot be read: ")
    assert error_of(gsm8k, eval_path=gsm8k) == (
        f"nothing is left to train on: every question of task.path={gsm8k!r} is in task.eval_path={gsm8k!r} too"
    )
    assert error_of(gsm8k, timeout=0).startswith("task.timeout=0: ")


def test_a_data_set_is_read_by_its_splits(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")  # the variable is read at import only
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    both, one = tmp_path / "both", tmp_path / "one"
    for folder in (both, one):
        folder.mkdir()
        write(folder / "train.jsonl", GSM8K[:20])
    write(both / "test.jsonl", GSM8K[20:25])
    task = math_file(both)
    assert {p.question for p in task.train_problems(0, 20)} == {row["question"] for row in GSM8K[:20]}
    assert {p.question for p in task.held_out_problems(99)} == {row["question"] for row in GSM8K[20:25]}
    assert error_of(one) == f"data set {str(one)!r} has no split 'test' (it has: train): set task.eval_path"


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


@pytest.mark.parametrize(
    "row", ['{"question": "\\ud800", "answer": "1"}', "[" * 5000, '{"question": "q", "answer": NaN}', "9" * 5000]
)
def test_a_line_that_is_no_text_or_number_is_named(tmp_path, row):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "2"}\n' + row + "\n")
    with pytest.raises(UserError, match=r"questions.jsonl line 2: (not JSON: |the answer is nan)"):
        read_problems(str(file), "train", None)


def test_names_of_files_that_cannot_be_are_refused():
    for name in ("a" * 5000 + ".jsonl", "a\0.jsonl", "a" * 5000 + ".parquet", "a\0.parquet"):
        with pytest.raises(UserError, match="cannot be read"):
            read_problems(name, "train", None)


@pytest.fixture
def math():
    grader = MathGrader(math_worker_process(timeout=5))
    yield grader
    grader.close()


def test_an_answer_of_thousands_of_characters_is_no_answer(math):
    problem = Problem("1/2 + 1/3?", "\\frac{5}{6}")
    math.grade([problem], ["\\boxed{1}"])  # the worker is started before the clock
    begin = time.perf_counter()
    assert math.grade([problem], ["\\boxed{" + "9" * 10**6 + "}"]) == [0.0]
    assert math.answer_groups(["\\boxed{" + "1+" * 10**5 + "1}", "\\boxed{7}"], [0.0, 0.0]) == [None, 1]
    assert math.worker.num_timeouts == 0
    assert time.perf_counter() - begin < 10


def test_a_worker_has_no_more_memory_than_it_may(math):
    problem = Problem("?", "1")
    assert math.grade([problem, problem], ["\\boxed{2^{20000000000}}", "\\boxed{2-1}"]) == [0.0, 1.0]


def test_the_base_of_a_number_is_found_in_linear_time():
    begin = time.perf_counter()
    assert math_worker.base_of("5_" + " " * 10**6) is None
    assert time.perf_counter() - begin < 1
    assert [math_worker.base_of(text) for text in ("52_8", "52 _ { 8 }", "52")] == ["8", "8", None]
