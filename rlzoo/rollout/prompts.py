"""Converts prompts to token IDs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from rlzoo.core.errors import UserError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger("rlzoo")

_BREAK = "\ufdd0"  # a code point that no text may contain; the texts before and after it are encoded separately

_CONTROL = re.compile(r"<\|.+\|>|<(start|end)_of_\w+>")  # such as <|im_end|> and <end_of_turn>

_control_tokens: WeakKeyDictionary[PreTrainedTokenizerBase, re.Pattern[str]] = WeakKeyDictionary()

T = TypeVar("T")
Message = Mapping[str, Any]


class PromptError(UserError):
    """Raised if a prompt cannot be encoded. ``reason`` states the cause but does not quote the prompt or give advice."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat_template: bool) -> tuple[int, ...]:
    """Encode a prompt, wrapped in the tokenizer's chat template if ``chat_template`` is set.

    With the template, control tokens in the prompt are encoded as plain text. Without the template, the prompt is all the text
    that the model reads, so its control tokens are encoded as control tokens.

    Raises:
        PromptError: the tokenizer has no token for a character, the template fails, or the result has no tokens.
    """
    if not chat_template:
        return encode_text(tokenizer, prompt, bare=True)
    messages = without_control_tokens(tokenizer, [{"role": "user", "content": prompt}])
    return encode_text(tokenizer, rendered(tokenizer, messages))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, bare: bool = False, follows: bool = False) -> tuple[int, ...]:
    """Encode a text in which `without_control_tokens` may have marked control tokens.

    A ``bare`` text starts a row without a template. Its encoding includes the tokens that the tokenizer adds before a text but
    not those that it adds after one. If the text ``follows`` other text, no space is added before it.

    Raises:
        PromptError: the tokenizer fails, or the start of a row has no tokens.
    """

    def encode(segment: str) -> list[int]:
        return list(tokenizer(segment, add_special_tokens=False)["input_ids"])

    def encode_bare(segment: str) -> list[int]:
        ids, bare_ids = list(tokenizer(segment)["input_ids"]), encode(segment)
        if not bare_ids:
            return ids[: ids[:1] == [tokenizer.bos_token_id]]
        starts = (start for start in range(len(ids)) if ids[start : start + len(bare_ids)] == bare_ids)
        return ids[: next(starts, len(ids)) + len(bare_ids)]

    def encode_after(segment: str) -> list[int]:
        try:
            edge, ids = encode("\n"), encode("\n" + segment)
        except Exception:  # a tokenizer without a token for a line break adds no space before a text
            return encode(segment)
        return ids[len(edge) :] if ids[: len(edge)] == edge else encode(segment)

    ids: list[int] = []
    for place, segment in enumerate(text.split(_BREAK)):
        ids += encoded(encode_after if follows or place else encode_bare if bare else encode, segment)
    if not ids and not follows:
        reason = "the model's tokenizer turns it into no tokens, so the model has nothing to answer"
        raise PromptError(f"the prompt {shown(text)}: {reason}; change the questions or task.template", reason)
    return tuple(ids)


def without_control_tokens(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Mark control tokens in messages, so that `encode_text` encodes them as plain text."""
    if (pattern := _control_tokens.get(tokenizer)) is None:
        first = (
            f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in special_tokens(tokenizer).values() if token[1:]
        )
        pattern = _control_tokens[tokenizer] = re.compile("|".join(first) or "(?!)")
    return [{**message, "content": pattern.sub(rf"\g<0>{_BREAK}", str(message["content"]))} for message in messages]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the tokenizer's control tokens by ID, including added tokens that merely look like control tokens."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = tokenizer.added_tokens_decoder.items()
    return named | {key: str(token) for key, token in added if token.special or _CONTROL.fullmatch(str(token))}


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
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Message] = (), *, closed: bool = False
) -> str:
    """Render messages with the tokenizer's chat template, up to the start of the model's turn.

    Args:
        tokenizer: the model's tokenizer.
        messages: messages, each with a role and content.
        tools: JSON schemas of functions, passed to the template as ``tools``.
        closed: whether to stop after the last message, before the start of the model's turn.

    Raises:
        PromptError: the template fails.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(conversation: list[Message]) -> str:
        texts, _ = render_jinja_template(
            [conversation],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=tokenizer.get_chat_template(),
            add_generation_prompt=not closed,
            **tokenizer.special_tokens_map,
        )
        return str(texts[0])

    contents, text, failure = [str(message["content"]).strip() for message in messages], "", None
    try:
        text = render([dict(message) for message in messages])
    except Exception as error:  # a template can raise any exception
        failure = error
    if failure is None and all(content in text for content in contents):
        return text
    with suppress(Exception):  # templates that iterate over contents drop strings or fail
        in_parts = render([{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages])
        if "'type': 'text'" not in in_parts and all(content in in_parts for content in contents):
            return in_parts
    if failure is not None:
        problem = f"the model's chat template fails for the prompt {shown(messages[-1].get('content'))}"
        reason = f"{problem}: {type(failure).__name__}: {failure}"
        raise PromptError(f"{reason}; set model.chat_template=false, or use another model", reason) from failure
    return text
