"""Functions that the model calls: execution, results, and how both appear in the model's prompt."""

import json
import textwrap

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlzoo.core.errors import UserError
from rlzoo.rollout.dialogue import Dialogue
from rlzoo.rollout.tool_style import ToolStyle
from rlzoo.tasks import build_task
from rlzoo.tasks.environments.tools import MOST_CALLS, ToolEnvironment, calculator, find_calls, parse_call
from rlzoo.tasks.problem import Problem
from tests.cli.conftest import rlzoo  # noqa: F401

CALCULATOR = "rlzoo.tasks.environments.tools:calculator"


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def add(first: int, second: int = 1) -> int:
    """Add two numbers.

    Args:
        first: The first.
        second: The second.
    """
    return first + second


def begun(*tools):
    episode = ToolEnvironment(tools)
    episode.reset(Problem("6 * 7?", ""), seed=0)
    return episode


def answer_to(message, *tools):
    """Return the reply to a turn with one call, and the number of errors so far."""
    (answer,), reward, done, info = begun(*tools).step(message)
    assert (answer["role"], reward, done) == ("tool", 0.0, False)
    return answer["content"], info["tool_errors"]


# --- the calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17 * 24", "408"),
        ("(3 + 4) * 2.5", "17.5"),
        ("2^10", "1024"),
        ("2 ** -1", "0.5"),
        ("7 // 2 + 7 % 4", "6"),
        ("-3 × 4 ÷ 2 − 1", "-7"),
        ("10 / 4", "2.5"),
        ("10 / 5", "2"),
        ("0.1 + 0.2", "0.30000000000000004"),
        ("2 ** 100", "1.2676506002282294e+30"),
    ],
)
def test_the_calculator_gives_the_value(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "(1).__class__", "[1][0]", "'a' * 3", "True + 1", "1j * 1j", "1 if 1 else 2", "x",
        "lambda: 1", "1 < 2", "f'{1}'", "9 ** 9 ** 9", "10 ** 100000", "2 ** 4096 * 2", "1e308 * 10", "(-8) ** 0.5", "",
        "2 +", "(" * 299, "1" * 301, "1e999", "9.0 ** 9999", "0 ** -1", "1 / 0", "5 << 3", "1 @ 2", "~5", "\0", "1\n2",
    ],
)  # fmt: skip
def test_the_calculator_refuses_everything_else_at_once(expression):
    with pytest.raises((ValueError, ArithmeticError)):
        calculator(expression)


# --- calls


def test_calls_of_a_turn_run_in_order_and_each_is_answered():
    answers, _, done, info = begun(calculator, add).step(
        f"So: {call('add', first=1, second=2)} {call('calculator', expression='5*5')}"
    )
    assert [(each["name"], each["content"]) for each in answers] == [("add", "3"), ("calculator", "25")]
    assert not done
    assert info == {"state": "25", "tool_calls": 2, "tool_errors": 0}


