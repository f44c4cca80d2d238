"""Measures, without reinforcement learning, how the variance of the summed log-ratio grows with the response length.

    python -m examples.lab.length_law --output FOLDER [--results FOLDER] [--quick]

SmolLM2-135M-Instruct writes documents. The model's weights take one step of a given kind, and the log-ratio of every token is
measured in float32. A response of L tokens is a window of a document, and its prompt is the text before the window, so windows
of every length have the same mix of positions. All steps are scaled to the same spread of token log-ratios:

- ``random``: every weight moves up or down by the same amount, and the direction is random.
- ``mean``: the first Adam step (the sign of the gradient) of a policy gradient that takes the mean over a response's tokens.
- ``sum``: the same with the sum over a response's tokens, which weights the response by its length.

The gradients come from separate responses, of 16 to 512 tokens, to other prompts. The reward of a response is its share of
commas and full stops. The model of the variance is ``Var(S | L) = a L + b L^2``, where a is the variance of a token's log-ratio
plus its covariance with neighbouring tokens, and b is the variance of the component that all tokens of a response share. The
model is fitted to every other length and tested on the lengths in between. Results are kept in FOLDER. To resume, repeat the
command.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlzoo.learner.log_probs import chunked_log_probs
from rlzoo.models.pretrained import load_pretrained
from rlzoo.rollout.sampler import HFSampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Array = NDArray[np.float64]
Document = tuple[tuple[int, ...], tuple[int, ...]]  # token IDs of the prompt and of the response
Row = dict[str, float]
TOPICS = (
    "the history of bridges", "how bread is made", "the life of a river", "why the sky is blue", "a lost dog",
    "the first train", "planting a garden", "the rules of chess", "a storm at sea", "how a clock works",
    "the city of Rome", "learning to swim", "the moon landing", "a family dinner", "how vaccines work",
    "the deep ocean", "a haunted house", "the price of gold", "building a boat", "the human heart", "a mountain hike",
    "how computers add", "the art of painting", "an old letter", "the honey bee", "a trip to the market",
    "how volcanoes erupt", "the invention of paper", "a school play", "the desert at night", "how music is written",
    "the work of a nurse", "a chess tournament", "the bicycle", "why leaves change color", "a detective story",
    "the water cycle", "a robot that dreams", "how glass is made", "the Olympic games",
)  # fmt: skip
KINDS = ("random", "mean", "sum")
SPREAD = 0.02  # root mean square of the token log-ratios after every step, in nats
TRAINING_TOPICS = 4  # number of initial topics whose responses give the gradients and are not measured
GROUP = 8
LENGTHS = (16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048)  # lengths of the windows in tokens
PER_DOCUMENT = 8  # maximum number of windows of one length from one document


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the experiment."""

    model: str = "smollm2"
    prompt: str = "Write a long text about {topic}."
    topics: tuple[str, ...] = TOPICS
    length: int = 2048  # number of tokens in a document
    training_length: int = 512  # number of tokens in the longest response that gives the gradients
    probe: int = 512  # number of tokens in each of the two documents that set the size of a step
    batch: int = 12  # number of prompts that are sampled together
    kinds: tuple[str, ...] = KINDS


QUICK = Settings("embedded", "{topic}=", tuple(f"{1 + i % 9}+{1 + i // 9}+7+3" for i in range(24)), 181, 64, 64)


def documents(folder: Path, options: Settings) -> tuple[list[Document], list[Document]]:
    """Return the documents for the gradients and those to measure, sampled at temperature 1 without an end token."""
    model, tokenizer = load_pretrained(options.model)
    prompts = [options.prompt.format(topic=topic) for topic in options.topics]
    chat = options.model != "embedded"
    how = {"end_ids": frozenset[int](), "chat_template": chat, "batch_size": options.batch}
    found = []
    for name, texts, samples, limit in (
        ("training", prompts[:TRAINING_TOPICS], GROUP, options.training_length),
        ("measured", prompts[TRAINING_TOPICS:], 1, options.length),
    ):
        sampler = HFSampler(model, tokenizer, max_new_tokens=limit, **how)
        listed: list[Document] = []
        for start in range(0, len(texts), options.batch):
            listed += sampled(
                folder / f"{name}-{start}.json", sampler, texts[start : start + options.batch], samples, seed=start
            )
        found.append(listed)
    return found[0], found[1]


