"""Questions and answers are read from every layout, and errors name the row."""

import json

import pytest

from rlzoo.errors import UserError
from rlzoo.tasks.math_rows import read_problems
from rlzoo.types import Problem
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


def test_a_parquet_file_that_is_none_or_lacks_a_column_is_told_of(tmp_path):
    pytest.importorskip("pyarrow")
    file = tmp_path / "rows.parquet"
    assert error_of(file).startswith(f"{str(file)!r} is not a file")
    file.write_bytes(b"PAR1 is not all there is to it")
    assert error_of(file).startswith(f"{file}: cannot be read: ")
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([{"text": "q", "answer": "1"}]), file)
    assert error_of(file) == f"{file}: no column with the question (columns found: text, answer; {ALLOWED})"


def test_each_mistake_in_a_file_is_told_with_its_place(tmp_path, gsm8k):
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
    assert message('{"question": 3, "answer": "1"}') == "the question is 3, not a string"
    assert message('{"question": " ", "answer": "1"}') == "the question is ' ', not a string"
    assert message('{"question": "q", "answer": ["1"]}') == "the answer is ['1'], not a string or a number"
    assert message('{"question": "q", "answer": true}') == "the answer is True, not a string or a number"
    assert message('{"question": "q", "answer": "hm\\n####"}') == "the answer is empty"


def test_each_unusable_file_is_told_in_one_line(tmp_path, gsm8k, monkeypatch):
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
def test_a_line_that_is_no_text_or_number_is_named(tmp_path, row):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "2"}\n' + row + "\n")
    with pytest.raises(UserError, match=r"questions.jsonl line 2: (not JSON: |the answer is nan)"):
        read_problems(str(file), "train", None)


def test_names_of_files_that_cannot_be_are_refused():
    for name in ("a" * 5000 + ".jsonl", "a\0.jsonl", "a" * 5000 + ".parquet", "a\0.parquet"):
        with pytest.raises(UserError, match="cannot be read"):
            read_problems(name, "train", None)
