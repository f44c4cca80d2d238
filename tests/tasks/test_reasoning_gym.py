"""Laws of the reasoning-gym task."""

import pytest

from rlzoo.core.errors import UserError
from rlzoo.tasks import build_task
from rlzoo.tasks.problem import Problem

pytest.importorskip("reasoning_gym")


def gym(dataset, /, **settings):
    return build_task({"name": f"reasoning_gym:{dataset}", **settings})


@pytest.fixture(scope="module")
def chain_sum():
    with gym("chain_sum") as task:
        yield task


def error_of(dataset, /, **settings):
    with pytest.raises(UserError) as caught:
        gym(dataset, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_training_never_uses_a_held_out_question():
    # one digit and two terms give few questions, so 1000 draws would include held-out ones if they could
    task = gym("chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    held_out = {problem.question for problem in task.held_out_problems(500)}
    train = {problem.question for problem in task.train_problems(0, 1000)}
    assert 5 < len(held_out) < 100
    assert len(train) > 5
    assert not held_out & train


def test_questions_that_differ_in_a_few_digits_are_held_out_too():
    # 193 different ones in 500 draws; CRC-32 of the question itself, modulo 8, is 0 for none of them
    assert len(gym("string_splitting").held_out_problems(10)) == 10


def test_options_reach_the_dataset():
    task = gym("chain_sum", options={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1})
    expression = task.train_problems(0, 1)[0].question.partition(":")[2]
    assert len(expression.split("=")[0].split()) == 5  # three terms and two signs


@pytest.mark.long
def test_a_superset_of_the_answer_has_reward_0_despite_the_scorer(chain_sum):
    import reasoning_gym

    (problem,) = chain_sum.train_problems(0, 1)
    entry = {"question": problem.question, "answer": problem.answer, "metadata": {}}
    superset = f"it is {problem.answer} or 13"
    # the answer's own length over the length of the text: '61' in 'it is 61 or 13' is 2 / 14
    paid = reasoning_gym.create_dataset("chain_sum").score_answer(superset, entry)
    assert paid == pytest.approx(len(problem.answer) / len(superset))
    responses = [f"<answer>{superset}</answer>", superset, f"<answer>{problem.answer}</answer>", problem.answer]
    assert chain_sum.grade([problem] * 4, responses) == [0.0, 0.0, 1.0, 1.0]


def test_a_response_without_an_answer_has_reward_0(chain_sum):
    problems = chain_sum.train_problems(0, 3)
    assert chain_sum.grade(problems, ["", "<answer></answer>", "I cannot say"]) == [0.0, 0.0, 0.0]


@pytest.mark.long
def test_a_scorer_that_rewards_any_text_is_overridden():
    with gym("game_of_life_halting") as task:
        problems = task.train_problems(0, 6)
        assert {problem.answer for problem in problems} == {"True", "False"}
        assert task.grade(problems, [problem.answer for problem in problems]) == [1.0] * 6
        assert task.grade(problems, ["anything"] * 6) == [0.0] * 6
        wrong = {"True": "False", "False": "True"}
        assert task.grade(problems, [wrong[problem.answer] for problem in problems]) == [0.0] * 6


def test_composite_datasets_are_written_as_plain_settings():
    parts = [{"name": "chain_sum", "weight": 1, "config": {}}, {"name": "gcd", "weight": 1, "config": {"max_value": 50}}]
    task = gym("composite", options={"datasets": parts})
    questions = [problem.question for problem in task.train_problems(0, 20)]
    assert 0 < sum("Greatest Common Divisor" in question for question in questions) < 20


def test_the_default_template_asks_for_answer_tags(chain_sum):
    prompt = chain_sum.prompt(Problem("1+1=", "2"))
    assert prompt.startswith("1+1=\n")
    assert "<answer></answer>" in prompt


def test_every_error_is_reported_in_one_line():
    assert error_of("chain_summ") == "unknown reasoning-gym dataset 'chain_summ' (106 are available); did you mean 'chain_sum'?"
    assert error_of("chain_sum", options={"max_term": 4}) == "unknown key 'task.options.max_term'; did you mean 'max_terms'?"
    assert error_of("chain_sum", options={"zzz": 4}) == (
        "unknown key 'task.options.zzz' (allowed: min_terms, max_terms, min_digits, max_digits, allow_negation)"
    )
    assert error_of("chain_sum", options={"max_terms": -4}) == (
        "task.options={'max_terms': -4}: max_terms must be >= min_terms"
    )
    assert error_of("chain_sum", options={"max_terms": "many"}).startswith("task.options={'max_terms': 'many'}: ")
    assert error_of("chain_sum", options={"seed": 3}) == (
        "task.options.seed is set by rlzoo; remove it (task.seed determines the order of problems)"
    )
    assert error_of("chain_sum", dataset="gcd") == (
        "task.dataset='gcd': remove this setting; task.name='reasoning_gym:chain_sum' sets it too"
    )
    assert error_of("chain_sum", options=3).startswith("task.options=3: ")
