"""The records that flow through a step: rollouts, what a clip policy reads, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # names only: tasks and the command line read this module without waiting for torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its reference answer.

    Example:
        >>> Problem(question="3+5+9=", answer="17").answer
        '17'
    """

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model in an episode, and what the environment answered.

    Example:
        The model's tokens 0 to 4 of the response, "50", after which the environment wrote "lower" and paid nothing:
        ``Turn(start=0, end=5, text="50", observation="lower", reward=0.0, state=812)``
    """

    start: int  # of its tokens in the response
    end: int  # behind them
    text: str  # what the model wrote
    observation: str = ""  # what the environment answered
    reward: float = 0.0  # what it paid for this turn
    state: int = 0  # a number for the state of the environment that the turn began in


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response, as the sampler reported it. In an episode the environment has written some of its tokens.

    Example:
        Response "8#17" with its end token, one id and one log-probability (in nats) per token:
        ``Rollout(prompt_ids=(5, 12, 7), response_ids=(10, 14, 3, 9, 1), rollout_log_probs=(-.1, -.2, -.1, -.9, 0.),
        text="8#17", finished=True, policy_version=12, reward=1.0)``
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # with the end token, when the response reached it
    rollout_log_probs: tuple[
        float, ...
    ]  # one per response token, under the sampler's weights; 0 where the model did not choose
    text: str
    finished: bool  # False: cut off at a limit
    policy_version: int  # optimizer steps taken by the weights that sampled it
    reward: float = 0.0
    turns: tuple[Turn, ...] = ()  # of an episode, in order; none of a response that is one turn
    opening: str = ""  # of an episode: what the environment wrote first
    failure: str = ""  # of an episode whose environment failed: why
    numbers: Mapping[str, float] = field(default_factory=dict)  # that the environment of an episode gave at its end

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where the tokens that the model chose begin and end, turn by turn."""
        return tuple((turn.start, turn.end) for turn in self.turns) or ((0, len(self.response_ids)),)

    @property
    def transcript(self) -> str:
        """The response as a person reads it: of an episode, who wrote what, a line each."""
        lines = [f"environment: {self.opening}"]
        for turn in self.turns:
            lines += [f"model: {turn.text}", *([f"environment: {turn.observation}"] if turn.observation else [])]
        return "\n".join(lines) if self.turns else self.text

    @property
    def length(self) -> int:
        """Number of tokens that the model chose."""
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All responses sampled for one problem; advantages compare the members of a group.

    Example:
        ``RolloutGroup(problem=Problem("3+5=", "8"), rollouts=(right, wrong))`` with rewards 1 and 0.
    """

    problem: Problem
    rollouts: tuple[Rollout, ...]

    @property
    def is_mixed(self) -> bool:
        """Whether its rewards differ; if not, comparing its members teaches nothing."""
        return len({rollout.reward for rollout in self.rollouts}) > 1


@dataclass(frozen=True, slots=True)
class ClipInputs:
    """What a clip policy reads. B responses, T response tokens; log-probabilities are in nats.

    The engine fills the fields below ``seed`` only for rules that name them in `ClipPolicy.needs`; for all others they are
    None. They carry no gradient, and what they hold on masked positions must not matter to a rule.

    Example:
        Two responses of 3 and 2 tokens, the first with advantage +1, the second with -1:

        >>> import torch
        >>> inputs = ClipInputs(
        ...     log_probs=torch.tensor([[-0.9, -0.5, -0.1], [-1.2, -0.4, 0.0]]),
        ...     old_log_probs=torch.tensor([[-1.0, -0.5, -0.2], [-1.0, -0.4, 0.0]]),
        ...     advantages=torch.tensor([[1.0], [-1.0]]),
        ...     response_mask=torch.tensor([[True, True, True], [True, True, False]]),
        ... )
        >>> tuple(inputs.log_probs.shape)
        (2, 3)
    """

    log_probs: Tensor  # (B, T) current policy; the only tensor that carries gradient
    old_log_probs: Tensor  # (B, T) the policy at the start of the update: the ratio's denominator
    advantages: Tensor  # (B, 1), or (B, T) where credit differs by token; sequence policies take (B, 1) only
    response_mask: Tensor  # (B, T) bool, True on tokens the policy chose
    rollout_log_probs: Tensor | None = None  # (B, T) what the sampler reported; only rules that ask for it read it
    seed: int = 0  # the optimizer step's; rules that draw at random make their generator from it
    group_ids: Tensor | None = None  # (B, 1) int64; responses to one prompt share one, and are judged together
    turn_ids: Tensor | None = None  # (B, T) int64: 0, 1, ... on the model's tokens, -1 elsewhere
    old_entropy: Tensor | None = None  # (B, T) nats, of the model at the start of the update
    ref_log_probs: Tensor | None = None  # (B, T) of the model that the run started from
    rewards: Tensor | None = None  # (B, 1) float32, before they became advantages
    token_ids: Tensor | None = None  # (B, T) int64
    finished: Tensor | None = None  # (B, 1) bool; False: cut off at a limit
    max_length: int | None = None  # the run's limit on the model's tokens in a response
    progress: float | None = None  # in [0, 1), share of the run's updates that are done


@dataclass(frozen=True, slots=True)
class ClipBand:
    """The log-ratios within which the gradient flows; each edge broadcasts against the log-ratio.

    Example:
        A band of 0.03 per sqrt(token) on responses of 100 and 400 tokens has ``high = [[0.3], [0.6]]``.
    """

    low: Tensor  # log-ratio floor, where the advantage is negative
    high: Tensor  # log-ratio ceiling, where the advantage is positive
    ceiling: Tensor | None = None  # dual clip: log-ratio ceiling where the advantage is negative


@dataclass(frozen=True, slots=True)
class ClipResult:
    """What a clip policy answers: its objective, not reduced, and where it cut.

    The decisions may be per token while the objective is per response: a rule may cut tokens before it pools them.

    Example:
        A ratio of 1.5 under a ceiling of 1.2 with advantage 2: ``objective = 2.4``, ``log_ratio = 0.405``, ``clipped = True``.
    """

    objective: Tensor  # (B, T) or (B, 1): to be maximised, not reduced, float32
    log_ratio: Tensor  # (B, T) or (B, 1), detached: the quantity the policy judged
    clipped: Tensor  # (B, T) or (B, 1), bool: where it cut the gradient, or capped or reversed it in rules that never cut
    band: ClipBand | None = None  # the band itself, for rules that have one: tells a dual-clip cut from a low one
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # (B, T) or (B, 1); their means are logged as rule/<name>
