"""Runs the environments of episodes in worker processes, which are killed and replaced if they hang or crash."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rlzoo.core.errors import one_line
from rlzoo.support.workers import Worker
from rlzoo.tasks.environments.environment import Environment, Move, Observation
from rlzoo.tasks.problem import Problem

MEMORY = 4 * 2**30
"""Memory limit of a worker process for environments, in bytes."""

LOST = "lost"  # reply of a replacement worker that does not know the episode

Make = Callable[[], Environment]


class _EpisodeError(Exception):
    """Raised if an environment failed. The message says why."""


class Host:
    """Runs any number of episodes in parallel.

    Every worker process holds the environments of several episodes and calls them one after another. Workers run in parallel.
    An environment fails if it raises an error, takes too long, ends its process or returns too much text. Its episode is then
    over, but other episodes are not affected. If a worker is killed, its other episodes are replayed in a new worker. If an
    environment gives different results in the replay because it uses random numbers that do not depend on its seed, its
    episode also fails.
    """

    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas of the functions that the model may call, for its prompt

    def __init__(self, make: Make, *, workers: int, timeout: float) -> None:
        """Store the arguments. The first call starts the workers.

        Args:
            make: returns an environment. It must be importable by name.
            workers: number of worker processes. 0 runs the environments in this process, without time or memory limits.
            timeout: time limit for one call in seconds.
        """
        self.make, self.timeout = make, timeout
        self._seats = [Seat(make, timeout) for _ in range(workers)]
        self._environments: dict[int, Environment] = {}  # environments in this process
        self._next = 0

    def begin(self, problems: Sequence[Problem], seeds: Sequence[int]) -> tuple[list[int], list[Observation]]:
        """Begin episodes, and return their numbers and their first observations.

        Args:
            problems: one problem per episode.
            seeds: one seed per episode.
        """
        numbers = list(range(self._next, self._next + len(problems)))
        self._next += len(problems)
        moves = [Move(number, "", problem, seed) for number, problem, seed in zip(numbers, problems, seeds, strict=True)]
        return numbers, self.call(moves)

    def step(self, messages: Mapping[int, str]) -> list[Observation]:
        """Pass the model's texts to their episodes, and return the environments' observations in the same order."""
        return self.call([Move(number, message) for number, message in messages.items()])

    def end(self, numbers: Sequence[int]) -> None:
        """Discard finished episodes."""
        for number in numbers:
            self._environments.pop(number, None)
            for seat in self._seats:
                seat.past.pop(number, None)

    def call(self, moves: Sequence[Move]) -> list[Observation]:
        """Call the environments of different episodes. Several workers run in parallel."""
        if not self._seats:
            return [self._alone(move) for move in moves]
        seats = [self._seats[move.episode % len(self._seats)] for move in moves]
        jobs = [seat.pool.submit(seat.call, move) for seat, move in zip(seats, moves, strict=True)]
        return [job.result() for job in jobs]

    def close(self) -> None:
        """Stop the worker processes. The host can be used again afterwards."""
        for seat in self._seats:
            seat.worker.close()

    def _alone(self, move: Move) -> Observation:
        try:
            return _called(self._environments, self.make, move)
        except Exception as error:
            return Observation(done=True, failure=one_line(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))


class Seat:
    """One worker process and the episodes whose environments it holds."""

    def __init__(self, make: Make, timeout: float) -> None:
        self.worker = Worker(partial(_answer, make), partial(_start, make), MEMORY)
        self.worker.title = "the environment"
        self.timeout = timeout
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="environments")
        self.past: dict[int, list[tuple[Move, str]]] = {}  # calls and results of each open episode

    def call(self, move: Move) -> Observation:
        """Call the environment of one episode."""
        try:
            answer = self._asked(move)
            if answer == LOST:
                self._play_again(move.episode)
                answer = self._asked(move)
        except _EpisodeError as error:
            self.past.pop(move.episode, None)
            return Observation(done=True, failure=one_line(str(error)))
        self.past.setdefault(move.episode, []).append((move, answer))
        messages, *rest = json.loads(answer)
        return Observation(tuple(messages), *rest)

    def _asked(self, move: Move) -> str:
        answers, failure = self.worker.call((move, list(self.past)), self.timeout)
        if failure:
            raise _EpisodeError(failure)
        return str(answers[0])

    def _play_again(self, number: int) -> None:
        for move, before in self.past.get(number, []):
            if self._asked(move) != before:
                raise _EpisodeError(
                    "another episode ended the worker process, and the replay of this episode gave different results"
                )


def _start(make: Make) -> None:
    """Create an environment in a worker, so that its imports do not count against a call's time limit."""
    make()


_EPISODES: dict[int, Environment] = {}
"""The environments of the open episodes in a worker process."""


def _answer(make: Make, move: Move, open_ones: Sequence[int]) -> str:
    """Call an environment in a worker and discard finished episodes."""
    for number in _EPISODES.keys() - {*open_ones, move.episode}:
        del _EPISODES[number]
    if move.problem is None and move.episode not in _EPISODES:
        return LOST
    seen = _called(_EPISODES, make, move)
    return json.dumps([[dict(message) for message in seen.messages], seen.reward, seen.done, seen.state, dict(seen.numbers)])


def _called(episodes: dict[int, Environment], make: Make, move: Move) -> Observation:
    if move.problem is not None:
        episodes[move.episode] = make()
        begun = Observation.checked(episodes[move.episode].reset(move.problem, move.seed))
        if not begun.text:
            raise ValueError("reset returned no text, so the model has nothing to respond to")
        return begun
    answer: Any = episodes[move.episode].step(move.message)
    if not isinstance(answer, tuple) or len(answer) != 4:
        raise ValueError("step did not return a tuple (messages, reward, done, info)")
    return Observation.checked(*answer)
