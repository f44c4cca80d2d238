"""Plays all episodes of a batch together, alternating between the model and the environments."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from rlzoo.config.sections import RolloutConfig
from rlzoo.core.errors import shown
from rlzoo.rollout.dialogue import Dialogue
from rlzoo.rollout.draws import Truncation
from rlzoo.rollout.kept import KeptSets
from rlzoo.rollout.prompts import PromptError
from rlzoo.rollout.sampler import Drawn, Draws, Ids, Sampler
from rlzoo.rollout.types import Rollout, Turn
from rlzoo.tasks.environments import Host, Message, Observation
from rlzoo.tasks.problem import Problem

logger = logging.getLogger("rlzoo")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on an episode. An episode that reaches a limit ends unfinished."""

    turns: int
    turn_tokens: int  # maximum number of tokens that the model generates in a turn
    tokens: int  # maximum number of tokens that the model generates in an episode
    observation_tokens: int  # maximum number of tokens that the environment writes between two turns
    context: int  # maximum number of tokens in the whole episode, including the prompt

    @classmethod
    def of(cls, settings: RolloutConfig, context: int) -> Limits:
        """Return the limits set by a run's settings and the model's context length."""
        tokens = settings.max_new_tokens
        turn_tokens = min(settings.max_turn_tokens or tokens, tokens)
        return cls(settings.max_turns, turn_tokens, tokens, settings.max_observation_tokens, context)

    def longest(self, prompt: int) -> tuple[int, int]:
        """Return the maximum number of tokens that the model generates in an episode, and the episode's maximum length.

        Example:
            >>> Limits(turns=3, turn_tokens=10, tokens=25, observation_tokens=100, context=512).longest(prompt=7)
            (25, 232)
        """
        chosen = min(self.tokens, self.turns * self.turn_tokens)
        return chosen, min(self.context, prompt + chosen + (self.turns - 1) * self.observation_tokens)


@dataclass(slots=True)
class Episode:
    """The state of an episode in progress."""

    number: int  # identifies the episode in the host
    first: tuple[Message, ...]  # the messages before the model's first turn
    prompt_ids: Ids
    state: int  # environment state before the next turn
    ids: list[int] = field(default_factory=list)  # tokens after the prompt
    log_probs: list[float] = field(default_factory=list)
    kept: list[KeptSets] = field(default_factory=list)  # kept tokens for ``ids``, turn by turn; empty without truncation
    turns: list[Turn] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    is_open: bool = True
    finished: bool = False
    failure: str = ""

    @property
    def length(self) -> int:
        """Number of tokens that the model generated."""
        return sum(turn.end - turn.start for turn in self.turns)

    def rollout(self, text: str, policy_version: int) -> Rollout:
        """Return the rollout for training, without the environment's text after the last turn."""
        end = self.turns[-1].end if self.turns else 0
        return Rollout(
            prompt_ids=self.prompt_ids,
            response_ids=tuple(self.ids[:end]),
            rollout_log_probs=tuple(self.log_probs[:end]),
            text=text,
            finished=self.finished,
            policy_version=policy_version,
            reward=None if self.failure else sum(turn.reward or 0.0 for turn in self.turns),
            turns=tuple(self.turns),
            opening="\n".join(str(message["content"]) for message in self.first),
            failure=self.failure,
            numbers=self.numbers,
            kept=KeptSets.join(self.kept).first(end) if self.kept else None,
        )


