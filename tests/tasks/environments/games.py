"""Environments for tests, well-behaved and misbehaving."""

import os
import random
import signal
import time
from pathlib import Path
from typing import ClassVar

from rlzoo.core.errors import UserError


class Words:
    """Returns a number of words that depends on the seed and the turn, and ends after some turns."""

    def __init__(self, turns=5, least=1, most=6):
        self.turns, self.least, self.most = turns, least, most

    def words(self):
        return " ".join(f"w{self.rng.randint(2, 90)}" for _ in range(self.rng.randint(self.least, self.most)))

    def reset(self, problem, seed):
        self.rng = random.Random(seed)
        self.left = self.rng.randint(1, self.turns)
        return self.words()

    def step(self, message):
        self.left -= 1
        words = message.split()
        return " " + self.words(), len(words) / 10, self.left == 0, {"words": len(words), "state": f"{self.left} left"}


class Counting:
    """Counts its own calls; if the problem says so, misbehaves in the second turn of the episode."""

    def reset(self, problem, seed):
        self.what, self.calls = problem.question, 0
        if self.what == "no start":
            raise RuntimeError("the board is broken")
        return "w2"

    def step(self, message):
        self.calls += 1
        if self.calls == 2:
            self.misbehave()
        return f"w{self.calls + 2}", 1.0, self.calls == 3, {}

    def misbehave(self):
        if self.what == "raise":
            raise ValueError("no such move")
        if self.what == "hang":
            time.sleep(60)
        if self.what == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "leave":
            raise SystemExit(3)
        if self.what == "memory":
            self.hoard = bytearray(2**36)


class Odd(Counting):
    """Returns an invalid result, which the problem selects."""

    ANSWERS: ClassVar = {
        "nothing": None,
        "number": 5,
        "pair": ("w2", 1.0),
        "no role": ([{"content": "w2"}], 1.0, False, {}),
        "no number": ("w2", "much", False, {}),
        "not finite": ("w2", float("nan"), False, {}),
        "too much": ("w2 " * 400_000, 1.0, False, {}),
        "info": ("w2", 1.0, False, [1]),
        "state": ("w2", 1.0, False, {"state": 5}),
        "done": ("w2", 1.0, "no", {}),
        "reward in words": ("w2", "1.0", False, {}),
        "huge": ("w2", 10**400, False, {}),
    }

    def step(self, message):
        if self.what == "escape":
            raise ValueError("red \x1b[31m")
        return self.ANSWERS.get(self.what, ("w3", 1.0, True, {}))


class Unavailable(Counting):
    """Needs a library that is not installed."""

    def __init__(self):
        raise UserError("boards is not installed: pip install boards")


class Careless(Counting):
    """Draws random numbers that do not depend on its seed."""

    def step(self, message):
        messages, *rest = super().step(message)
        return f"{messages} w{os.urandom(8).hex()}", *rest


class Chain:
    """Asks a series of sums, each after the answer to the previous one."""

    def __init__(self, turns=3):
        self.turns = turns

    def reset(self, problem, seed):
        self.rng, self.left = random.Random(seed), self.turns
        return self.ask()

    def ask(self):
        numbers = [self.rng.randint(1, 9) for _ in range(self.rng.randint(2, 4))]
        self.answer = sum(numbers)
        return "+".join(map(str, numbers)) + "="

    def step(self, message):
        self.left -= 1
        right = message.rpartition("#")[2] == str(self.answer)
        return self.ask(), float(right), self.left == 0, {"right": right, "state": str(self.left)}


class Killer(Chain):
    """Kills the training process once, in the second turn of an episode of step 2."""

    def __init__(self, marker, turns=3):
        super().__init__(turns)
        self.marker = marker

    def reset(self, problem, seed):
        self.problem = problem
        return super().reset(problem, seed)

    def step(self, message):
        marker = Path(f"{self.marker}.killed")  # a file in the arguments would be a change of the run
        if self.left == 2 and self.problem.question.endswith(":9") and not marker.exists():
            marker.touch()
            os.kill(os.getppid(), signal.SIGKILL)
        return super().step(message)


class Unspeakable(Chain):
    """Writes text that the shipped model's tokenizer does not support, in half of the episodes after the first four."""

    def reset(self, problem, seed):
        _, _, index = problem.question.rpartition(":")
        self.kind = ["good", "good", "reset", "step", "empty"][int(index) % 5] if int(index) > 3 else "good"
        begun = super().reset(problem, seed)
        return {"reset": f"what is {begun}", "empty": []}.get(self.kind, begun)

    def step(self, message):
        answer, *rest = super().step(message)
        return f"wrong\n{answer}" if self.kind == "step" else answer, *rest


class Whimsical(Chain):
    """Begins every episode at random, regardless of the seed."""

    def reset(self, problem, seed):
        return super().reset(problem, os.urandom(4))


class Unruly(Chain):
    """Misbehaves in the second turn of half of the episodes: raises an error, hangs, or returns a megabyte."""

    def reset(self, problem, seed):
        self.kind = ["good", "good", "good", "raise", "hang", "flood"][seed % 6]
        return super().reset(problem, seed)

    def step(self, message):
        if self.left == 2 and self.kind == "raise":
            raise ValueError("no such move")
        if self.left == 2 and self.kind == "hang":
            time.sleep(60)
        answer, *rest = super().step(message)
        return "1+" * 500_000 if self.left == 1 and self.kind == "flood" else answer, *rest


class Uneven(Chain):
    """Of seven problems, the first three have one turn and the others six; the last two raise or hang in the second turn."""

    def reset(self, problem, seed):
        self.index = int(problem.question.rpartition(":")[2]) % 7
        self.turns = 1 if self.index < 3 else 6
        return super().reset(problem, seed)

    def step(self, message):
        if self.left == self.turns - 1 and self.index == 5:
            raise ValueError("no such move")
        if self.left == self.turns - 1 and self.index == 6:
            time.sleep(60)
        return super().step(message)


class Leaver(Uneven):
    """Exits its process in the last two of seven problems."""

    def reset(self, problem, seed):
        answer = super().reset(problem, seed)
        if self.index >= 5:
            os._exit(7)
        return answer


class Speechless(Uneven):
    """Begins the last two of seven problems without a message."""

    def reset(self, problem, seed):
        answer = super().reset(problem, seed)
        return [] if self.index >= 5 else answer
