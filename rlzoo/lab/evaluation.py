"""Samples and grades k responses to every problem in the given suites, and computes the results."""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from pydantic import Field, ValidationError

from rlzoo.config.composition import parse_overrides
from rlzoo.config.redaction import redact_settings, redacted_keys
from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import EvalConfig, LaunchConfig, ModelConfig, RolloutConfig
from rlzoo.core.errors import UserError, explain, shown
from rlzoo.core.settings import Settings, user_path
from rlzoo.gate.enter import TO_SAMPLE, Opening
from rlzoo.gate.fingerprint import file_facts
from rlzoo.gate.tokens import Asked
from rlzoo.journal.manifest import check_model
from rlzoo.journal.state import numbered
from rlzoo.journal.tracking.store import connected
from rlzoo.journal.tracking.sync import Sync
from rlzoo.journal.tracking.uploads import Upload, git_commit, run_id_of, tracking_uri
from rlzoo.lab.evaluation_directory import Answered, EvaluationDirectory
from rlzoo.lab.runs import changed_settings, read_mapping
from rlzoo.lab.study import plain
from rlzoo.learner.optimization import named_weights
from rlzoo.measure.at_k import AtK, Completion, Completions, differences, estimates, means
from rlzoo.measure.report import Cell, Row, Table, Tabular
from rlzoo.models.pretrained import load_named
from rlzoo.models.processes import make_accelerator
from rlzoo.rollout.draws import Truncation
from rlzoo.rollout.prompts import PromptError
from rlzoo.rollout.rollouts import Rollouts
from rlzoo.rollout.sampler import Sampler
from rlzoo.rollout.seeds import EVALUATION, step_seed
from rlzoo.rollout.types import RolloutGroup
from rlzoo.support.atomic import write_text
from rlzoo.support.distribution import version
from rlzoo.tasks.problem import Problem
from rlzoo.tasks.suites import NUM_SUMS, Suite, SuiteGrader, find_suite
from rlzoo.tasks.task import seeded

logger = logging.getLogger("rlzoo")

UNUSED = {"num_prompts", "dynamic_sampling", "max_staleness"}
"""Rollout settings that only training uses."""

Progress = Callable[[str, int, int, dict[str, float]], None]
"""A callback that receives the suite, the number of answered problems, the number of all problems, and the means so far."""


class EvaluatedModel(ModelConfig):
    """The language model to evaluate."""

    chat_template: bool | None = Field(  # type: ignore[assignment]
        None, description="wrap prompts in the chat template; null: only if the tokenizer has one"
    )


class EvaluationConfig(Settings):
    """The configuration for evaluating a model on suites, or a run on the held-out problems of its own task."""

    model: EvaluatedModel = Field(default_factory=EvaluatedModel, description="the language model to evaluate")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="how responses are sampled; group_size is k")
    seed: int = Field(0, ge=0, lt=2**32, description="seed for sampling")
    suites: tuple[str, ...] = Field((), description="names of suites; none: the task of a run")
    run: RunConfig | None = Field(None, description="configuration of the run whose task is the suite")
    limit: int | None = Field(
        None, ge=1, description="maximum number of problems per suite, in order; null: all, or as many as the run evaluates"
    )
    data: Path | None = Field(None, description="folder with local copies of the suites; null: the hub")

    @classmethod
    def compose(cls, model: str, overrides: Sequence[str], plugins: Sequence[str | Path] = (), **settings: Any) -> Self:
        """Compose the configuration from a model, ``"section.key=value"`` overrides, a run's plugins and top-level settings.

        Raises:
            UserError: a setting is invalid; the message says what was given, what is allowed, and what to do.
        """
        sections = parse_overrides(overrides)
        allowed = "model and rollout" if settings.get("suites") else "model, rollout and task"
        if other := next((text for text in overrides if text.partition(".")[0] not in re.findall(r"\w+", allowed)), None):
            raise UserError(f"--set {other.partition('=')[0]}: an evaluation has only the sections {allowed}")
        path = sections.get("model", {}).get("path", model)  # on the task of a run, another model can be evaluated
        if path != model and settings.get("suites"):
            raise UserError(f"--set model.path: MODEL already sets it to {model!r}; use only one of the two")
        saved = [str(folder) for _, folder in numbered(user_path(path)) if (folder / "config.json").is_file()]
        named = {**sections.get("model", {}), "path": saved[-1] if saved else path}  # for a run directory, the last checkpoint
        used: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 2048}
        if not settings.get("suites"):
            run = _run_of(model, [text for text in overrides if text.startswith("task.")], plugins)
            limits = {"max_new_tokens", "max_turns", "max_turn_tokens", "max_observation_tokens"}
            used = run.rollout.model_dump(include=limits) | {"temperature": run.eval.temperature}
            settings = {"seed": run.seed, **settings, "run": run}
            named = run.model.model_dump(include={"dtype", "attn_implementation", "chat_template"}) | named
        rollout = {"batch_size": 64} | used | sections.get("rollout", {})
        try:
            return cls.model_validate({**settings, "model": named, "rollout": rollout})
        except ValidationError as error:
            raise UserError(explain(error, cls)) from error

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect completions. An evaluation can be resumed only with the same settings."""
        included = {"model", "rollout", "seed"}
        settings = redact_settings(self.model_dump(mode="json", include=included, exclude={"rollout": UNUSED}))
        if self.run is not None:
            settings |= redact_settings(self.run.model_dump(mode="json", include={"task", "reward"}))
            settings["files_of_the_task"] = file_facts(self.run)
        path = user_path(self.model.path)
        files = [(file.name, file.stat()) for file in (path, *sorted(path.glob("*"))) if file.is_file()]
        states = [(name, state.st_size, state.st_mtime_ns) for name, state in files]
        return settings | ({"files_of_the_model": f"{zlib.crc32(repr(states).encode()):08x}"} if states else {})


def default_output(config: EvaluationConfig) -> Path:
    """Return a path that depends on the settings, so that rerunning the command finds the same directory."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", config.model.path).strip("-")
    return Path("evals") / f"{name}-{zlib.crc32(repr(config.settings()).encode()):08x}"


