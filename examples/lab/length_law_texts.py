"""Tests the length law on 2,000 independent texts, each from its first token, at lengths that were not used for fitting.

    python -m examples.lab.length_law_texts --output FOLDER [--results FOLDER] [--texts 2000] [--quick]

SmolLM2-135M-Instruct generates texts of 16 to 2,048 tokens from 2,000 different prompts. Its weights take the steps that
`examples.lab.length_law` describes. Two models of the variance of S, the summed log-ratio of a text, are fitted to the texts of
every other length and tested on the texts of the lengths in between:

- ``a L + b L^2``: all tokens have the same variance, and the tokens of a text share a component.
- ``tokens``: the sum of the variances of the token log-ratio at the first L positions. This model has no common component
  but lets the variance depend on the position.

The command writes ``length-law-texts.csv``, with a row for each text, and ``length-law-texts-fit.csv``, with a row for each
kind of step and model. Results are kept in FOLDER. To resume, repeat the command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest

from examples.lab.length_law import (
    GROUP,
    KINDS,
    LENGTHS,
    QUICK,
    SPREAD,
    TRAINING_TOPICS,
    Array,
    Document,
    Row,
    Settings,
    directions,
    lessons,
    log_probs,
    move,
    sampled,
    write,
)
from examples.lab.length_law_fit import BANDS, NUM_RESAMPLES, SPLITS, Fit, Windows, clipped, error, width, words
from rlzoo.models.pretrained import load_pretrained
from rlzoo.rollout.sampler import HFSampler

FORMS = (
    "a long text", "an essay", "a report", "a story", "a lecture", "a chapter", "a guide", "a magazine article",
    "an encyclopedia entry", "a dialogue", "a speech", "a letter", "a diary", "a review", "an interview", "a tutorial",
    "a memoir", "a critique", "a list of questions and answers", "a news report", "a fairy tale", "a travel guide",
    "a script", "a debate", "a biography", "a summary of facts", "a lesson plan", "a blog post", "an argument", "a history",
)  # fmt: skip
AUDIENCES = ("", " for children", " for experts")
CACHE_TOKENS = 90_000  # maximum number of tokens in the cache while texts are sampled
MODELS = ("a L + b L^2", "tokens")


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of the same length that were sampled together."""

    name: str
    length: int
    first: int  # index of the first text
    documents: list[Document]


def prompts(options: Settings, number: int) -> list[str]:
    """Return different prompts, none of them on a topic of the responses that the gradients come from."""
    topics = options.topics[TRAINING_TOPICS:]
    if options is QUICK:
        return [options.prompt.format(topic=topics[index % len(topics)]) for index in range(number)]
    found = [f"Write {form} about {topic}{who}." for who in AUDIENCES for form in FORMS for topic in topics]
    order = np.random.default_rng(0).permutation(len(found))
    return [found[index] for index in order[:number]]


def texts(folder: Path, options: Settings, number: int) -> list[Batch]:
    """Sample the texts at temperature 1 without an end token. Each length has the same number of texts."""
    model, tokenizer = load_pretrained(options.model)
    lengths = [length for length in LENGTHS if length <= options.length]
    asked, batches = prompts(options, number), []
    for place, length in enumerate(reversed(lengths)):  # the longest texts take most of the time
        share = asked[place :: len(lengths)]
        size = min(64, CACHE_TOKENS // (length + 64))
        sampler = HFSampler(
            model,
            tokenizer,
            max_new_tokens=length,
            end_ids=frozenset[int](),
            chat_template=options.model != "embedded",
            batch_size=size,
        )
        for start in range(0, len(share), size):
            name = f"{length}-{start}"
            found = sampled(folder / f"texts-{name}.json", sampler, share[start : start + size], 1, seed=1000 * length + start)
            batches.append(Batch(name, length, place + start * len(lengths), found))
    return batches


@torch.no_grad()
def measured(folder: Path, options: Settings, batches: Sequence[Batch]) -> dict[str, dict[str, Array]]:
    """Return the token log-ratios ``(B, L)`` by kind of step and batch."""
    model, tokenizer = load_pretrained(options.model)
    weights = [p.clone() for p in model.parameters()]
    sampler = HFSampler(
        model,
        tokenizer,
        max_new_tokens=options.training_length,
        end_ids=frozenset[int](),
        chat_template=options.model != "embedded",
        batch_size=options.batch,
    )
    asked = [options.prompt.format(topic=topic) for topic in options.topics[:TRAINING_TOPICS]]
    training = sampled(folder / "training-0.json", sampler, asked, GROUP, seed=0)
    with torch.enable_grad():
        steps = directions(model, lessons(training, tokenizer))

    def restore() -> None:
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)

    def of(name: str) -> dict[str, Array]:
        found = {}
        for number, batch in enumerate(batches):
            file = folder / f"{name}-{batch.name}.npy"
            if not file.exists():
                rows = [log_probs(model, document).double().numpy() for document in batch.documents]
                temporary = file.with_suffix(".tmp.npy")
                np.save(temporary, np.stack(rows))
                temporary.replace(file)
                print(f"{name}: {number + 1} of {len(batches)} batches", flush=True)
            found[batch.name] = np.load(file)
        return found

    before = of("base")
    probe = [(prompt, response[: options.probe]) for prompt, response in batches[0].documents[:2]]
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
        found[kind] = {name: after - before[name] for name, after in of(kind).items()}
        restore()
        print(f"{kind}: a step of {size:.3g} for every weight", flush=True)
    return found


def sums(log_ratios: Mapping[str, Mapping[str, Array]], batches: Sequence[Batch]) -> list[Row]:
    """Return the summed log-ratio of every text after every kind of step."""
    return [
        {
            "document": batch.first + row,
            "length": batch.length,
            **{kind: float(each[batch.name][row].sum()) for kind, each in log_ratios.items()},
        }
        for batch in batches
        for row in range(len(batch.documents))
    ]


