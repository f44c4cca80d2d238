"""Converts prompts to token ids; chat templates are untrusted programs, so a worker process renders them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rlzoo.errors import UserError, shown
from rlzoo.support.workers import Worker, WorkerError, WorkerStartError
from rlzoo.tasks.grading import MEMORY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger("rlzoo")

TEMPLATE_SECONDS = 10.0
"""Time limit in seconds for rendering a chat template. A typical template takes a millisecond."""

LONGEST_PROMPT = 10_000_000  # maximum number of characters

T = TypeVar("T")


class PromptError(UserError):
    """A prompt cannot be encoded for the model; ``reason`` states the cause, but does not quote the prompt or give advice."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat_template: bool) -> tuple[int, ...]:
    """Encode a prompt, wrapped in the tokenizer's chat template if ``chat_template`` is set.

    Raises:
        PromptError: the tokenizer has no token for a character, or the template fails or takes too long.
    """
    text = rendered(tokenizer, [{"role": "user", "content": prompt}]) if chat_template else prompt
    special = {"add_special_tokens": False} if chat_template else {}
    return tuple(encoded(lambda part: list(tokenizer(part, **special)["input_ids"]), text))


def encoded(encode: Callable[[str], T], text: str) -> T:
    """Call a tokenizer's ``encode`` on a text.

    Raises:
        PromptError: the tokenizer fails; the message lists the characters that have no token.
    """
    try:
        return encode(text)
    except Exception as error:  # tokenizers raises plain exceptions
        missing = [character for character in dict.fromkeys(text) if not _is_known(encode, character)]
        problem = f"has no token for {', '.join(map(repr, missing[:10]))}" if missing else f"failed: {error}"
        reason = f"the model's tokenizer {problem}"
        message = f"the prompt {shown(text)}: {reason}; change the questions or task.template, or use another model"
        raise PromptError(message, reason) from error


def _is_known(encode: Callable[[str], object], character: str) -> bool:
    try:
        encode(character)
    except Exception:
        return False
    return True


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Render messages with the tokenizer's chat template, up to the start of the model's turn.

    Args:
        tokenizer: the model's tokenizer.
        messages: messages, each with a role and content.
        tools: JSON schemas of functions, passed to the template as ``tools``.

    Raises:
        PromptError: the template fails or takes too long.
    """
    try:
        given_messages, given_tools = [dict(message) for message in messages], [dict(tool) for tool in tools]
        call = (tokenizer.get_chat_template(), dict(tokenizer.special_tokens_map), given_messages, given_tools)
        return str(TEMPLATES.call(call, TEMPLATE_SECONDS))
    except (WorkerError, WorkerStartError, ValueError) as error:
        reason = f"the model's chat template fails for the prompt {shown(messages[-1].get('content'))}: {error}"
        raise PromptError(f"{reason}; set model.chat_template=false, or use another model", reason) from error


def _start() -> None:
    """Import the renderer in the worker process."""
    from transformers.utils import chat_template_utils

    assert chat_template_utils


def _render(
    template: str, special_tokens: Mapping[str, str], messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]
) -> str:
    """Render messages in the worker process, as ``tokenizer.apply_chat_template`` does."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        [messages], tools=tools or None, chat_template=template, add_generation_prompt=True, **special_tokens
    )
    text = str(texts[0])
    if len(text) > LONGEST_PROMPT:
        raise ValueError(f"the prompt has {len(text):,} characters (at most {LONGEST_PROMPT:,})")
    return text


TEMPLATES = Worker(_render, _start, MEMORY)
