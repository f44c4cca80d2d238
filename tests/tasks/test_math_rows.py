"""Questions and answers are read from every layout, and errors name the row."""

import json
import logging
from decimal import Decimal

import pytest

from rlzoo.core.errors import UserError
from rlzoo.tasks.math_rows import clean_answer, read_problems
from rlzoo.tasks.problem import Problem
from tests.tasks.math_files import GSM8K, error_of, math_file, write

ALLOWED = (
    "allowed: a question in question, problem, prompt or messages, and its answer in answer, ground_truth, final_answer, "
    "expected_answer, reward_model.ground_truth, solution or the assistant's message"
)


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
def test_the_usual_layouts_are_read_from_every_file_format(tmp_path, layout):
    table = pytest.importorskip("pyarrow").Table.from_pylist([LAYOUTS[layout]])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "rows.parquet")
    write(tmp_path / "rows.jsonl", [LAYOUTS[layout]])
    (tmp_path / "rows.json").write_text(json.dumps([LAYOUTS[layout]], indent=2), encoding="utf-8")
    for name in ("rows.jsonl", "rows.json", "rows.parquet"):
        assert read_problems(str(tmp_path / name), "train", None) == [Problem("1 + 2?", "3")], name


def test_a_layout_is_read_from_a_data_set(tmp_path, monkeypatch):
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


def test_an_invalid_or_incomplete_parquet_file_is_reported(tmp_path):
    pytest.importorskip("pyarrow")
    file = tmp_path / "rows.parquet"
    assert error_of(file).startswith(f"{str(file)!r} is not a file")
    file.write_bytes(b"PAR1 is not all there is to it")
    assert error_of(file).startswith(f"{file}: cannot be read: ")
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([{"text": "q", "answer": "1"}]), file)
    assert error_of(file) == f"{file}: no column with the question (columns found: text, answer; {ALLOWED})"


def test_every_error_in_a_file_is_reported_with_its_location(tmp_path, gsm8k):
    file = tmp_path / "bad.jsonl"
    good = json.dumps(GSM8K[0]) + "\n\n"  # the blank line counts, so the next row is on line 3

    def message(line):
        file.write_text(good + line + "\n")
        return error_of(file).removeprefix(f"{file} line 3: ")

    assert message('{"question": ') == "not JSON: Expecting value at column 14"
    assert message("[1, 2]") == "expected an object with columns, got a list"
    assert message('{"text": "q", "answer": "1"}') == f"no column with the question (columns found: text, answer; {ALLOWED})"
    assert message('{"question": "q", "level": 3}') == f"no column with the answer (columns found: question, level; {ALLOWED})"
    assert message("{}") == f"no column with the question (columns found: none; {ALLOWED})"
    assert message('{"problem": "q", "solution": "it is 3"}') == (
        "no column 'answer', and solution contains no \\boxed{} or ####"
    )
    assert message('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "it is 3"}]}') == (
        "no column 'answer', and the assistant's message contains no \\boxed{} or ####"
    )
    twice = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]
    assert message(json.dumps({"prompt": twice, "answer": "1"})) == "2 user messages; expected exactly one, with the question"
    assert message('{"prompt": [], "answer": "1"}') == "0 user messages; expected exactly one, with the question"
    assert message('{"prompt": [{"role": "user"}], "answer": "1"}').startswith("no column with the question")
    assert message('{"question": 3, "answer": "1"}') == "the question is 3; expected a non-empty string"
    assert message('{"question": " ", "answer": "1"}') == "the question is ' '; expected a non-empty string"
    assert message('{"question": "q", "answer": ["1"]}') == "the answer is ['1'], not a string or a number"
    assert message('{"question": "q", "answer": true}') == "the answer is True, not a string or a number"
    assert message('{"question": "q", "answer": "hm\\n####"}') == "the answer is empty"


