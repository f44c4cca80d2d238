"""Evaluation: samples and grades k responses to every problem of some suites."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rlzoo.config.sections import ModelConfig, RolloutConfig
from rlzoo.errors import UserError
from rlzoo.lab.completions import Answered, Completion, EvaluationDirectory
from rlzoo.lab.evaluation import EvaluatedModel, Evaluation, EvaluationConfig, SuiteResult, default_output, finish
from rlzoo.learner.optimization import named_weights
from rlzoo.measure.at_k import means
from rlzoo.models.pretrained import eos_token_ids, load_pretrained
from rlzoo.rollout.make_sampler import make_sampler
from rlzoo.rollout.prompts import check_prompts, encode_prompt
from rlzoo.rollout.sampler import Sampler
from rlzoo.support.seeds import step_seed
from rlzoo.tasks.suites import Suite, SuiteGrader, find_suite
from rlzoo.types import Problem

Told = Callable[[str, int, int, dict[str, float]], None]
"""Called with the suite, the numbers of answered and of all its problems, and the means so far."""


def evaluate(
    config: EvaluationConfig,
    output: Path | None = None,
    *,
    experiment: str | None = None,
    told: Told = lambda suite, done, total, so_far: None,
) -> Evaluation:
    """Sample and grade the responses that are missing, and compute the results; what ``rlzoo eval`` does.

    Args:
        config: the complete evaluation.
        output: its directory; None for one named after the model.
        experiment: MLflow experiment to log the results to; None for none.
        told: for progress.

    Raises:
        UserError: it cannot start as configured; nothing has been written then.
    """
    suites = [find_suite(name, config.data) for name in dict.fromkeys(config.suites)]
    problems = {suite.name: suite.problems(config.data, config.limit) for suite in suites}
    directory = EvaluationDirectory(output or default_output(config))
    directory.check(config.settings())
    answered = {name: directory.read(name, asked) for name, asked in problems.items()}
    with ExitStack() as stack:
        graders = {make: make() for make in dict.fromkeys(suite.make_grader for suite in suites)}
        for grader in graders.values():
            stack.callback(grader.close)
        if any(len(answered[name]) < len(asked) for name, asked in problems.items()):
            prompts = {suite.name: [suite.prompt(problem) for problem in problems[suite.name]] for suite in suites}
            sampler = _open_sampler(config.model, config.rollout, prompts)
            stack.callback(sampler.close)
            directory.create(config.settings())
            for suite in suites:
                grader, own = graders[suite.make_grader], (answered[suite.name], problems[suite.name])
                _complete(config, suite, grader, sampler, directory, *own, told)
    results = tuple(SuiteResult.of(name, responses) for name, responses in answered.items())
    return finish(Evaluation(config, directory.path, results, None), directory, experiment)


def _open_sampler(model: EvaluatedModel, rollout: RolloutConfig, prompts: Mapping[str, Sequence[str]]) -> Sampler:
    """Open the sampler that ``rollout.engine`` names, with the model's weights; ``prompts`` of each suite are tried first.

    Raises:
        UserError: the model cannot be loaded or does not know the prompts' words, or the sampler cannot start.
    """
    from accelerate import PartialState

    language_model, tokenizer = load_pretrained(
        model.path, model.dtype, model.attn_implementation, trust_remote_code=model.trust_remote_code
    )
    has_template = tokenizer.chat_template is not None
    if model.chat_template and not has_template:
        raise UserError(f"--chat-template: the tokenizer of {model.path!r} has none; leave it out")
    template = has_template if model.chat_template is None else model.chat_template
    for suite, asked in prompts.items():
        try:
            check_prompts(tokenizer, asked)
            encode_prompt(tokenizer, asked[0], template)
        except UserError as error:
            raise UserError(f"suite {suite!r} cannot be put to model {model.path!r}: {error}") from error
    named = ModelConfig(**{**model.model_dump(), "chat_template": template})
    language_model = language_model.to(PartialState().device)
    end_ids = eos_token_ids(language_model, tokenizer)
    sampler = make_sampler(language_model, tokenizer, end_ids, named=named, settings=rollout)
    if sampler.needs_weights:
        sampler.update_weights(named_weights(language_model))
    return sampler


def _complete(
    config: EvaluationConfig,
    suite: Suite,
    grader: SuiteGrader,
    sampler: Sampler,
    directory: EvaluationDirectory,
    answered: list[Answered],
    problems: Sequence[Problem],
    told: Told,
) -> None:
    """Add the missing problems to ``answered`` and to the directory, whole problem by whole problem.

    The batches do not depend on where the evaluation was stopped, because a model's numbers depend slightly on the batch. A
    batch that was half answered is therefore sampled again as a whole.
    """
    k = config.rollout.group_size
    size = max(1, config.rollout.batch_size // k)
    reported = (f"mean@{k}", f"pass@{k}", f"maj@{k}")
    seed = step_seed(config.seed, zlib.crc32(suite.name.encode()), 0)
    while True:
        found = means([item.outcome for item in answered]) if answered else {}
        told(suite.name, len(answered), len(problems), {name: found[name] for name in reported if name in found})
        if len(answered) == len(problems):
            return
        start = len(answered) // size * size
        batch = problems[start : start + size]
        rollouts = sampler.sample(
            [suite.prompt(problem) for problem in batch],
            k,
            seed=seed,
            temperature=config.rollout.temperature,
            first_row=start * k,
        )
        texts = [rollout.text for rollout in rollouts]
        rewards = grader.grade([problem for problem in batch for _ in range(k)], texts)
        fresh = []
        for place, problem in enumerate(batch):
            rows = slice(place * k, (place + 1) * k)
            groups = grader.answer_groups(texts[rows], rewards[rows])
            completions = (
                Completion(rollout.text, reward, group, len(rollout.response_ids), rollout.finished)
                for rollout, reward, group in zip(rollouts[rows], rewards[rows], groups, strict=True)
            )
            fresh.append(Answered(problem, tuple(completions)))
        fresh = fresh[len(answered) - start :]
        directory.append(suite.name, len(answered), fresh)
        answered += fresh
