"""Environments on an OpenEnv server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlzoo.core.errors import UserError, shown
from rlzoo.support.extras import require_extra
from rlzoo.tasks.environments.environment import Messages
from rlzoo.tasks.problem import Problem

_ABOUT = ("done", "reward", "metadata")  # fields of every observation


class OpenEnv:
    """A session with an OpenEnv server, which receives the seed at reset and the model's text in a field of each action.

    Whether the same seed begins the same episode depends on the server's environment.
    """

    def __init__(
        self,
        url: str = "",
        *,
        action: str | None = None,
        observation: str | None = None,
        fields: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Ask the server for the fields of its actions.

        Args:
            url: address of the server, such as ``http://127.0.0.1:8000``.
            action: field of the action that receives the model's text. By default, this is the only required field.
            observation: field of the observation that the model sees. By default, this is the only field besides ``done``,
                ``reward`` and ``metadata`` if that field is text. Otherwise, the model sees the whole observation as JSON.
            fields: further fields to send with every action.
            reset: further arguments for the environment's ``reset``.
            timeout: time limit for a reply from the server in seconds.
        """
        require_extra("openenv", "openenv")
        from openenv import GenericEnvClient  # imported here, so that the import does not count against a call's time limit

        self._kind = GenericEnvClient
        if not url.startswith(("http://", "https://")):
            raise UserError(f"task.arguments.url={shown(url)}: expected the server's address, such as http://127.0.0.1:8000")
        self.url, self.timeout = url.rstrip("/"), timeout
        self.fields, self.reset_arguments = dict(fields or {}), dict(reset or {})
        self.action = self._action(action)
        self.observation = observation
        self._client: Any = None

    def reset(self, problem: Problem, seed: int) -> Messages:
        """Open a session and begin the episode with the given seed."""
        # the server limits the number of connections, so the session is closed as soon as the episode is over
        self._client = self._kind(base_url=self.url, message_timeout_s=self.timeout).sync()
        self._client.connect()
        return self._text(self._client.reset(seed=seed, **self.reset_arguments).observation)

    def step(self, message: str) -> tuple[Messages, float, bool, Mapping[str, Any]]:
        """Send an action."""
        result = self._client.step({**self.fields, self.action: message})
        if result.done:
            self.close()
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done), {}

    def close(self) -> None:
        """End the session. This method is called when the episode is over and when the object is deleted."""
        client, self._client = getattr(self, "_client", None), None
        if client is not None:
            client.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _action(self, action: str | None) -> str:
        import requests

        try:
            answer = requests.get(f"{self.url}/schema", timeout=self.timeout)
            answer.raise_for_status()
            schema = answer.json()["action"]
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"task.arguments.url={self.url!r}: no OpenEnv server responds; start one or correct the address ({error})"
            ) from error
        names = [name for name in schema.get("properties", {}) if name != "metadata"]
        if action is None:
            required = [name for name in schema.get("required", []) if name not in self.fields]
            if len(required) != 1:
                raise UserError(f"task.arguments.action: set the field for the model's text to one of {', '.join(names)}")
            return str(required[0])
        for name in (action, *self.fields):
            if name not in names:
                raise UserError(f"task.arguments: an action has no field {name!r} (fields: {', '.join(names)})")
        return action

    def _text(self, observation: Mapping[str, Any]) -> str:
        seen = {name: value for name, value in observation.items() if name not in _ABOUT}
        if self.observation is not None:
            if self.observation not in observation:
                have = ", ".join(seen)
                raise UserError(f"task.arguments.observation={self.observation!r}: no such field (fields: {have})")
            value = observation[self.observation]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        texts = [value for value in seen.values() if isinstance(value, str)]
        return texts[0] if len(texts) == len(seen) == 1 else json.dumps(seen, ensure_ascii=False)
