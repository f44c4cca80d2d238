"""Files of questions in the layouts of GSM8K and MATH, and the task that reads them."""

import json

import pytest

from rlzoo.core.errors import UserError
from rlzoo.tasks import build_task

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
