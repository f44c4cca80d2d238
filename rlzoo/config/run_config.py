"""The complete description of a run, and how it is composed from files, a policy and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationError, ValidationInfo, model_validator

from rlzoo.advantages import AdvantageEstimator
from rlzoo.config.composition import (
    clip_name,
    config_names,
    for_clip,
    listed,
    merge,
    named_settings,
    parse_overrides,
    read_config,
)
from rlzoo.config.sections import (
    CheckpointConfig,
    EvalConfig,
    LaunchConfig,
    LearnerConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    TrackingConfig,
    minibatches_by_prompts,
)
from rlzoo.corrections import Correction
from rlzoo.discovery import distinct
from rlzoo.errors import UserError, explain, shown
from rlzoo.policy import ClipPolicy, contract_problem, required_fields
from rlzoo.support.redaction import redact_settings, redacted_keys
from rlzoo.tasks import Task, build_task
from rlzoo.tasks.task import task_names
from rlzoo.zoo import load_zoo

DEFAULT_RUN = "arithmetic"
"""The config that is laid under every composition in which no file names a model."""


def _build_clip(value: object, info: ValidationInfo) -> ClipPolicy:
    if isinstance(value, ClipPolicy):
        if problem := contract_problem(type(value)):
            raise UserError(f"clip policy {type(value).__qualname__} {problem}")
        return value
    settings = named_settings("clip", value)
    if "name" not in settings:
        raise UserError(f"clip={shown(value)}: a policy's name, or settings with a name")
    zoo, name = load_zoo(info.data.get("plugins", ())), settings["name"]
    if name not in zoo and name in config_names():
        raise UserError(f"clip={name!r} is not a policy but a config: give it with --config {name}")
    policy = zoo[name]
    try:
        return policy.model_validate({key: item for key, item in settings.items() if key != "name"})
    except ValidationError as error:
        required = [name for name in required_fields(policy) if name not in settings]
        if required:
            raise UserError(
                f"clip.{required[0]} is missing: {name} has no default for it; set it with --set clip.{required[0]}=VALUE"
            ) from error
        raise UserError(explain(error, policy, "clip.")) from error


def _build_task(value: object, info: ValidationInfo) -> Task:
    if isinstance(value, Task):
        return value
    settings = named_settings("task", value)
    if settings.get("name") not in task_names():
        reference = load_zoo(info.data.get("plugins", ())).tasks.get(str(settings.get("name")))
        settings |= {"name": reference} if reference else {}
    return build_task(settings)


def _build_correction(value: object, info: ValidationInfo) -> Correction | None:
    if isinstance(value, Correction):
        return value
    if value in (None, "none", {"name": "none"}):
        return None
    return load_zoo(info.data.get("plugins", ())).corrections.build("correction", value)


def _dump_named(model: ClipPolicy | Task | Correction) -> dict[str, Any]:
    return {"name": model.name, **model.model_dump()}


def _dump_correction(correction: Correction | None) -> dict[str, Any] | None:
    return None if correction is None else _dump_named(correction)


class RunConfig(Section):
    """Everything that decides what a run does; ``config.yaml`` of a run directory is its dump.

    Example:
        ``RunConfig(clip=name, task={"name": "arithmetic"}, steps=5)``, or, as the command line does it,
        ``RunConfig.compose(clip=name, overrides=["learner.lr=1e-5"])``.
    """

    plugins: Annotated[tuple[str, ...], AfterValidator(distinct)] = Field(
        (), description="plugin files and folders to load beside the installed ones"
    )
    clip: Annotated[ClipPolicy, BeforeValidator(_build_clip), PlainSerializer(_dump_named)] = Field(
        description="the clip policy: its name, or name and settings"
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="which language model is trained")
    task: Annotated[Task, BeforeValidator(_build_task), PlainSerializer(_dump_named)] = Field(
        default_factory=lambda: build_task({"name": "arithmetic"}), description="the task: its name, or name and settings"
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="how responses are sampled")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="how grades become what is learned from")
    correction: Annotated[Correction | None, BeforeValidator(_build_correction), PlainSerializer(_dump_correction)] = Field(
        None, description="what weighs the objective where sampler and trainer differ: its name, or name and settings"
    )
    learner: LearnerConfig = Field(default_factory=LearnerConfig, description="how the model is updated")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="held-out evaluation")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="when the model is saved")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="what is logged to MLflow")
    launch: LaunchConfig = Field(default_factory=LaunchConfig, description="processes, and what is spread over them")
    seed: int = Field(0, ge=0, lt=2**32, description="seeds sampling and the order of the data")
    steps: int = Field(40, ge=1, le=10_000_000, description="rollout batches to learn from")
    output: Path | None = Field(None, description="run directory; null for runs/<clip>-<task>-<seed>-<time>")

    @model_validator(mode="after")
    def _has_an_output_that_can_be_written_down(self) -> Self:
        try:
            str(self.output).encode()
        except UnicodeEncodeError:
            raise UserError(f"output={shown(str(self.output))}: the name is not UTF-8; give another with --output") from None
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        needed = self.estimator.min_group_size
        if self.rollout.group_size < needed:
            raise UserError(
                f"rollout.group_size={self.rollout.group_size}: advantage {self.estimator.name!r} compares the responses "
                f"to one prompt and needs at least {needed}"
            )
        by_prompts = minibatches_by_prompts(self.learner, self.clip)
        what, each = ("prompts", 1) if by_prompts else ("responses", self.rollout.group_size)
        size = self.rollout.num_prompts * each
        if size < self.learner.num_minibatches:
            raise UserError(f"learner.num_minibatches={self.learner.num_minibatches}: more than the {size} {what} of a step")
        if "group_ids" in self.clip.needs and not by_prompts:
            raise UserError(
                f"learner.minibatch_by='responses': {self.clip.name} compares the responses to a prompt, which would fall into "
                "several minibatches; use learner.minibatch_by=prompts"
            )
        if self.rollout.dynamic_sampling and self.rollout.group_size < 2:
            raise UserError(f"rollout.dynamic_sampling={self.rollout.dynamic_sampling}: needs rollout.group_size of at least 2")
        return self

    @model_validator(mode="after")
    def _samples_at_a_temperature_vllm_takes(self) -> Self:
        for name, temperature in (("rollout", self.rollout.temperature), ("eval", self.eval.temperature)):
            if self.rollout.engine == "vllm" and not 0.01 <= temperature <= 2.0:
                raise UserError(f"{name}.temperature={temperature}: vLLM takes 0.01 to 2; set rollout.engine=hf for others")
        return self

    @model_validator(mode="after")
    def _corrects_what_the_policy_judges(self) -> Self:
        correction = self.correction
        if correction is not None and correction.is_per_token and self.clip.scope == "sequence":
            raise UserError(
                f"correction={correction.name!r} has a weight for each token with these settings, and {self.clip.name} has one "
                "objective per response; choose a correction with a weight per response (see `rlzoo corrections show`)"
            )
        if correction is not None and self.clip.ratio_to_sampler:
            raise UserError(
                f"correction={correction.name!r}: the ratio of {self.clip.name} is to the sampler already, and would be "
                "corrected twice; use correction=none"
            )
        return self

    @cached_property
    def estimator(self) -> AdvantageEstimator:
        """The advantage estimator that the policy uses."""
        return load_zoo(self.plugins).advantages.build("clip.advantage", self.clip.advantage)

    @model_validator(mode="after")
    def _gives_the_estimator_what_it_needs(self) -> Self:
        name, given = self.estimator.name, {"turn_ids", "old_log_probs", "collision_probs"}
        if self.task.host is not None:
            given |= {"token_rewards", "state_ids"}
        if self.reward.kl_coef:
            given.add("token_rewards")
        if missing := sorted(self.estimator.needs - given):
            raise UserError(
                f"advantage {name!r} needs {missing[0]}, which task {self.task.name!r} does not give; choose another"
            )
        if self.estimator.per_token and self.clip.scope == "sequence":
            raise UserError(
                f"clip.advantage={name!r}: its values differ by token, and {self.clip.name} takes one per response; "
                "choose another advantage, or a clip policy of scope token or batch"
            )
        return self

    @model_validator(mode="after")
    def _takes_kl_in_the_reward(self) -> Self:
        given, clip = f"reward.kl_coef={self.reward.kl_coef}", self.clip
        if self.reward.kl_coef and clip.scope == "sequence":
            raise UserError(
                f"{given}: makes advantages differ by token, and {clip.name} takes one per response; use learner.kl_coef"
            )
        if self.reward.kl_coef and not self.estimator.takes_token_rewards:
            kinds = load_zoo(self.plugins).advantages
            allowed = [name for name, kind in kinds.items() if kind.takes_token_rewards and not kind.needs]
            raise UserError(
                f"{given}: advantage {self.estimator.name!r} has no values per token (allowed: {', '.join(allowed)}); "
                f"set clip.advantage={allowed[0]}"
            )
        return self

    @classmethod
    def compose(
        cls,
        configs: Sequence[str | Path] = (),
        *,
        clip: str | None = None,
        overrides: Sequence[str] = (),
        plugins: Sequence[str | Path] = (),
        **settings: Any,
    ) -> Self:
        """Compose a run as the command line does; later sources win.

        The order: `DEFAULT_RUN` if no config names a model, each config, ``overrides``, ``settings``. A config's
        ``per_clip`` section holds what it changes for one policy, applied when that policy is chosen.

        Args:
            configs: names of shipped configs, or files.
            clip: a policy's name, over whatever the configs name.
            overrides: ``"section.key=value"``, the value in YAML.
            plugins: plugin files and folders, beside those the configs name.
            settings: top-level fields such as ``seed=1``; None is ignored.

        Raises:
            UserError: one line that says what was given, what is allowed, what to do.
        """
        layers = [read_config(config, plugins) for config in configs]
        if not any("model" in layer for layer in layers):
            layers.insert(0, read_config(DEFAULT_RUN))
        layers.append(parse_overrides(overrides))
        layers.append({key: value for key, value in settings.items() if value is not None})
        name = clip or next((n for n in map(clip_name, reversed(layers)) if n), None)
        merged: dict[str, Any] = {}
        for layer in layers:
            merged = merge(merged, for_clip(layer, name))
        if name:
            merged["clip"] = {**named_settings("clip", merged.get("clip")), "name": name}
        if plugins:
            merged["plugins"] = [*listed(merged.get("plugins")), *map(str, plugins)]
        try:
            return cls.model_validate(merged)
        except ValidationError as error:
            raise UserError(explain(error, cls)) from error

    def to_yaml(self, *, with_secrets: bool = False) -> str:
        """The complete configuration; `compose` on a file of it gives this run again.

        Args:
            with_secrets: leave passwords and tokens in it, for a file that nobody else can read; else what `redaction` finds
                is left out, and a run from the file needs it again.
        """
        settings = self.model_dump(mode="json")
        return yaml.safe_dump(settings if with_secrets else redact_settings(settings), sort_keys=False)

    def refuse_redacted(self) -> None:
        """Refuse to run with the placeholder of a secret that was left out.

        Raises:
            UserError: it names the setting and how to give it.
        """
        for key in redacted_keys(self.model_dump(mode="json")):
            raise UserError(
                f"{key}: holds a secret, which is not kept in config.yaml; give it again, with --set {key}=VALUE or in a config"
            )
