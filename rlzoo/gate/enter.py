"""Runs all checks before the first step and returns the objects that the run uses: its model, sampler, learner and so on."""

from __future__ import annotations

import copy
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from rlzoo.config.engines import engine_of
from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import LaunchConfig, ModelConfig, RolloutConfig
from rlzoo.core.errors import UserError
from rlzoo.gate.architecture import find_architecture, weights_on_this_machine
from rlzoo.gate.devices import Devices, this_machine
from rlzoo.gate.fingerprint import check_unchanged, model_facts, refuse_different_ranks, run_facts
from rlzoo.gate.plan import Plan, Prompts
from rlzoo.gate.settings import Start, check_settings, shortages, shown, usual_output
from rlzoo.gate.tokens import Asked, Tokens, check_tokens, question_counts
from rlzoo.learner.critic import HEAD, Critic
from rlzoo.learner.learner import Learner
from rlzoo.learner.teacher import Teacher
from rlzoo.models.machine import available_memory
from rlzoo.models.pretrained import context_length, load_alike, load_named, load_reference, local_model, naming
from rlzoo.models.probe import Probe
from rlzoo.models.processes import gather, make_accelerator, shards_weights
from rlzoo.tasks.task import seeded

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlzoo.rollout.sampler import Sampler
    from rlzoo.tasks import Task

logger = logging.getLogger("rlzoo")


