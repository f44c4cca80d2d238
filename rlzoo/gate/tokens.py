"""Checks that the model's tokenizer and template turn the questions of a run into correct prompts."""

from __future__ import annotations

import json
import logging
import math
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rlzoo.config.engines import engine_of
from rlzoo.core.errors import UserError, shown
from rlzoo.gate.architecture import model_file
from rlzoo.gate.plan import Prompts
from rlzoo.models.pretrained import context_length, embedding_rows, eos_token_ids, quiet
from rlzoo.rollout.dialogue import ANSWER, Dialogue
from rlzoo.rollout.episodes import Limits
from rlzoo.rollout.prompts import encode_prompt, encode_text, rendered, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlzoo.config.sections import ModelConfig, RolloutConfig
    from rlzoo.journal.recorded import Recording
    from rlzoo.tasks import Task

logger = logging.getLogger("rlzoo")

Encodings = Mapping[str, tuple[int, ...]]  # maps texts to their tokens

_ENCODED = 256  # number of prompts that are always encoded: those with the most bytes
_COMPLETE = 16  # number of complete prompts that are encoded: those whose questions have the most tokens
_BYTES_PER_TOKEN = 2  # assumed without a tokenizer; lower than for English (4) or LaTeX (3), so that lengths are overestimated
_TEMPLATE_TOKENS = 64  # allowance for a chat template's own tokens

_SAME = "set model.path to the model that generated the responses, or to one with its tokenizer"

GENERATED = 256
"""Number of problems whose prompts are checked before a run if the task generates an unlimited number of problems."""


