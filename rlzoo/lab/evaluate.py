"""Evaluation: k responses to every problem of some suites, graded, and what they come to."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
"""Told the suite, how many of its problems are answered, how many there are, and what they come to so far."""


def evaluate(
    config: EvaluationConfig,
    output: Path | None = None,
    *,
    experiment: str | None = None,
    told: Told = lambda suite, done, total, so_far: None,
) -> Evaluation:
    """Sample and grade whatever is still missing, and say what it all comes to; what ``rlzoo eval`` does.

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
            sampler = open_sampler(config.model, config.rollout, prompts)
            stack.callback(sampler.close)
            directory.create(config.settings())
            for suite in suites:
                sitting = Sitting(config, suite, graders[suite.make_grader], sampler, directory)
                sitting.complete(answered[suite.name], problems[suite.name], told)
    results = tuple(SuiteResult.of(name, responses) for name, responses in answered.items())
    return finish(Evaluation(config, directory.path, results, None), directory, experiment)


def open_sampler(model: EvaluatedModel, rollout: RolloutConfig, prompts: Mapping[str, Sequence[str]]) -> Sampler:
    """The sampler that ``rollout.engine`` names, with the model's weights.

    Args:
        model: what it samples from.
        rollout: how.
        prompts: of each suite, to try the tokenizer on.

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


@dataclass(frozen=True, slots=True)
class Sitting:
    """One suite put to one model.

    Example:
        ``Sitting(config, suite, grader, sampler, directory).complete([], problems, told)``
    """

    config: EvaluationConfig
    suite: Suite
    grader: SuiteGrader
    sampler: Sampler
    directory: EvaluationDirectory

    def complete(self, answered: list[Answered], problems: Sequence[Problem], told: Told) -> None:
        """Add to ``answered`` the problems that are not in it, and write them to the directory, whole problem by whole problem.

        Problems are sampled in the same batches whether or not the evaluation was stopped in between, since what a model
        computes depends a little on the batch: one that was left in half is drawn again as a whole.
        """
        size = max(1, self.config.rollout.batch_size // self.config.rollout.group_size)
        told(self.suite.name, len(answered), len(problems), self._so_far(answered))
        while len(answered) < len(problems):
            start = len(answered) // size * size
            fresh = self._answer(problems[start : start + size], start)[len(answered) - start :]
            self.directory.append(self.suite.name, len(answered), fresh)
            answered += fresh
            told(self.suite.name, len(answered), len(problems), self._so_far(answered))

    def _answer(self, problems: Sequence[Problem], start: int) -> list[Answered]:
        """Sample and grade; ``start`` is the number of the first of the problems in its suite."""
        k = self.config.rollout.group_size
        rollouts = self.sampler.sample(
            [self.suite.prompt(problem) for problem in problems],
            k,
            seed=step_seed(self.config.seed, zlib.crc32(self.suite.name.encode()), 0),
            temperature=self.config.rollout.temperature,
            first_row=start * k,
        )
        texts = [rollout.text for rollout in rollouts]
        rewards = self.grader.grade([problem for problem in problems for _ in range(k)], texts)
        answered = []
        for place, problem in enumerate(problems):
            rows = slice(place * k, (place + 1) * k)
            groups = self.grader.answer_groups(texts[rows], rewards[rows])
            parts = zip(rollouts[rows], rewards[rows], groups, strict=True)
            answered.append(
                Answered(
                    problem,
                    tuple(
                        Completion(rollout.text, reward, group, len(rollout.response_ids), rollout.finished)
                        for rollout, reward, group in parts
                    ),
                )
            )
        return answered

    def _so_far(self, answered: Sequence[Answered]) -> dict[str, float]:
        k = self.config.rollout.group_size
        found = means([item.outcome for item in answered]) if answered else {}
        return {name: found[name] for name in (f"mean@{k}", f"pass@{k}", f"maj@{k}") if name in found}
