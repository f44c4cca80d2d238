"""Converts a conversation to token IDs without retokenising earlier text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlzoo.core.errors import UserError, shown
from rlzoo.rollout.prompts import encode_text, rendered, special_tokens, without_control_tokens
from rlzoo.rollout.tool_style import ToolStyle
from rlzoo.tasks.environments import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "(the answer)"
"""Placeholder for the model's turn when a chat template is rendered to find the text after a turn."""


class Dialogue:
    """Converts messages to token IDs incrementally.

    Without a chat template, the contents of the messages are concatenated. With a chat template, the first messages are
    rendered up to the start of the model's turn. To find the text after a turn, the conversation is rendered with a
    placeholder for the turn. The text between the placeholder and the next turn is tokenised. The tokens that the model
    generated and those before them never change. `ToolStyle` determines how tools and their results are formatted.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int],
        *,
        chat_template: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.chat_template = chat_template
        self.style = ToolStyle.of(tokenizer, tools) if tools and chat_template else ToolStyle(has_role=not tools)
        self._special = special_tokens(tokenizer)
        self._after_turn: dict[str, tuple[int, ...]] = {}  # keyed by the messages' contents and roles

    def begin(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens up to the model's first turn.

        Raises:
            PromptError: the tokenizer or the chat template fails on the messages.
        """
        messages = without_control_tokens(self.tokenizer, messages)
        if self.chat_template:
            return encode_text(self.tokenizer, rendered(self.tokenizer, self.style.first(messages), self.style.schemas))
        return encode_text(self.tokenizer, "".join(str(message["content"]) for message in messages), bare=True)

    def after_turn(self, before: Sequence[Message], messages: Sequence[Message], last: int | None = None) -> tuple[int, ...]:
        """Return the tokens between the end of the model's turn and the start of its next turn.

        Args:
            before: the first messages of the episode.
            messages: the environment's reply.
            last: the end token that ends the model's turn; None for the first end token of the template.

        Raises:
            PromptError: the tokenizer or the chat template fails on the messages.
            UserError: the chat template changes earlier text.
        """
        key = repr([dict(message) for message in messages])
        if key not in self._after_turn:
            if len(self._after_turn) > 10_000:
                self._after_turn.clear()
            before, messages = (without_control_tokens(self.tokenizer, texts) for texts in (before, messages))
            self._after_turn[key] = self._between(before, messages) if self.chat_template else self._plain(messages)
        ids = self._after_turn[key]
        return ids[self._written(ids, last) :] if self.chat_template else ids

    def _written(self, ids: Sequence[int], last: int | None) -> int:
        """Return the number of leading tokens to drop: those that close the turn, up to the model's own end token."""
        is_text = (token not in self._special and self.tokenizer.decode([token]).strip() != "" for token in ids)
        closing = list(ids[: next((place for place, is_one in enumerate(is_text) if is_one), len(ids))])
        ends = [last] if last in closing else [token for token in closing if token in self.end_ids]
        return closing.index(ends[0]) + 1 if ends else 0

    def _plain(self, messages: Sequence[Message]) -> tuple[int, ...]:
        answers = self.style.answers(messages)
        edge = "" if answers == list(messages) else "\n"  # a tool result starts and ends with a line break
        text = edge + "".join(str(message["content"]) for message in answers) + edge
        return encode_text(self.tokenizer, text, follows=True)

    def _between(self, before: Sequence[Message], messages: Sequence[Message]) -> tuple[int, ...]:
        first, answers, schemas = self.style.first(before), self.style.answers(messages), self.style.schemas
        begun = rendered(self.tokenizer, first, schemas)
        answered = rendered(self.tokenizer, [*first, {"role": "assistant", "content": ANSWER}, *answers], schemas)
        after = answered[len(begun) :].lstrip() if answered.startswith(begun) else ""  # the model may write a space first
        if not after.startswith(ANSWER):
            raise UserError(
                f"the model's chat template changes earlier text: {shown(begun[-60:])} is rendered before the model's "
                "turn but is missing after it, so earlier tokens would change. Use another model, give the "
                "tokenizer a chat template that keeps earlier text, or set model.chat_template=false"
            )
        return encode_text(self.tokenizer, after[len(ANSWER) :], follows=True)
