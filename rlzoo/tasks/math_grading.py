"""Uses math-verify to compare answers mathematically with the reference and with each other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

from rlzoo.support.extras import require_extra
from rlzoo.tasks.extraction import after_hashes, last_boxed
from rlzoo.tasks.grading import MEMORY, Grader
from rlzoo.tasks.problem import Problem

ASK_FOR_A_BOX = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."

# maximum length in characters; references are less than a tenth as long, and math-verify takes minutes on much longer texts
LONGEST_ANSWER = 5_000
LONGEST_SEARCHED = 100_000  # number of characters at the end of a response that math-verify searches for an answer

# matches a number with commas between thousands unless another comma, or a preceding number or bracket, suggests a list
_THOUSANDS = re.compile(
    r"((?:[^0-9,;()\[\]{}<\\]|\\\$)*)(?<![A-Za-z_^.])([1-9][0-9]{0,2}(?:,[0-9]{3})+)(?![0-9])((?:[^,;{}\\]|\\%)*)"
)
_NUMBER_IN_A_FONT = re.compile(r"\\(?:text|textbf|textit|mathbf|mathrm)\{([^{}\\A-Za-z]*)\}")


class MathGrader:
    """Grades the final answers in responses with math-verify in a worker process and groups equal answers."""

    def __init__(self, timeout: float = 5.0) -> None:
        """Store the time limit per comparison in seconds, after which answers are unequal. The first call starts the worker.

        Raises:
            UserError: math-verify is not installed.
        """
        require_extra("math-verify", "math_verify")
        self.worker = Grader(score, start, timeout, MEMORY)

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        """Return 1.0 for each response whose answer is mathematically equal to its problem's reference, else 0.0."""
        rewards = [0.0] * len(responses)
        calls: dict[int, tuple[str, str, bool]] = {}
        for index, (problem, response) in enumerate(zip(problems, responses, strict=True)):
            answer = response_answer(response)
            if answer is not None and plain_answer(answer) == plain_answer(problem.answer):
                rewards[index] = 1.0
            elif text := _compared(response, answer, _bare):
                calls[index] = (_bare(problem.answer), text, answer is not None)
        for index, reward in zip(calls, self.worker.grade(list(calls.values())), strict=True):
            rewards[index] = reward or 0.0  # an answer that exhausts the grader is wrong, so hanging it is never rewarded
        return rewards

    def answer_groups(self, responses: Sequence[str], rewards: Sequence[float]) -> list[int | None]:
        """Group the responses to one problem by their answers.

        All correct responses form one group. A wrong response joins the first group whose first answer equals its own
        answer. The order of the responses matters, because math-verify's equality is not transitive.

        Args:
            responses: the responses to one problem.
            rewards: their rewards from `grade`.

        Returns:
            For each response, the index of the first response in its group, or None if no answer can be read.
        """
        marked = [response_answer(response) for response in responses]
        pairs = zip(responses, marked, strict=True)
        answers = [(_compared(text, answer, plain_answer), answer is not None) for text, answer in pairs]
        wrong = dict.fromkeys(answer for answer, reward in zip(answers, rewards, strict=True) if not reward and answer[0])
        checks = self.worker.grade([(text, text, is_marked, is_marked) for text, is_marked in wrong])
        heads: list[tuple[str, bool]] = []
        head_of: dict[tuple[str, bool], tuple[str, bool]] = {}
        for answer, is_read in zip(wrong, checks, strict=True):
            if is_read:  # if an answer does not equal itself, math-verify cannot read it
                equal = self.worker.grade([(head[0], answer[0], answer[1], head[1]) for head in heads])
                head_of[answer] = next((head for head, same in zip(heads, equal, strict=True) if same), answer)
                heads += [answer] if head_of[answer] == answer else []
        first_right = next((place for place, reward in enumerate(rewards) if reward), None)
        return [
            first_right if reward else answers.index(head_of[answer]) if answer in head_of else None
            for answer, reward in zip(answers, rewards, strict=True)
        ]

    def close(self) -> None:
        """Stop the worker process. The next call starts a new one."""
        self.worker.close()


def response_answer(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{}``, else the rest of the line after the last ``####``, else None.

    If the result is None, math-verify searches the response for an answer.

    Example:
        >>> response_answer("so it is \\boxed{18}"), response_answer("#### 18"), response_answer("it is 18")
        ('18', '18', None)
    """
    boxed = last_boxed(response)
    return after_hashes(response) if boxed is None else boxed


def _compared(response: str, answer: str | None, cleaned: Callable[[str], str]) -> str:
    """Return the text for math-verify: the answer (empty if too long), or the end of a response without a marked answer."""
    if answer is None:
        return response[-LONGEST_SEARCHED:].strip()
    return cleaned(answer) if len(answer) <= LONGEST_ANSWER else ""


def _bare(answer: str) -> str:
    r"""Remove a final full stop and a font command around a number, neither of which math-verify can handle.

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
    return text if text.endswith("..") else text.removesuffix(".")  # the dots in 0.33... stand for more digits


def plain_answer(answer: str) -> str:
    """Remove markup that never changes the value of an answer, so that equal texts can be compared without a worker."""
    text = _bare(answer).strip("$").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\!", "")
    return without_thousands_separators(text)


def without_thousands_separators(answer: str) -> str:
    """Remove the commas between the thousands of a number. A text that may be a list is returned unchanged.

    Example:
        >>> [without_thousands_separators(answer) for answer in ("-1,200.50", "$1,200", "3, -3", "(1,200, 5)")]
        ['-1200.50', '$1200', '3, -3', '(1,200, 5)']
    """
    match = _THOUSANDS.fullmatch(answer)
    return match[1] + match[2].replace(",", "") + match[3] if match else answer


def start() -> None:
    """Compare one answer before the first call so that math-verify's setup does not count against an answer's time limit."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # math-verify warns that its SIGALRM timeouts are off
    score("[1, 2)", r"so it is $[\frac{1}{2}, \sqrt{3})$", False)  # triggers lazy compilation


def score(reference: str, answer: str, is_marked: bool, is_reference_marked: bool = True) -> float:
    r"""Return 1.0 if the answer is mathematically equal to the reference, else 0.0. This function runs in the worker.

    Args:
        reference: the correct answer, in LaTeX or plain text.
        answer: the response's answer if ``is_marked``, else the whole response, in which math-verify looks for an answer.
        is_marked: whether ``answer`` has already been extracted.
        is_reference_marked: whether ``reference`` has already been extracted. Otherwise, it is another whole response.
    """
    from math_verify import parse, verify

    # 0 turns off math-verify's time limits, because SIGALRM works only in a main thread; the parent process enforces the limit
    gold = parse(_boxed(reference) if is_reference_marked else reference, parsing_timeout=0)
    parsed = parse(_boxed(answer) if is_marked else answer, parsing_timeout=0)
    return float(verify(gold, parsed, timeout_seconds=0))


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
