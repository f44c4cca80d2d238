"""Environments that use version 1 of the verifiers interface: a taskset, and an Env that runs each task with a single agent."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any

from rlzoo.core.errors import UserError, shown
from rlzoo.support.extras import require_extra
from rlzoo.tasks.environments.environment import Message, Messages
from rlzoo.tasks.environments.own_random import own_random
from rlzoo.tasks.problem import Problem


class Verifiers:
    """Plays a verifiers environment with the model as its only agent.

    A verifiers environment drives the conversation itself. Its ``run`` opens an interaction with an agent and asks for
    turns. Here, the agent is the trained model. ``run`` is suspended whenever it asks for a turn and resumes with the
    model's text. There is no harness, runtime or server, so environments that need tools, a container or several agents are
    rejected. The episode's reward is the trace's reward, which is given at the end.
    """

    def __init__(self, taskset: str = "", *, env: str = "", tasks: int = 1000, **config: Any) -> None:
        """Load the environment.

        Args:
            taskset: name of an installed module that exports a taskset in ``__all__``.
            env: name of the environment that plays the taskset. By default, it is the taskset's own environment or, if there is
                none, a single turn.
            tasks: number of tasks to use from an infinite taskset.
            config: further settings of the taskset.
        """
        require_extra("verifiers", "verifiers")
        if not taskset:
            raise UserError("task.arguments.taskset is missing: set it to the name of an installed verifiers taskset")
        self._key = json.dumps([taskset, env, config], sort_keys=True)
        self.count = tasks
        _loaded(self._key, tasks)
        self._loop: asyncio.AbstractEventLoop | None = None

    def reset(self, problem: Problem, seed: int) -> Messages:
        """Begin the task that the seed selects."""
        env, tasks = _loaded(self._key, self.count)
        task = tasks[seed % len(tasks)]
        _check(task)
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._agent = _Agent(self._loop)
        with own_random(self._random):
            self._run = self._loop.create_task(_played(env, task, self._agent))
            messages, _, done, _ = self._advance()
        if done:
            raise ValueError("the episode ended before the model's first turn")
        return messages

    def step(self, message: str) -> tuple[Messages, float, bool, Mapping[str, Any]]:
        """Pass the model's text to the environment, which is waiting for it."""
        with own_random(self._random):
            self._agent.answer.set_result(message)
            return self._advance()

    def close(self) -> None:
        """Cancel the environment if it is still running. This method is called when the object is deleted."""
        loop, self._loop = getattr(self, "_loop", None), None
        if loop is None or loop.is_closed():
            return
        if not self._run.done():
            self._run.cancel()
            with suppress(asyncio.CancelledError, Exception):
                loop.run_until_complete(self._run)
        loop.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _advance(self) -> tuple[list[Message], float, bool, Mapping[str, Any]]:
        """Let the environment run until it asks for a turn or ends."""
        assert self._loop is not None
        first = asyncio.wait({self._run, self._agent.asked}, return_when=asyncio.FIRST_COMPLETED)
        self._loop.run_until_complete(first)
        if not self._run.done():
            messages, self._agent.asked = self._agent.asked.result(), self._loop.create_future()
            return messages, 0.0, False, {}
        traces = self._run.result()
        self.close()
        numbers = {name: value for trace in traces for name, value in trace.metrics.items() if value is not None}
        return [], sum(trace.reward for trace in traces), True, numbers


async def _played(env: Any, task: Any, agent: _Agent) -> list[Any]:
    """Run one episode as `Env.run_episode` does and return its traces."""
    import verifiers.v1 as vf

    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    episode = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=about, traces=agent.traces)
    episode.traces = agent.traces  # the same list object, which grows while the environment runs
    agents = vf.Agents(env.config, lambda name, spec: _Seat(agent, name, spec))
    await env.setup(agents)
    await env.run(task, agents)
    await env.finalize(task, episode)
    return agent.traces


