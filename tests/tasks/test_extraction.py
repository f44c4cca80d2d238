"""Laws of finding the final answer in a response."""

import time

import pytest

from rlzoo.tasks.extraction import final_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{12}", "12"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x}", "x"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a} } {", "a"),
        (r"{ \boxed{a}", "a"),
        (r"\boxed{3} and cut off \boxed{\frac{1}{2", "3"),
        (r"\boxed{", None),
        (r"\boxed{}", ""),
        ("no box", None),
    ],
)
def test_last_boxed_takes_the_last_box_whose_braces_balance(text, content):
    assert last_boxed(text) == content


def test_last_boxed_is_linear_in_an_adversarial_text():
    begin = time.perf_counter()
    assert last_boxed(r"\boxed{" * 100_000) is None
    assert time.perf_counter() - begin < 5  # 0.05 s; quadratic would be hours


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>1</answer> no <answer> 2 </answer>", "2"),
        ("<answer>2</answer> \\boxed{3}", "2"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1\n2</answer>", "1\n2"),
        ("\\boxed{3} #### 4", "3"),
        ("the answer is 3\n#### 4\nbye", "4"),
        ("#### 4\nso the answer is: 3.\nbye", "3"),
        ("thinking\n 12 \n\n", "12"),
        ("<answer>12", "<answer>12"),
        ("", ""),
        (" \n", ""),
    ],
)
def test_final_answer_looks_in_order_of_explicitness(response, answer):
    assert final_answer(response) == answer


def test_final_answer_is_linear_in_an_adversarial_text():
    begin = time.perf_counter()
    assert final_answer("<answer>" * 100_000) == "<answer>" * 100_000
    assert final_answer("</answer><answer>" * 100_000) == ""
    assert time.perf_counter() - begin < 5  # 0.01 s; quadratic would be minutes