def test_every_unusable_file_is_reported_in_one_line(tmp_path, gsm8k, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of("none.jsonl") == f"'none.jsonl' is not a file (working directory: {tmp_path})"
    assert error_of(gsm8k, eval_path="none.jsonl") == f"'none.jsonl' is not a file (working directory: {tmp_path})"
    for path in ("./gsm8k", "../data/gsm8k", "/data/gsm8k.txt", "a/b/c", "my questions"):  # no dataset has such a name
        assert error_of(path) == f"{path!r} is not a file (working directory: {tmp_path})"
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert error_of("empty.jsonl") == "empty.jsonl: no rows"
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    assert error_of("binary.jsonl").startswith("binary.jsonl: cannot be read: ")
    assert error_of(gsm8k, eval_path=gsm8k) == (
        f"no questions are left to train on: every question in task.path={gsm8k!r} is also in task.eval_path={gsm8k!r}"
    )
    assert error_of(gsm8k, timeout=0).startswith("task.timeout=0: ")


def test_a_data_set_is_read_by_its_splits(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")  # the variable is only read at import
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    both, one = tmp_path / "both", tmp_path / "one"
    for folder in (both, one):
        folder.mkdir()
        write(folder / "train.jsonl", GSM8K[:20])
    write(both / "test.jsonl", GSM8K[20:25])
    task = math_file(both)
    assert {p.question for p in task.train_problems(0, 20)} == {row["question"] for row in GSM8K[:20]}
    assert {p.question for p in task.held_out_problems(99)} == {row["question"] for row in GSM8K[20:25]}
    assert error_of(one) == (
        f"dataset {str(one)!r} has no split 'test' (available: train); "
        "set task.eval_path to a file, or to a dataset that has this split"
    )


@pytest.mark.parametrize(
    "row", ['{"question": "\\ud800", "answer": "1"}', "[" * 5000, '{"question": "q", "answer": NaN}', "9" * 5000]
)
def test_a_line_that_is_neither_text_nor_number_is_reported(tmp_path, row):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "2"}\n' + row + "\n")
    with pytest.raises(UserError, match=r"questions.jsonl line 2: (not JSON: |the answer is nan)"):
        read_problems(str(file), "train", None)


def test_invalid_file_names_are_refused():
    for name in ("a" * 5000 + ".jsonl", "a\0.jsonl", "a" * 5000 + ".parquet", "a\0.parquet"):
        with pytest.raises(UserError, match=r"cannot be read|File name too long"):
            read_problems(name, "train", None)


@pytest.mark.parametrize(
    ("written", "reference"),
    [
        ("#### 2,500", "2500"),
        ("-2,500.75", "-2500.75"),
        ("\\boxed{\\$12,345,678}", "\\$12345678"),
        ("3,400 pages", "3400 pages"),
        ("about \u20ac1,050", "about \u20ac1050"),
        ("9,100\\%", "9100\\%"),
        # lists, points, sets and intervals
        ("#### 7, -7", "7, -7"),
        ("#### -1,2", "-1,2"),
        ("#### 10,20,300", "10,20,300"),
        ("(2,500, 8)", "(2,500, 8)"),
        ("#### (1,234)", "(1,234)"),
        ("]1,234[", "]1,234["),
        ("\\{1,234\\}", "\\{1,234\\}"),
        ("2,500, 3,500", "2,500, 3,500"),
        ("5 or 2,500", "5 or 2,500"),
        # decimal commas, subscripts, and other groups than thousands
        ("0,125", "0,125"),
        ("1.200,500", "1.200,500"),
        ("x_1,200", "x_1,200"),
        ("1,2000", "1,2000"),
        ("12,34,567", "12,34,567"),
        ("#### red, green", "red, green"),
    ],
)
def test_a_reference_loses_only_commas_between_thousands(written, reference):
    assert clean_answer(written) == reference


@pytest.mark.parametrize(
    ("number", "reference"),
    [
        ("0.000025", "0.000025"),
        ("2.5e-6", "0.0000025"),
        ("4E+22", "4" + "0" * 22),
        ("12.500", "12.5"),
        ("-0.0", "0"),
        ("300", "300"),
        ("98765432109876543210", "98765432109876543210"),
        ("0.12345678901234567890123", "0.12345678901234567890123"),
        ("-1e3", "-1000"),
    ],
)
def test_a_number_is_converted_to_text_with_all_its_digits(tmp_path, number, reference):
    file = tmp_path / "numbers.jsonl"
    rows = (f'{{"question": "a", "answer": {number}}}', f'{{"question": "b", "reward_model": {{"ground_truth": {number}}}}}')
    file.write_text("\n".join(rows))
    assert [problem.answer for problem in read_problems(str(file), "train", None)] == [reference, reference]


def test_a_number_that_cannot_be_converted_to_text_is_refused(tmp_path):
    file = tmp_path / "numbers.jsonl"
    for number, shown in (("-Infinity", "-inf"), ("1e999999999", "1E+999999999"), ("1e-9999999999999999999999", "NaN")):
        file.write_text(f'{{"question": "a", "answer": {number}}}')
        assert error_of(file) == f"{file} line 1: the answer is {shown}, not a string or a number"
    file.write_text('{"question": 2.50, "answer": "1"}')
    assert error_of(file) == f"{file} line 1: the question is 2.50; expected a non-empty string"


def narrow_table():
    pyarrow = pytest.importorskip("pyarrow")
    numpy = pytest.importorskip("numpy")
    inner = pyarrow.struct([("ground_truth", pyarrow.float32()), ("style", pyarrow.string())])
    nested = [None, None, {"ground_truth": 0.7, "style": "rule"}, None, None]
    return pyarrow.table(
        {
            "question": ["a", "b", "c", "d", "e"],
            "answer": pyarrow.array([0.2, 1e-6, None, None, None], pyarrow.float32()),
            "ground_truth": pyarrow.array(
                numpy.array([1, 1, 1, 0.3, 1], numpy.float16), mask=numpy.array([1, 1, 1, 0, 1], bool)
            ),
            "final_answer": pyarrow.array([None, None, None, None, Decimal("3.750")]),
            "reward_model": pyarrow.array(nested, inner),
        }
    )


def test_narrow_floats_and_decimals_of_a_table_keep_their_stored_digits(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow.parquet").write_table(narrow_table(), tmp_path / "rows.parquet")
    answers = ["0.2", "0.000001", "0.7", "0.3", "3.75"]
    assert [problem.answer for problem in read_problems(str(tmp_path / "rows.parquet"), "train", None)] == answers
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    (tmp_path / "rows.parquet").rename(tmp_path / "set" / "train.parquet")
    assert [problem.answer for problem in read_problems(str(tmp_path / "set"), "train", None)] == answers


def test_equal_questions_are_asked_once_and_reported_once(tmp_path, caplog):
    rows = [
        ("  How many\n pens? ", "1,200"),
        ("How many pencils?", "5"),
        ("How many pens?", "1200"),
        ("How  many\u00a0pens?\r\n", "$1,200$"),
        ("How many pens?", "1200."),
    ]
    file = tmp_path / "pens.jsonl"
    write(file, [{"question": question, "answer": answer} for question, answer in rows])
    with caplog.at_level(logging.WARNING, "rlzoo"):
        problems = read_problems(str(file), "train", None)
    assert problems == [Problem("  How many\n pens? ", "1200"), Problem("How many pencils?", "5")]  # asked as written
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} line 3 repeats the question of {file} line 1; number of repeated rows, which are not used: 3"
    ]