@dataclass
class Opening:
    """A model that is being checked before anything is sampled from it. A check may use fields that earlier checks have set."""

    model: PreTrainedModel = field(init=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    tokens: Tokens = field(init=False)
    probe: Probe = field(init=False)
    sampler: Sampler = field(init=False)
    seconds: dict[str, float] = field(init=False, default_factory=dict)  # time that each check took

    named: ModelConfig
    rollout: RolloutConfig
    asked: Asked  # the prompts
    own_weights: bool = False  # see `rlzoo.config.engines.Engine.make`
    device: torch.device | None = None

    def ask(self, questions: Sequence[Callable[[Any], None]]) -> None:
        """Run the checks in order. If a check fails, release the resources that the earlier checks opened."""
        with ExitStack() as failed:
            failed.callback(self.close)
            for question in questions:
                start = time.perf_counter()
                question(self)
                self.seconds[question.__name__] = time.perf_counter() - start
            failed.pop_all()

    def close(self) -> None:
        """Close the sampler, if there is one."""
        if hasattr(self, "sampler"):
            self.sampler.close()


def tokens(opening: Opening) -> None:
    """Are the prompts encoded correctly, and are they short enough?"""
    opening.tokens = check_tokens(opening.model, opening.tokenizer, opening.asked, named=opening.named, rollout=opening.rollout)


def rows(opening: Opening) -> None:
    """Do the model's log-probs for a row depend on that row alone?"""
    opening.probe = Probe.of(opening.model, opening.tokens.longest_row)


def sampler(opening: Opening) -> None:
    """Does the sampler draw from the model's distribution?"""
    # build the sampler before the learner, which may partition the model with ZeRO-3 or replace its modules for an adapter
    opening.sampler = engine_of(opening.rollout).make(
        opening.model,
        opening.tokenizer,
        opening.tokens.end_ids,
        named=opening.named,
        own_weights=opening.own_weights,
        device=opening.device,
        probe=opening.probe,
    )


TO_SAMPLE = (tokens, rows, sampler)
"""Checks of a loaded model before it is sampled from."""


@dataclass
class Admission(Opening):
    """A run that is passing through the gate. Afterwards, this object holds everything that the run's steps use."""

    accelerator: Accelerator = field(init=False)
    learner: Learner = field(init=False)
    reference: PreTrainedModel | None = field(init=False, default=None)
    critic_model: PreTrainedModel | None = field(init=False, default=None)
    critic: Critic | None = field(init=False, default=None)
    facts: dict[str, Any] = field(init=False)  # the run's fingerprint
    changes: list[tuple[int, str]] = field(init=False, default_factory=list)  # since the resumed run started, with log levels

    config: RunConfig = field(kw_only=True)
    task: Task = field(kw_only=True)
    resume: bool = field(kw_only=True, default=False)
    allow_changed: bool = field(kw_only=True, default=False)


def settings(run: Admission) -> None:
    """Are the settings compatible with each other, the environment, the packages and the output directory?"""
    check_settings(run.config, Start.of(run.config, resume=run.resume))
    for level, line in question_counts(run.task, run.config.eval.num_problems):
        logger.log(level, line)


def processes(run: Admission) -> None:
    """Can the processes reach each other?"""
    run.accelerator = make_accelerator(run.config.launch, run.config.learner, dtype=run.config.model.dtype)
    run.device = run.accelerator.device
    # ranks may disagree about the time in the default name
    output = gather(run.accelerator, [run.config.output or usual_output(run.config)])[0]
    run.config = run.config.model_copy(update={"output": output})


def model(run: Admission) -> None:
    """Can the model be loaded? Is everything the same on all ranks and, in a resumed run, unchanged since the run started?"""
    run.model, run.tokenizer = load_named(run.config.model)
    if not shards_weights(run.config.launch):  # otherwise, the weights are moved when they are sharded
        run.model.to(run.accelerator.device)
    run.facts = run_facts(run.config) | model_facts(run.model, run.tokenizer)
    if run.config.model.reference is not None:
        run.reference = load_reference(run.config.model, run.tokenizer)
        run.facts |= model_facts(run.reference, run.tokenizer, "reference ")
    if (path := run.config.critic.model) is not None:
        with naming("critic.model"):
            run.critic_model = load_alike(run.config.model.model_copy(update={"path": path}), run.tokenizer)
        run.facts |= model_facts(run.critic_model, run.tokenizer, "critic ")
    refuse_different_ranks(gather(run.accelerator, [(socket.gethostname(), run.facts)]))
    if run.resume:
        run.changes = _changes(run.accelerator, run.config, run.facts, run.allow_changed)


def room(run: Admission) -> None:
    """Is there enough memory and disk space? The forecast may be wrong, so this check only warns."""
    prompts, architecture = Prompts(run.tokens.longest, counted=True), find_architecture(run.config.model.path)
    plan = Plan(run.config, architecture, this_machine(), prompts, run.accelerator.num_processes)
    for shortage in shortages(plan) if run.accelerator.is_main_process else ():
        logger.warning("%s", shortage)


def critic(run: Admission) -> None:
    """Can the critic be loaded, and do its batches give the same results as plain passes?"""
    config, path, model, head, probe = run.config, run.config.critic.model, run.critic_model, None, run.probe
    if not config.has_critic:
        return
    if path is None or model is None:
        model = copy.deepcopy(run.model)  # before the learner adds an adapter or shards it
    else:
        model.to(run.accelerator.device)
        limit, longest = context_length(model), run.tokens.longest_row
        if longest is not None and limit is not None and longest > limit:
            raise UserError(f"critic.model={path!r}: accepts at most {limit} tokens, but rows may have {longest}")
        with naming("critic.model"):
            folder, probe = local_model(path), Probe.of(model, longest)
        head = load_file(folder / HEAD) if folder is not None and (folder / HEAD).is_file() else None
    run.critic = Critic(
        model,
        config.critic,
        config.learner,
        run.accelerator,
        pad_id=int(run.tokenizer.pad_token_id),
        probe=probe,
        fsdp=config.launch.fsdp,
        head=head,
    )


def learner(run: Admission) -> None:
    """Do the learner's batches give the log-probs of plain passes? Do merged weights give the logits of the adapted model?"""
    config = run.config
    teacher = run.reference and Teacher(run.reference, run.accelerator, config, run.tokens.longest_row)
    run.learner = Learner(
        run.model,
        config.clip,
        config.learner,
        pad_id=int(run.tokenizer.pad_token_id),
        max_length=config.rollout.max_new_tokens,
        num_updates=config.steps * config.learner.num_minibatches * config.learner.num_epochs,
        temperature=config.rollout.temperature,
        reward=config.reward,
        estimator=config.estimator,
        correction=config.correction,
        accelerator=run.accelerator,
        launch=config.launch,
        probe=run.probe,
        teacher=teacher,
        critic=run.critic,
    )


TO_TRAIN = (settings, processes, model, *TO_SAMPLE, room, critic, learner)
"""Checks of a run before its first step."""


def enter(config: RunConfig, task: Task, *, resume: bool = False, allow_changed: bool = False) -> Admission:
    """Check everything that the engine assumes about a run, before anything is written.

    Args:
        config: configuration of the run.
        task: the run's task, entered and seeded.
        resume: whether the run continues from its directory.
        allow_changed: see `check_unchanged`.

    Raises:
        UserError: the run cannot start; the message says what was given, what is allowed and what to do.
    """
    admission = Admission(
        named=config.model,
        rollout=config.rollout,
        asked=Asked.of(task, needed=_needed(config), held_out=config.eval.num_problems),
        own_weights=config.rollout.max_staleness > 0 or shards_weights(config.launch),
        config=config,
        task=task,
        resume=resume,
        allow_changed=allow_changed,
    )
    admission.ask(TO_TRAIN)
    return admission


def _needed(config: RunConfig) -> int:
    """Return a number n such that the task's first n training problems include every problem that the run may train on."""
    if config.rollout.recorded is not None:
        return 0
    size = config.task.num_problems(held_out=False) if config.rollout.band is not None else None
    return size or config.steps * config.rollout.num_prompts


def forecast(config: RunConfig, devices: Devices | None = None, *, resume: bool = False) -> Plan:
    """Run all checks that are possible before anything is loaded, and forecast the resources that the run needs.

    Args:
        config: configuration of the run.
        devices: devices to plan for, one process each; None for this machine.
        resume: whether the run continues from its directory.

    Raises:
        UserError: the run cannot start.
    """
    start = Start.of(config, resume=resume, devices=devices)
    check_settings(config, start)
    asked = Asked.of(config.task, needed=_needed(config), held_out=config.eval.num_problems)
    architecture, there = find_architecture(config.model.path), devices or this_machine()
    prompts = asked.estimate(config.model, config.rollout, architecture.max_length if architecture else None)
    return Plan(config, architecture, there, prompts, start.processes, start.here)


def rehearse(plan: Plan, *, resume: bool = False, allow_changed: bool = False) -> str:
    """Run all checks of a planned run in one process without starting the run, if the model's weights are on this machine.

    Returns:
        The time that the checks took, in seconds, or the reason why the model was not checked.

    Raises:
        UserError: see `enter`.
    """
    config, size = plan.config, weights_on_this_machine(plan.config.model.path)
    more = weights_on_this_machine(config.model.reference) if config.model.reference is not None else 0
    if not plan.is_here:
        unasked = "--devices plans for other devices"
    elif size is None or more is None:
        unasked = "its weights are not on this machine"
    elif 4 * size + more > available_memory():
        unasked = f"its weights ({shown(size + more)}) need most of the memory"
    else:
        with seeded(config.task, config.seed) as task:
            alone = config.model_copy(update={"launch": LaunchConfig()})
            admission = enter(alone, task, resume=resume, allow_changed=allow_changed)
            admission.close()
        parts = ", ".join(f"{question} {seconds:.1f}" for question, seconds in admission.seconds.items())
        return f"passed in {sum(admission.seconds.values()):.1f} s ({parts})"
    if resume:
        check_unchanged(config, run_facts(config), allow_changed=allow_changed)
    return f"settings passed; the model was not checked, because {unasked}"


def _changes(accelerator: Accelerator, config: RunConfig, facts: Mapping[str, Any], allowed: bool) -> list[tuple[int, str]]:
    """Return the changes since the resumed run started. An error in the main process is raised in all processes."""
    changes: list[tuple[int, str]] | UserError | OSError = []
    if accelerator.is_main_process:
        try:
            changes = check_unchanged(config, facts, allow_changed=allowed)
        except (UserError, OSError) as error:
            changes = error
    changes = gather(accelerator, [changes])[0]
    if isinstance(changes, Exception):
        raise changes
    return changes
