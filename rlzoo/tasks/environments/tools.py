"""Tools, which are Python functions that the model can call during its turns. A calculator serves as an example."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from rlzoo.core.errors import shown
from rlzoo.tasks.environments.environment import Message
from rlzoo.tasks.problem import Problem

Tool = Callable[..., Any]
"""A function that the model can call.

The optional attribute ``prepare`` is a function that is called before a run starts and once in every worker process, outside
the time limit of a call. It raises `rlzoo.core.errors.UserError` if the tool cannot be used.
"""

MOST_CALLS = 8
"""Maximum number of calls in a turn. Further calls are answered with an error."""

HOW = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


class ToolError(Exception):
    """A call failed. The model reads the error message."""


class ToolEnvironment:
    """An episode with one question, in which the model may call tools before it answers.

    The calls in a turn are answered in order, each by a message with the role ``tool``. A turn without a call is the answer
    and ends the episode. The reward is 0, because the task that asked the question grades the answer.

    Example:
        >>> episode = ToolEnvironment([calculator])
        >>> episode.reset(Problem("What is 12 * 12?", ""), seed=0)
        'What is 12 * 12?'
        >>> messages, reward, done, info = episode.step(
        ...     '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 12"}}</tool_call>'
        ... )
        >>> messages, done, info
        ([{'role': 'tool', 'name': 'calculator', 'content': '144'}], False, {'state': '144', 'tool_calls': 1, 'tool_errors': 0})
        >>> episode.step("144")
        ([], 0.0, True, {'state': '144', 'tool_calls': 1, 'tool_errors': 0})
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.__name__: tool for tool in tools}
        for tool in tools:
            getattr(tool, "prepare", lambda: None)()
        self.num_calls = self.num_errors = 0
        self.last = ""

    def reset(self, problem: Problem, seed: int) -> str:
        """Return the question."""
        return problem.question

    def step(self, message: str) -> tuple[list[Message], float, bool, Mapping[str, Any]]:
        """Run the calls of a turn."""
        calls = find_calls(message)
        answers = [self._answer(number, text) for number, text in enumerate(calls)]
        self.last = str(answers[-1]["content"]) if answers else self.last
        info = {"state": self.last, "tool_calls": self.num_calls, "tool_errors": self.num_errors}
        return answers, 0.0, not calls, info

    def _answer(self, number: int, text: str) -> Message:
        """Run one call and return the message that answers it."""
        self.num_calls += 1
        name = "unknown"
        try:
            if number >= MOST_CALLS:
                raise ToolError(f"a turn may have at most {MOST_CALLS} calls; this is call {number + 1}")
            name, arguments = parse_call(text)
            content = call_tool(self.tools, name, arguments)
        except ToolError as error:
            self.num_errors += 1
            content = f"error: {error}"
        return {"role": "tool", "name": name, "content": content}


def find_calls(text: str) -> list[str]:
    """Return the text between the tags of each call in a turn. Calls before the end of the model's reasoning are ignored.

    Example:
        >>> find_calls('<think>a <tool_call>?</think>Let me see. <tool_call>{"name": "f"}</tool_call> <tool_call>{')
        ['{"name": "f"}', '{']
    """
    return [call.strip() for call in _CALL.findall(text.rpartition("</think>")[2])]


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a call.

    Example:
        >>> parse_call('{"name": "calculator", "arguments": {"expression": "1 + 1"}}')
        ('calculator', {'expression': '1 + 1'})

    Raises:
        ToolError: the call does not have the form of `HOW`.
    """
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the call is not valid JSON ({error}); write {HOW}") from error
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
        raise ToolError(f"the call has no name; write {HOW}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ToolError(f"the arguments are {shown(arguments)}, not an object; write {HOW}")
    return call["name"][:100], arguments


def call_tool(tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any]) -> str:
    """Return the result of a tool as text. A string is returned unchanged, and anything else is formatted as JSON.

    Raises:
        ToolError: there is no such tool, the arguments are wrong, or the tool raised an error.
    """
    if name not in tools:
        raise ToolError(f"there is no tool {name!r} (available: {', '.join(tools)})")
    try:
        value = checked(tools[name])(**arguments)
        return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, detail['loc'])) or 'arguments'}: {detail['msg']}" for detail in error.errors()]
        raise ToolError(f"wrong arguments for {name}: {'; '.join(wrong)[:500]}") from error
    except Exception as error:
        raise ToolError(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}") from error


@cache
def checked(tool: Tool) -> Tool:
    """Return the tool, wrapped so that its arguments are validated against its annotations."""
    return validate_call(config=ConfigDict(arbitrary_types_allowed=True))(tool)


_LONGEST = 300  # maximum number of characters in an expression
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,  # a float, so that the result cannot be an integer of any length
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **, for example (3 + 4) * 2.5.

    Returns:
        The number.

    Example:
        >>> calculator("17 * 24"), calculator("(3 + 4) * 2.5"), calculator("7 / 2"), calculator("6 / 3"), calculator("2^10")
        ('408', '17.5', '3.5', '2', '1024')
        >>> calculator("9 ** 9 ** 9")
        Traceback (most recent call last):
        ...
        OverflowError: math range error
        >>> calculator("__import__('os')")
        Traceback (most recent call last):
        ...
        ValueError: only numbers, parentheses and + - * / // % ** are allowed, not "__import__('os')"
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression):,} characters (at most {_LONGEST})")
    try:
        tree = ast.parse(expression.translate(_SIGNS).strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    value = _value(tree.body, expression)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return repr(value)


def _value(node: ast.AST, expression: str) -> int | float:
    """Return the value of a subexpression."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            value = _OPERATORS[type(node.op)](_value(node.operand, expression))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            value = _OPERATORS[type(node.op)](_value(node.left, expression), _value(node.right, expression))
        case _:
            text = ast.get_source_segment(expression, node) or expression
            raise ValueError(f'only numbers, parentheses and + - * / // % ** are allowed, not "{text}"')
    if not math.isfinite(value):
        raise ValueError(f"the result is {value}, not a finite number")
    return value
