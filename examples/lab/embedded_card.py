"""Writes the model card of the tiny language model that ships with rlzoo, using measurements of its responses.

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

    question: str  # the prompt without its equals sign
    text: str
    length: int  # number of tokens, including the end token
    finished: bool
    reward: float

    @property
    def num_operands(self) -> int:
        """The number of operands in the question."""
        return self.question.count("+") + 1

    @property
    def well_formed(self) -> bool:
        """Whether the response ends and contains one total, right or wrong, for each operand after the first."""
        totals = self.text.replace("#", ",").lstrip(",").count(",") + 1
        return self.finished and bool(WELL_FORMED.fullmatch(self.text)) and totals == self.num_operands - 1


def accuracy_table(samples: list[Sample]) -> str:
    """Return a Markdown table of accuracy by number of operands."""
    rewards = defaultdict(list)
    for sample in samples:
        rewards[sample.num_operands].append(sample.reward)
    rows = [f"| {count} | {fmean(found):.2f} | {len(found)} |" for count, found in sorted(rewards.items())]
    return "\n".join(["| operands | accuracy | samples |", "|---|---|---|", *rows])


def model_card(
    parameters: int, solutions: int, samples: list[Sample], numbers: dict[str, float], options: argparse.Namespace
) -> str:
    """Return the model's README, which describes the model and how it was made, and lists its measurements."""
    percentiles = quantiles((sample.length for sample in samples), n=20)
    command = f"python examples/lab/make_embedded_model.py --seed {options.seed} --steps {options.steps} --slip {options.slip}"
    measured = "\n".join(f"| {what} | {number:.3f} |" for what, number in numbers.items())
    return f"""---
license: apache-2.0
library_name: transformers
---

# The model that ships with rlzoo

This is a Qwen3 model with {parameters:,} parameters (2 layers, width 64, one token per character) that adds 2 to
{OPERANDS_MAX} digits step by step. Given `3+5+9+6=`, it answers `8,17#23`: the running totals and, after `#`, the sum. With
this model, you can try reinforcement learning in a minute on two CPU cores. It can do nothing else.

## How it was made

    {command}

The model was trained from scratch by supervised learning on {solutions:,} worked solutions, which the script generated. No
other data was used. **The solutions contain mistakes on purpose**: each total is off by one with probability
{options.slip}, and the later totals continue from the wrong one. The model can therefore add (see the greedy
accuracy), but it makes mistakes when sampled, at about the same rate in every step. The decrease in accuracy with length
is a property of the data. Reinforcement learning mostly removes these mistakes. How much a rule gains here says little about
how much it would gain with a model that lacks knowledge.

A sum such as `3+5+9+6` is held out if `zlib.crc32(b"3+5+9+6") % 8 == 0`. Held-out sums were never trained on.

## What was measured

The responses to held-out sums were sampled at temperature 1 from the whole distribution (without top-k and top-p).

| | |
|---|---|
{measured}

A response is well-formed if it has one total for each operand after the first, the last one after `#`, and then the end
token. The totals may be right or wrong. The 5th and the 95th percentile of the response length, including the end token, are
{percentiles[0]:.0f} and {percentiles[-1]:.0f} tokens.

{accuracy_table(samples)}

The counts for short sums are small because there are few distinct short sums.
"""
