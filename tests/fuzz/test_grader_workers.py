"""Model outputs graded in a worker process: any text gets a reward, and the next answer is graded as usual.

A worker's own time limit (`task.timeout`, by default 5 s per answer) is 1 s here; a case that takes 5 s shows that the limit
does not work.
"""

import pytest
from hypothesis import strategies as st

from rlzoo.tasks import build_task
from rlzoo.tasks.math_grading import MathGrader
from rlzoo.tasks.problem import Problem
from tests.fuzz.law import SURFACES, held_to_the_law
from tests.fuzz.spoiled import MEGABYTE
from tests.fuzz.test_answers import responses

SURFACE = SURFACES["model outputs, graded in a worker"]
TIMEOUT = 1.0
PROBLEMS = [
    Problem("1/2 + 1/3 = ?", "\\frac{5}{6}"),
    Problem("2 + 2 = ?", "4"),
    Problem("Solve x^2 = 4.", "x = 2 or x = -2"),
    Problem("?", "(1, 2]"),
]
PARTS = [
    *(
        "\\frac{5}{6}",
        "\\frac{",
        "}{",
        "}",
        "{",
        "\\sqrt{2}",
        "\\sqrt[",
        "x^",
        "^{",
        "_{",
        "x = ",
        ",",
        "\\pi",
        "\\infty",
        "\\cdot",
        "!",
        "(",
        "]",
    ),
    *(
        "\\left(",
        "\\right)",
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "\\sum_{i=1}^{10} i",
        "\\int x dx",
        "\\log",
        "\\sin",
        "\\text{and}",
    ),
    *(
        "9",
        "-",
        "0",
        "1/0",
        "0.1",
        "10^{10^{10}}",
        "9^{9^{9^{9}}}",
        "100000!",
        "1e400",
        "9" * 5000,
        "\\cup",
        "\\in",
        "\\le",
        "\\%",
        "\\$",
        "∞",
        "\x00",
    ),
    *(
        "\\def\\a{\\a\\a}\\a",
        "\\binom{1000000}{500000}",
        "x^{1000000}",
        "(x+1)^{10000}",
        "\\boxed{",
        "\\\\",
        "&",
        "#",
        "$",
        "~",
        "'",
        '"',
        "`",
        "%",
    ),
]
HUGE = [
    *(
        "\\boxed{" + "9" * MEGABYTE + "}",
        "\\boxed{" + "(" * MEGABYTE + "}",
        "9" * MEGABYTE,
        "{" * MEGABYTE,
        "\\boxed{" * 100_000,
        "$" * MEGABYTE,
    ),
    *(
        "\\boxed{" + "\\frac{1}" * 50_000 + "}",
        "\\boxed{" + "{" * 3000 + "1" + "}" * 3000 + "}",
        "\\boxed{" + "1+" * 100_000 + "1}",
    ),
    *(
        "\\boxed{" + "\\sqrt{" * 500 + "2" + "}" * 501,
        "the answer is " * 70_000,
        "\\boxed{5_" + " " * MEGABYTE + "}",
        "<answer>" * 120_000,
    ),
    *(
        "\\boxed{10^{10^{10}}}",
        "\\boxed{2^{20000000000}}",
        "\\boxed{(10^{10})!}",
        "$x=" * 100_000,
        "\\boxed{" + "1," * 100_000 + "}",
    ),
]
answers = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), min_size=1, max_size=6).map("".join)
outputs = st.one_of(
    answers.map(lambda answer: f"So it is $\\boxed{{{answer}}}$."),
    answers.map(lambda answer: f"#### {answer}"),
    answers,
    responses,
)
PUZZLES = [
    "chain_sum",
    "basic_arithmetic",
    "countdown",
    "spell_backward",
    "word_sorting",
    "simple_equations",
    "zebra_puzzles",
    "sudoku",
]
PUZZLES += ["polynomial_equations", "letter_counting", "fraction_simplification", "game_of_life", "knights_knaves", "gcd"]


@pytest.fixture(scope="module")
def grader():
    found = MathGrader(TIMEOUT)
    found.grade(PROBLEMS[:1], ["\\boxed{1}"])  # started before the clock
    with SURFACE.watching_workers():
        yield found
    found.close()


def grade(grader, problem, response):
    """Grade the answer and then another one: two parts."""
    rewards = grader.grade([problem, PROBLEMS[1]], [response, "\\boxed{2+2}"])
    assert rewards[0] in (0.0, 1.0)
    assert rewards[1] == 1.0, f"the answer after it is graded wrong; the worker's last failure: {grader.worker.last_failure}"


@held_to_the_law("model outputs, graded in a worker", 0.7, problem=st.sampled_from(PROBLEMS), response=outputs)
def test_mathematics(grader, problem, response):
    SURFACE.check(lambda: grade(grader, problem, response), parts=2)


@held_to_the_law("model outputs, graded in a worker", 0.02, response=st.sampled_from(HUGE), end=outputs)
@pytest.mark.long
def test_long_mathematics(grader, response, end):
    SURFACE.check(lambda: grade(grader, PROBLEMS[0], response), parts=2)
    SURFACE.check(lambda: grade(grader, PROBLEMS[0], end + response), parts=2)


@held_to_the_law("model outputs, graded in a worker", 0.03, texts=st.lists(outputs, min_size=2, max_size=4))
def test_the_same_answers(grader, texts):
    parts = len(texts) * (len(texts) + 1) // 2  # each is compared with itself and with those before it
    groups = SURFACE.check(lambda: grader.answer_groups(texts, [0.0] * len(texts)), parts=parts)
    assert len(groups) == len(texts)


@pytest.fixture(scope="module")
def puzzles():
    tasks = [build_task({"name": f"reasoning_gym:{name}", "seed": 0, "timeout": TIMEOUT}) for name in PUZZLES]
    pairs = [(task, problem) for task in tasks for problem in task.train_problems(0, 3)]
    for other in tasks[1:]:  # one worker for all of them
        other.__dict__["_grader"] = tasks[0]._grader
    for task, problem in pairs:
        task.grade([problem], [f"<answer>{problem.answer}</answer>"])
    with SURFACE.watching_workers():
        yield pairs
    tasks[0].close()


@held_to_the_law(
    "model outputs, graded in a worker", 0.25, place=st.integers(0, 3 * len(PUZZLES) - 1), start=st.booleans(), text=outputs
)
def test_puzzles(puzzles, place, start, text):
    task, problem = puzzles[place]
    right = f"<answer>{problem.answer}</answer>"
    response = f"<answer>{problem.answer}{text}</answer>" if start else text

    def judge():
        rewards = task.grade([problem, problem], [response, right])
        assert rewards[0] in (0.0, 1.0)
        assert rewards[1] == 1.0, "the answer after it is graded wrong"

    SURFACE.check(judge, parts=2)