def test_a_turn_without_a_call_is_the_answer():
    episode = begun(calculator)
    episode.step(call("calculator", expression="6*7"))
    assert episode.step("42") == ([], 0.0, True, {"state": "42", "tool_calls": 1, "tool_errors": 0})


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("<tool_call>{name: add}</tool_call>", "is not valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {"first": 1}', "is not valid JSON"),
        ("<tool_call>" + "[" * 90_000, "is not valid JSON"),
        ("<tool_call>" + "[" * 100_001, "the call is not valid JSON"),
        ("<tool_call>[1]</tool_call>", "has no name"),
        ('<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "not an object"),
        (call("subtract", first=1), "there is no tool 'subtract' (available: add)"),
        (call("add"), "first: Missing required argument"),
        (call("add", first="one"), "first: Input should be a valid integer"),
        (call("add", first=1, third=1), "third: Unexpected keyword argument"),
        (call("__init__"), "there is no tool"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_the_reason(message, said):
    content, errors = answer_to(message, add)
    assert content.startswith("error: ")
    assert said in content
    assert len(content) < 1000
    assert errors == 1


def test_a_tool_error_is_reported_to_the_model_and_the_episode_continues():
    assert answer_to(call("calculator", expression="1/0"), calculator) == ("error: ZeroDivisionError: division by zero", 1)


def test_the_result_of_a_tool_is_converted_to_text():
    def pairs() -> dict:
        return {"a": [1, 2.5, None], "b": {1}}

    assert answer_to(call("pairs"), pairs)[0] == '{"a": [1, 2.5, null], "b": "{1}"}'


def test_calls_beyond_the_limit_of_a_turn_are_not_made():
    answers, _, _, info = begun(add).step(call("add", first=1) * (MOST_CALLS + 2))
    assert [each["content"] for each in answers[:MOST_CALLS]] == ["2"] * MOST_CALLS
    assert all(f"a turn may have at most {MOST_CALLS} calls" in each["content"] for each in answers[MOST_CALLS:])
    assert info["tool_errors"] == 2


def test_a_call_inside_think_tags_is_not_made():
    assert find_calls(f"<think>{call('add', first=1)}</think>2") == []
    assert [parse_call(text) for text in find_calls(f"<think>?</think>{call('add', first=1)}")] == [("add", {"first": 1})]


# --- the task


TOOLS = '''
import os, time
from pydantic import BaseModel

def search(query: str, limit: int = 3) -> list:
    """Look something up.

    Args:
        query: What to look for.
        limit: How much to find.
    """
    return [query] * limit

def hang() -> str:
    """Never return."""
    time.sleep(60)

def crash() -> str:
    """End the process."""
    os._exit(3)

def flood() -> str:
    """Say too much."""
    return "x" * 300_000

def undocumented(query: str) -> str:
    return query

def unannotated(query):
    """Look.

    Args:
        query: What.
    """

def calculator() -> str:
    """Another one."""

number = 3
'''


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Make a task with some tools of `TOOLS`, in a separate module."""
    (tmp_path / f"tools_of_{tmp_path.name}.py").write_text(textwrap.dedent(TOOLS))
    monkeypatch.chdir(tmp_path)
    tasks = []

    def make(*tools, **settings):
        references = [tool if ":" in tool else f"tools_of_{tmp_path.name}:{tool}" for tool in tools]
        tasks.append(
            build_task({"name": "tools", "problems": {"name": "arithmetic"}, "tools": references, "workers": 1, **settings})
        )
        return tasks[-1]

    yield make
    for task in tasks:
        task.close()


def test_the_answer_is_graded_by_the_underlying_task(made):
    task = made(CALCULATOR, workers=0, seed=3)
    right, wrong = problems = task.train_problems(0, 2)
    assert problems == build_task({"name": "arithmetic", "seed": 3}).train_problems(0, 2)
    assert task.prompts(problems) == [f"{problem.question}=" for problem in problems]
    numbers, _ = task.host.begin(problems, [0, 0])
    (called,) = task.host.step({numbers[0]: call("calculator", expression=right.question)})
    assert called.messages[0]["content"] == right.answer
    assert (called.reward, called.done) == (0.0, False)
    seen = task.host.step({numbers[1]: f"#{int(wrong.answer) + 1}", numbers[0]: f"#{right.answer}"})
    assert [(each.reward, each.done) for each in seen] == [(0.0, True), (1.0, True)]
    assert seen[1].numbers == {"tool_calls": 1.0, "tool_errors": 0.0}
    assert build_task({"name": task.name, **task.model_dump(mode="json")}) == task


def test_a_copy_with_another_seed_reorders_questions_and_shares_the_workers(made):
    task = made(CALCULATOR, workers=0, problems={"name": "arithmetic", "reward": f"{__name__}:length"})
    seeded = task.model_copy(update={"seed": 5})
    assert seeded.train_problems(0, 3) == build_task({"name": "arithmetic", "seed": 5}).train_problems(0, 3)
    assert seeded.graders == task.graders
    assert seeded.host is not None


def length(problem, response):
    return len(response)


def test_a_tool_that_hangs_crashes_or_floods_fails_only_its_episode(made):
    task = made("hang", "crash", "flood", "search", timeout=2.0)
    problems = task.train_problems(0, 4)
    numbers, _ = task.host.begin(problems, [0] * 4)
    turns = [call("hang"), call("crash"), call("flood"), call("search", query="a", limit=2)]
    hung, crashed, flooded, fine = task.host.step(dict(zip(numbers, turns, strict=True)))
    assert "longer than 2 s" in hung.failure
    assert "exited with code 3" in crashed.failure
    assert "300,000 characters" in flooded.failure
    assert [each.done for each in (hung, crashed, flooded, fine)] == [True, True, True, False]
    assert fine.messages[0]["content"] == '["a", "a"]'


@pytest.mark.parametrize(
    ("tools", "settings", "said"),
    [
        (["undocumented"], {}, "a tool needs a docstring"),
        (["unannotated"], {}, "an annotation for every argument"),
        (["searc"], {}, "did you mean 'search'?"),
        (["number"], {}, "expected a function, got an object of type int"),
        (["calculator", CALCULATOR], {}, "two tools are named 'calculator'"),
        (["calculator.py"], {}, "task.tools="),
        ([CALCULATOR], {"reward": f"{__name__}:length"}, "set task.problems.reward instead"),
        ([CALCULATOR], {"template": "{question}?"}, "set task.problems.template instead"),
        ([CALCULATOR], {"problems": {"name": "arithmetik"}}, "task.problems: unknown task 'arithmetik'"),
        ([CALCULATOR], {"problems": {}}, "task.problems: task.name is missing"),
        (
            [CALCULATOR],
            {"problems": {"name": "tools", "problems": {"name": "arithmetic"}, "tools": [CALCULATOR]}},
            "is already a multi-turn task",
        ),
        ([], {}, "task.tools"),
    ],
)
def test_an_error_is_reported_in_one_line_before_anything_starts(made, tools, settings, said):
    with pytest.raises(UserError) as caught:
        made(*tools, **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# --- a run


SMALL = [
    "train", "--clip", "grpo", "--steps", 2, "--output", "run", "--set", "task.name=tools", "--set", "task.workers=1",
    "--set", "task.problems.name=arithmetic", "--set", "rollout.num_prompts=4", "--set", "rollout.group_size=4",
    "--set", "eval.num_problems=4",
]  # fmt: skip


@pytest.mark.long
def test_a_run_with_tools_is_graded_as_one_without(rlzoo, tmp_path, caplog):  # noqa: F811
    code, _, err = rlzoo(*SMALL, "--set", f"task.tools=[{CALCULATOR}]")
    assert (code, "Traceback" in err) == (0, False)
    assert "model.chat_template=false: no template describes the tools" in caplog.text
    rows = [json.loads(line) for line in (tmp_path / "here" / "run" / "metrics.jsonl").read_text().splitlines()]
    rollouts = [json.loads(line) for line in (tmp_path / "here" / "run" / "rollouts" / "000001.jsonl").read_text().splitlines()]
    task = build_task({"name": "arithmetic"})
    for each in rollouts:
        assert [each["reward"]] == task.grade([Problem(each["question"], each["answer"])], [each["response"]])
        assert len(each["turns"]) == 1
    assert rows[1]["reward/mean"] == sum(each["reward"] for each in rollouts) / len(rollouts) > 0


def test_an_error_in_the_tools_is_reported_in_one_line_by_the_command(rlzoo):  # noqa: F811
    code, _, err = rlzoo(*SMALL, "--set", "task.tools=[rlzoo.tasks.environments.tools:calculater]")
    assert code == 2
    assert err.count("\n") == 1
    assert "did you mean 'calculator'?" in err


# --- how tools appear in the prompt


def tokenizer_with(template):
    """Return a byte tokenizer with the given chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: place for place, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def put(template, first, *answers):
    """Return the model's prompt with this template, and the text after its first turn."""
    tokenizer = tokenizer_with(template)
    (schema,) = build_task({"name": "tools", "problems": {"name": "arithmetic"}, "tools": [CALCULATOR], "workers": 0}).schemas
    dialogue = Dialogue(tokenizer, frozenset([tokenizer.eos_token_id]), chat_template=template is not None, tools=[schema])
    messages = [{"role": "tool", "name": "calculator", "content": answer} for answer in answers]
    return tokenizer.decode(dialogue.begin(first)), tokenizer.decode(dialogue.after_turn(first, messages))


ASK = [{"role": "user", "content": "6*7?"}]

# of SmolLM2-135M-Instruct
ROLES_AS_THEY_ARE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHATML_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\nSignatures:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nA call:' }}
    {{- ' <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

ANSWERED = (
    "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)


def test_a_template_without_tools_gets_them_in_a_system_message_and_answers_from_the_user():
    begin, behind = put(ROLES_AS_THEY_ARE, ASK, "42", "43")
    assert begin.startswith("<|im_start|>system\nYou may call functions")
    assert '"name": "calculator"' in begin
    assert begin.endswith("</tool_call><|im_end|>\n<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n")
    assert behind == ANSWERED


def test_a_template_with_tools_explains_them_itself():
    begin, behind = put(CHATML_WITH_TOOLS, ASK, "42", "43")
    assert begin.startswith("<|im_start|>system\nSignatures:\n<tools>\n{")
    assert "You may call functions" not in begin
    assert behind == ANSWERED


def test_a_template_with_another_call_format_does_not_describe_the_tools():
    template = CHATML_WITH_TOOLS.replace("<tool_call>", "[CALL]").replace("</tool_call>", "[/CALL]")
    begin, behind = put(template, ASK, "42", "43")
    assert begin.startswith("<|im_start|>system\nYou may call functions")
    assert "[CALL]" not in begin
    assert behind == ANSWERED


def test_a_system_message_of_the_task_is_kept():
    begin, _ = put(ROLES_AS_THEY_ARE, [{"role": "system", "content": "Be brief."}, *ASK], "42")
    assert begin.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert begin.count("<|im_start|>system") == 1


def test_a_template_that_refuses_system_messages_gets_the_tools_with_the_question():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    begin, _ = put(refuses + ROLES_AS_THEY_ARE, ASK, "42")
    assert "<|im_start|>user\nYou may call functions" in begin
    assert begin.endswith("</tool_call>\n\n6*7?<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_chat_template_the_prompt_is_only_the_question():
    begin, behind = put(None, ASK, "42", "43")
    assert begin == "6*7?"
    assert behind == "\n<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response>\n"


def test_a_message_between_tool_results_keeps_them_separate():
    tool, user = {"role": "tool", "content": "1"}, {"role": "user", "content": "go on"}
    roles = [
        (each["role"], each["content"].count("<tool_response>"))
        for each in ToolStyle(text="t").answers([tool, tool, user, tool])
    ]
    assert roles == [("user", 2), ("user", 0), ("user", 1)]
