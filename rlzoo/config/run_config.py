"""The complete configuration of a run, composed from config files, a rule and overrides."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from rlzoo.config.composition import (
    build_rule,
    clip_name,
    for_clip,
    listed,
    merge,
    named_settings,
    parse_overrides,
    read_config,
)
from rlzoo.config.engines import engine_of
from rlzoo.config.redaction import redact_settings, redacted_keys
from rlzoo.config.sections import (
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    LaunchConfig,
    LearnerConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrackingConfig,
    minibatches_by_prompts,
)
from rlzoo.core.advantages import AdvantageEstimator
from rlzoo.core.corrections import Correction
from rlzoo.core.discovery import distinct
from rlzoo.core.errors import UserError, did_you_mean, explain, shown
from rlzoo.core.plugin_files import plugins_of_run
from rlzoo.core.policy import ClipPolicy, contract_problem
from rlzoo.core.settings import Settings, user_path
from rlzoo.core.zoo import Zoo, load_zoo, log_once
from rlzoo.support.parsing import dump_yaml
from rlzoo.tasks import Task, build_task

DEFAULT_RUN = "arithmetic"
"""The config that serves as the base if no config file sets a model."""


class Plugins(tuple[str, ...]):
    """Plugin files and folders. Each configuration loads them once, because they may change between two runs."""

    @cached_property
    def zoo(self) -> Zoo:
        """Everything that the installed plugins and these files provide."""
        return load_zoo(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Validate a sequence of paths. Plugins that another configuration has loaded are not loaded again."""

        def validate(paths: Any, check: ValidatorFunctionWrapHandler) -> Plugins:
            return paths if isinstance(paths, cls) else cls(distinct(check(paths)))

        return handler.generate_schema(Annotated[tuple[str, ...], WrapValidator(validate)])


def _zoo(info: ValidationInfo) -> Zoo:
    zoo: Zoo = info.data.get("plugins", Plugins()).zoo
    return zoo


def _remark_on_base(path: str, lr: float, *, has_base: bool) -> None:
    """Log whether the settings of `DEFAULT_RUN`, which suit only the bundled models, apply if the user may not expect it."""
    if has_base != (path in ("embedded", "embedded-guess")):
        relation = "are" if has_base else "are not"
        log_once(
            f"model.path={path!r}: learner.lr={lr:g}, the widths of rules and other settings {relation} those of "
            f"{DEFAULT_RUN}, a config for the bundled model; a config that names a model (--config FILE) has other defaults",
            logging.WARNING if has_base else logging.INFO,
        )


def _build_clip(value: object, info: ValidationInfo) -> ClipPolicy:
    if isinstance(value, ClipPolicy):
        if problem := contract_problem(type(value)):
            raise UserError(f"rule {type(value).__qualname__} {problem}")
        return value
    settings = named_settings("clip", value)
    if "name" not in settings:
        raise UserError(f"clip={shown(value)}: expected the name of a rule, or settings that include a name")
    return build_rule(_zoo(info), settings)


def _build_task(value: object, info: ValidationInfo) -> Task:
    if isinstance(value, Task):
        return value
    return build_task(named_settings("task", value), _zoo(info).tasks)


def _reward_section(value: object) -> object:
    if isinstance(value, str):
        raise UserError(
            f"reward={shown(value)}: must be a section of settings; to select a reward function, use task.reward={value}"
        )
    return value


def _build_correction(value: object, info: ValidationInfo) -> Correction | None:
    if isinstance(value, Correction):
        return value
    if value in ("auto", {"name": "auto"}):
        value = _usual_correction(info.data.get("clip"), info.data.get("rollout"))
    if value in (None, "none", {"name": "none"}):
        return None
    return _zoo(info).corrections.build("correction", value)


def _usual_correction(clip: ClipPolicy | None, rollout: RolloutConfig | None) -> dict[str, Any] | None:
    """Return the settings of the correction that ``correction=auto`` selects, or None if no correction is needed."""
    if clip is None or rollout is None or clip.ratio_to_sampler or (rollout.max_staleness < 2 and rollout.recorded is None):
        return None
    return {"name": "tis", "pool": "token" if clip.scope == "token" else "sum"}


def _dump_named(model: ClipPolicy | Task | Correction | None) -> dict[str, Any] | None:
    return None if model is None else {"name": model.name, **model.model_dump()}