class Player:
    """Plays episodes with a sampler and a host of environments."""

    def __init__(self, sampler: Sampler, host: Host, limits: Limits) -> None:
        self.sampler = sampler
        self.host = host
        self.limits = limits
        self._has_warned = False
        self.dialogue = Dialogue(sampler.tokenizer, sampler.end_ids, chat_template=sampler.chat_template, tools=host.tools)
        if host.tools and not sampler.chat_template:
            logger.warning("model.chat_template=false: no template describes the tools, so the question must describe them")

    @torch.no_grad()
    def play(
        self,
        problems: Sequence[Problem],
        seeds: Sequence[int],
        *,
        seed: int,
        temperature: float = 1.0,
        truncation: Truncation | None = None,
        policy_version: int = 0,
        first_row: int = 0,
    ) -> list[Rollout]:
        """Play one episode per problem, in batches of the sampler's ``batch_size``.

        Args:
            problems: problem for each episode. Episodes of the same problem are consecutive.
            seeds: seed for the environment of each episode.
            seed: seed for drawing tokens. Equal seeds and weights give equal episodes.
            temperature: sampling temperature.
            truncation: top-k and top-p; None samples from the whole distribution.
            policy_version: version number to record in every rollout.
            first_row: index of the first episode in the batch of all processes.
        """
        rollouts: list[Rollout] = []
        for start in range(0, len(problems), self.sampler.batch_size):
            batch = slice(start, start + self.sampler.batch_size)
            observations = zip(*self.host.begin(problems[batch], seeds[batch]), strict=True)
            episodes = [self._opened(number, observation) for number, observation in observations]
            rows = [first_row + start + place for place in range(len(episodes))]
            draws = Draws(seed, rows, self.limits.turn_tokens, temperature, truncation=truncation)
            try:
                self._advance(episodes, draws)
            finally:
                self.sampler.rest()
            self.host.end([episode.number for episode in episodes])
            rollouts += [episode.rollout(self.sampler.text(episode.ids), policy_version) for episode in episodes]
        self._compare_openings(seeds, rollouts)
        return rollouts

    def _compare_openings(self, seeds: Sequence[int], rollouts: Sequence[Rollout]) -> None:
        """Warn once if two consecutive episodes with the same seed began differently."""
        for seed, following, first, second in zip(seeds, seeds[1:], rollouts, rollouts[1:], strict=False):
            began = not first.failure and not second.failure
            if seed == following and began and first.opening != second.opening and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "two episodes with the same problem and seed began with %s and with %s; their rewards are compared "
                    "with each other, so an environment's reset must derive all randomness from its seed",
                    shown(first.opening),
                    shown(second.opening),
                )

    def _opened(self, number: int, seen: Observation) -> Episode:
        failure = seen.failure
        if not failure:
            try:
                return Episode(number, seen.messages, self.dialogue.begin(seen.messages), seen.state)
            except PromptError as error:
                failure = f"reset returned {shown(seen.text)}: {error.reason}"
        # the model has nothing to respond to, so the episode is over
        return Episode(number, seen.messages, (0,), 0, is_open=False, failure=failure)

    def _advance(self, episodes: Sequence[Episode], draws: Draws) -> None:
        """Play turns until every episode is over. ``draws.rows`` holds the row numbers of all episodes."""
        caches = None
        for turn in range(self.limits.turns):
            places = [place for place, episode in enumerate(episodes) if episode.is_open and self._has_room(episode)]
            if not places:
                break
            contexts = {place: (*episodes[place].prompt_ids, *episodes[place].ids) for place in places}
            of_turn = replace(draws, rows=[draws.rows[place] for place in places], turn=turn)
            turns, caches = self.sampler.draw_turn(contexts, of_turn, caches)
            written = zip(places, turns, strict=True)
            asked = {place: text for place, drawn in written if (text := self._write(episodes[place], drawn)) is not None}
            messages = {episodes[place].number: text for place, text in asked.items()}
            for place, seen in zip(asked, self.host.step(messages), strict=True):
                self._answer(episodes[place], seen)

    def _has_room(self, episode: Episode) -> bool:
        """Return whether the episode has room for another turn. If it does not, close the episode."""
        size = len(episode.prompt_ids) + len(episode.ids) + self.limits.turn_tokens
        episode.is_open = episode.length < self.limits.tokens and size <= self.limits.context
        return episode.is_open

    def _write(self, episode: Episode, drawn: Drawn) -> str | None:
        """Add the model's turn and return its text, or None if the turn was cut off, which ends the episode."""
        ids, ended = self.sampler.ended(drawn)
        left = self.limits.tokens - episode.length
        ids, ended = ids[:left], ended and len(ids) <= left
        start = len(episode.ids)
        episode.ids += ids
        episode.log_probs += drawn.log_probs[: len(ids)]
        if drawn.kept is not None:
            episode.kept.append(drawn.kept.first(len(ids)))
        text = self.sampler.text(ids)
        episode.turns.append(Turn(start, start + len(ids), text, state=episode.state))
        episode.is_open = ended
        return text if ended else None

    def _answer(self, episode: Episode, seen: Observation) -> None:
        """Add the environment's reply, which ends where the model's next turn begins."""
        last = episode.turns[-1]
        episode.turns[-1] = Turn(last.start, last.end, last.text, seen.text, seen.reward, last.state)
        episode.numbers = {**episode.numbers, **seen.numbers}
        episode.state = seen.state
        if seen.failure or seen.done:
            episode.is_open, episode.finished, episode.failure = False, not seen.failure, seen.failure
            return
        try:
            ids = self.dialogue.after_turn(episode.first, seen.messages, episode.ids[-1])
        except PromptError as error:
            episode.is_open, episode.failure = False, f"step returned {shown(seen.text)}: {error.reason}"
            return
        if len(ids) > self.limits.observation_tokens:
            limit = self.limits.observation_tokens
            episode.is_open = False
            episode.failure = f"step returned {len(ids)} tokens (at most rollout.max_observation_tokens={limit})"
        elif len(episode.turns) < self.limits.turns:
            episode.ids += ids
            episode.log_probs += [0.0] * len(ids)
            if episode.kept:
                episode.kept.append(KeptSets.of([], [0] * len(ids)))
