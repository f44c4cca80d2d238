"""Writes the model card of the tiny language model that ships with rlzoo, from the responses that were used to measure it.

python examples/lab/make_embedded_model.py    # writes the card
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, quantiles

OPERANDS_MAX = 20
WELL_FORMED = re.compile(r"(\d+(,\d+)*)?#\d+")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled response to a held-out problem.

    Example:
        ``Sample(question="3+5+9", text="8#17", length=5, finished=True, reward=1.0)``
    """

    question: str  # without the equals sign of the prompt
    text: str
    length: int  # tokens, with the end token
    finished: bool
    reward: float

    @property
    def num_operands(self) -> int:
        """The number of operands in the question."""
        return self.question.count("+") + 1

    @property
    def well_formed(self) -> bool:
        """Whether the response ends and has one total per operand after the first, right or wrong."""
        totals = self.text.replace("#", ",").lstrip(",").count(",") + 1
        return self.finished and bool(WELL_FORMED.fullmatch(self.text)) and totals == self.num_operands - 1


def accuracy_table(samples: list[Sample]) -> str:
    """Return accuracy by number of operands, as a Markdown table."""
    rewards = defaultdict(list)
    for sample in samples:
        rewards[sample.num_operands].append(sample.reward)
    rows = [f"| {count} | {fmean(found):.2f} | {len(found)} |" for count, found in sorted(rewards.items())]
    return "\n".join(["| operands | accuracy | samples |", "|---|---|---|", *rows])


def model_card(
    parameters: int, solutions: int, samples: list[Sample], numbers: dict[str, float], options: argparse.Namespace
) -> str:
    """Return the README of the model: what it is, how it was made, and its measurements."""
    percentiles = quantiles((sample.length for sample in samples), n=20)
    command = f"python examples/lab/make_embedded_model.py --seed {options.seed} --steps {options.steps} --slip {options.slip}"
    measured = "\n".join(f"| {what} | {number:.3f} |" for what, number in numbers.items())
    return f"""---
license: apache-2.0
library_name: transformers
---

# The model that ships with rlzoo

A Qwen3 of {parameters:,} parameters (2 layers, width 64, one token per character) that adds 2 to {OPERANDS_MAX} digits in
writing: asked `3+5+9+6=` it answers `8,17#23`, the running totals and, after `#`, the sum. It exists so that
reinforcement learning can be tried in a minute on two CPU cores. It can do nothing else.

## How it was made

    {command}

Supervised learning from scratch on {solutions:,} worked solutions made by the program itself; no other data.
**The solutions contain mistakes on purpose**: each total is off by one with probability {options.slip}, and the later totals
continue from it. So the model can add (see greedy accuracy) but slips when sampled, at about the same rate in every step, and
the loss of accuracy with length is a property of the data. Reinforcement learning mostly takes these slips away; how much a
rule gains here says little about what it would gain on a model that lacks knowledge.

Sums whose text has `zlib.crc32(b"3+5+9+6") % 8 == 0` (without the equals sign) are held out: they were never trained on.

## What was measured

Responses to held-out sums, sampled at temperature 1 from the whole distribution (no top-k, no top-p).

| | |
|---|---|
{measured}

"Well-formed" means one total per operand after the first, the last of them after `#`, then the end token; right or wrong.
Response length in tokens, with the end token: 5th percentile {percentiles[0]:.0f}, 95th percentile {percentiles[-1]:.0f}.

{accuracy_table(samples)}

There are few distinct short sums, hence their small counts.
"""