def _run_of(path: str, overrides: Sequence[str], plugins: Sequence[str | Path]) -> RunConfig:
    """Return a run's configuration for sampling in this process, given the run's directory or one of its checkpoints."""
    folder = user_path(path).absolute()
    file = next((parent / "config.yaml" for parent in (folder, *folder.parents[1:2]) if (parent / "run.json").is_file()), None)
    if file is None:
        raise UserError(f"{shown(path)} is not a run: add --suite NAME, or use the task of a run: RUN --set model.path={path}")
    here = ["rollout.engine=hf", "rollout.recorded=null", "rollout.vllm.in_flight=false"]
    run = RunConfig.compose(file, overrides=[*here, *overrides], plugins=plugins, use_changed_plugins=False)
    for key in redacted_keys(run.model_dump(mode="json", include={"task"})):
        raise UserError(f"{key}: holds a secret, which config.yaml does not store; supply it again with --set {key}=VALUE")
    return run


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """The results of one suite."""

    suite: str
    num_problems: int
    estimates: dict[str, AtK]
    response_length_mean: float  # in tokens
    truncated: float  # share of the responses that reached the length limit
    failed: float  # share of responses without a grade
    no_answer: float | None  # share of responses that contain no answer; None if the task does not compare answers

    @classmethod
    def of(cls, suite: str, answered: Sequence[Answered], votes: bool) -> Self:
        """Compute the results from all completions of a suite. ``votes`` says whether equal answers are known."""
        problems = _completions(answered)
        completions = [completion for of_problem in problems for completion in of_problem]
        return cls(
            suite,
            len(answered),
            estimates(problems, votes=votes),
            response_length_mean=fmean(completion.length for completion in completions),
            truncated=fmean(not completion.finished for completion in completions),
            failed=fmean(completion.reward is None for completion in completions),
            no_answer=fmean(completion.answer_group is None for completion in completions) if votes else None,
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics, keyed by their MLflow names, which cannot contain an @."""
        shares = ("response_length_mean", "truncated", "failed", "no_answer")
        values = {key: value for key in shares if (value := getattr(self, key)) is not None}
        for name, estimate in self.estimates.items():
            values[name], (values[f"{name}_ci_low"], values[f"{name}_ci_high"]) = estimate.value, estimate.interval
        return {f"eval/{self.suite}/{name.replace('@', '_at_')}": float(value) for name, value in values.items()}


def _table(caption: str, found: Mapping[str, Mapping[str, AtK]]) -> Table:
    """Return a table with one row per measure and one column per suite."""
    names = dict.fromkeys(name for of_suite in found.values() for name in of_suite)
    rows: list[Row] = [[name, *(cell for of_suite in found.values() for cell in _cells(of_suite.get(name)))] for name in names]
    return Table(caption, ["measure", *(column for suite in found for column in (suite, "95 %"))], rows)


def _table_of(results: Sequence[SuiteResult]) -> Table:
    plain: dict[str, list[float | None]] = {
        "problems": [result.num_problems for result in results],
        "tokens": [result.response_length_mean for result in results],
        "cut off": [result.truncated for result in results],
        **({"no grade": [result.failed for result in results]} if any(result.failed for result in results) else {}),
        "no answer": [result.no_answer for result in results],
    }
    table = _table("", {result.suite: result.estimates for result in results})
    rows: list[Row] = [[name, *(cell for value in values for cell in (value, ""))] for name, values in plain.items()]
    return replace(table, rows=[*table.rows, *rows])


def _cells(estimate: AtK | None) -> tuple[Cell, Cell]:
    return (None, None) if estimate is None else (estimate.value, estimate.interval)


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation(Tabular):
    """A finished evaluation."""

    config: EvaluationConfig
    path: Path
    results: tuple[SuiteResult, ...]
    differences: dict[str, dict[str, AtK]]  # from an earlier evaluation, by suite and measure
    mlflow_run_id: str | None

    def tables(self) -> list[Table]:
        """Return a table of the measures of all suites, and a table of their differences from the earlier evaluation."""
        found = {result.suite: self.differences[result.suite] for result in self.results if result.suite in self.differences}
        return [_table_of(self.results), *([_table("Differences", found)] if found else [])]

    def as_dict(self) -> dict[str, Any]:
        """Return the content of ``results.json`` as JSON-serialisable data."""
        settings = {**self.config.settings(), "limit": self.config.limit}
        found = {"suites": {result.suite: result for result in self.results}, "differences": self.differences}
        return plain({"settings": settings, **found, "mlflow_run_id": self.mlflow_run_id})


def evaluate(
    config: EvaluationConfig | str | Path,
    output: Path | None = None,
    *,
    k: int = 16,
    against: Path | None = None,
    experiment: str | None = None,
    progress: Progress = lambda suite, done, total, means_so_far: None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> Evaluation:
    """Sample and grade the missing responses, and compute the results, as ``rlzoo eval`` does.

    Args:
        config: a complete configuration, or a model or run to pass to `EvaluationConfig.compose`.
        output: directory of the evaluation; None for a directory named after the model and the settings.
        k: number of responses per problem, unless ``config`` is complete.
        against: directory of an earlier evaluation of the same problems, from which to compute the differences.
        experiment: MLflow experiment for the results; None to log nothing.
        progress: called to report progress.
        overrides: ``key=value`` overrides to pass to `compose`. They require an incomplete ``config``.
        settings: settings to pass to `compose`, such as ``suites=("gsm8k",)`` and ``limit=100``. They also require an
            incomplete ``config``.

    Raises:
        UserError: the evaluation cannot start as configured. In that case, nothing has been written.
    """
    if not isinstance(config, EvaluationConfig):
        config = EvaluationConfig.compose(str(config), [f"rollout.group_size={k}", *overrides], **settings)
    directory = EvaluationDirectory(user_path(output or default_output(config)))
    with ExitStack() as stack:
        suites = [_of_run(config, config.run, stack)] if config.run is not None else _of_suites(config, stack)
        problems = {suite.name: suite.problems for suite in suites}
        for name, asked in problems.items():
            if config.limit is not None and len(asked) < config.limit:
                logger.warning("--limit %d exceeds the number of problems in suite %r, %d", config.limit, name, len(asked))
        directory.check(config.settings())
        before = _answered_before(against, config, problems) if against is not None else {}

        def reopened() -> dict[str, list[Answered]]:
            stack.callback(directory.create(config.settings()).release)
            return {name: directory.read(name, asked) for name, asked in problems.items()}

        answered = reopened() if (directory.path / "settings.yaml").exists() else {}
        if any(len(answered.get(name, ())) < len(asked) for name, asked in problems.items()):
            sampler = stack.enter_context(_open_sampler(config.model, config.rollout, suites))
            answered = answered or reopened()
            for suite in suites:
                _complete(config, suite, sampler, directory, answered[suite.name], progress)
        votes = {suite.name: suite.answer_groups is not None for suite in suites}
        results = tuple(SuiteResult.of(name, answered[name], votes[name]) for name in votes)
        found = {name: differences(before[name], _completions(answered[name]), votes=votes[name]) for name in before}
        evaluation = Evaluation(config, directory.path, results, found, None)
        stored = read_mapping(directory.path / "results.json")
        run_id = stored.get("mlflow_run_id") if stored.get("suites") == evaluation.as_dict()["suites"] else None
        if experiment is not None and run_id is None:
            run_id = _track(evaluation, experiment)
        evaluation = replace(evaluation, mlflow_run_id=run_id)
        write_text(directory.path / "results.json", json.dumps(evaluation.as_dict(), indent=2) + "\n", "evaluation")
    return evaluation


def _completions(answered: Sequence[Answered]) -> list[Completions]:
    return [item.completions for item in answered]


def _answered_before(
    path: Path, config: EvaluationConfig, problems: Mapping[str, list[Problem]]
) -> dict[str, list[Completions]]:
    """Read the responses of another evaluation to the same problems, and log how its settings differ.

    Raises:
        UserError: the evaluation does not contain responses to all problems.
    """
    directory = EvaluationDirectory(user_path(path))
    changed = changed_settings(directory.settings() or {}, config.settings())
    before = {name: directory.read(name, asked, repair=False) for name, asked in problems.items()}
    for name, answered in before.items():
        if len(answered) < len(problems[name]):
            raise UserError(
                f"--against {str(path)!r}: it answers {len(answered)} of the {len(problems[name])} problems of {name!r}; "
                "finish that evaluation first, or use fewer problems with --limit"
            )
    for change in changed:
        if change.startswith(("task.", "reward.")):
            raise UserError(f"--against {str(path)!r}: {change} differs, so the two results do not measure the same")
        is_of_one = change.startswith("files_of_the_task") and "None" in change  # such as the file of a run's own rule
        if not change.startswith(("model.path", "files_of_the_model")) and not is_of_one:
            logger.warning("--against %s: %s differs", path, change)
    return {name: _completions(answered) for name, answered in before.items()}


@dataclass(frozen=True, slots=True)
class Questions:
    """Problems of a suite, or held-out problems of a run's task, with functions that sample and grade responses to them."""

    name: str
    problems: list[Problem]
    asked: Asked
    seed: int  # seed for sampling
    answer: Callable[[Sampler, list[Problem], dict[str, Any]], list[RolloutGroup]]  # samples k responses
    answer_groups: Callable[[Sequence[str], Sequence[float]], list[int | None]] | None  # see `MathGrader.answer_groups`


def _of_suites(config: EvaluationConfig, stack: ExitStack) -> list[Questions]:
    """Return the questions of the suites. Their graders are closed when the stack is."""
    suites, k = [find_suite(name, config.data) for name in dict.fromkeys(config.suites)], config.rollout.group_size
    graders = {make: make() for make in dict.fromkeys(suite.make_grader for suite in suites)}
    for grader in graders.values():
        stack.callback(grader.close)

    def questions(suite: Suite, grader: SuiteGrader) -> Questions:
        def answer(sampler: Sampler, problems: list[Problem], how: dict[str, Any]) -> list[RolloutGroup]:
            rollouts = sampler.sample([suite.prompt(problem) for problem in problems], k, **how)
            grades: Any = grader.grade([problem for problem in problems for _ in range(k)], [one.text for one in rollouts])
            graded = [replace(one, reward=reward) for one, reward in zip(rollouts, grades, strict=True)]
            return [RolloutGroup(problem, tuple(graded[row * k : row * k + k])) for row, problem in enumerate(problems)]

        problems, seed = suite.problems(config.data, config.limit), step_seed(config.seed, zlib.crc32(suite.name.encode()), 0)
        asked = Asked([suite.prompt(problem) for problem in problems])
        return Questions(suite.name, problems, asked, seed, answer, grader.answer_groups)

    return [questions(suite, graders[suite.make_grader]) for suite in suites]


def _of_run(config: EvaluationConfig, run: RunConfig, stack: ExitStack) -> Questions:
    """Return the held-out problems of a run's task, to be answered as in the run's evaluations."""
    task = stack.enter_context(seeded(run.task, run.seed))
    problems = task.held_out_problems(config.limit or run.eval.num_problems or task.num_problems(held_out=True) or NUM_SUMS)
    if not problems:
        raise UserError(f"task {task.name!r} has no held-out problems; choose a suite with --suite")

    @cache
    def rollouts(sampler: Sampler) -> Rollouts:
        settings = run.model_copy(update={"rollout": config.rollout, "eval": EvalConfig()})
        return Rollouts(settings, task, sampler, make_accelerator(LaunchConfig(), run.learner))

    def answer(sampler: Sampler, batch: list[Problem], how: dict[str, Any]) -> list[RolloutGroup]:
        return rollouts(sampler).answer(batch, config.rollout.group_size, **how)

    compares = getattr(task, "answer_groups", None) if task.reward is None else None
    asked, seed = Asked.of(task, needed=0, held_out=len(problems)), step_seed(config.seed, EVALUATION, 0)
    return Questions("task", problems, asked, seed, answer, compares)


@contextmanager
def _open_sampler(model: EvaluatedModel, rollout: RolloutConfig, suites: Sequence[Questions]) -> Iterator[Sampler]:
    """Open the sampler of ``rollout.engine`` with the model's weights after checking that it can answer the prompts."""
    import torch

    check_model(model.path)
    language_model, tokenizer = load_named(model)
    has_template = tokenizer.chat_template is not None
    if model.chat_template and not has_template:
        raise UserError(f"model.chat_template=true: the tokenizer of {model.path!r} has no chat template; remove the setting")
    named = model.model_copy(update={"chat_template": has_template if model.chat_template is None else model.chat_template})
    language_model = language_model.to(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    asked = replace(suites[0].asked, prompts=[prompt for suite in suites for prompt in suite.asked.prompts])
    opening = Opening(named, rollout, asked)
    opening.model, opening.tokenizer = language_model, tokenizer
    try:
        opening.ask(TO_SAMPLE)
    except PromptError as error:
        named_suites = " or ".join(repr(suite.name) for suite in suites)
        raise UserError(f"suite {named_suites} cannot be used with model {model.path!r}: {error}") from error
    with closing(opening.sampler) as sampler:
        if sampler.needs_weights:
            sampler.update_weights(named_weights(language_model))
        yield sampler


def _complete(
    config: EvaluationConfig,
    suite: Questions,
    sampler: Sampler,
    directory: EvaluationDirectory,
    answered: list[Answered],
    progress: Progress,
) -> None:
    """Sample and grade the missing responses, and add each completed problem to ``answered`` and the directory.

    A model's outputs depend slightly on which problems share a batch, so the batches must not depend on where the evaluation
    was interrupted. Therefore, a batch that was only partly answered is resampled as a whole.
    """
    k, problems, votes = config.rollout.group_size, suite.problems, suite.answer_groups is not None
    size = max(1, config.rollout.batch_size // k)
    reported = (f"mean@{k}", f"pass@{k}", f"maj@{k}")
    truncation = Truncation.of(config.rollout.top_p, config.rollout.top_k)
    how: dict[str, Any] = {"seed": suite.seed, "temperature": config.rollout.temperature, "truncation": truncation}
    while True:
        so_far = means(_completions(answered), votes=votes) if answered else {}
        progress(suite.name, len(answered), len(problems), {name: so_far[name] for name in reported if name in so_far})
        if len(answered) == len(problems):
            return
        start = len(answered) // size * size
        fresh = []
        for group in suite.answer(sampler, problems[start : start + size], how | {"first_row": start * k}):
            texts, rewards = zip(*((one.transcript, one.reward) for one in group.rollouts), strict=True)
            groups = suite.answer_groups(texts, rewards) if suite.answer_groups is not None else [None] * k
            completions = (
                Completion(text, reward, equal, rollout.length, rollout.finished)
                for text, reward, equal, rollout in zip(texts, rewards, groups, group.rollouts, strict=True)
            )
            fresh.append(Answered(group.problem.question, group.problem.answer, tuple(completions)))
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
    record = Upload.new(experiment, f"eval {evaluation.path.name}", tags=tags, params=params, files=("settings.yaml",))
    replace(record, status="FINISHED", ended=time.time(), metrics=metrics).write(evaluation.path)
    with connected(f"log the results with: rlzoo sync {shlex.quote(str(evaluation.path))}"):
        Sync(evaluation.path, tracking_uri()).send(is_over=True)
    return run_id_of(evaluation.path)
