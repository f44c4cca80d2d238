"""Several tries at a single-turn problem: a wrong answer is followed by "try again"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlzoo.environments.environment import Messages
from rlzoo.types import Problem


class Retries:
    """Grades every turn; the episode ends with the first right answer, or with the last try.

    Example:
        >>> env = Retries(lambda problem, answer: float(answer == problem.answer), lambda problem: problem.question, tries=2)
        >>> env.reset(Problem("1+1=", "2"), seed=0)
        '1+1='
        >>> env.step("3")
        ('That is wrong. Try again.', 0.0, False, {'tries': 1, 'solved': False, 'state': '1+1= 1'})
        >>> env.step("2")
        ('', 1.0, True, {'tries': 2, 'solved': True, 'state': '1+1= 2'})
    """

    def __init__(
        self,
        grade: Callable[[Problem, str], float],
        prompt: Callable[[Problem], str],
        *,
        tries: int = 3,
        again: str = "That is wrong. Try again.",
        discount: float = 1.0,
        solved: float = 1.0,
    ) -> None:
        """Store the arguments.

        Args:
            grade: returns the reward of an answer.
            prompt: returns the prompt for a problem.
            tries: maximum number of answers.
            again: message to the model after a wrong answer.
            discount: factor that multiplies the reward once for each earlier try.
            solved: minimum reward for an answer to count as right.
        """
        self.grade, self.prompt = grade, prompt
        self.tries, self.again, self.discount, self.solved = tries, again, discount, solved

    def reset(self, problem: Problem, seed: int) -> Messages:
        """Return the problem's prompt; the seed is not used."""
        self._problem, self._tries = problem, 0
        return self.prompt(problem)

    def step(self, message: str) -> tuple[Messages, float, bool, Mapping[str, Any]]:
        """Grade an answer. Only the last answer earns a reward, so that extra tries alone gain nothing."""
        reward = self.grade(self._problem, message)
        solved = reward >= self.solved
        self._tries += 1
        done = solved or self._tries == self.tries
        paid = reward * self.discount ** (self._tries - 1) if done else 0.0
        state = f"{self._problem.question} {self._tries}"
        return "" if done else self.again, paid, done, {"tries": self._tries, "solved": solved, "state": state}