@dataclass(frozen=True)
class Asked:
    """The prompts of a run or an evaluation."""

    prompts: list[str]  # before the chat template
    tools: Sequence[Mapping[str, Any]] = ()  # described by the template before the first message
    host: bool = False  # whether an environment answers the model, so that episodes have several turns

    @classmethod
    def of(cls, task: Task, *, needed: int, held_out: int) -> Asked:
        """Return the prompts of a run. If its task is endless, only the first `GENERATED` training prompts are included.

        Args:
            task: the run's task.
            needed: number of training problems in the whole run.
            held_out: number of problems to evaluate on.
        """
        size = task.num_problems(held_out=False)
        problems = task.train_problems(0, min(needed, GENERATED if size is None else size))
        problems = [*problems, *(task.held_out_problems(held_out) if held_out else [])]
        return cls(task.prompts(problems), task.host.tools if task.host else (), task.host is not None)

    def estimate(self, model: ModelConfig, rollout: RolloutConfig, limit: int | None) -> Prompts:
        """Return the length of the longest prompt without loading the model. Without a local tokenizer, it is an estimate.

        Raises:
            UserError: a prompt has no tokens, or is too long for the model, whose longest row has ``limit`` tokens.
        """
        tokenizer = local_tokenizer(model.path)
        if tokenizer is not None:
            complete = self.encode(tokenizer, chat_template=model.chat_template, room=_room(limit, rollout))[1]
            prompts = Prompts(max(map(len, complete.values()), default=0), counted=True)
        else:
            tools = -(-len(json.dumps(self.tools).encode()) // _BYTES_PER_TOKEN) if self.tools else 0
            text = max((-(-len(prompt.encode()) // _BYTES_PER_TOKEN) for prompt in self.prompts), default=0)
            prompts = Prompts(text + (_TEMPLATE_TOKENS + tools if model.chat_template else 0), counted=False)
        check_length(prompts, rollout, limit=limit, path=model.path)
        recording = engine_of(rollout).recording
        return replace(prompts, longest=max(prompts.longest, recording.largest["prompt"] if recording else 0))

    def encode(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template: bool, room: float = math.inf
    ) -> tuple[Encodings, Encodings]:
        """Return the tokens of selected questions without a template and of some complete prompts, including the longest.

        The selected questions are the longest, those with new characters, and those that might have more than ``room`` tokens.

        Raises:
            PromptError: a prompt has no tokens, the tokenizer has no token for a character, or the template fails.
        """

        def complete(prompt: str) -> tuple[int, ...]:
            if dialogue is None:
                return encode_prompt(tokenizer, prompt, chat_template)
            return dialogue.begin([{"role": "user", "content": prompt}])

        dialogue = Dialogue(tokenizer, frozenset(), chat_template=chat_template, tools=self.tools) if self.host else None
        sizes = {prompt: len(prompt.encode()) for prompt in self.prompts}  # no token is shorter than a byte
        room -= len(complete(self.prompts[0])) if self.prompts else 0
        met: set[str] = set()
        chosen = []
        for place, (prompt, size) in enumerate(sorted(sizes.items(), key=itemgetter(1), reverse=True)):
            if place < _ENCODED or size > room or not met.issuperset(prompt):
                chosen.append(prompt)
                met.update(prompt)
        try:
            encoded = tokenizer(chosen, add_special_tokens=False)["input_ids"] if chosen else []
        except Exception:  # find the prompt that fails, and say why
            encoded = [encode_text(tokenizer, prompt) for prompt in chosen]
        questions = dict(zip(chosen, map(tuple, encoded), strict=True))
        chosen.sort(key=lambda prompt: len(questions[prompt]), reverse=True)
        prompts = dict.fromkeys(
            [*chosen[:_COMPLETE], *self.prompts[:1], *chosen[-1:], *sorted(sizes, key=sizes.__getitem__)[:1]]
        )
        return questions, {prompt: complete(prompt) for prompt in prompts}


@dataclass(frozen=True)
class Tokens:
    """A run's end tokens and maximum lengths."""

    end_ids: frozenset[int]  # tokens that end a response
    longest: int  # length of the longest prompt, in tokens
    longest_row: int  # maximum length of a row in tokens, including its prompt, responses and observations


def check_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Asked, *, named: ModelConfig, rollout: RolloutConfig
) -> Tokens:
    """Check that the prompts are encoded correctly, and count their tokens.

    Raises:
        UserError: a prompt cannot be used with the model.
    """
    rows, limit = embedding_rows(model), context_length(model)
    room = _room(limit, rollout) if len(tokenizer) <= rows else 0  # otherwise, any prompt may have a token without a row
    questions, complete = asked.encode(tokenizer, chat_template=named.chat_template, room=room)
    for prompt, ids in (*questions.items(), *complete.items()):
        if max(ids, default=0) >= rows:
            lacks = f"the token {tokenizer.convert_ids_to_tokens(max(ids))!r} (row {max(ids)} of {rows})"
            raise UserError(f"the prompt {shown(prompt)}: the embedding has no row for {lacks}; use the model's own tokenizer")
    end_ids = frozenset(token for token in eos_token_ids(model, tokenizer) if token < rows)
    if not end_ids and (stated := eos_token_ids(model, tokenizer)):
        lacks = f"model.path={named.path!r}: the embedding has no row for an end token (rows {sorted(stated)} of {rows})"
        raise UserError(f"{lacks}, so no response would end; use the model's tokenizer")
    if named.chat_template and (end := end_of_turn(tokenizer, end_ids)) is not None and end < rows:
        end_ids |= {end}
        name = tokenizer.convert_ids_to_tokens(end)
        logger.warning("the template ends turns with %r, which is not an end token of the model; it ends responses too", name)
    _check_contents(tokenizer, questions, complete, end_ids, "chat template" if named.chat_template else "tokenizer")
    longest = max(map(len, complete.values()), default=0)
    check_length(Prompts(longest, counted=True), rollout, limit=limit, path=named.path)
    context = int(min(_room(limit, rollout) + rollout.max_new_tokens, sys.maxsize))
    row = Limits.of(rollout, context).longest(longest)[1] if asked.host else longest + rollout.max_new_tokens
    if recording := engine_of(rollout).recording:
        _check_recorded(model, tokenizer, recording, asked, named)
        longest, row = max(longest, recording.largest["prompt"]), max(row, recording.largest["row"])
    return Tokens(end_ids, longest, row)


def _check_recorded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recording: Recording, asked: Asked, named: ModelConfig
) -> None:
    """Check that recorded rollouts fit the model and its tokenizer and do not answer held-out prompts."""
    path, trained = str(recording.files[0].parent), f"model {named.path!r}"
    limits = {"token_id": embedding_rows(model) - 1, "row": context_length(model)}
    for name, limit in limits.items():
        if limit is not None and (size := recording.largest[name]) > limit:
            raise UserError(f"the rollouts in {path!r} have a {name} of {size}, but {trained} allows at most {limit}; {_SAME}")
    for other in sorted(recording.models):
        before = local_tokenizer(other)
        if before is not None and before.get_vocab() != tokenizer.get_vocab():
            raise UserError(f"the rollouts in {path!r} are from model {other!r}, but {trained} has another tokenizer; {_SAME}")
    for prompt in () if asked.host else asked.prompts:  # the first messages of all episodes may be the same
        if hash(encode_prompt(tokenizer, prompt, named.chat_template)) in recording.prompts:
            answered = f"the rollouts in {path!r} answer the held-out prompt {shown(prompt)}"
            raise UserError(f"{answered}; set eval.num_problems=0, or choose a task with other held-out problems")


def end_of_turn(tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int]) -> int | None:
    """Return the control token that ends turns in the chat template, or None if there is none or if an end token ends turns."""
    turn = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = rendered(tokenizer, turn, closed=True).rpartition(ANSWER)[2].lstrip()
    except UserError:  # the template has no such turns
        return None
    special = special_tokens(tokenizer)
    closing = list(takewhile(special.__contains__, encode_text(tokenizer, text, follows=True)))
    return closing[0] if closing and not end_ids.intersection(closing) else None


def _check_contents(
    tokenizer: PreTrainedTokenizerBase, questions: Encodings, complete: Encodings, end_ids: frozenset[int], writer: str
) -> None:
    """Check that every prompt contains its question, differs from the others, and does not end with an end token."""
    setting = "set model.chat_template=false" if writer == "chat template" else "change task.template"
    way_out = f"{setting}, or use another model"
    for encodings in (complete, questions):
        first: dict[tuple[int, ...], str] = {}
        for prompt, ids in encodings.items():
            if first.setdefault(ids, prompt).split() != prompt.split():
                pair = f"the prompts {shown(first[ids])} and {shown(prompt)} have the same tokens"
                raise UserError(f"{pair}: the model's {writer} drops what differs; {way_out}")
    for prompt, ids in complete.items():
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if tokenizer.unk_token_id in ids:
            logger.warning("the prompt %s: the tokenizer has no tokens for part of it: %s", shown(prompt), shown(text))
            break
        question_ids = questions.get(prompt) or encode_text(tokenizer, prompt, follows=True)
        alone = tokenizer.decode(question_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if "".join(alone.split()) not in "".join(text.split()) or _letters(prompt) not in _letters(text):
            raise UserError(f"the prompt {shown(prompt)}: the model's {writer} turns it into {shown(text)}; {way_out}")
        last = next((token for token in reversed(ids) if tokenizer.decode([token]).strip()), ids[-1])
        if last in end_ids and len(ids) > 1:
            ends = f"its prompt ends with the end token {tokenizer.decode([last])!r}, so there is nothing to answer"
            raise UserError(f"the question {shown(prompt)}: {ends}; {way_out}")
    if complete and writer == "tokenizer":
        prompt, ids = next(iter(complete.items()))
        if appended := list(tokenizer(prompt)["input_ids"])[len(ids) :]:
            logger.warning("the tokenizer appends %r to every text; prompts end without it", tokenizer.decode(appended))


def _letters(text: str) -> str:
    """Return the letters and digits of a text, normalized to remove distinctions that tokenizers may drop."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text).casefold()))


def check_length(prompts: Prompts, rollout: RolloutConfig, *, limit: int | None, path: str) -> None:
    """Raise UserError if a prompt and its response exceed the ``limit`` of the model at ``path`` or the engine's limit."""
    new, engine = rollout.max_new_tokens, engine_of(rollout)
    about = "" if prompts.counted else "about "
    needed = f"with prompts of up to {about}{prompts.longest} tokens, a sequence length of {prompts.longest + new} is needed"
    if limit is not None and prompts.longest + new > limit:
        left = limit - prompts.longest
        advice = f"set rollout.max_new_tokens to at most {left}" if left > 0 else "the prompts alone are too long"
        raise UserError(f"rollout.max_new_tokens={new}: {needed}, but model {path!r} accepts at most {limit}; {advice}")
    if engine.max_length is not None and prompts.longest + new > engine.max_length:
        setting = f"{engine.length_setting}={engine.max_length}"
        raise UserError(f"{setting}: {needed}; raise it, or remove it to use the model's own limit")


def _room(limit: int | None, rollout: RolloutConfig) -> float:
    """Return the maximum number of tokens in a prompt."""
    limits = (size for size in (limit, engine_of(rollout).max_length) if size is not None)
    return min(limits, default=math.inf) - rollout.max_new_tokens


def local_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """Return a model's tokenizer if its files are on this machine."""
    from transformers import AutoTokenizer

    file = model_file(path, "tokenizer.json", download=False)
    with suppress(Exception), quiet():  # an unreadable tokenizer is refused later
        return AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False) if file else None
    return None


def question_counts(task: Task, wanted: int) -> list[tuple[int, str]]:
    """Return messages to log: the number of questions in the run, and a warning if fewer than ``wanted`` are held out."""
    size, held_out = (task.num_problems(held_out=side) for side in (False, True))
    held_out = len(task.held_out_problems(wanted)) if held_out is None else held_out
    counts = f"task {task.name}: {'endless' if size is None else f'{size:,}'} training questions, {held_out:,} held out"
    few = f"eval.num_problems={wanted}: only {held_out:,} questions are held out and evaluated; add questions, or lower it"
    return [(logging.INFO, counts), *([(logging.WARNING, few)] if held_out < wanted else [])]
