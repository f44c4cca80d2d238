"""The environment interface, which consists of two methods and the types that they take and return."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlzoo.core.errors import shown
from rlzoo.tasks.grading import checked_reward
from rlzoo.tasks.problem import Problem

Message = Mapping[str, Any]
"""A message of a conversation: ``{"role": "user", "content": "higher"}``."""

Messages = str | Message | Sequence[Message]
"""Values that an environment may return: messages, a single message, or the text of a single user message."""

LONGEST_TEXT = 200_000
"""Maximum length of an observation in characters. An environment that returns a longer observation fails."""


class Environment(Protocol):
    """One episode, in which the model and the environment take turns.

    Any class with these two methods is an environment. One object is created per episode, with the arguments from the run's
    configuration, and is reset once. The same problem and seed must begin the same episode, because the responses to one
    problem are compared with each other.

    Example:
        >>> class Echo:
        ...     def reset(self, problem, seed):
        ...         return "Say anything."
        ...     def step(self, message):
        ...         return f"You said {message}.", float(len(message)), True, {}
        >>> Echo().step("hello")
        ('You said hello.', 5.0, True, {})
    """

    def reset(self, problem: Problem, seed: int) -> Messages:
        """Begin the episode.

        Args:
            problem: the problem of the episode.
            seed: seed for all randomness in the episode.

        Returns:
            The first messages for the model.
        """
        ...

    def step(self, message: str) -> tuple[Messages, float, bool, Mapping[str, Any]]:
        """Process the text that the model wrote in one turn.

        Returns:
            The next messages for the model, the reward of this turn, whether the episode is over, and an info mapping.
            The mapping's ``state`` is a string that is equal for turns that begin in the same state. By default, it is the
            observation. Each numeric entry is logged as ``env/<name>``, using its last finite value in each episode, averaged
            over the episodes. Other entries are ignored.
        """
        ...


@dataclass(frozen=True, slots=True)
class Move:
    """A call to one episode's environment with the model's text, or with the problem and seed that begin the episode."""

    episode: int
    message: str = ""
    problem: Problem | None = None  # begins the episode
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """The checked result of a call to an environment."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    state: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""  # why the environment gave no result, in which case the episode is over

    @property
    def text(self) -> str:
        """The contents of the messages."""
        return "\n".join(str(message["content"]) for message in self.messages)

    @classmethod
    def checked(cls, messages: Any, reward: Any = 0.0, done: Any = False, info: Any = None) -> Observation:
        """Check the values that an environment returned.

        Raises:
            ValueError: a value does not match the `Environment` interface.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        elif isinstance(messages, Mapping):
            messages = [messages]
        if not isinstance(messages, Sequence) or not all(_is_message(message) for message in messages):
            raise ValueError(f"returned {shown(messages)}; expected a string, or messages with a role and content")
        size = sum(len(message["content"]) for message in messages)
        if size > LONGEST_TEXT:
            raise ValueError(f"returned {size:,} characters (at most {LONGEST_TEXT:,})")
        if done not in (True, False):  # NumPy's booleans compare equal to True and False
            raise ValueError(f"returned done={shown(done)}; expected True or False")
        info = {} if info is None else info
        if not isinstance(info, Mapping) or not isinstance(info.get("state", ""), str):
            raise ValueError(f"returned the info {shown(info)}; expected a mapping whose 'state', if present, is a string")
        numbers = {str(name): float(value) for name, value in info.items() if isinstance(value, int | float)}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        text = "\n".join(message["content"] for message in messages)
        return cls(tuple(messages), checked_reward(reward), bool(done), state_id(info.get("state", text)), finite)


def state_id(state: str) -> int:
    """Return an int64 that identifies a state. Equal texts give equal numbers in every process and run."""
    return int.from_bytes(hashlib.blake2b(state.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