def test_different_answers_to_a_question_are_refused_with_both_lines(tmp_path, monkeypatch):
    file = tmp_path / "pens.jsonl"
    write(file, [{"question": "q", "answer": "2"}, {"question": "p", "answer": "1"}, {"question": " q\n", "answer": "2, 3"}])
    assert error_of(file) == (
        f"{file} line 1 and {file} line 3: the same question has the answers '2' and '2, 3'; correct or remove one row"
    )
    write(file, [{"question": "q", "answer": "1,200"}, {"question": "q", "answer": "1200"}])
    assert [problem.answer for problem in read_problems(str(file), "train", None)] == ["1200"]
    (tmp_path / "zero_reward.py").write_text("def zero(problem, response):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "'1,200' and '1200'" in error_of(file, reward="zero_reward:zero")  # the user's function may distinguish them


def test_a_custom_reward_receives_references_unchanged(tmp_path, monkeypatch):
    (tmp_path / "text_reward.py").write_text("def same(problem, response):\n    return float(response == problem.answer)\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [("a", "so\n#### 1,200"), ("b", "red, green"), ("c", "\\boxed{2, 3}"), ("d", 5e-5)]
    evaluation = write(tmp_path / "eval.jsonl", [{"question": question, "answer": answer} for question, answer in rows])
    train = write(tmp_path / "train.jsonl", [{"question": "other", "answer": "1"}])
    with math_file(train, eval_path=evaluation, reward="text_reward:same") as task:
        answers = {problem.question: problem.answer for problem in task.held_out_problems(9)}
    assert answers == {"a": "1,200", "b": "red, green", "c": "2, 3", "d": "0.00005"}


def test_held_out_questions_are_matched_ignoring_white_space(tmp_path):
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]
    spaced = [{**row, "question": f" {row['question']}\n".replace(" + ", "\u00a0+\t")} for row in rows]
    one, other = (math_file(write(tmp_path / f"{name}.jsonl", lines)) for name, lines in (("one", rows), ("other", spaced)))
    assert [p.answer for p in one.held_out_problems(40)] == [p.answer for p in other.held_out_problems(40)]
    task = math_file(write(tmp_path / "train.jsonl", rows[:9]), eval_path=write(tmp_path / "eval.jsonl", spaced[:8]))
    assert {problem.answer for problem in task.train_problems(0, 20)} == {"9"}


def test_a_key_that_is_repeated_in_a_row_is_refused_with_its_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "2", "answer": "3"}\n')
    assert error_of(file) == f"{file} line 2: not JSON: the key 'answer' occurs twice in one object"
    file = tmp_path / "rows.json"
    file.write_text('[{"question": "a", "answer": "1"},\n{"question": "b",\n"answer": "2",\n"question": "c"}]')
    assert error_of(file) == f"{file}: not JSON: the key 'question' occurs twice in one object"
