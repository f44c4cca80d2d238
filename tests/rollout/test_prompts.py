"""Prompts that a model does not support are rejected with the reason; a chat template cannot hang or fill the memory."""

import logging
import time

import pytest

import rlzoo
from rlzoo.errors import UserError
from rlzoo.models.pretrained import load_pretrained
from rlzoo.rollout import prompts
from rlzoo.rollout.prompts import TEMPLATES, encode_prompt
from rlzoo.tasks import Task, build_task
from rlzoo.types import Problem
from tests.quick import QUICK
from tests.tasks.math_files import write


class Sums(Task):
    """Sums, one of which is spelled out."""

    questions: tuple[str, ...] = ("1+1=", "2+3=", "five + five?", "3+3=")

    def train_problems(self, start, count):
        return [Problem(self.questions[index % len(self.questions)], "2") for index in range(start, start + count)]

    def held_out_problems(self, count):
        return []

    def _grade(self, problems, responses):
        return [0.0] * len(responses)


@pytest.fixture(scope="module")
def tokenizer():
    return load_pretrained("embedded")[1]


def test_characters_without_a_token_are_named_with_their_question(tokenizer):
    with pytest.raises(UserError) as caught:
        check_task(Sums(), tokenizer, chat_template=False, needed=100, held_out=0)
    message = str(caught.value)
    assert message.startswith(
        "the prompt 'five + five?': the model's tokenizer has no token for 'f', 'i', 'v', 'e', ' ', '?'; "
    )
    assert "task.template" in message
    check_task(Sums(), tokenizer, chat_template=False, needed=2, held_out=0)  # the run does not reach it


def test_a_run_with_such_a_question_is_refused_before_anything_is_written(tmp_path):
    settings = [f"task.name={__name__}:Sums", *QUICK]
    config = rlzoo.RunConfig.compose(clip="fspo", overrides=settings, steps=1, output=tmp_path / "run")
    with pytest.raises(UserError, match="five"):
        rlzoo.train(config)
    assert not (tmp_path / "run").exists()


def templated(tokenizer, template):
    tokenizer.chat_template = template
    return encode_prompt(tokenizer, "1+1=", chat_template=True)


def test_a_template_is_rendered_as_the_tokenizer_would(tokenizer):
    template = "{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    ids = templated(tokenizer, template)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], add_generation_prompt=True, tokenize=False)
    assert ids == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took longer than 2 s"),
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{{ 'a' * 11000000 }}", "the prompt has 11,000,000 characters"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{% for %}", "TemplateSyntaxError"),
    ],
)
def test_a_template_that_does_not_end_or_makes_too_much_is_one_line(tokenizer, monkeypatch, template, reason):
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 2.0)
    begin = time.monotonic()
    with pytest.raises(UserError, match=reason) as caught:
        templated(tokenizer, template)
    assert time.monotonic() - begin < 60
    assert str(caught.value).startswith("the model's chat template fails for the prompt '1+1=': ")
    # another worker renders it
    assert templated(tokenizer, "{{ messages[0].content }}") == tuple(tokenizer("1+1=")["input_ids"])
    assert TEMPLATES.pid is not None


def test_a_run_says_how_many_questions_train_and_are_held_out(tokenizer, tmp_path, monkeypatch, caplog):
    (tmp_path / "any_reward.py").write_text("def pay(problem, response):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = {"train": [f"{n}+1" for n in range(12)], "eval": ["1+2", "1+3", "1+4", "3+1"]}
    for name, questions in rows.items():
        write(tmp_path / f"{name}.jsonl", [{"question": question, "answer": "0"} for question in questions])
    settings = {"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "eval.jsonl"), "template": "{question}"}
    file = build_task({"name": "math_file", "reward": "any_reward:pay", "seed": 0, **settings})
    counts = (logging.INFO, "task math_file: 11 training questions, 4 held out")  # 3+1 is in both files
    few = "eval.num_problems=5 exceeds the number of held-out questions, 4; add questions, or lower it"
    sums = build_task({"name": "arithmetic", "operand_max": 3, "num_operands_max": 2, "seed": 0})  # 9 sums
    number = len(sums.held_out_problems(9))
    for task, wanted, said in (
        (file, 4, [counts]),
        (file, 5, [counts, (logging.WARNING, few)]),
        (sums, number, [(logging.INFO, f"task arithmetic: endless training questions, {number} held out")]),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "rlzoo"):
            check_task(task, tokenizer, chat_template=False, needed=4, held_out=wanted)
        assert [(record.levelno, record.getMessage()) for record in caplog.records] == said
    with caplog.at_level(logging.WARNING, "rlzoo"):
        check_task(sums, tokenizer, chat_template=False, needed=4, held_out=9)
    assert f"eval.num_problems=9 exceeds the number of held-out questions, {number}; " in caplog.records[-1].getMessage()
