"""Evaluation: samples and grades k responses to every problem in the given suites, and computes the results."""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from pydantic import Field, ValidationError

from rlzoo.config.composition import parse_overrides
from rlzoo.config.redaction import redact_settings
from rlzoo.config.sections import ModelConfig, RolloutConfig
from rlzoo.core.errors import UserError, explain
from rlzoo.core.settings import Settings, user_path
from rlzoo.gate.enter import TO_SAMPLE, Opening
from rlzoo.gate.tokens import Asked
from rlzoo.journal.manifest import check_model
from rlzoo.journal.state import numbered
from rlzoo.journal.tracking.store import connected
from rlzoo.journal.tracking.sync import Sync
from rlzoo.journal.tracking.uploads import Upload, git_commit, run_id_of, tracking_uri
from rlzoo.lab.evaluation_directory import Answered, EvaluationDirectory
from rlzoo.lab.runs import read_mapping
from rlzoo.lab.study import plain
from rlzoo.learner.optimization import named_weights
from rlzoo.measure.at_k import AtK, Completion, LengthBin, by_length, estimates, means
from rlzoo.models.pretrained import load_named
from rlzoo.rollout.draws import Truncation
from rlzoo.rollout.prompts import PromptError
from rlzoo.rollout.sampler import Sampler
from rlzoo.rollout.seeds import step_seed
from rlzoo.support.atomic import write_text
from rlzoo.support.distribution import version
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.suites import Suite, SuiteGrader, find_suite

logger = logging.getLogger("rlzoo")

