"""Types for sampled responses, their turns, and the group of responses to one problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlzoo.rollout.kept import KeptSets
from rlzoo.tasks.problem import Problem


@dataclass(frozen=True, slots=True)
class Turn:
    """One model turn in an episode, with the environment's observation.

    Example:
        The model wrote "50" in tokens 0 to 4 of the response, and the environment replied "lower" without a reward:

        >>> turn = Turn(start=0, end=5, text="50", observation="lower", reward=0.0, state=812)
    """

    start: int  # index of the turn's first token in the response
    end: int  # index after the turn's last token
    text: str  # text that the model wrote
    observation: str = ""  # the environment's reply
    reward: float | None = 0.0  # reward for this turn; None if it is unknown, as in recorded rollouts
    state: int = 0  # identifies the environment's state at the start of the turn


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response, as reported by the sampler. In an episode, some tokens of the response come from the environment.

    Example:
        The response is "8#17" with its end token. Each token has an ID and a log-probability in nats:

        >>> rollout = Rollout(
        ...     prompt_ids=(5, 12, 7), response_ids=(10, 14, 3, 9, 1), rollout_log_probs=(-0.1, -0.2, -0.1, -0.9, 0.0),
        ...     text="8#17", finished=True, policy_version=12, reward=1.0,
        ... )
        >>> rollout.length
        5
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # includes the end token if the response reached it
    rollout_log_probs: tuple[float, ...]  # one per response token, from the sampler; 0 on tokens that the model did not choose
    text: str
    finished: bool  # False if the response was cut off at a limit
    policy_version: int  # version of the weights that sampled the first token, as a number of optimizer steps
    reward: float | None = None  # None if there is no grade, for example because the grader failed
    reward_parts: Mapping[str, float] = field(default_factory=dict)  # named rewards, of which `reward` is the weighted sum
    turns: tuple[Turn, ...] = ()  # turns of an episode, in order; empty for a single-turn response
    opening: str = ""  # in an episode, the environment's first message
    failure: str = ""  # why the environment of an episode failed; empty if it did not fail
    numbers: Mapping[str, float] = field(default_factory=dict)  # metrics from an episode's environment
    kept: KeptSets | None = None  # one set per response token; None if responses were sampled from the whole vocabulary
    token_versions: tuple[int, ...] = ()  # policy_version of each response token; empty if all are the same

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and end of the model's tokens in each turn."""
        return tuple((turn.start, turn.end) for turn in self.turns) or ((0, len(self.response_ids)),)

    @property
    def transcript(self) -> str:
        """The response as text. An episode has one labelled line per message from the environment or the model."""
        lines = [f"environment: {self.opening}"]
        for turn in self.turns:
            lines += [f"model: {turn.text}", *([f"environment: {turn.observation}"] if turn.observation else [])]
        return "\n".join(lines) if self.turns else self.text

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of the weights that sampled each of the model's tokens, as a number of optimizer steps."""
        every = self.token_versions or (self.policy_version,) * len(self.response_ids)
        return tuple(version for start, end in self.spans for version in every[start:end])

    @property
    def length(self) -> int:
        """Number of tokens that the model chose."""
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All responses sampled for one problem. Their advantages are computed relative to each other."""

    problem: Problem
    rollouts: tuple[Rollout, ...]
    compared: tuple[str, ...] = ()  # named rewards that the estimator compares; empty if it compares `Rollout.reward`

    @property
    def graded(self) -> list[Rollout]:
        """The responses that have a grade."""
        return [rollout for rollout in self.rollouts if rollout.reward is not None]

    @property
    def is_mixed(self) -> bool:
        """Whether the rewards differ. If they do not, comparing the responses gives no signal."""
        names, graded = self.compared, self.graded
        return len({tuple(one.reward_parts[name] for name in names) if names else one.reward for one in graded}) > 1


@dataclass(frozen=True, slots=True)
class QueuedBatch:
    """A batch that was sampled ahead of its training step, as stored in a checkpoint."""

    indices: list[int]  # indices of the batch's training problems
    rollouts: list[Rollout] | None  # responses from all processes, without rewards; None if they are not sampled yet
