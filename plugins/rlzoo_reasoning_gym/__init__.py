r"""Puzzles from any of reasoning-gym's generated datasets, graded as right or wrong by the dataset's own scorer."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property, lru_cache, partial
from importlib import import_module
from typing import Any

from pydantic import Field

from rlzoo.core.errors import UserError, did_you_mean
from rlzoo.core.hookspecs import hookimpl
from rlzoo.support.extras import require_extra
from rlzoo.tasks.extraction import final_answer
from rlzoo.tasks.grading import MEMORY, Grader
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.task import Task, is_held_out

_MAX_TRIES = 1000  # maximum number of consecutive draws on the wrong side of the split or with a repeated question
_MAX_ENTRIES = 100_000  # maximum number of recent entries to keep, because scorers need the whole entry, not just the answer
_CHUNK = 500  # reasoning-gym's default dataset size; some datasets cannot be indexed beyond their size
_NONSENSE = "?"
_SET_BY_TASK = ("seed", "size")


class ReasoningGymTask(Task):
    """Problems from one reasoning-gym dataset. The reward is 1 for a full score, else 0.

    The scorers run in a worker process, because some of them evaluate the answer as Python code, and some never return if the
    answer is bad. A few datasets (isomorphic_strings, polynomial_multiplication, ransom_note, word_ladder) sample from Python
    sets, so their problems depend on ``PYTHONHASHSEED``.
    """

    dataset: str = Field(exclude=True, description="name of the dataset; the part of task.name after the colon")
    options: dict[str, Any] = Field(default_factory=dict, description="the dataset's own settings, such as max_terms: 4")
    template: str = Field(
        default="{question}\n\nThink step by step, then give only the final answer inside <answer></answer> tags.",
        description="prompt template; {question} is replaced by the question",
    )

    def model_post_init(self, context: Any) -> None:
        """Generate one problem so that an invalid option is reported before a run starts."""
        super().model_post_init(context)
        require_extra("reasoning-gym", "reasoning_gym")
        _check_options(self.dataset, self.options)
        self.train_problems(0, 1)

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Return ``count`` training problems, starting at index ``start``."""
        return [self._train_problem(index) for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """Return the first ``count`` distinct held-out problems, or fewer if the dataset has no more."""
        problems: dict[str, Problem] = {}
        draw = tries = 0
        while len(problems) < count and tries < _MAX_TRIES:
            entry = self._entry("held-out", draw)
            draw += 1
            tries += 1
            if _is_held_out(entry["question"]) and entry["question"] not in problems:
                problems[entry["question"]] = self._remember(entry)
                tries = 0
        return list(problems.values())

    def _train_problem(self, index: int) -> Problem:
        for attempt in range(_MAX_TRIES):
            entry = self._entry(f"train:{self.seed}:{attempt}", index)
            if not _is_held_out(entry["question"]):
                return self._remember(entry)
        raise UserError(f"task.name={self.name!r} with task.options={self.options} has too few distinct questions")

    def _entry(self, stream: str, index: int) -> dict[str, Any]:
        chunk, position = divmod(index, _CHUNK)
        seed = zlib.crc32(f"{stream}:{chunk}".encode()) % 2**31
        entry: dict[str, Any] = _make_dataset(self.dataset, self._options_json, seed)[position]
        return entry

    @property
    def _options_json(self) -> str:
        return json.dumps(self.options, sort_keys=True)

    @cached_property
    def _entries(self) -> dict[Problem, dict[str, Any]]:
        """The full entries of the most recent problems, which the scorers need."""
        return {}

    def _remember(self, entry: dict[str, Any]) -> Problem:
        problem = Problem(question=entry["question"], answer="" if entry["answer"] is None else str(entry["answer"]))
        self._entries[problem] = entry
        if len(self._entries) > _MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]
        return problem

    @cached_property
    def _grader(self) -> Grader:
        # the worker imports the package beforehand, so that the import does not use up the first answer's time
        return Grader(_score, partial(import_module, "reasoning_gym"), self.timeout, MEMORY)

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        pairs = zip(problems, responses, strict=True)
        grades = self._grader.grade(
            [(self.dataset, self._options_json, final_answer(response), self._entries[problem]) for problem, response in pairs]
        )
        return [grade or 0.0 for grade in grades]  # an answer that hangs the grader must not be rewarded


@hookimpl
def rlzoo_tasks() -> dict[str, str]:
    """Return the task. Its name ends with the name of a dataset."""
    return {"reasoning_gym:<dataset>": "rlzoo_reasoning_gym:ReasoningGymTask"}


def _is_held_out(question: str) -> bool:
    # CRC-32 is linear, so on its own it may hold out no question if questions differ in few digits, as in string_splitting
    return is_held_out(hashlib.sha256(question.encode()).hexdigest())


def _check_options(dataset: str, options: dict[str, Any]) -> None:
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        close = did_you_mean(dataset, DATASETS)
        raise UserError(f"unknown reasoning-gym dataset {dataset!r} ({len(DATASETS)} are available){close}")
    allowed = [field.name for field in fields(DATASETS[dataset][1]) if field.name not in _SET_BY_TASK]
    for key in options:
        if key in _SET_BY_TASK:
            raise UserError(f"task.options.{key} is set by rlzoo; remove it (task.seed determines the order of problems)")
        if key not in allowed:
            hint = did_you_mean(key, allowed) or f" (allowed: {', '.join(allowed)})"
            raise UserError(f"unknown key 'task.options.{key}'{hint}")
    try:
        _make_dataset(dataset, json.dumps(options, sort_keys=True), 0)
    except Exception as error:  # the dataset configurations validate themselves with assertions
        raise UserError(f"task.options={options}: {error or type(error).__name__}") from error


@lru_cache(maxsize=64)
def _make_dataset(name: str, options: str, seed: int) -> Any:
    """Return ``_CHUNK`` problems of the reasoning-gym dataset with the given name, options (as JSON) and seed."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    settings = json.loads(options)
    if name == "composite":
        settings["datasets"] = [DatasetSpec(**spec) for spec in settings.get("datasets", [])]
    return reasoning_gym.create_dataset(name, seed=seed, size=_CHUNK, **settings)


def _score(name: str, options: str, answer: str, entry: dict[str, Any]) -> float:
    """Return 1.0 if the answer equals the reference or gets a full score, else 0.0. This function runs in the worker.

    Args:
        name: name of the dataset.
        options: settings of the dataset, as JSON.
        answer: the response's final answer.
        entry: the full entry of the problem, for the scorer.
    """
    if entry["answer"] is not None and answer == str(entry["answer"]):
        return 1.0
    scorer = _make_dataset(name, options, 0)
    paid_in_full = scorer.score_answer(answer, entry) == 1.0  # supersets of the answer and failed attempts get partial scores
    # one scorer (game_of_life_halting in reasoning-gym 0.1.25) gives any text a full score
    return float(paid_in_full and scorer.score_answer(_NONSENSE, entry) < 1.0)