def sampled(file: Path, sampler: HFSampler, prompts: Sequence[str], samples: int, *, seed: int) -> list[Document]:
    """Return the responses to the prompts, sampling them only if the file does not exist yet."""
    if not file.exists():
        rollouts = sampler.sample(prompts, samples, seed=seed, first_row=0)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps([[rollout.prompt_ids, rollout.response_ids] for rollout in rollouts]))
        temporary.replace(file)
        print(f"sampled {file.name}", flush=True)
    return [(tuple(prompt), tuple(response)) for prompt, response in json.loads(file.read_text())]


def log_probs(model: PreTrainedModel, document: Document) -> Tensor:
    """Return the log-probability of every token in the response, ``(T,)``. It is differentiable if gradients are enabled."""
    prompt, response = document
    ids = torch.tensor([[*prompt, *response]])
    hidden = model.get_decoder()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    return chunked_log_probs(hidden, ids[0, len(prompt) :], model.get_output_embeddings(), 1.0)[0]


def lessons(training: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> list[tuple[Document, float]]:
    """Return the responses for the gradients, cut to lengths from 16 tokens to the maximum, with their advantages."""
    punctuation = torch.tensor([any(c in tokenizer.decode([i]) for c in ",.#") for i in range(len(tokenizer))])
    longest = len(training[0][1])
    lengths = [round(16 * (longest / 16) ** (index / (GROUP - 1))) for index in range(GROUP)]
    cut = [(prompt, response[: lengths[index % GROUP]]) for index, (prompt, response) in enumerate(training)]
    rewards = torch.tensor([float(punctuation[list(response)].float().mean()) for _, response in cut]).view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    return list(zip(cut, advantages.flatten().tolist(), strict=True))


def directions(model: PreTrainedModel, given: Sequence[tuple[Document, float]]) -> dict[str, list[Tensor]]:
    """Return the direction of each kind of step as a sign for every weight."""
    generator = torch.Generator().manual_seed(0)
    parameters = list(model.parameters())
    found = {"random": [torch.randn(p.shape, generator=generator).sign() for p in parameters]}
    for kind in ("mean", "sum"):
        model.zero_grad()
        for document, advantage in given:
            each = log_probs(model, document)
            (advantage * (each.mean() if kind == "mean" else each.sum())).backward()
        found[kind] = [torch.zeros_like(p) if p.grad is None else p.grad.sign() for p in parameters]
    model.zero_grad()
    return found


@torch.no_grad()
def move(model: PreTrainedModel, direction: Sequence[Tensor], size: float) -> None:
    """Add a multiple of the direction to the weights."""
    for parameter, sign in zip(model.parameters(), direction, strict=True):
        parameter.add_(sign, alpha=size)


@torch.no_grad()
def measured(
    folder: Path, options: Settings, documents: Sequence[Document], training: Sequence[Document]
) -> tuple[dict[str, Array], list[Row]]:
    """Return the token log-ratios ``(D, T)`` for every kind of step and the sums for the responses that give the gradients."""
    model, tokenizer = load_pretrained(options.model)
    weights = [p.clone() for p in model.parameters()]

    def restore() -> None:
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)

    def of(name: str) -> Array:
        rows = []
        for number, document in enumerate(documents):
            file = folder / f"{name}-{number}.npy"
            if not file.exists():
                np.save(file, log_probs(model, document).double().numpy())
                print(f"{name}: {number + 1} of {len(documents)} documents", flush=True)
            rows.append(np.load(file))
        return np.stack(rows)

    given = lessons(training, tokenizer)
    with torch.enable_grad():
        steps = directions(model, given)
    own = [
        {
            "response": number,
            "length": len(response),
            "advantage": advantage,
            "base": float(log_probs(model, (prompt, response)).sum()),
        }
        for number, ((prompt, response), advantage) in enumerate(given)
    ]
    before = of("base")
    probe = [(prompt, response[: options.probe]) for prompt, response in documents[:2]]
    base = torch.cat([log_probs(model, document) for document in probe])
    found = {}
    for kind in options.kinds:
        size = 1e-6
        for _ in range(3):  # the spread is nearly proportional to the size of a small step
            move(model, steps[kind], size)
            spread = float((torch.cat([log_probs(model, document) for document in probe]) - base).square().mean().sqrt())
            restore()
            size *= SPREAD / spread
        move(model, steps[kind], size)
        found[kind] = of(kind) - before
        for row, (document, _) in zip(own, given, strict=True):
            row[kind] = float(log_probs(model, document).sum()) - row["base"]
        restore()
        print(
            f"{kind}: a step of {size:.3g} for every weight, spread {float(np.sqrt(np.square(found[kind]).mean())):.4f}",
            flush=True,
        )
    return found, own


