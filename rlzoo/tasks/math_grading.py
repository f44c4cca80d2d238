"""Answers compared as mathematics by math-verify: with the reference, and with each other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlzoo.tasks.extraction import after_hashes, last_boxed
from rlzoo.tasks.grading import MEMORY, Grader
from rlzoo.types import Problem

ASK_FOR_A_BOX = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."

LONGEST_ANSWER = 5_000  # characters; no reference has a tenth of them, and math-verify takes minutes for many more
LONGEST_SEARCHED = 100_000  # characters of a response, from its end, in which math-verify looks for an answer

_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+")
_IN_A_BASE = re.compile(r"-?[0-9]+\s*_\s*(?:\{\s*)?([0-9]+)\s*\}?")  # 52_8, 52_{8}
_NUMBER_IN_A_FONT = re.compile(r"\\(?:text|textbf|textit|mathbf|mathrm)\{([^{}\\A-Za-z]*)\}")


@dataclass(frozen=True, slots=True)
class MathGrader:
    r"""Grades the final answers of responses, and says which of them are the same."""

    worker: Grader

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        """1.0 for each response whose answer is the same mathematics as its problem's, else 0.0."""
        rewards = [0.0] * len(responses)
        calls: dict[int, tuple[str, str, bool]] = {}
        for index, (problem, response) in enumerate(zip(problems, responses, strict=True)):
            answer = response_answer(response)
            if answer is not None and _plain(answer) == _plain(problem.answer):
                rewards[index] = 1.0
            elif text := _compared(response, answer, _bare):
                calls[index] = (_bare(problem.answer), text, answer is not None)
        for index, reward in zip(calls, self.worker.grade(list(calls.values())), strict=True):
            rewards[index] = reward
        return rewards

    def answer_groups(self, responses: Sequence[str], rewards: Sequence[float]) -> list[int | None]:
        """Which responses to one problem give the same answer.

        Right responses equal the reference, so they are one group. A wrong one joins the first group whose first answer
        it equals: math-verify's equality is not transitive, and an order decides where it is not.

        Args:
            responses: to one problem.
            rewards: what `grade` gave them.

        Returns:
            For each response the place of the first one with its answer; None where there is no answer to be read.
        """
        answers = [_readable(response) for response in responses]
        wrong = dict.fromkeys(answer for answer, reward in zip(answers, rewards, strict=True) if not reward and answer[0])
        checks = self.worker.grade([(text, text, found, found) for text, found in wrong])
        heads: list[tuple[str, bool]] = []
        head_of: dict[tuple[str, bool], tuple[str, bool]] = {}
        for answer, is_read in zip(wrong, checks, strict=True):
            if is_read:  # an answer that does not equal itself could not be read
                equal = self.worker.grade([(head[0], answer[0], answer[1], head[1]) for head in heads])
                head_of[answer] = next((head for head, same in zip(heads, equal, strict=True) if same), answer)
                heads += [answer] if head_of[answer] == answer else []
        first_right = next((place for place, reward in enumerate(rewards) if reward), None)
        return [
            first_right if reward else answers.index(head_of[answer]) if answer in head_of else None
            for answer, reward in zip(answers, rewards, strict=True)
        ]

    def close(self) -> None:
        """End the worker process; grading again starts another."""
        self.worker.close()


def math_worker_process(timeout: float) -> Grader:
    """A worker process for a `MathGrader`; ``timeout`` in seconds for one comparison, a longer one counts as different."""
    return Grader(score, start, timeout, MEMORY)


def response_answer(response: str) -> str | None:
    r"""The last ``\boxed{}``, else the line after the last ``####``, else None: math-verify is to look for one.

    Example:
        >>> response_answer("so it is \\boxed{18}"), response_answer("#### 18"), response_answer("it is 18")
        ('18', '18', None)
    """
    boxed = last_boxed(response)
    return after_hashes(response) if boxed is None else boxed


def _readable(response: str) -> tuple[str, bool]:
    """What of a response is compared, and whether it is the answer alone; an empty text where there is none."""
    answer = response_answer(response)
    return _compared(response, answer, _plain), answer is not None


def _compared(response: str, answer: str | None, cleaned: Callable[[str], str]) -> str:
    """What math-verify is given: the answer, or where there is none to be seen the response; empty for what is no answer."""
    if answer is None:
        return response[-LONGEST_SEARCHED:].strip()
    return cleaned(answer) if len(answer) <= LONGEST_ANSWER else ""


def _bare(answer: str) -> str:
    r"""The answer without what math-verify stumbles over: a full stop at its end, a number set in a font of its own.

    Example:
        >>> _bare("$104$."), _bare(r"\textbf{(073)}"), _bare(r"\text{Evelyn}")
        ('104', '(073)', '\\text{Evelyn}')
    """
    text = _without_full_stop(answer.strip())
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = _without_full_stop(text.strip("$").strip())
    number = _NUMBER_IN_A_FONT.fullmatch(text)
    return number[1].strip() if number else text


def _without_full_stop(text: str) -> str:
    return text if text.endswith("..") else text.removesuffix(".")  # 0.33... is a number with more digits


def _plain(answer: str) -> str:
    """The answer without what never changes its value: equal texts need no worker."""
    text = _bare(answer).strip("$").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\!", "")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def start() -> None:
    """Compare one answer ahead of the first in the worker, so that no answer's time pays for imports and tables."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its SIGALRM time-outs are off
    score("[1, 2)", r"so it is $[\frac{1}{2}, \sqrt{3})$", False)  # compiles what is compiled at its first use


def score(reference: str, answer: str, found: bool, reference_found: bool = True) -> float:
    r"""1.0 where the answer equals the reference as mathematics, else 0.0; runs in the worker.

    Args:
        reference: the right answer, LaTeX or plain.
        answer: the response's answer if ``found``, else the whole response, for math-verify to find one in.
        found: whether ``answer`` has been extracted already.
        reference_found: the same of ``reference``, where that is another response.
    """
    from math_verify import parse, verify

    if len({base_of(text) for text in (reference, answer)} - {None}) > 1:  # math-verify drops the base
        return 0.0
    gold = parse(_boxed(reference) if reference_found else reference, parsing_timeout=0)  # 0: SIGALRM works in a main
    given = parse(_boxed(answer) if found else answer, parsing_timeout=0)  # thread only, and the parent watches the time
    return float(verify(gold, given, timeout_seconds=0))


def base_of(answer: str) -> str | None:
    """The base that a number is said to be written in.

    Example:
        >>> base_of("52_{8}"), base_of("52")
        ('8', None)
    """
    match = _IN_A_BASE.fullmatch(answer)
    return match[1] if match else None


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