UNUSED = {"num_prompts", "dynamic_sampling", "max_staleness"}
"""Rollout settings that only training uses."""

Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called with the suite, the number of problems answered, the total number of problems, and the means so far."""


class EvaluatedModel(ModelConfig):
    """The language model to evaluate."""

    chat_template: bool | None = Field(  # type: ignore[assignment]
        None, description="wrap prompts in the chat template; null: only if the tokenizer has one"
    )


class EvaluationConfig(Settings):
    """The configuration of an evaluation."""

    model: EvaluatedModel = Field(default_factory=EvaluatedModel, description="the language model to evaluate")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="how responses are sampled; group_size is k")
    seed: int = Field(0, ge=0, lt=2**32, description="seed for sampling")
    suites: tuple[str, ...] = Field(min_length=1, description="names of suites")
    limit: int | None = Field(
        None, ge=1, description="maximum number of problems per suite, starting with the first; null: all"
    )
    data: Path | None = Field(None, description="folder with local copies of the suites; null: the hub")

    @classmethod
    def compose(cls, model: str, overrides: Sequence[str], **settings: Any) -> Self:
        """Compose the configuration from a model, ``"section.key=value"`` overrides and top-level settings.

        Raises:
            UserError: a setting is invalid; the message says what was given, what is allowed, and what to do.
        """
        sections = parse_overrides(overrides)
        if other := next((text for text in overrides if text.partition(".")[0] not in ("model", "rollout")), None):
            raise UserError(f"--set {other.partition('=')[0]}: an evaluation has only the sections model and rollout")
        if "path" in sections.get("model", {}):
            raise UserError(f"--set model.path: MODEL already sets it to {model!r}; use only one of the two")
        saved = [str(folder) for _, folder in numbered(user_path(model)) if (folder / "config.json").is_file()]
        named = {**sections.get("model", {}), "path": saved[-1] if saved else model}  # for a run directory, the last checkpoint
        try:
            return cls.model_validate({**sections, **settings, "model": named})
        except ValidationError as error:
            raise UserError(explain(error, cls)) from error

    def settings(self) -> dict[str, Any]:
        """Return the settings that completions depend on; an evaluation can be resumed only with the same settings."""
        included = {"model", "rollout", "seed"}
        settings = redact_settings(self.model_dump(mode="json", include=included, exclude={"rollout": UNUSED}))
        files = [(file.name, file.stat()) for file in sorted(user_path(self.model.path).glob("*")) if file.is_file()]
        states = [(name, state.st_size, state.st_mtime_ns) for name, state in files]
        return settings | ({"files_of_the_model": f"{zlib.crc32(repr(states).encode()):08x}"} if states else {})


def default_output(config: EvaluationConfig) -> Path:
    """Return a path named after the model and the seed, so that rerunning the command finds the same directory."""
    return Path("evals") / f"{re.sub(r'[^A-Za-z0-9]+', '-', config.model.path).strip('-')}-{config.seed}"


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """The results of one suite."""

    suite: str
    num_problems: int
    estimates: dict[str, AtK]
    by_length: tuple[LengthBin, ...]  # shortest first
    response_length_mean: float  # in tokens
    truncated: float  # share of the responses that reached the length limit
    no_answer: float  # share of responses that contain no answer

    @classmethod
    def of(cls, suite: str, answered: Sequence[Answered]) -> Self:
        """Compute the results from all completions of a suite."""
        problems = [item.completions for item in answered]
        completions = [completion for item in answered for completion in item.completions]
        return cls(
            suite,
            len(answered),
            estimates(problems),
            tuple(by_length(problems)),
            response_length_mean=fmean(completion.length for completion in completions),
            truncated=fmean(not completion.finished for completion in completions),
            no_answer=fmean(completion.answer_group is None for completion in completions),
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics, keyed by their MLflow names, which cannot contain an @."""
        values = {key: getattr(self, key) for key in ("response_length_mean", "truncated", "no_answer")}
        named = list(self.estimates.items())
        for place, length_bin in enumerate(self.by_length):
            values[f"length_bin_{place}_edge"] = length_bin.longest
            named += [(f"{name}_length_bin_{place}", estimate) for name, estimate in length_bin.estimates.items()]
        for name, estimate in named:
            values[name], (values[f"{name}_ci_low"], values[f"{name}_ci_high"]) = estimate.value, estimate.interval
        return {f"eval/{self.suite}/{name.replace('@', '_at_')}": float(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation."""

    config: EvaluationConfig
    path: Path
    results: tuple[SuiteResult, ...]
    mlflow_run_id: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the content of ``results.json`` as plain JSON."""
        settings = {**self.config.settings(), "limit": self.config.limit}
        suites = {result.suite: result for result in self.results}
        return plain({"settings": settings, "suites": suites, "mlflow_run_id": self.mlflow_run_id})


def evaluate(
    config: EvaluationConfig,
    output: Path | None = None,
    *,
    experiment: str | None = None,
    progress: Progress = lambda suite, done, total, means_so_far: None,
) -> Evaluation:
    """Sample and grade the missing responses, and compute the results, as ``rlzoo eval`` does.

    Args:
        config: the complete configuration.
        output: directory of the evaluation; None for a directory named after the model and the seed.
        experiment: MLflow experiment for the results; None to log nothing.
        progress: called to report progress.

    Raises:
        UserError: the evaluation cannot start as configured; nothing has been written in that case.
    """
    suites = [find_suite(name, config.data) for name in dict.fromkeys(config.suites)]
    problems = {suite.name: suite.problems(config.data, config.limit) for suite in suites}
    for name, asked in problems.items():
        if config.limit is not None and len(asked) < config.limit:
            logger.warning("--limit %d exceeds the number of problems in suite %r, %d", config.limit, name, len(asked))
    directory = EvaluationDirectory(user_path(output or default_output(config)))
    directory.check(config.settings())
    with ExitStack() as stack:

        def reopened() -> dict[str, list[Answered]]:
            stack.callback(directory.create(config.settings()).release)
            return {name: directory.read(name, asked) for name, asked in problems.items()}

        answered = reopened() if (directory.path / "settings.yaml").exists() else {}
        graders = {make: make() for make in dict.fromkeys(suite.make_grader for suite in suites)}
        for grader in graders.values():
            stack.callback(grader.close)
        if any(len(answered.get(name, ())) < len(asked) for name, asked in problems.items()):
            prompts = [suite.prompt(problem) for suite in suites for problem in problems[suite.name]]
            sampler = stack.enter_context(_open_sampler(config.model, config.rollout, list(problems), prompts))
            answered = answered or reopened()
            for suite in suites:
                grader = graders[suite.make_grader]
                _complete(config, suite, grader, sampler, directory, answered[suite.name], problems[suite.name], progress)
        results = tuple(SuiteResult.of(name, responses) for name, responses in answered.items())
        evaluation = Evaluation(config, directory.path, results, None)
        before = read_mapping(directory.path / "results.json")
        run_id = before.get("mlflow_run_id") if before.get("suites") == evaluation.as_dict()["suites"] else None
        if experiment is not None and run_id is None:
            run_id = _track(evaluation, experiment)
        evaluation = replace(evaluation, mlflow_run_id=run_id)
        write_text(directory.path / "results.json", json.dumps(evaluation.as_dict(), indent=2) + "\n", "evaluation")
    return evaluation


@contextmanager
def _open_sampler(
    model: EvaluatedModel, rollout: RolloutConfig, suites: Sequence[str], prompts: list[str]
) -> Iterator[Sampler]:
    """Open the sampler for ``rollout.engine`` with the model's weights, after asking whether it can answer the prompts."""
    import torch

    check_model(model.path)
    language_model, tokenizer = load_named(model)
    has_template = tokenizer.chat_template is not None
    if model.chat_template and not has_template:
        raise UserError(f"model.chat_template=true: the tokenizer of {model.path!r} has no chat template; remove the setting")
    named = model.model_copy(update={"chat_template": has_template if model.chat_template is None else model.chat_template})
    language_model = language_model.to(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    opening = Opening(named, rollout, Asked(prompts))
    opening.model, opening.tokenizer = language_model, tokenizer
    try:
        opening.ask(TO_SAMPLE)
    except PromptError as error:
        named_suites = " or ".join(map(repr, suites))
        raise UserError(f"suite {named_suites} cannot be used with model {model.path!r}: {error}") from error
    with closing(opening.sampler) as sampler:
        if sampler.needs_weights:
            sampler.update_weights(named_weights(language_model))
        yield sampler


def _complete(
    config: EvaluationConfig,
    suite: Suite,
    grader: SuiteGrader,
    sampler: Sampler,
    directory: EvaluationDirectory,
    answered: list[Answered],
    problems: Sequence[Problem],
    progress: Progress,
) -> None:
    """Sample and grade the missing responses, and add each completed problem to ``answered`` and to the directory.

    A model's outputs depend slightly on which problems share a batch, so the batches must not depend on where the evaluation
    was interrupted: a batch that was only partly answered is resampled as a whole.
    """
    k = config.rollout.group_size
    size = max(1, config.rollout.batch_size // k)
    reported = (f"mean@{k}", f"pass@{k}", f"maj@{k}")
    seed = step_seed(config.seed, zlib.crc32(suite.name.encode()), 0)
    while True:
        so_far = means([item.completions for item in answered]) if answered else {}
        progress(suite.name, len(answered), len(problems), {name: so_far[name] for name in reported if name in so_far})
        if len(answered) == len(problems):
            return
        start = len(answered) // size * size
        batch = problems[start : start + size]
        rollouts = sampler.sample(
            [suite.prompt(problem) for problem in batch],
            k,
            seed=seed,
            temperature=config.rollout.temperature,
            truncation=Truncation.of(config.rollout.top_p, config.rollout.top_k),
            first_row=start * k,
        )
        texts = [rollout.text for rollout in rollouts]
        grades = grader.grade([problem for problem in batch for _ in range(k)], texts)
        rewards = [grade if isinstance(grade, float) else 0.0 for grade in grades]  # the graders of suites grade every answer
        fresh = []
        for place, problem in enumerate(batch):
            rows = slice(place * k, (place + 1) * k)
            groups = grader.answer_groups(texts[rows], rewards[rows])
            completions = (
                Completion(rollout.text, reward, group, len(rollout.response_ids), rollout.finished)
                for rollout, reward, group in zip(rollouts[rows], rewards[rows], groups, strict=True)
            )
            fresh.append(Answered(problem.question, problem.answer, tuple(completions)))
        fresh = fresh[len(answered) - start :]
        directory.append(suite.name, len(answered), fresh)
        answered += fresh


def _track(evaluation: Evaluation, experiment: str) -> str | None:
    """Log an evaluation to MLflow and return the run ID, or None if the store cannot be reached."""
    config = evaluation.config
    tags = {
        "kind": "evaluation",
        "suites": ",".join(result.suite for result in evaluation.results),
        "model": config.model.path,
        "seed": str(config.seed),
        "git_commit": git_commit(),
        "rlzoo_version": version(),
    }
    params = {**config.settings(), "limit": config.limit}
    metrics = {name: value for result in evaluation.results for name, value in result.metrics().items()}
    record = Upload.new(experiment, evaluation.path.name, tags=tags, params=params, files=("settings.yaml",))
    replace(record, status="FINISHED", ended=time.time(), metrics=metrics).write(evaluation.path)
    with connected(f"log the results with: rlzoo sync {shlex.quote(str(evaluation.path))}"):
        Sync(evaluation.path, tracking_uri()).send(is_over=True)
    return run_id_of(evaluation.path)