class RunConfig(Settings):
    """The complete configuration of a run, as saved in ``config.yaml`` in the run directory.

    Example:
        >>> rule = min(load_zoo())  # the name of any installed rule
        >>> config = RunConfig.compose(clip=rule, overrides=["learner.lr=1e-5"])  # as the command line does
        >>> config.learner.lr, config.task.name
        (1e-05, 'arithmetic')
    """

    plugins: Plugins = Field(
        default_factory=Plugins, description="plugin files and folders to load, in addition to installed plugins"
    )
    clip: Annotated[ClipPolicy, BeforeValidator(_build_clip), PlainSerializer(_dump_named)] = Field(
        description="the rule: its name, or its name and settings"
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="the language model to train")
    task: Annotated[Task, BeforeValidator(_build_task), PlainSerializer(_dump_named)] = Field(
        "arithmetic", validate_default=True, description="the task: its name, or its name and settings"
    )
    rollout: Annotated[RolloutConfig, AfterValidator(lambda rollout: engine_of(rollout).settled())] = Field(
        default_factory=RolloutConfig, description="how responses are sampled"
    )
    reward: Annotated[RewardConfig, BeforeValidator(_reward_section)] = Field(
        default_factory=RewardConfig, description="how responses are rewarded"
    )
    correction: Annotated[Correction | None, BeforeValidator(_build_correction), PlainSerializer(_dump_named)] = Field(
        "auto",
        validate_default=True,
        description="the correction for differences between sampler and trainer: its name, or its name and settings; none: no "
        "correction; auto: tis if rollout.max_staleness is above 1 or rollout.engine is recorded, and the rule's ratio is not "
        "relative to the sampler, otherwise none",
    )
    learner: LearnerConfig = Field(default_factory=LearnerConfig, description="how the model is updated")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="the critic, for an advantage that needs values")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="held-out evaluation")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="when the model is saved")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="what is logged to MLflow")
    launch: LaunchConfig = Field(default_factory=LaunchConfig, description="number of processes, and how states are sharded")
    seed: int = Field(0, ge=0, lt=2**32, description="seed for sampling and for the data order")
    steps: int = Field(40, ge=1, le=10_000_000, description="number of rollout batches to learn from")
    output: Path | None = Field(None, description="run directory; null: runs/<clip>-<task>-<seed>-<time>-<random>")

    @model_validator(mode="after")
    def _has_an_output_that_can_be_written_down(self) -> Self:
        try:
            str(self.output).encode()
        except UnicodeEncodeError:
            raise UserError(f"output={shown(str(self.output))}: the name is not UTF-8; choose another with --output") from None
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        needed = self.estimator.min_group_size
        if self.rollout.group_size < needed:
            raise UserError(
                f"rollout.group_size={self.rollout.group_size}: advantage {self.estimator.name!r} compares the responses "
                f"to one prompt and needs at least {needed} of them"
            )
        by_prompts = minibatches_by_prompts(self.learner, self.clip)
        unit, size = "prompts" if by_prompts else "responses", self.rollout.num_prompts
        size *= 1 if by_prompts else self.rollout.group_size
        if size < self.learner.num_minibatches:
            raise UserError(f"learner.num_minibatches={self.learner.num_minibatches}: more than the {size} {unit} in a step")
        if self.clip.needs_whole_prompts and not by_prompts:
            raise UserError(
                f"learner.minibatch_by='responses': {self.clip.name} with {self.clip.reduction} needs all responses to a "
                "prompt in one minibatch; use learner.minibatch_by=prompts"
            )
        replaced, ignored = self.rollout.dynamic_sampling, self.learner.ignore_equal_groups
        if replaced or ignored:
            setting = f"rollout.dynamic_sampling={replaced}" if replaced else "learner.ignore_equal_groups=true"
            if self.rollout.group_size < 2:
                raise UserError(f"{setting}: needs a rollout.group_size of at least 2")
            if self.estimator.per_token and not self.estimator.compares:
                name = self.estimator.name
                raise UserError(f"{setting}: advantage {name!r} also learns from groups with equal rewards; remove the setting")
        return self

    @model_validator(mode="after")
    def _can_choose_problems(self) -> Self:
        band, size, number = self.rollout.band, self.task.num_problems(held_out=False) or 0, self.rollout.num_prompts
        if band is None:
            return self
        problems = {
            "the first value is above the second": not band[0] <= band[1],
            "recorded rollouts determine the problems; remove the setting": self.rollout.recorded is not None,
            f"needs a task with a list of at least rollout.num_prompts={number} problems, such as math_file": size < number,
        }
        for problem in (problem for problem, is_so in problems.items() if is_so):
            raise UserError(f"rollout.band={list(band)}: {problem}")
        return self

    @model_validator(mode="after")
    def _suits_the_engine(self) -> Self:
        engine = engine_of(self.rollout)
        engine.check()
        smallest, largest = engine.temperatures
        for name, temperature in (("rollout", self.rollout.temperature), ("eval", self.eval.temperature)):
            if not smallest <= temperature <= largest:
                accepted = f"{engine.title} accepts {smallest:g} to {largest:g}"
                raise UserError(f"{name}.temperature={temperature}: {accepted}; for other temperatures, set rollout.engine=hf")
        if engine.in_flight and self.task.host is not None:
            raise UserError(
                f"{engine.in_flight_setting}=true: task {self.task.name!r} has several turns, and such tasks are sampled one "
                f"batch at a time; use {engine.in_flight_setting}=false"
            )
        return self

    @model_validator(mode="after")
    def _corrects_what_the_policy_judges(self) -> Self:
        correction = self.correction
        if correction is not None and correction.is_per_token and self.clip.scope == "sequence":
            raise UserError(
                f"correction={correction.name!r} gives one weight per token with these settings, but {self.clip.name} has one "
                "objective per response; choose a correction with one weight per response (see `rlzoo corrections show`)"
            )
        if correction is not None and self.clip.ratio_to_sampler:
            raise UserError(
                f"correction={correction.name!r}: the ratio of {self.clip.name} is already relative to the sampler and would "
                "be corrected twice; use correction=none"
            )
        return self

    @cached_property
    def estimator(self) -> AdvantageEstimator:
        """Return the advantage estimator that the policy uses."""
        return self.plugins.zoo.advantages.build("clip.advantage", self.clip.advantage)

    @model_validator(mode="after")
    def _gives_the_estimator_what_it_needs(self) -> Self:
        name = self.estimator.name
        provided = {"turn_ids", "old_log_probs", "ref_log_probs", "values", "last_values", "finished"}
        if self.rollout.recorded is None:
            # only the first grades show whether a task's rewards have names
            provided |= {"reward_parts"} if self.task.host is None else {"token_rewards", "state_ids"}
        if self.reward.kl_coef:
            provided.add("token_rewards")
        if missing := sorted(self.estimator.needs - provided):
            raise UserError(
                f"advantage {name!r} needs {missing[0]}, which task {self.task.name!r} does not provide; choose another "
                "advantage"
            )
        if self.estimator.per_token and self.clip.scope == "sequence":
            raise UserError(
                f"clip.advantage={name!r}: its values differ between tokens, but {self.clip.name} accepts only one value per "
                "response; choose another advantage, or a rule with scope token or batch"
            )
        return self

    @property
    def held_out_score(self) -> Literal["accuracy", "reward"]:
        """The quantity that an evaluation's mean reward measures: accuracy if every response is right (1) or wrong (0)."""
        is_accuracy = self.task.right_or_wrong and self.task.reward is None and not self.reward.weights
        return "accuracy" if is_accuracy else "reward"

    @property
    def has_critic(self) -> bool:
        """Whether the estimator needs the values of a critic."""
        return "values" in self.estimator.needs

    @model_validator(mode="after")
    def _sets_up_no_absent_critic(self) -> Self:
        for name, value in self.critic:
            if not self.has_critic and value != getattr(CriticConfig(), name):
                raise UserError(
                    f"critic.{name}={shown(value)}: advantage {self.estimator.name!r} has no critic; remove the "
                    "setting, or set clip.advantage=gae"
                )
        return self

    @model_validator(mode="after")
    def _can_name_rewards(self) -> Self:
        if self.reward.weights and self.task.host is not None:
            raise UserError(
                f"reward.weights={self.reward.weights}: task {self.task.name!r} has several turns, and their rewards have "
                "no names; remove reward.weights"
            )
        if self.reward.overlong_buffer and "reward_parts" in self.estimator.needs:
            raise UserError(
                f"reward.overlong_buffer={self.reward.overlong_buffer}: the length penalty is not one of the named "
                f"rewards that advantage {self.estimator.name!r} reads; return it as a named reward instead"
            )
        return self

    @model_validator(mode="after")
    def _takes_kl_in_the_reward(self) -> Self:
        setting, clip = f"reward.kl_coef={self.reward.kl_coef}", self.clip
        if self.reward.kl_coef and clip.scope == "sequence":
            raise UserError(
                f"{setting}: a KL term in the reward makes advantages per-token, but {clip.name} accepts only one advantage "
                "per response; use learner.kl_coef instead"
            )
        if self.reward.kl_coef and not self.estimator.takes_token_rewards:
            allowed = [
                name for name, kind in self.plugins.zoo.advantages.items() if kind.takes_token_rewards and not kind.needs
            ]
            raise UserError(
                f"{setting}: advantage {self.estimator.name!r} does not accept per-token rewards (allowed: "
                f"{', '.join(allowed)}); set clip.advantage={allowed[0]}"
            )
        return self

    @classmethod
    def compose(
        cls,
        configs: str | Path | Sequence[str | Path] = (),
        *,
        clip: str | ClipPolicy | None = None,
        overrides: Sequence[str] = (),
        plugins: Sequence[str | Path] = (),
        use_changed_plugins: bool = True,
        **settings: Any,
    ) -> Self:
        """Compose a run as the command line does. Later sources override earlier ones.

        The sources are, in order, `DEFAULT_RUN` (if no config names a model), the configs, and ``overrides`` with ``settings``.
        A config's ``per_clip`` section holds settings for individual rules. Only the settings for the chosen rule apply.

        Args:
            configs: names of shipped configs or paths of config files. A single config needs no list.
            clip: name of the rule, which takes precedence over the configs, or a rule object, which keeps its own settings.
            overrides: ``"section.key=value"`` strings, with values in YAML.
            plugins: plugin files and folders, in addition to those listed in the configs.
            use_changed_plugins: whether to load a plugin that has changed since the run started instead of its copy in the
                run directory. This applies only to the config of a run.
            settings: top-level fields such as ``seed=1``. Fields that are None are ignored.

        Raises:
            UserError: a setting is not valid, or ``overrides`` contradict ``clip`` or ``settings``; the message says what was
                given, what is allowed and what to do.
        """
        configs = [configs] if isinstance(configs, str | Path) else configs
        layers = [read_config(config) for config in configs]
        for file, layer in zip(map(user_path, configs), layers, strict=True):
            if layer.get("plugins") and file.is_file() and (file.parent / "run.json").is_file():
                layer["plugins"] = plugins_of_run(file.parent, listed(layer["plugins"]), use_changed=use_changed_plugins)
        base = [] if any("model" in layer for layer in layers) else [read_config(DEFAULT_RUN)]
        layers = base + layers
        changed = parse_overrides(overrides)
        rule, clip = (clip, clip.name) if isinstance(clip, ClipPolicy) else (None, clip)
        if rule and "clip" in changed:
            raise UserError(
                f"clip={rule!r} is an object, so overrides cannot change it; pass {type(rule).__name__}(SETTING=VALUE)"
            )
        for key, value in {"clip": clip, **settings}.items():
            other = clip_name(changed) if key == "clip" else changed.get(key)
            if not (value is None or other is None or isinstance(value, Mapping) or str(value) == str(other)):
                option = "--seed or --seeds" if key == "seed" else f"--{key}"
                raise UserError(f"{key}={other}: {option} already sets {key} to {value}; use only one of the two")
        settings = {key: value for key, value in settings.items() if value is not None}
        layers.append(merge(changed, settings, is_one_layer=True))
        sections = [layer.get("rollout") for layer in layers]
        if base and any(isinstance(section, Mapping) and section.get("recorded") for section in sections):
            del base[0]["rollout"]  # so that recorded rollouts conflict only with what the user has set
        name = clip or next((n for n in map(clip_name, reversed(layers)) if n), None)
        merged: dict[str, Any] = {}
        for layer in layers:
            merged = merge(merged, for_clip(layer, name))
        if name:
            merged["clip"] = rule or {**named_settings("clip", merged.get("clip")), "name": name}
        paths = listed(merged.get("plugins"))
        merged["plugins"] = plugins if isinstance(plugins, Plugins) and not paths else [*paths, *map(str, plugins)]
        try:
            config = cls.model_validate(merged)
        except ValidationError as error:
            raise UserError(explain(error, cls)) from error
        if not any("lr" in (layer.get("learner") or {}) for layer in layers[len(base) :]):
            _remark_on_base(config.model.path, config.learner.lr, has_base=bool(base))
        for unknown in {key for layer in layers for key in layer.get("per_clip") or ()} - config.plugins.zoo.keys():
            log_once(f"per_clip.{unknown}: no such rule is loaded{did_you_mean(str(unknown), config.plugins.zoo)}")
        return config

    def to_yaml(self, *, with_secrets: bool = False) -> str:
        """Return the complete configuration as YAML, from which `compose` recreates the same run.

        Args:
            with_secrets: whether to include passwords and tokens, for a file that no other user can read. If False, the
                secrets that `redaction` finds are left out and must be supplied again when the file is used.
        """
        settings = self.model_dump(mode="json")
        return dump_yaml(settings if with_secrets else redact_settings(settings))

    def refuse_redacted(self) -> None:
        """Reject a configuration in which a secret was replaced by a placeholder.

        Raises:
            UserError: a setting holds a placeholder; the message names the setting and says how to supply it.
        """
        for key in redacted_keys(self.model_dump(mode="json")):
            raise UserError(
                f"{key}: holds a secret, which config.yaml does not store; supply it again with --set {key}=VALUE "
                "or in a config"
            )
