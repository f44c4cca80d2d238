"""Asks whether the model's tokenizer and template turn the questions of a run into the prompts that they should be."""

from __future__ import annotations

import json
import logging
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlzoo.errors import UserError, shown
from rlzoo.gate.architecture import find_architecture, model_file
from rlzoo.gate.plan import Prompts
from rlzoo.models.pretrained import context_length, embedding_rows, eos_token_ids, quiet
from rlzoo.rollout.dialogue import ANSWER, Dialogue
from rlzoo.rollout.episodes import Limits
from rlzoo.rollout.prompts import encode_prompt, encode_start, encode_text, rendered, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlzoo.config.sections import ModelConfig, RolloutConfig
    from rlzoo.tasks import Task

logger = logging.getLogger("rlzoo")

_COMPLETE = 16  # how many prompts are encoded as the model reads them: those whose texts have the most tokens
_BYTES_PER_TOKEN = 2  # assumed without a tokenizer; lower than for English (4) or LaTeX (3), so that lengths are overestimated
_TEMPLATE_TOKENS = 64  # allowance for a chat template's own tokens

GENERATED = 256
"""Number of problems whose prompts are checked before a run if the task generates an unlimited number of problems."""


@dataclass(frozen=True)
class Asked:
    """The prompts of a run or an evaluation."""

    prompts: list[str]  # before the chat template
    tools: Sequence[Mapping[str, Any]] = ()  # which the template describes before the first message
    host: bool = False  # whether an environment answers, so that episodes have several turns

    @classmethod
    def of(cls, task: Task, *, needed: int, held_out: int) -> Asked:
        """Return the prompts of a run; if its task generates questions, those of the first `GENERATED`.

        Args:
            task: the run's task.
            needed: number of training problems in the whole run.
            held_out: number of problems to evaluate on.
        """
        size = task.origin(held_out=False).size
        problems = task.train_problems(0, min(needed, GENERATED if size is None else size))
        problems = [*problems, *(task.held_out_problems(held_out) if held_out else [])]
        for level, line in question_counts(task, held_out):
            logger.log(level, line)
        return cls(task.prompts(problems), task.host.tools if task.host else (), task.host is not None)

    def estimate(self, model: ModelConfig, rollout: RolloutConfig | None = None) -> Prompts:
        """Return the length of the longest prompt, counted if the tokenizer is on this machine, without loading the model.

        Raises:
            UserError: a prompt has no tokens, or, with ``rollout``, is too long for the model.
        """
        file = model_file(model.path, "tokenizer.json", download=False)
        if file is None:
            text = max(-(-len(prompt.encode()) // _BYTES_PER_TOKEN) for prompt in self.prompts)
            tools = -(-len(json.dumps(self.tools).encode()) // _BYTES_PER_TOKEN) if self.tools else 0
            prompts = Prompts(text + (_TEMPLATE_TOKENS + tools if model.chat_template else 0), counted=False)
        else:
            from transformers import AutoTokenizer

            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(file.parent)
            complete = self.encode(tokenizer, chat_template=model.chat_template)[1]
            prompts = Prompts(max(map(len, complete.values())), counted=True)
        if rollout is not None:
            check_length(prompts, rollout, limit=_stated_length(model.path), path=model.path)
        return prompts

    def encode(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template: bool
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Return the tokens of all questions without a template, and some complete prompts, the longest among them.

        Raises:
            PromptError: a prompt has no tokens, the tokenizer has no token for a character, or the template fails.
        """
        different = list(dict.fromkeys(self.prompts))
        try:
            questions = dict(
                zip(different, map(tuple, tokenizer(different, add_special_tokens=False)["input_ids"]), strict=True)
            )
        except Exception:  # find the prompt that fails, and say why
            questions = {prompt: encode_text(tokenizer, prompt) for prompt in different}
        chosen = sorted(different, key=lambda prompt: len(questions[prompt]), reverse=True)
        if len(chosen) > _COMPLETE:
            chosen = [*chosen[: _COMPLETE - 2], different[0], chosen[-1]]
        if not self.host:
            return questions, {prompt: encode_prompt(tokenizer, prompt, chat_template) for prompt in chosen}
        dialogue = Dialogue(tokenizer, frozenset(), chat_template=chat_template, tools=self.tools)
        return questions, {prompt: dialogue.begin([{"role": "user", "content": prompt}]) for prompt in chosen}


@dataclass(frozen=True)
class Tokens:
    """What the gate found out about the tokens of a run."""

    end_ids: frozenset[int]  # tokens that end a response
    longest: int  # the longest prompt, in tokens
    longest_row: int  # the longest row that the run may need: prompt, responses and observations, in tokens


def check_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Asked, *, named: ModelConfig, rollout: RolloutConfig
) -> Tokens:
    """Ask whether the prompts are what they should be, and count their tokens.

    Raises:
        UserError: a prompt cannot be used with the model.
    """
    rows, limit = embedding_rows(model), context_length(model)
    end_ids = check_ends(tokenizer, eos_token_ids(model, tokenizer), rows=rows, named=named)
    questions, complete = asked.encode(tokenizer, chat_template=named.chat_template)
    for prompt, ids in (*questions.items(), *complete.items()):
        if max(ids, default=0) >= rows:
            lacks = f"{tokenizer.convert_ids_to_tokens(max(ids))!r} with the id {max(ids)}, but the model's embedding has only {rows}"
            raise UserError(f"the prompt {shown(prompt)}: it has the token {lacks} rows; use the tokenizer of the model")
    check_contents(tokenizer, questions, complete, end_ids, chat_template=named.chat_template)
    longest = max(map(len, complete.values()), default=0)
    check_length(Prompts(longest, counted=True), rollout, limit=limit, path=named.path)
    context = min((size for size in (limit, _vllm_length(rollout)) if size is not None), default=sys.maxsize)
    row = Limits.of(rollout, context).longest(longest)[1] if asked.host else longest + rollout.max_new_tokens
    return Tokens(end_ids, longest, row)


def check_ends(tokenizer: PreTrainedTokenizerBase, stated: frozenset[int], *, rows: int, named: ModelConfig) -> frozenset[int]:
    """Return the tokens that end a response: those that the model and its tokenizer state, and the template's end of turn.

    Raises:
        UserError: the embedding has none of the stated tokens.
    """
    ends = frozenset(token for token in stated if token < rows)
    if stated and not ends:
        given = (
            f"model.path={named.path!r}: the end tokens have the ids {sorted(stated)}, but the embedding has only {rows} rows"
        )
        raise UserError(f"{given}, so no response would end; resize the embedding, or use the tokenizer of the model")
    if not named.chat_template:
        return ends
    turn = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = rendered(tokenizer, turn, closed=True).rpartition(ANSWER)[2].lstrip()
    except UserError:  # the template has no such turns
        return ends
    special, closing = special_tokens(tokenizer), []
    for token in encode_text(tokenizer, text, follows=True):
        if token not in special:
            break
        closing.append(token)
    if not closing or ends.intersection(closing) or closing[0] >= rows:
        return ends
    name = special[closing[0]]
    logger.warning("the chat template ends a turn with %r, which is no end token of the model; it ends responses too", name)
    return ends | {closing[0]}


def check_contents(
    tokenizer: PreTrainedTokenizerBase,
    questions: Mapping[str, tuple[int, ...]],
    complete: Mapping[str, tuple[int, ...]],
    end_ids: frozenset[int],
    *,
    chat_template: bool,
) -> None:
    """Ask whether every prompt contains its question, differs from the others and lets the model begin.

    Args:
        tokenizer: the model's tokenizer.
        questions: the tokens of all questions, without a template.
        complete: the tokens of some complete prompts.
        end_ids: tokens that end a response.
        chat_template: whether the prompts are wrapped in the chat template.

    Raises:
        UserError: a prompt lacks its question, equals another one or ends with an end token.
    """
    source, way_out = ("tokenizer", "use another model")
    if chat_template:
        source, way_out = ("chat template", "set model.chat_template=false, or use another model")
    unknown = next((question for question, ids in questions.items() if tokenizer.unk_token_id in ids), None)
    if unknown is not None and tokenizer.unk_token_id is not None:
        lost = [one for one in dict.fromkeys(unknown) if tokenizer.unk_token_id in encode_text(tokenizer, one, follows=True)]
        given = "the prompt %s: the model's tokenizer has no token for %s, so the model reads %r instead"
        logger.warning(given, shown(unknown), ", ".join(map(repr, lost[:10])) or "a part of it", tokenizer.unk_token)
    for encodings in (complete, questions):
        first: dict[tuple[int, ...], str] = {}
        for prompt, ids in encodings.items():
            if first.setdefault(ids, prompt).split() != prompt.split():
                pair = f"the prompts {shown(first[ids])} and {shown(prompt)} have the same tokens"
                raise UserError(f"{pair}: the model's {source} drops what differs between them; {way_out}")
    for prompt, ids in complete.items():
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if _letters(prompt) not in _letters(text) and tokenizer.unk_token_id not in ids:
            raise UserError(f"the prompt {shown(prompt)}: the model's {source} makes {shown(text)} of it; {way_out}")
        last = next((token for token in reversed(ids) if tokenizer.decode([token]).strip()), ids[-1])
        if last in end_ids and len(ids) > 1:
            ends = f"the prompt {shown(prompt)}: the model's {source} ends it with the end token {tokenizer.decode([last])!r}"
            if not chat_template:
                ends, way_out = f"the prompt {shown(prompt)}: it ends with {tokenizer.decode([last])!r}", "change task.template"
            raise UserError(f"{ends}, so that there is nothing to answer; {way_out}")
    if complete and not chat_template:
        prompt, ids = next(iter(complete.items()))
        if behind := list(tokenizer(prompt)["input_ids"])[len(ids) :]:
            logger.warning("the tokenizer puts %r behind every text; prompts end without it", tokenizer.decode(behind))


def _letters(text: str) -> str:
    """Return the letters and digits of a text, without differences that tokenizers may remove."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text).casefold()))


def check_length(prompts: Prompts, rollout: RolloutConfig, *, limit: int | None, path: str) -> None:
    """Ask whether prompts and responses fit the model and vLLM. Episodes end where the model's limit is reached.

    Args:
        prompts: the longest prompt.
        rollout: how responses are sampled.
        limit: the longest row that the model can read, in tokens; None for any length.
        path: the model.

    Raises:
        UserError: the longest prompt and response need more tokens.
    """
    new, vllm = rollout.max_new_tokens, _vllm_length(rollout)
    about = "" if prompts.counted else "about "
    needed = f"with prompts of up to {about}{prompts.longest} tokens, a sequence length of {prompts.longest + new} is needed"
    if limit is not None and prompts.longest + new > limit:
        left = limit - prompts.longest
        advice = f"set rollout.max_new_tokens to at most {left}" if left > 0 else "the prompts alone are too long"
        has = f"model {path!r} accepts at most {limit}"
        raise UserError(f"rollout.max_new_tokens={new}: {needed}, but {has}; {advice}")
    if vllm is not None and prompts.longest + new > vllm:
        raise UserError(f"rollout.vllm.max_model_len={vllm}: {needed}; raise it, or remove it to use the model's own limit")


def _vllm_length(rollout: RolloutConfig) -> int | None:
    return rollout.vllm.max_model_len if rollout.engine == "vllm" else None


def _stated_length(path: str) -> int | None:
    """Return `context_length` of a model whose weights are not read; None if it is unknown."""
    if (architecture := find_architecture(path)) is not None:
        return architecture.max_length
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with quiet(), torch.device("meta"):
            file = model_file(path, "config.json", download=False)
            return context_length(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file.parent))) if file else None
    except Exception:  # code that comes with the model, or a model that cannot be loaded, which is refused later
        return None


def question_counts(task: Task, wanted: int) -> list[tuple[int, str]]:
    """Return messages to log: how many questions a run has, and a warning if fewer than ``wanted`` are held out."""
    size, held_out = (task.origin(held_out=side).size for side in (False, True))
    held_out = len(task.held_out_problems(wanted)) if held_out is None else held_out
    counts = f"task {task.name}: {'endless' if size is None else f'{size:,}'} training questions, {held_out:,} held out"
    few = f"eval.num_problems={wanted} exceeds the number of held-out questions, {held_out:,}; add questions, or lower it"
    return [(logging.INFO, counts), *([(logging.WARNING, few)] if held_out < wanted else [])]
