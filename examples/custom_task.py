"""A custom task: one class provides the questions, answers and grades, with no changes to the library.

``python examples/custom_task.py`` trains the bundled model on this task for three steps, in under a minute. The equivalent
command, in this folder, is ``rlzoo train --set task.name=custom_task:LastDigit --set task.num_operands=4 --steps 3``.

The fields of the class are its settings. They are validated and saved in the run's ``config.yaml`` like all other settings.
"""

import random
from collections.abc import Sequence

from pydantic import Field

import rlzoo
from rlzoo.tasks import Problem, Task, is_held_out

QUICK = ["rollout.num_prompts=8", "rollout.group_size=4", "eval.num_problems=20", "tracking.mlflow=false"]


class LastDigit(Task):
    """Sums in which only the last digit counts, so that both ``#5`` and ``#15`` are right for ``7+8=``."""

    template: str = Field(default="{question}=", description="prompt template; {question} is replaced by the sum")
    num_operands: int = Field(default=3, ge=2, le=20, description="numbers in a sum")

    def train_problems(self, start: int, count: int) -> list[Problem]:
        """Return sums from an infinite sequence. Each sum depends only on the seed and its index."""
        return [self._draw(f"{self.seed}:{index}", held_out=False) for index in range(start, start + count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """Return distinct sums that are never used for training and are the same for every seed."""
        drawn = (self._draw(f"held-out:{index}", held_out=True) for index in range(10 * count))
        return list(dict.fromkeys(drawn))[:count]

    def _grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        return [
            float(response.rpartition("#")[2].strip()[-1:] == problem.answer)
            for problem, response in zip(problems, responses, strict=True)
        ]

    def _draw(self, key: str, held_out: bool) -> Problem:
        generator = random.Random(key)
        while True:
            numbers = [generator.randint(1, 9) for _ in range(self.num_operands)]
            question = "+".join(map(str, numbers))
            if is_held_out(question) == held_out:  # this depends only on the question's text
                return Problem(question=question, answer=str(sum(numbers) % 10))


def main() -> None:
    """Train for three steps and print the rewards."""
    settings = ["task.name=custom_task:LastDigit", "task.num_operands=4", *QUICK]
    result = rlzoo.train(rlzoo.RunConfig.compose(clip="fspo", overrides=settings, steps=3))
    for step, metrics in enumerate(result.metrics):
        known = {name: metrics[name] for name in ("reward/mean", "eval/accuracy") if name in metrics}
        print(f"step {step}", *(f"{name} {value:.3f}" for name, value in known.items()), sep="  ")
    print(f"run directory {result.path}")


if __name__ == "__main__":
    main()