class _Agent:
    """The model, which answers one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.asked: asyncio.Future[list[Message]] = loop.create_future()
        self.answer: asyncio.Future[str] = loop.create_future()
        self.traces: list[Any] = []
        self.interactions = 0

    async def ask(self, messages: list[Message]) -> str:
        self.answer = self.loop.create_future()
        self.asked.set_result(messages)
        return await self.answer


class _Seat:
    """The environment's view of an agent, which is the part of `verifiers.v1.Agent` that needs no harness."""

    trainable = True

    def __init__(self, agent: _Agent, name: str, config: Any) -> None:
        self._agent, self.name, self.config = agent, name, config

    async def run(self, task: Any, **_: Any) -> Any:
        """Play a single turn."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Interaction]:
        """Open a multi-turn conversation."""
        from verifiers.v1.utils.decorators import invoke

        self._agent.interactions += 1
        if self._agent.interactions > 1:
            raise ValueError("the environment opens a second conversation; only one is supported")
        _check(task)
        interaction = _Interaction(self._agent, task, self.name, self.config)
        trace = interaction.trace
        await invoke(task.setup, {"trace": trace, "runtime": None})
        yield interaction
        if trace.stop_condition is None:
            trace.stop("user_closed")
        await invoke(task.finalize, {"trace": trace, "runtime": None})
        await task.score(trace)
        trace.is_completed = trace.ok = True
        self._agent.traces.append(trace)


class _Interaction:
    """The environment's view of an open conversation, like `verifiers.v1.Interaction`."""

    def __init__(self, agent: _Agent, task: Any, name: str, config: Any) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls

        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace: Any = vf.Trace(task=about, state=state_cls(type(task))(), agent=vf.AgentInfo(config=config, name=name))
        self._agent, self._task = agent, task
        self._messages: list[Any] = []  # the whole conversation
        self._turns, self._over = 0, False

    async def turn(self, message: Any = None) -> Any:
        """Send messages to the model and return its reply."""
        import verifiers.v1 as vf
        from verifiers.v1.graph import prepare_turn

        new = self._new(message)
        self._messages += new
        if self._over or await self._stopped():
            self._over = True
            return vf.Segment(messages=[], terminated=True)
        text = await self._agent.ask([_plain(entry) for entry in new])
        said = vf.AssistantMessage(content=text)
        number = str(self._turns)
        answer = vf.Response(id=number, created=int(time.time()), model="policy", message=said, finish_reason="stop")
        prepare_turn(self.trace, list(self._messages)).commit(answer)
        self._messages.append(said)
        self._turns += 1
        return vf.Segment(messages=[said])

    def _new(self, message: Any) -> list[Any]:
        import verifiers.v1 as vf
        from verifiers.v1.dialects import parse_message

        data, new = self._task.data, []
        if self._turns == 0 and data.system_prompt is not None:
            new.append(vf.SystemMessage(content=data.system_prompt))
        if message is None:
            if self._turns or data.prompt is None:
                raise ValueError("turn() needs a message, except in the first turn of a task with a prompt")
            message = data.prompt
        if isinstance(message, str):
            return [*new, vf.UserMessage(content=message)]
        return [*new, *(parse_message(entry) if isinstance(entry, dict) else entry for entry in message)]

    async def _stopped(self) -> bool:
        for stop in self._task.hooks("stop"):
            ended = stop(self.trace)
            if await ended if inspect.isawaitable(ended) else ended:
                self.trace.stop(stop.__name__)
                return True
        return False


@lru_cache(maxsize=8)
def _loaded(key: str, count: int) -> tuple[Any, list[Any]]:
    """Load the environment and its tasks, or the first ``count`` tasks of an infinite taskset, once per process."""
    import verifiers.v1 as vf

    taskset, name, settings = json.loads(key)
    try:
        config = vf.resolve_env_config({"id": name, "taskset": {"id": taskset, **settings}})
        env = vf.load_environment(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"task.arguments.taskset={shown(taskset)}: verifiers cannot load it: {error}") from error
    if env.taskset.toolsets(env.taskset.config):
        raise UserError(f"task.arguments.taskset={taskset!r}: the taskset has tools, which are not supported")
    tasks = list(itertools.islice(env.taskset, count if env.taskset.INFINITE else None))
    if not tasks:
        raise UserError(f"task.arguments.taskset={taskset!r}: the taskset has no tasks")
    return env, tasks


def _check(task: Any) -> None:
    """Raise a `UserError` if a task needs something that is not supported."""
    lacking = []
    if task.NEEDS_CONTAINER or task.data.image:
        lacking.append("a container")
    if task.toolsets(task.config):
        lacking.append("tools")
    hooks = [*task.hooks("reward"), *task.hooks("metric"), *_overridden(task, "setup", "finalize")]
    if any("runtime" in inspect.signature(hook).parameters for hook in hooks):
        lacking.append("a runtime")
    if any("trace" not in inspect.signature(hook).parameters for hook in task.hooks("stop")):
        lacking.append("stop conditions on requests")
    if lacking:
        raise UserError(f"task.arguments.taskset: {type(task).__name__} is not supported: it needs {' and '.join(lacking)}")


def _overridden(task: Any, *names: str) -> list[Any]:
    import verifiers.v1 as vf

    return [getattr(task, name) for name in names if getattr(type(task), name) is not getattr(vf.Task, name)]


def _plain(message: Any) -> Message:
    if not isinstance(message.content, str):
        raise ValueError(f"a message with the role {message.role!r} is not text; only text is supported")
    return {"role": message.role, "content": message.content}