def windows(log_ratios: dict[str, Array]) -> list[Row]:
    """Return disjoint, evenly spaced windows of every length, up to `PER_DOCUMENT` per length and document."""
    some = next(iter(log_ratios.values()))
    sums = {kind: np.concatenate([np.zeros((len(values), 1)), values.cumsum(1)], 1) for kind, values in log_ratios.items()}
    rows: list[Row] = []
    for document in range(len(some)):
        for length in (length for length in LENGTHS if length <= some.shape[1]):
            number = some.shape[1] // length
            count = min(number, PER_DOCUMENT)
            chosen = ((np.arange(count) + 0.5) * number / count).astype(int)  # from the middle of each of ``count`` equal parts
            for start in (chosen * length).tolist():
                found = {kind: float(total[document, start + length] - total[document, start]) for kind, total in sums.items()}
                rows.append({"document": document, "start": start, "length": length, **found})
    return rows


def prefixes(log_ratios: dict[str, Array]) -> list[Row]:
    """Return the summed log-ratios of every document's prefixes, as if its response had been cut off at each length."""
    some = next(iter(log_ratios.values()))
    return [
        {"document": document, "length": length, **{kind: float(v[document, :length].sum()) for kind, v in log_ratios.items()}}
        for document in range(len(some))
        for length in (length for length in LENGTHS if length <= some.shape[1])
    ]


def positions(log_ratios: dict[str, Array]) -> list[Row]:
    """Return the root mean square of the token log-ratios by position in the document."""
    some = next(iter(log_ratios.values()))
    ends = [0, *(end for end in (4, 16, 64, 256) if end < some.shape[1]), some.shape[1]]
    return [
        {"first": first, "end": end, **{kind: float(np.sqrt((v[:, first:end] ** 2).mean())) for kind, v in log_ratios.items()}}
        for first, end in itertools.pairwise(ends)
    ]


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file."""
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )


def main() -> None:
    """Sample the documents, take the steps, measure the log-ratios, and write the windows."""
    parser = argparse.ArgumentParser(description="Measure how the variance of the summed log-ratio grows with length.")
    parser.add_argument("--output", type=Path, required=True, help="folder for results, from which the command resumes")
    parser.add_argument("--results", type=Path, help="folder for the CSV file (default: --output)")
    parser.add_argument(
        "--quick", action="store_true", help="use the shipped model and short documents, which takes less than a minute"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of steps (default: %(default)s)")
    parsed = parser.parse_args()
    options = QUICK if parsed.quick else Settings(kinds=tuple(parsed.kinds.split(",")))
    parsed.output.mkdir(parents=True, exist_ok=True)
    training, listed = documents(parsed.output, options)
    log_ratios, own = measured(parsed.output, options, listed, training)
    results = parsed.results or parsed.output
    results.mkdir(parents=True, exist_ok=True)
    write(results / "length-law.csv", windows(log_ratios))
    write(results / "length-law-prefixes.csv", prefixes(log_ratios))
    write(results / "length-law-positions.csv", positions(log_ratios))
    write(results / "length-law-own.csv", own)


if __name__ == "__main__":
    main()
