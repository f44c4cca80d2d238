"""Single-player games from TextArena."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlzoo.core.errors import UserError, did_you_mean, shown
from rlzoo.support.extras import require_extra
from rlzoo.tasks.environments.environment import Messages
from rlzoo.tasks.environments.own_random import own_random
from rlzoo.tasks.problem import Problem


class TextArena:
    """A game from TextArena, with a single reward at the end.

    The games draw from Python's global random generator. Each episode therefore keeps its own generator state so that
    the game depends only on the seed and the moves.
    """

    def __init__(self, game: str = "", **options: Any) -> None:
        """Check and import the game.

        Args:
            game: name in TextArena's registry, such as ``GuessTheNumber-v0``.
            options: options that override the game's registered options, such as ``max_number``.
        """
        require_extra("textarena", "textarena")
        from textarena.envs.registration import ENV_REGISTRY

        if game not in ENV_REGISTRY:
            example = "its games include GuessTheNumber-v0, Mastermind-v0 and Blackjack-v0"
            close = did_you_mean(game, ENV_REGISTRY)
            raise UserError(f"task.arguments.game={shown(game)}: TextArena has no game with that name ({example}){close}")
        self.game, self.options = game, options
        with _no_download(game):
            _imported(game)

    def reset(self, problem: Problem, seed: int) -> Messages:
        """Begin the game with the given seed. The problem is not used."""
        import textarena

        self._random = random.Random(seed)
        with own_random(self._random), _no_download(self.game):
            try:
                self._env = textarena.make(self.game, **self.options)
            except TypeError as error:
                raise UserError(f"task.arguments: {self.game} does not take {shown(self.options)}: {error}") from error
            try:
                self._env.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise UserError(
                    f"task.arguments.game={self.game!r}: the game does not support a single player: {error}"
                ) from error
        self._inner = self._env  # bypass the wrappers, which repeat the whole game in every observation
        while hasattr(self._inner, "env"):
            self._inner = self._inner.env
        if not isinstance(self._inner.state, textarena.SinglePlayerState):
            raise UserError(f"task.arguments.game={self.game!r}: the game does not support a single player")
        return self._seen()

    def step(self, message: str) -> tuple[Messages, float, bool, Mapping[str, Any]]:
        """Make a move."""
        with own_random(self._random):
            done, _ = self._env.step(message)
            seen = self._seen()
        if not done:
            return seen, 0.0, False, {}
        rewards, about = self._env.close()
        reason = str(about[0].get("reason") or "")
        numbers = {"invalid_move": bool(about[0]["invalid_move"])}
        return "\n".join(text for text in (seen, reason) if text), float((rewards or {}).get(0, 0.0)), True, numbers

    def _seen(self) -> str:
        """Return what the game has written since the last call, excluding the model's own moves."""
        player, observation = self._inner.get_observation()
        return "\n".join(text.strip("\n") for sender, text, _ in observation if sender != player)


def _imported(game: str) -> None:
    """Import the game's module so that the import does not count against a step's time limit."""
    import importlib

    from textarena.envs.registration import ENV_REGISTRY

    entry = ENV_REGISTRY[game].entry_point
    try:
        if isinstance(entry, str):
            importlib.import_module(entry.partition(":")[0])
    except SyntaxError as error:
        raise UserError(f"task.arguments.game={game!r}: cannot be imported with this version of Python: {error}") from error


@contextmanager
def _no_download(game: str) -> Iterator[None]:
    """Prevent downloads of NLTK data, which word games request whenever they are created. Only installed data is used."""
    import nltk

    download, nltk.download = nltk.download, lambda *_, **__: True
    try:
        yield
    except LookupError as error:
        if type(error) is not LookupError:  # a KeyError of the game
            raise
        raise UserError(
            f"task.arguments.game={game!r} needs NLTK data that is not installed: "
            "run python -m nltk.downloader words averaged_perceptron_tagger_eng"
        ) from error
    finally:
        nltk.download = download
