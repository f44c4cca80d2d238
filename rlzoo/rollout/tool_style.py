"""Determines how to describe tools and format their results, using a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rlzoo.core.errors import UserError
from rlzoo.rollout.prompts import rendered
from rlzoo.tasks.environments import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPLAINED = """\
You may call functions to help with the question. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call, write a JSON object with the name and the arguments of the function within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_WORD = {"type": "string", "description": "A word."}
_PROBE = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"word": _WORD}, "required": ["word"]},
    },
}
_USER, _ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}


@dataclass(frozen=True, slots=True)
class ToolStyle:
    r"""The format of tools and their results. Anything that the chat template does not support becomes ordinary messages.

    Example:
        >>> style = ToolStyle(text="You may call f.")
        >>> style.first([{"role": "user", "content": "What is 2 + 3?"}])[0]
        {'role': 'system', 'content': 'You may call f.'}
        >>> style.answers([{"role": "tool", "name": "f", "content": "5"}])
        [{'role': 'user', 'content': '<tool_response>\n5\n</tool_response>'}]
    """

    schemas: tuple[Mapping[str, Any], ...] = ()  # passed to the template as ``tools``
    text: str = ""  # describes the tools if the template does not do so
    has_role: bool = False  # whether the template supports the role "tool"
    has_system: bool = True  # whether the template supports the role "system"

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Determine the style by rendering test messages. A template with a different call format is not used for tools."""
        described = _try(tokenizer, [_USER], [_PROBE])
        if all(word in described for word in ("probe_of_tools", "<tool_call>", '"arguments"')):
            answer = {"role": "tool", "name": "probe_of_tools", "content": "an answer"}
            has_role = "an answer" in _try(tokenizer, [_USER, _ASSISTANT, answer], [_PROBE])
            style = cls(schemas=tuple(tools), has_role=has_role)
        else:
            text = EXPLAINED.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
            has_system = "a rule" in _try(tokenizer, [{"role": "system", "content": "a rule"}, _USER])
            style = cls(text=text, has_system=has_system)
        return style

    def first(self, messages: Sequence[Message]) -> list[Message]:
        """Add the description of the tools to the first messages of an episode."""
        if not self.text:
            return list(messages)
        role, content = str(messages[0]["role"]), str(messages[0]["content"])
        if role == "system" or not self.has_system:
            merged = f"{content}\n\n{self.text}" if role == "system" else f"{self.text}\n\n{content}"
            return [{**messages[0], "content": merged}, *messages[1:]]
        return [{"role": "system", "content": self.text}, *messages]

    def answers(self, messages: Sequence[Message]) -> list[Message]:
        """Convert the environment's messages. Without a tool role, consecutive tool results become one user message."""
        if self.has_role:
            return list(messages)
        converted: list[Message] = []
        previous = ""
        for message in messages:
            if message["role"] != "tool":
                converted.append(message)
            else:
                content = f"<tool_response>\n{message['content']}\n</tool_response>"
                if previous == "tool":
                    content = f"{converted.pop()['content']}\n{content}"
                converted.append({"role": "user", "content": content})
            previous = str(message["role"])
        return converted


def _try(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Render messages, or return an empty string if the template rejects them."""
    try:
        return rendered(tokenizer, messages, tools)
    except UserError:
        return ""
