r"""The puzzles of reasoning-gym: any of its generated datasets, graded by its own scorers, all or nothing."""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

from pydantic import Field, field_validator

from rlzoo.errors import UserError, did_you_mean
from rlzoo.tasks import gym_worker
from rlzoo.tasks.extraction import final_answer
from rlzoo.tasks.grading import Grader
from rlzoo.tasks.task import WorkerGradedTask, is_held_out, require_extra
from rlzoo.types import Problem

_MAX_TRIES = 1000  # draws in a row on the wrong side of the split, or without a new question, before giving up
_MAX_ENTRIES = 100_000  # scorers need more than the answer, so the entries of recent problems are kept
_SET_BY_TASK = ("seed", "size")


class ReasoningGymTask(WorkerGradedTask):
    """Problems of one reasoning-gym dataset; a response earns 1 for a full score and else nothing.

    The scorers run in a worker process: several evaluate the answer as Python, and some never return on a bad one.
    A few datasets (isomorphic_strings, polynomial_multiplication, ransom_note, word_ladder) draw from Python sets, so their
    problems are the same in another process only under the same ``PYTHONHASHSEED``.
    """

    dataset: str = Field(exclude=True, description="name of the dataset: the part of task.name after the colon")
    options: dict[str, Any] = Field(default_factory=dict, description="the dataset's own settings, such as max_terms: 4")
    template: str = Field(
        default="{question}\n\nThink step by step, then give only the final answer inside <answer></answer> tags.",
        description="the prompt, with {question} where the question goes",
    )

    @property
    def name(self) -> str:
        """``reasoning_gym:<dataset>``."""
        return f"reasoning_gym:{self.dataset}"

    @field_validator("options")
    @classmethod
    def _seed_and_size_are_taken(cls, options: dict[str, Any]) -> dict[str, Any]:
        for key in _SET_BY_TASK:
            if key in options:
                raise UserError(f"task.options.{key} is set by rlzoo: leave it out (task.seed orders the training problems)")
        return options

    def model_post_init(self, context: Any) -> None:
        """Also generate one problem, so that a wrong option shows before a run starts."""
        super().model_post_init(context)
        require_extra("reasoning-gym", "reasoning_gym")
        _check_options(self.dataset, self.options)
        self.train_problems(0, 1)

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Training problems ``start`` to ``start + count``."""
        return [self._train_problem(index) for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """The first ``count`` distinct held-out problems, fewer if the dataset has no more."""
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
        raise UserError(f"task.name={self.name!r} with task.options={self.options} has too few different questions")

    def _entry(self, stream: str, index: int) -> dict[str, Any]:
        chunk, position = divmod(index, gym_worker.CHUNK)
        seed = zlib.crc32(f"{stream}:{chunk}".encode()) % 2**31
        entry: dict[str, Any] = gym_worker.make_dataset(self.dataset, self._options_json, seed)[position]
        return entry

    @property
    def _options_json(self) -> str:
        return json.dumps(self.options, sort_keys=True)

    @cached_property
    def _entries(self) -> _Entries:
        return _Entries()

    def _remember(self, entry: dict[str, Any]) -> Problem:
        problem = Problem(question=entry["question"], answer="" if entry["answer"] is None else str(entry["answer"]))
        self._entries.add(problem, entry)
        return problem

    def _make_grader(self) -> Grader:
        return Grader(gym_worker.score, gym_worker.start, self.timeout)

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        options = self._options_json
        pairs = zip(problems, responses, strict=True)
        return self._grader.grade(
            [(self.dataset, options, final_answer(response), self._entries.get(problem)) for problem, response in pairs]
        )


class _Entries:
    """The most recent problems' full entries, which the scorers read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Problem, dict[str, Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Entries, ()

    def add(self, problem: Problem, entry: dict[str, Any]) -> None:
        with self._lock:
            self._entries[problem] = entry
            if len(self._entries) > _MAX_ENTRIES:
                del self._entries[next(iter(self._entries))]

    def get(self, problem: Problem) -> dict[str, Any]:
        if problem not in self._entries:  # a guess at what the scorer reads would grade 0 without a word
            raise ValueError("unknown problem: draw it from this task, by train_problems or held_out_problems, to grade it")
        return self._entries[problem]


def _is_held_out(question: str) -> bool:
    # CRC-32 is linear: of questions that differ in a few digits only, as in string_splitting, it may hold out none
    return is_held_out(hashlib.sha256(question.encode()).hexdigest())


def _check_options(dataset: str, options: dict[str, Any]) -> None:
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        close = did_you_mean(dataset, DATASETS)
        raise UserError(f"unknown reasoning-gym dataset {dataset!r} (it has {len(DATASETS)}){close}")
    allowed = [field.name for field in fields(DATASETS[dataset][1]) if field.name not in _SET_BY_TASK]
    for key in options:
        if key not in allowed:
            raise UserError(f"unknown key 'task.options.{key}' (allowed: {', '.join(allowed)}){did_you_mean(key, allowed)}")
    try:
        gym_worker.make_dataset(dataset, json.dumps(options, sort_keys=True), 0)
    except Exception as error:  # their configurations check themselves with assertions
        raise UserError(f"task.options={options}: {error or type(error).__name__}") from error
