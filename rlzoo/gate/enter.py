"""The one call before the first step: it asks everything, and returns what passed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import ModelConfig, RolloutConfig
from rlzoo.errors import UserError
from rlzoo.gate.architecture import find_architecture
from rlzoo.gate.devices import Devices, this_machine
from rlzoo.gate.fingerprint import check_unchanged, model_facts, run_facts
from rlzoo.gate.plan import Plan
from rlzoo.gate.settings import check_disk, check_memory, check_settings, num_processes, usual_output
from rlzoo.gate.tokens import Asked, Tokens, check_tokens
from rlzoo.journal.manifest import check_model
from rlzoo.learner.learner import Learner
from rlzoo.models.pretrained import load_named
from rlzoo.models.probe import Probe
from rlzoo.processes import gather, make_accelerator, shards_weights
from rlzoo.rollout.make_sampler import make_sampler
from rlzoo.tasks.task import seeded

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlzoo.rollout.sampler import Sampler
    from rlzoo.tasks import Task

logger = logging.getLogger("rlzoo")


@dataclass
class Findings:
    """What the gate found, and the seconds that each question took."""

    lines: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def asking(self, question: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        yield
        self.seconds[question] = time.perf_counter() - start


@dataclass(frozen=True)
class Ready:
    """A model that passed the gate, with its tokenizer and its sampler."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tokens: Tokens
    probe: Probe
    sampler: Sampler


@dataclass(frozen=True)
class Admitted:
    """A run that passed the gate: everything that its steps use."""

    config: RunConfig  # with its output
    task: Task
    accelerator: Accelerator
    ready: Ready
    learner: Learner
    facts: Mapping[str, Any]  # its fingerprint
    changes: list[tuple[int, str]]  # of a resumed run: logging levels, and what has changed since it started
    findings: Findings


def enter(config: RunConfig, task: Task, *, resume: bool = False, allow_changed: bool = False) -> Admitted:
    """Ask everything that the engine assumes about a run, before anything is written.

    Args:
        config: configuration of the run.
        task: its task, entered and seeded.
        resume: whether the run continues from its directory.
        allow_changed: see `check_unchanged`.

    Raises:
        UserError: the run cannot start; the message says what was given, what is allowed and what to do.
    """
    findings = Findings()
    with findings.asking("settings"):
        check_settings(config, resume=resume)
    accelerator = make_accelerator(config.launch, config.learner, dtype=config.model.dtype)
    # the time in the default name may differ between ranks
    config = config.model_copy(update={"output": gather(accelerator, [config.output or usual_output(config)])[0]})
    sharded = shards_weights(config.launch)
    with ExitStack() as failed:
        with findings.asking("model"):
            check_model(config.model.path)
            model, tokenizer = load_named(config.model)
            if not sharded:  # otherwise the weights are moved when they are sharded
                model.to(accelerator.device)
            facts = run_facts(config) | model_facts(model, tokenizer)
            changes = _changes(accelerator, config, facts, allow_changed) if resume else []
        ready = open_sampler(
            model,
            tokenizer,
            Asked.of(task, needed=config.steps * config.rollout.num_prompts, held_out=config.eval.num_problems),
            named=config.model,
            rollout=config.rollout,
            own_weights=config.rollout.max_staleness > 0 or sharded,
            device=accelerator.device,
            findings=findings,
        )
        failed.callback(ready.sampler.close)
        with findings.asking("learner"):
            learner = Learner(
                model,
                config.clip,
                config.learner,
                pad_id=int(tokenizer.pad_token_id),
                max_length=config.rollout.max_new_tokens,
                num_updates=config.steps * config.learner.num_minibatches * config.learner.num_epochs,
                temperature=config.rollout.temperature,
                reward=config.reward,
                estimator=config.estimator,
                correction=config.correction,
                accelerator=accelerator,
                launch=config.launch,
                probe=ready.probe,
            )
        failed.pop_all()
    return Admitted(config, task, accelerator, ready, learner, facts, changes, findings)


@dataclass(frozen=True)
class Examined:
    """What the gate says about a run that does not start."""

    plan: Plan
    findings: Findings


def examine(config: RunConfig, devices: Devices | None = None, *, resume: bool = False) -> Examined:
    """Ask what can be asked without starting a run: with ``devices``, only what does not depend on this machine.

    Raises:
        UserError: see `enter`.
    """
    findings, number = Findings(), config.launch.processes
    processes = number or (devices.count if devices else num_processes(None))
    if devices and processes > devices.count:
        given = f"launch.processes={processes}: more than the {devices.count} devices of --devices"
        raise UserError(f"{given}; each process needs a device")
    with findings.asking("settings"):
        check_settings(config, processes=processes, resume=resume, here=devices is None)
    task = seeded(config.task, config.seed)
    with task, findings.asking("forecast"):
        asked = Asked.of(task, needed=config.steps * config.rollout.num_prompts, held_out=config.eval.num_problems)
        prompts = asked.estimate(config.model)
        architecture = find_architecture(config.model.path)
        plan = Plan(config, architecture, devices or this_machine(), prompts, processes)
        if devices is None:
            check_disk(plan)
        check_memory(plan)
    return Examined(plan, findings)


def _changes(accelerator: Accelerator, config: RunConfig, facts: Mapping[str, Any], allowed: bool) -> list[tuple[int, str]]:
    """Return what has changed since a resumed run started; all processes raise the main one's error."""
    found: list[tuple[int, str]] | UserError | OSError = []
    if accelerator.is_main_process:
        try:
            found = check_unchanged(config, facts, allow_changed=allowed)
        except (UserError, OSError) as error:
            found = error
    found = gather(accelerator, [found])[0]
    if isinstance(found, Exception):
        raise found
    return found


def open_sampler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Asked,
    *,
    named: ModelConfig,
    rollout: RolloutConfig,
    own_weights: bool = False,
    device: torch.device | None = None,
    findings: Findings | None = None,
) -> Ready:
    """Ask whether a loaded model can answer the prompts of a run or an evaluation, and open its sampler.

    Args:
        model: the model as it was loaded.
        tokenizer: its tokenizer.
        asked: the prompts.
        named: its settings.
        rollout: how responses are sampled.
        own_weights: see `make_sampler`.
        device: see `make_sampler`.
        findings: what the gate has found so far, which is extended.

    Raises:
        UserError: the model, its tokenizer or its sampler cannot be used.
    """
    findings = findings or Findings()
    with findings.asking("tokens"):
        tokens = check_tokens(model, tokenizer, asked, named=named, rollout=rollout)
    with findings.asking("model's rows"):
        probe = Probe.of(model, tokens.longest_row)
    # build the sampler before the learner, in which ZeRO-3 partitions the model and an adapter replaces its modules
    with findings.asking("sampler"):
        sampler = make_sampler(
            model,
            tokenizer,
            tokens.end_ids,
            named=named,
            settings=rollout,
            own_weights=own_weights,
            device=device,
            probe=probe,
        )
    return Ready(model, tokenizer, tokens, probe, sampler)