def summed_token_variances(rows: Sequence[Array], lengths: Array) -> Array:
    """Return, for each length L, the sum of the variances of the token log-ratio at the first L positions."""
    longest = max(len(row) for row in rows)
    padded = np.full((len(rows), longest), np.nan)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return np.nanvar(padded, axis=0, ddof=1).cumsum()[lengths.astype(int) - 1]


def analysed(kind: str, log_ratios: Mapping[str, Array], batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Return, for each model, the errors of the predicted variance and of the predicted clip rates at the held-out lengths."""
    each = [(batch.length, row) for batch in batches for row in log_ratios[batch.name]]
    windows = Windows(
        np.arange(len(each)), np.array([length for length, _ in each], dtype=float), np.array([row.sum() for _, row in each])
    )
    lengths, variances = windows.lengths, windows.variances()
    fitted = SPLITS["between"](lengths[::-1])[::-1]  # includes the longest length, because only its texts reach every position
    inside = np.isin(windows.length, lengths[fitted])
    law = Fit.of(lengths[fitted], variances[fitted])
    predicted = dict(
        zip(
            MODELS,
            (
                law.variance("a L + b L^2", lengths),
                summed_token_variances([row for (_, row), used in zip(each, inside, strict=True) if used], lengths),
            ),
            strict=True,
        )
    )
    rng = np.random.default_rng(0)
    # resample every length separately, because its texts are independent of the others
    resamples = [stratified(windows, rng) for _ in range(NUM_RESAMPLES)]
    laws = [Fit.of(lengths[fitted], one.variances()[fitted]) for one in resamples]
    sampling = float(np.median([error(one.variances()[~fitted], variances[~fitted]) for one in resamples]))
    rows = []
    for model, variance in predicted.items():
        row: dict[str, Any] = {
            "step": kind,
            "model": model,
            "fitted": words(lengths[fitted]),
            "tested": words(lengths[~fitted]),
            "texts": len(each),
            "variance": words(variances),
            "predicted variance": words(variance),
            "error": error(variance[~fitted], variances[~fitted]),
            "sampling_error": sampling,
            **(parameters(law, laws) if model == MODELS[0] else {}),
        }
        used = Windows(windows.document[inside], windows.length[inside], windows.total[inside])
        spread = dict(zip(lengths.tolist(), np.sqrt(variance), strict=True))
        shape = np.abs(used.total) / np.array([spread[length] for length in used.length.tolist()])
        for band, power in BANDS.items():
            edge = width(used, power)
            expected = np.array([(shape * spread[length] > edge * length**power).mean() for length in lengths.tolist()])
            low, high = binomial_intervals(clipped(windows, edge, power), windows)
            held = ((low <= expected) & (expected <= high))[~fitted]
            row |= {
                f"clip by {band}": words(clipped(windows, edge, power)),
                f"predicted clip by {band}": words(expected),
                f"held by {band}": f"{int(held.sum())} of {len(held)}",
            }
        rows.append(row)
    return rows


def parameters(law: Fit, resampled: Sequence[Fit]) -> Row:
    """Return sigma, tau and the crossover of the law ``a L + b L^2``, with percentile intervals over resampled texts."""
    found: Row = {}
    for name, value, drawn in (
        ("sigma", law.a**0.5, [one.a**0.5 for one in resampled]),
        ("tau", law.b**0.5, [one.b**0.5 for one in resampled]),
        ("crossover", law.crossover, [one.crossover for one in resampled]),
    ):
        low, high = np.quantile(drawn, [0.025, 0.975], method="inverted_cdf")
        found |= {name: value, f"{name}_low": float(low), f"{name}_high": float(high)}
    return found


def binomial_intervals(shares: Array, windows: Windows) -> tuple[Array, Array]:
    """Return the exact (Clopper-Pearson) 95% interval for the share of clipped texts at each length."""
    numbers = [int((windows.length == length).sum()) for length in windows.lengths]
    found = [
        binomtest(round(float(share) * number), number).proportion_ci(method="exact")
        for share, number in zip(shares, numbers, strict=True)
    ]
    return np.array([each.low for each in found]), np.array([each.high for each in found])


def stratified(windows: Windows, rng: np.random.Generator) -> Windows:
    """Return a bootstrap resample that keeps the number of texts of every length."""
    index = np.concatenate(
        [rng.choice(found, len(found)) for found in (np.flatnonzero(windows.length == length) for length in windows.lengths)]
    )
    return Windows(np.arange(len(index)), windows.length[index], windows.total[index])


def main() -> None:
    """Sample the texts, take the steps, measure the log-ratios, and test both models."""
    parser = argparse.ArgumentParser(description="Test the length law on independent texts.")
    parser.add_argument("--output", type=Path, required=True, help="folder for results, from which the command resumes")
    parser.add_argument("--results", type=Path, help="folder for the CSV files (default: --output)")
    parser.add_argument("--texts", type=int, default=2000, help="number of texts (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="use the shipped model and short texts, which takes less than a minute"
    )
    parsed = parser.parse_args()
    options, number = (QUICK, 180) if parsed.quick else (Settings(), parsed.texts)
    parsed.output.mkdir(parents=True, exist_ok=True)
    batches = texts(parsed.output, options, number)
    log_ratios = measured(parsed.output, options, batches)
    results = parsed.results or parsed.output
    results.mkdir(parents=True, exist_ok=True)
    write(results / "length-law-texts.csv", sums(log_ratios, batches))
    rows = [row for kind in KINDS for row in analysed(kind, log_ratios[kind], batches)]
    write(results / "length-law-texts-fit.csv", rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
